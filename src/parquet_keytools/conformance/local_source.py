"""A file on this machine, read without any other library: to show a footer must take no time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from parquet_keytools.errors import ParquetFormatError


class LocalSource:
    """A `ByteSource` over an open file."""

    def __init__(self, path: str, file_descriptor: int) -> None:
        self.path = path
        self._file_descriptor = file_descriptor
        self.size_bytes = os.fstat(file_descriptor).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            message = f"bytes {offset} to {offset + length} are outside of the file of {self.size_bytes} bytes"
            raise ParquetFormatError(message, path=self.path)
        parts: list[bytes] = []
        while length:
            part = os.pread(self._file_descriptor, length, offset)
            if not part:
                raise ParquetFormatError("the file ends early; it changed while it was read", path=self.path)
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)


@contextlib.contextmanager
def open_local(path: str) -> Iterator[LocalSource]:
    """Open a file for reading.

    Raises:
        OSError: It cannot be read, or is a folder.
    """
    with Path(path).expanduser().open("rb") as file:
        yield LocalSource(path, file.fileno())
