"""What many tests need."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from cryptography.hazmat.primitives.kdf import scrypt
from order import position, scheduler

REPOSITORY = Path(__file__).resolve().parent.parent


class RememberedScrypt:
    """Scrypt, which is slow on purpose, and so remembers what it made of a passphrase and a salt."""

    def __init__(self, salt: bytes, length: int, n: int, r: int, p: int) -> None:
        self._parameters = (salt, length, n, r, p)

    def derive(self, key_material: bytes) -> bytes:
        return _derive(bytes(key_material), *self._parameters)


@cache
def _derive(key_material: bytes, *parameters: Any, original: Any = scrypt.Scrypt) -> bytes:
    derived: bytes = original(*parameters).derive(key_material)
    return derived


# Before anything of the package is imported, which takes the class from there.
scrypt.Scrypt = RememberedScrypt  # type: ignore[assignment]
# Typer makes the whole tree of commands for each call of one.
typer.testing._get_command = cache(typer.testing._get_command)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes longest begin first, where several processes share the work."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: position(item.nodeid))


def pytest_collection_finish() -> None:
    """Spare the collector of garbage what stays anyway: many tests call it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log)


@pytest.fixture(scope="session")
def parquet_test_data() -> Path:
    """The folder of the public Parquet test files."""
    default = REPOSITORY.parent / "shared" / "parquet-testing" / "data"
    folder = Path(os.environ.get("PARQUET_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"there are no Parquet test files in {folder}; set PARQUET_TEST_DATA")
    return folder


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's state, where rotations have their journals: one for each test."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder
