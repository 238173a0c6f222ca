"""Many small regions of a file that lie side by side, read together."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable

from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import Region

_SMALL = 64 * 1024
"""Longer regions are read as they are asked for."""

_READ_LENGTH = 256 * 1024
"""How much is read at once, at most."""


class ReadAhead:
    """A source that reads small regions ahead, as far as they follow one another; for any number of threads.

    No byte outside of the regions is read for it.

    Args:
        source: The file.
        regions: What will be read of it, by offset.
    """

    def __init__(self, source: ByteSource, regions: Iterable[Region]) -> None:
        self.path = source.path
        self.size_bytes = source.size_bytes
        self._source = source
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._held = threading.local()
        for region in regions:
            if not 0 < region.limit - region.offset <= _SMALL:
                continue
            if self._ends and self._ends[-1] == region.offset:
                self._ends[-1] = region.limit
            else:
                self._starts.append(region.offset)
                self._ends.append(region.limit)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `offset`.

        Raises:
            ParquetFormatError: The file ends before.
        """
        start, data = getattr(self._held, "window", _NOTHING)
        position = offset - start
        if 0 <= position <= len(data) - length:
            return data[position : position + length]
        run = bisect_right(self._starts, offset) - 1
        if run < 0 or offset + length > self._ends[run] or length >= _READ_LENGTH:
            return self._source.read_at(offset, length)
        data = memoryview(self._source.read_at(offset, min(_READ_LENGTH, self._ends[run] - offset)))
        self._held.window = (offset, data)
        return data[:length]


_NOTHING = (0, memoryview(b""))
