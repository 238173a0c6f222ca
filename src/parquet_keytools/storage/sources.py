"""Files that are read by ranges, from memory, local disks and any other file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import Bytes, ByteSource, FileSource, check_range, shortened
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.locations import FileLocation


@dataclass(frozen=True)
class BufferSource:
    """A file in memory."""

    path: str
    buffer: Bytes | pa.Buffer

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return len(self.buffer)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return a range, without a copy."""
        check_range(self, offset, length)
        # Arrow's buffers have signed bytes.
        return memoryview(self.buffer).cast("B")[offset : offset + length]


@dataclass(frozen=True)
class ArrowSource:
    """An open pyarrow file."""

    path: str
    file: pa.NativeFile
    size_bytes: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Read one range with one request."""
        check_range(self, offset, length)
        try:
            data: bytes = self.file.read_at(length, offset)
        except OSError as error:
            raise _naming(error, self.path) from error.__cause__
        if len(data) != length:
            raise shortened(self.path)
        return data


def _naming(error: OSError, path: str) -> OSError:
    """Return an error that names its file, as errors of store clients often do not."""
    kind = type(error)
    if error.errno is not None or kind.__module__ != "builtins" or path in str(error):
        return error
    return kind(f"{path}: {error or 'it could not be read'}").with_traceback(error.__traceback__)


@contextlib.contextmanager
def open_source(location: FileLocation) -> Iterator[ByteSource]:
    """Open a file for reading by ranges.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ParquetFormatError: It is not a regular file.
    """
    if not location.is_local:
        with location.filesystem.open_input_file(location.path) as file:
            yield ArrowSource(str(location), file, file.size())
        return
    _refuse_irregular(location)
    # Not `open`, which makes a dozen system calls.
    descriptor = operating_system.open_file(location.path, os.O_RDONLY, follow_link=True)
    try:
        yield FileSource.of(str(location), descriptor)
    finally:
        os.close(descriptor)


def _refuse_irregular(location: FileLocation) -> None:
    """Refuse folders, pipes, sockets and devices unopened, because opening a pipe waits for its other end."""
    mode = os.stat(location.path).st_mode  # noqa: PTH116 - no object for each of a million files
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), location.path)
    if not stat.S_ISREG(mode):
        raise ParquetFormatError(
            "it is not a regular file.",
            path=str(location),
            hint="Parquet is read from its end: write it to a file.",
        )


def ends_with(source: ByteSource, offset: int, data: bytes) -> bool:
    """Return whether a file ends with these bytes, from an offset on."""
    return source.size_bytes == offset + len(data) and bytes(source.read_at(offset, len(data))) == data


def read_whole(location: FileLocation, max_bytes: int) -> bytes:
    """Read a small file.

    Raises:
        FileNotFoundError: There is no such file.
        ParquetFormatError: It has more than `max_bytes` bytes, or is not a regular file.
    """
    if location.is_local:
        _refuse_irregular(location)
    with location.filesystem.open_input_file(location.path) as file:
        if file.size() > max_bytes:
            raise ParquetFormatError(f"longer than {max_bytes} bytes", path=str(location))
        data: bytes = file.readall()
        return data
