"""A plaintext view as a file object of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parquet_keytools.format.byte_ranges import RangedFile
from parquet_keytools.runtime.process_end import share_with_arrow
from parquet_keytools.view.plain_file import PlainFile


class PlainInput(RangedFile):
    """The view of one file, to read and seek in; any number may be open.

    Attributes:
        name: The file's name.
        size: Length in bytes, as fsspec names it.
        mode: As of files that Python opens.
    """

    mode = "rb"

    def __init__(
        self, file: PlainFile, reopen: Callable[[], Any] | None = None, *, whole_row_groups: bool = False
    ) -> None:
        """Make one.

        Args:
            file: The view.
            reopen: Opens the file again in another process, with the keys of who unpickles.
            whole_row_groups: See `PlainFile.read_at`.
        """
        super().__init__()
        self.name = file.path
        self.size = self.size_bytes = file.size_bytes
        self._file = file
        self._reopen = reopen
        self._whole_row_groups = whole_row_groups
        share_with_arrow(self)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range of the view."""
        return self._file.read_at(offset, length, whole_row_groups=self._whole_row_groups) if length else b""

    def __reduce__(self) -> Any:
        if self._reopen is None:
            raise TypeError("this file cannot be pickled")
        return self._reopen, ()
