"""Where the bytes of a file are read from and written to: by ranges, so that no file is held whole."""

from __future__ import annotations

from typing import Protocol

Bytes = bytes | bytearray | memoryview


class ByteSource(Protocol):
    """A file to read from, by ranges, from any number of threads."""

    @property
    def path(self) -> str:
        """The name for error texts."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the file in bytes."""
        ...

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `offset`, without a copy where the source has them in memory.

        Raises:
            ParquetFormatError: The file ends before.
        """
        ...


class ByteSink(Protocol):
    """A file to write to."""

    @property
    def takes_any_order(self) -> bool:
        """Whether ranges may be written in any order and by several threads; else in order, without gaps."""
        ...

    def reserve(self, length: int) -> None:
        """Say how many bytes the file will have, before the first one is written."""
        ...

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write `data` at `offset`."""
        ...
