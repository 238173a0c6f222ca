"""Small adjacent regions are read together, and nothing else is read."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import pytest

from parquet_keytools.encryption.file_rewriter import ReadAhead
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import Region, RegionKind

_DATA = os.urandom(2_000_000)


@dataclass
class Source:
    """A file in memory that records its reads."""

    path: str = "file"
    size_bytes: int = len(_DATA)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range."""
        if offset + length > self.size_bytes:
            raise ParquetFormatError("outside", path=self.path)
        self.reads.append((offset, length))
        return _DATA[offset : offset + length]


def _regions(*places: tuple[int, int]) -> list[Region]:
    return [Region(RegionKind.PAGES, 0, 0, start, end - start, end) for start, end in places]


def test_neighbours_are_read_by_one_read() -> None:
    source = Source()
    ahead = ReadAhead(source, _regions((100, 200), (200, 350), (350, 400)))
    for start, end in ((100, 200), (200, 350), (350, 400), (120, 130)):
        assert bytes(ahead.read_at(start, end - start)) == _DATA[start:end]
    assert source.reads == [(100, 300)]


def test_what_lies_between_regions_is_not_read() -> None:
    source = Source()
    ahead = ReadAhead(source, _regions((100, 200), (201, 300), (1_000, 1_100)))
    for start, end in ((100, 200), (201, 300), (1_000, 1_100)):
        assert bytes(ahead.read_at(start, end - start)) == _DATA[start:end]
    assert source.reads == [(100, 100), (201, 99), (1_000, 100)]


def test_long_regions_are_read_as_they_are_asked_for() -> None:
    source = Source()
    ahead = ReadAhead(source, _regions((0, 1_000_000), (1_000_000, 1_000_010)))
    assert bytes(ahead.read_at(10, 512)) == _DATA[10:522]
    assert bytes(ahead.read_at(1_000_000, 5)) == _DATA[1_000_000:1_000_005]
    assert source.reads == [(10, 512), (1_000_000, 10)]


def test_many_small_regions_are_read_in_pieces() -> None:
    places = [(start, start + 1_000) for start in range(0, 2_000_000, 1_000)]
    source = Source()
    ahead = ReadAhead(source, _regions(*places))
    assert b"".join(bytes(ahead.read_at(start, 1_000)) for start, _ in places) == _DATA
    assert len(source.reads) < 10
    assert max(length for _, length in source.reads) <= 256 * 1024


def test_a_long_read_of_small_regions_is_whole() -> None:
    source = Source()
    ahead = ReadAhead(source, _regions(*[(start, start + 1_000) for start in range(0, 2_000_000, 1_000)]))
    assert (ahead.path, ahead.size_bytes) == (source.path, source.size_bytes)
    for length in (256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 1_500_000):
        assert bytes(ahead.read_at(length, length // 4)) == _DATA[length : length + length // 4]
        assert bytes(ahead.read_at(0, length)) == _DATA[:length]


def test_what_is_in_no_region_is_read_all_the_same() -> None:
    source = Source()
    ahead = ReadAhead(source, _regions((100, 200)))
    assert bytes(ahead.read_at(150, 100)) == _DATA[150:250]
    assert bytes(ahead.read_at(5, 0)) == b""
    with pytest.raises(ParquetFormatError, match="outside"):
        ahead.read_at(len(_DATA), 1)


def test_threads_do_not_disturb_each_other() -> None:
    places = [(start, start + 1_000) for start in range(0, 2_000_000, 1_000)]
    ahead = ReadAhead(Source(), _regions(*places))
    wrong: list[int] = []

    def read(step: int) -> None:
        wrong.extend(
            start for start, end in places[::step] if bytes(ahead.read_at(start, end - start)) != _DATA[start:end]
        )

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, -1, 7, -7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
