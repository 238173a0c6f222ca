"""File objects over ranges: one position for threads that take turns, and otherwise one for each thread."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor

from parquet_keytools.format.file_layout import RangedFile

DATA = bytes(range(256)) * 16


class Ranged(RangedFile):
    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = len(DATA)

    def read_at(self, offset: int, length: int) -> bytes:
        return DATA[offset : offset + length]


def test_a_thread_reads_where_it_went_to() -> None:
    """As DuckDB's threads do: each one seeks, and others seek before it reads."""
    file = Ranged()
    threads = 8
    together = threading.Barrier(threads)

    def work(number: int) -> None:
        for turn in range(50):
            start = (number * 500 + turn) % 4_000
            assert file.seek(start) == start
            together.wait()
            assert file.tell() == start
            assert file.read(60) == DATA[start : start + 60]
            together.wait()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def test_threads_that_take_turns_share_the_position() -> None:
    """As with `asyncio.to_thread`, which uses a thread for each call."""
    file = Ranged()
    with ThreadPoolExecutor(1) as other:
        file.seek(100)
        assert other.submit(file.read, 10).result() == DATA[100:110]
        assert file.tell() == 110
        assert file.read(10) == DATA[110:120]
        other.submit(file.seek, 7).result()
        assert file.read(3) == DATA[7:10]
        assert other.submit(file.read, 3).result() == DATA[10:13]
        assert file.seek(2, io.SEEK_CUR) == 15
        buffer = bytearray(5)
        assert file.readinto(buffer) == 5 and buffer == DATA[15:20]
        assert file.tell() == 20


def test_the_position_goes_on_from_read_to_read() -> None:
    file = Ranged()
    assert [file.read(2) for _ in range(3)] == [DATA[0:2], DATA[2:4], DATA[4:6]]
    assert file.seek(-3, io.SEEK_END) == len(DATA) - 3
    assert file.read() == DATA[-3:]
    assert file.read() == b""
    assert file.seek(10_000) == 10_000 and file.read(1) == b""
