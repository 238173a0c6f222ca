"""A plaintext view as a file object of Python."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from parquet_keytools.runtime.process_end import share_with_arrow
from parquet_keytools.view.plain_file import PlainFile


class PlainInput(io.RawIOBase):
    """The view of one file, to read and seek in; for one thread, beside others of the same file.

    Attributes:
        name: The file's name.
        size: Length in bytes.
        mode: As of files that Python opens.
    """

    mode = "rb"

    def __init__(self, file: PlainFile, reopen: Callable[[], Any] | None = None) -> None:
        """Make one.

        Args:
            file: The view.
            reopen: Opens the file again in another process, with the keys of who unpickles.
        """
        super().__init__()
        self.name = file.path
        self.size = file.size_bytes
        self._file = file
        self._reopen = reopen
        self._position = 0
        share_with_arrow(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position; it may lie behind the end."""
        self._refuse_closed()
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}
        if whence not in starts:
            raise ValueError(f"whence is 0, 1 or 2, and not {whence}")
        if starts[whence] + offset < 0:
            raise ValueError("a position before the start of the file")
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; less than fits there only at the end. Returns the number of bytes."""
        self._refuse_closed()
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(self.size - self._position, 0))
        view[:length] = self._file.read_at(self._position, length)
        self._position += length
        return length

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes; fewer than `size` only at the end, and all that are left where it is negative or None."""
        self._refuse_closed()
        left = max(self.size - self._position, 0)
        length = left if size is None or size < 0 else min(size, left)
        data = self._file.read_at(self._position, length)
        self._position += length
        return data

    def readall(self) -> bytes:
        """Read all that is left."""
        return self.read()

    def __reduce__(self) -> Any:
        if self._reopen is None:
            raise TypeError("this file cannot be pickled")
        return self._reopen, ()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ValueError("the file is closed")
