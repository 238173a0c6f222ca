"""Where plaintext is collected: bounded in memory, and encrypted on disk."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parquet_keytools.errors import OutputError, ParquetFormatError
from parquet_keytools.files import plaintext_spool
from parquet_keytools.files.plaintext_spool import PlaintextSpool, SpoolRoom
from parquet_keytools.storage.locations import FileLocation


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plaintext_spool, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(plaintext_spool, "SLOT_BYTES", 1016)


def room(folder: Path, memory_bytes: int) -> SpoolRoom:
    return SpoolRoom(FileLocation.resolve(folder / "not there" / "x.parquet"), memory_bytes)


@pytest.mark.parametrize("memory_bytes", [0, 3000, 100_000])
def test_every_range_comes_back(tmp_path: Path, memory_bytes: int) -> None:
    content = random.Random(1).randbytes(12_345)
    spool = PlaintextSpool(room(tmp_path, memory_bytes), "x")
    for start in range(0, len(content), 777):
        assert spool.write(memoryview(content)[start : start + 777]) == len(content[start : start + 777])
    assert spool.size_bytes == len(content)
    numbers = random.Random(2)
    ranges = [(0, 0), (0, len(content)), (len(content), 0), (999, 2), (1000, 1000)]
    ranges += [(start, numbers.randrange(12_345 - start)) for start in numbers.sample(range(12_345), 100)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: bytes(spool.read_at(*one)), ranges))
    assert found == [content[start : start + length] for start, length in ranges]
    with pytest.raises(ParquetFormatError, match="outside"):
        spool.read_at(12_000, 346)
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_disk_is_encrypted_and_its_room_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[bytes] = []
    pwrite = os.pwrite

    def writing(descriptor: int, data: bytes, offset: int) -> int:
        stored.append(bytes(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", writing)
    shared = room(tmp_path, 0)
    for _ in range(3):
        spools = [PlaintextSpool(shared, "x") for _ in range(2)]
        for spool in spools:
            spool.write(b"secret" * 1000)
        assert all(bytes(spool.read_at(0, 6000)) == b"secret" * 1000 for spool in spools)
        for spool in spools:
            spool.close()
    assert len(stored) == 3 * 2 * 6
    assert len(set(stored)) == len(stored)
    assert not any(b"secretsecret" in data for data in stored)


def test_a_change_of_the_temporary_file_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = PlaintextSpool(room(tmp_path, 0), "x")
    spool.write(b"secret" * 1000)
    pread = os.pread

    def altered(descriptor: int, length: int, offset: int) -> bytes:
        data = bytearray(pread(descriptor, length, offset))
        data[7] ^= 1
        return bytes(data)

    monkeypatch.setattr(os, "pread", altered)
    with pytest.raises(OutputError, match="was changed"):
        spool.read_at(0, 10)


def test_the_garbage_collector_may_end_a_file_while_a_segment_is_kept(tmp_path: Path) -> None:
    here = room(tmp_path, 2000)
    first = here.put(bytearray(1000))

    class Collecting(bytearray):
        def __len__(self) -> int:
            if threading.current_thread() is keeping and not freed:
                freed.append(first)
                here.free(first)
            return super().__len__()

    freed: list[object] = []
    kept: list[object] = []
    keeping = threading.Thread(target=lambda: kept.append(here.put(Collecting(1000))), daemon=True)
    keeping.start()
    keeping.join(60)
    assert len(kept) == 1
    assert isinstance(here.put(bytearray(1000)), bytearray)
