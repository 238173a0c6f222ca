"""A file for Arrow whose bytes are not those of a file system."""

from __future__ import annotations

import io

import pyarrow as pa

from parquet_keytools.arrow.process_end import share_with_arrow
from parquet_keytools.format.byte_ranges import ByteSource


def source_file(source: ByteSource, file: pa.NativeFile) -> pa.NativeFile:
    """Return a file that has the bytes of a source.

    Args:
        source: Its bytes.
        file: What the source reads from; it is closed together with the one returned.
    """
    return pa.PythonFile(_SourceFile(source, file), mode="r")


class _SourceFile(io.RawIOBase):
    """Arrow locks it: a position belongs to one read at a time."""

    def __init__(self, source: ByteSource, file: pa.NativeFile) -> None:
        super().__init__()
        self._source = source
        self._file = file
        self._position = 0
        share_with_arrow(self)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence, self._source.size_bytes)
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start, end = self._position, self._source.size_bytes
        end = end if size < 0 else min(end, start + size)
        if end <= start:
            return b""
        data = bytes(self._source.read_at(start, end - start))
        self._position = end
        return data

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
