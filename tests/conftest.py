"""Fixtures that many tests need."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import remembered_scrypt
import typer.testing
from hypothesis import HealthCheck, settings
from order import position, pytest_handlecrashitem, pytest_xdist_make_scheduler
from soak import SOAK
from warm_python import WarmPython

__all__ = ["pytest_handlecrashitem", "pytest_xdist_make_scheduler"]

pytest_plugins = ["core_tests", "skipped_tests"]

REPOSITORY = Path(__file__).resolve().parent.parent

collect_ignore = []
if sys.platform != "linux":
    # They use calls that only Linux has, or look into /proc.
    collect_ignore += [
        "fuzz/test_state_mutants.py",
        "tamper/test_other_writers.py",
        "tamper/test_rotation_crashes.py",
        "tamper/test_two_users.py",
        "tamper/test_write_crashes.py",
        "unit/cli/test_processes.py",
        "unit/files/test_replacement.py",
        "unit/rotation/test_kernel_copy.py",
        "unit/rotation/test_rekeying_in_processes.py",
        "unit/storage/test_outputs.py",
        "unit/storage/test_storage.py",
    ]

remembered_scrypt.install()
# A script in the background ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# For each client, boto3 and requests would read the certificates of the machine's proxy; all servers are local.
for _name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
    os.environ.pop(_name, None)
# A busy machine is no failure. Each run uses the same examples as the last; a soak draws others.
settings.register_profile(
    "tests", deadline=None, derandomize=not SOAK, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
# Typer builds the whole tree of commands for each call of one.
typer.testing._get_command = cache(typer.testing._get_command)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slowest tests first where several processes share the work."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: position(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep long-lived objects out of garbage collection, while tests are collected and while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Collect rarely: it takes a twentieth of the time of the tests.
        gc.set_threshold(5_000, 20, 10)
        gc.enable()


@pytest.fixture(scope="session")
def parquet_test_data() -> Path:
    """The folder of the public Parquet test files."""
    default = REPOSITORY.parent / "shared" / "parquet-testing" / "data"
    folder = Path(os.environ.get("PARQUET_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"there are no Parquet test files in {folder}; set PARQUET_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def iceberg_test_data() -> Path:
    """The folder of the encrypted tables that other Iceberg implementations wrote."""
    default = REPOSITORY.parent / "shared" / "iceberg-testing"
    folder = Path(os.environ.get("ICEBERG_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"there are no tables of Iceberg in {folder}; set ICEBERG_TEST_DATA")
    return folder


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork worker processes from a process that has imported what they need, which takes most of their time.

    In a soak, they start as users' do. Forked workers have the environment of the first call.
    """
    if sys.platform == "linux" and not SOAK:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parquet_keytools.keytools", "parquet_keytools.tables.reading"])
        monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """A process that runs programs of the documentation and of the command line."""
    warm = WarmPython()
    yield warm
    warm.close()


# To number a folder, pytest would scan the folders of all earlier tests.
_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of a test."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    folder.mkdir(0o700)
    return folder
