"""fsspec's own abstract tests over `filesystem()` and views: their payloads are written as Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.tests import abstract
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS
from soak import SOAK, sample

from parquet_keytools import Keytools

PLACES = ["view", "local", "memory"]
GLOB_EDGE_CASES_TESTS["argvalues"][:] = sample(GLOB_EDGE_CASES_TESTS["argvalues"], 5, 0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Use one place for a test, and the next one for the next test; in a soak, all of them."""
    if "place" in metafunc.fixturenames:
        assert metafunc.cls is not None
        number = sorted(vars(metafunc.cls.__mro__[1])).index(metafunc.function.__name__)
        metafunc.parametrize("place", PLACES if SOAK else [PLACES[number % len(PLACES)]])


class Payload(io.BytesIO):
    """The payload of a test; the file below receives it as a Parquet file."""

    def __init__(self, below: Any) -> None:
        super().__init__()
        self._below = below

    def close(self) -> None:
        if not self.closed:
            with self._below as file:
                pq.write_table(pa.table({"payload": [self.getvalue()]}), file)
            super().close()


def with_payloads(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a file system whose `open` accepts any bytes."""
    opened = filesystem._open

    def opening(path: str, mode: str = "rb", **options: Any) -> Any:
        file = opened(path, mode, **options)
        if mode != "rb":
            return Payload(file)
        with file:
            return io.BytesIO(pq.read_table(file)["payload"][0].as_py())

    monkeypatch.setattr(filesystem, "_open", opening)
    return filesystem


class Fixtures(abstract.AbstractFixtures):
    """The file system under test, and its place."""

    @pytest.fixture
    def fs(self, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        keytools = Keytools.from_mapping(
            {
                "version": 1,
                "kms": {"type": "in_memory", "keys": ["footer"]},
                "tables": {"t": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
            }
        )
        (tmp_path / "lake").mkdir()
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        # The tests write into folders that do not exist.
        local = LocalFileSystem(auto_mkdir=True)
        made = {
            "local": lambda: keytools.filesystem(filesystem=local),
            "view": lambda: keytools.view(tmp_path, filesystem=local),
            "memory": lambda: keytools.filesystem(filesystem=MemoryFileSystem()),
        }[place]()
        yield with_payloads(made, monkeypatch)
        for file in (tmp_path / "lake").rglob("*"):
            assert not file.is_file() or file.read_bytes()[-4:] == b"PARE"

    @pytest.fixture
    def fs_path(self, place: str, tmp_path: Path) -> str:
        return {"view": "lake", "memory": "/lake"}.get(place, str(tmp_path / "lake"))

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return True


class TestCopy(abstract.AbstractCopyTests, Fixtures): ...


class TestGet(abstract.AbstractGetTests, Fixtures): ...


class TestPut(abstract.AbstractPutTests, Fixtures): ...


if hasattr(abstract, "AbstractPipeTests"):  # Older versions of fsspec have fewer tests.

    class TestPipe(abstract.AbstractPipeTests, Fixtures): ...

    class TestOpen(abstract.AbstractOpenTests, Fixtures): ...
