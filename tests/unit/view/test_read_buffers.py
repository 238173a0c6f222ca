"""Memory that reads share: what was given out never changes, and what is kept is bounded."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parquet_keytools.view.chunk_view import ReadBuffers

LARGE = 1_000_000


def read(buffers: ReadBuffers, length: int, byte: int, places: set[int] | None = None) -> bytes:
    def fill(out: memoryview) -> None:
        out[:] = bytes([byte]) * len(out)

    data = buffers.filled(length, fill)
    if places is not None:
        places.add(id(data))
    return data


def test_memory_is_taken_again_when_the_reader_is_done() -> None:
    buffers = ReadBuffers()
    places: set[int] = set()
    for number in range(20):
        data = read(buffers, LARGE, number, places)
        assert data == bytes([number]) * LARGE
        del data
    assert len(places) == 1


def test_what_was_given_out_never_changes() -> None:
    buffers = ReadBuffers()
    choose = random.Random(1)
    held: list[tuple[bytes, int, int]] = []
    for number in range(300):
        length = choose.choice((0, 1, 1_000, 130_000, 200_000, LARGE, LARGE + 1, 3 * LARGE))
        held.append((read(buffers, length, number % 256), length, number % 256))
        if choose.random() < 0.5:
            held.pop(choose.randrange(len(held)))
        if len(held) > 20:
            del held[:10]
        assert all(data == bytes([byte]) * length for data, length, byte in held)


def test_what_is_kept_is_bounded() -> None:
    buffers = ReadBuffers(3 * LARGE)
    held = [read(buffers, LARGE, number) for number in range(10)]
    assert len(buffers._kept) == 3
    read(buffers, 4 * LARGE, 1)
    assert sum(len(buffer.getvalue()) for buffer in buffers._kept) <= 3 * LARGE
    assert [data[0] for data in held] == list(range(10))


def test_memory_of_a_read_that_failed_is_not_given_out() -> None:
    buffers = ReadBuffers()

    def fail(out: memoryview) -> Any:
        raise OSError("broken")

    read(buffers, LARGE, 7)
    with pytest.raises(OSError, match="broken"):
        buffers.filled(LARGE, fail)
    assert buffers._kept == []


def test_threads() -> None:
    buffers = ReadBuffers()
    start = threading.Barrier(8)

    def work(byte: int) -> None:
        start.wait()
        for turn in range(30):
            length = 200_000 + 10_000 * (turn % 3)
            data = read(buffers, length, byte)
            other = read(buffers, LARGE, byte + 100)
            assert data == bytes([byte]) * length and other == bytes([byte + 100]) * LARGE

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
