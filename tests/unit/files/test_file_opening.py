"""On which threads the footers of files are read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs as pafs

from parquet_keytools.files import opened_file
from parquet_keytools.storage.locations import FileLocation

FILES = 8


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the threads that read a footer."""
    found: list[int] = []

    def read(location: FileLocation) -> Any:
        found.append(threading.get_ident())
        return location, None

    monkeypatch.setattr(opened_file, "_read_envelope", read)
    return found


def read_envelopes(filesystem: pafs.FileSystem, folder: Path) -> None:
    locations = [FileLocation(filesystem, str(folder / f"{number}.parquet")) for number in range(FILES)]
    with ThreadPoolExecutor(2) as pool:
        envelopes: list[Any] = [*opened_file._read_envelopes(locations, pool)]
    assert [read for read, _ in envelopes] == locations


def clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let this pass from each look at the clock to the next one."""
    times = count(0, seconds)
    monkeypatch.setattr(opened_file, "time", SimpleNamespace(monotonic=lambda: next(times)))


def test_footers_of_a_local_disk_are_read_at_once(
    readers: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock(monkeypatch, 0.0001)
    read_envelopes(pafs.LocalFileSystem(), tmp_path)
    assert readers == [threading.get_ident()] * FILES


def test_a_slow_disk_is_asked_for_many_at_a_time(
    readers: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock(monkeypatch, 0.5)
    read_envelopes(pafs.LocalFileSystem(), tmp_path)
    assert readers.count(threading.get_ident()) == 1
    assert len(readers) == FILES


def test_a_store_is_asked_for_many_at_a_time(readers: list[int], tmp_path: Path) -> None:
    read_envelopes(pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), tmp_path)
    assert threading.get_ident() not in readers
    assert len(readers) == FILES
