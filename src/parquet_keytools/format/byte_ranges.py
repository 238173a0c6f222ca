"""Where the bytes of a file are read from and written to: by ranges, so that no file is held whole."""

from __future__ import annotations

import io
import os
import threading
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from parquet_keytools.errors import FileChangedError, ParquetFormatError
from parquet_keytools.runtime import operating_system

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


def check_range(source: ByteSource, offset: int, length: int) -> None:
    """Refuse a range that is not in a file.

    Raises:
        ParquetFormatError: It is not.
    """
    if offset < 0 or length < 0 or offset + length > source.size_bytes:
        raise ParquetFormatError(
            f"bytes {offset} to {offset + length} are outside of the file of {source.size_bytes} bytes",
            path=source.path,
        )


class HeldSource:
    """A source of which a part is in memory: bytes that were read, or another end than the file has."""

    def __init__(self, source: ByteSource, offset: int, data: bytes | memoryview, *, is_end: bool = False) -> None:
        """Take the part from `offset`; with `is_end`, the file ends with it."""
        self.path = source.path
        self._source = source
        self._start = offset
        self._end = offset + len(data)
        self._data = memoryview(data)
        self.size_bytes = self._end if is_end else source.size_bytes

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes of the source."""
        check_range(self, offset, length)
        end = offset + length
        start, stop = self._start, self._end
        if start <= offset and end <= stop:
            return self._data[offset - start : end - start]
        if end <= start or offset >= stop:
            return self._source.read_at(offset, length)
        parts: list[bytes | memoryview] = []
        if offset < start:
            parts.append(self._source.read_at(offset, start - offset))
        parts.append(self._data[max(offset - start, 0) : end - start])
        if end > stop:
            parts.append(self._source.read_at(stop, end - stop))
        return b"".join(parts)


@dataclass(frozen=True)
class FileSource:
    """An open local file.

    It is read and never mapped: a file that another process truncates would end this process with SIGBUS.
    """

    path: str
    file_descriptor: int
    size_bytes: int

    @classmethod
    def of(cls, path: str, file_descriptor: int) -> FileSource:
        """Return a source for an open file as long as it is now."""
        return cls(path, file_descriptor, os.fstat(file_descriptor).st_size)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read one range.

        Raises:
            FileChangedError: The file became shorter.
            OSError: It cannot be read.
        """
        check_range(self, offset, length)
        data = operating_system.read_at(self.file_descriptor, length, offset)
        if len(data) == length:
            return data
        # The operating system reads no more than about 2 GiB at a time.
        parts = [data]
        while data and (length := length - len(data)):
            offset += len(data)
            data = operating_system.read_at(self.file_descriptor, length, offset)
            parts.append(data)
        if not data:
            raise shortened(self.path)
        return b"".join(parts)


def shortened(path: str) -> FileChangedError:
    """Return the error for a file that became shorter while it was read."""
    return FileChangedError(
        "the file ends early: it became shorter while it was read.", path=path, hint="Try again."
    )


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


class RangedFile(io.RawIOBase):
    """A file object of Python over what is read by ranges.

    It has one position, but a thread that goes to one reads there, wherever others go meanwhile: DuckDB reads
    a file by several threads, of which each goes to its place and then reads.

    Attributes:
        size_bytes: Length in bytes.
    """

    size_bytes: int
    _position = 0

    def __init__(self) -> None:
        super().__init__()
        self._sought: dict[int, int] = {}
        """Thread -> where it went to and has not read yet."""

    @abstractmethod
    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset`; it is called with a length of 0 behind the end, too."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the start."""
        return self._sought.get(threading.get_ident(), self._position)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position, which may lie behind the end, and return it.

        Raises:
            ValueError: The position is before the start, `whence` is unknown, or the file is closed.
        """
        self._refuse_closed()
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size_bytes}.get(whence)
        if start is None or start + offset < 0:
            raise ValueError(f"no such position: {offset} with whence {whence}")
        self._position = self._sought[threading.get_ident()] = start + offset
        return start + offset

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes from the position, all that follow where it is negative or None."""
        return bytes(self.read_uncopied(size))

    def read_uncopied(self, size: int | None = -1) -> bytes | memoryview:
        """Read like `read`, without a copy where the bytes are in memory."""
        self._refuse_closed()
        start = self._sought.pop(threading.get_ident(), None)
        if start is None:
            # Threads take turns: what one of them did last counts for all.
            self._sought.clear()
            start = self._position
        left = max(self.size_bytes - start, 0)
        data = self.read_at(start, left if size is None or size < 0 else min(size, left))
        self._position = start + len(data)
        return data

    def readall(self) -> bytes:
        """Return all that follows."""
        return self.read()

    def readinto(self, buffer: Bytes, /) -> int:  # type: ignore[override]
        """Read into memory of the caller, and return the number of bytes: fewer than fit only at the end."""
        view = memoryview(buffer).cast("B")
        data = self.read_uncopied(len(view))
        view[: len(data)] = data
        return len(data)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")
