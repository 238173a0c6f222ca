"""The file system over which Arrow reads: it serves files that were opened as plain Parquet, and no others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import DelegatingHandler
from parquet_keytools.arrow.read_options import has_stand_ins
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.files.files_ahead import FilesAhead
from parquet_keytools.files.opened_file import OpenedFile, as_verified
from parquet_keytools.format.byte_ranges import ByteSource, RangedFile
from parquet_keytools.runtime.endings import in_use, share_with_arrow
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.runtime.working_threads import in_threads
from parquet_keytools.storage.sources import ArrowSource
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile

PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_A_TIME = 4

_MOST_VIEWS = 64
"""How many views are kept for the case that Arrow opens their files again."""

FOOTER_READ_BYTES = 64 * 1024
"""Arrow reads this much from the end of a file for its footer. A gap of this length keeps pages out of that read:
they would be decrypted for nothing, and a damaged page would break reads of other columns."""


class ViewHandler(DelegatingHandler):
    """Serves the views of opened files.

    A file that is not the file that was opened is refused, and so is a path that is not among the files. Columns
    that cannot be read are in the view, and reading them raises our error: Arrow fills a column that a file lacks
    with nulls.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        files: Mapping[str, OpenedFile] | FilesAhead,
        *,
        denied_columns: str = "error",
    ) -> None:
        """Make one; `denied_columns` is the setting of the configuration."""
        super().__init__(filesystem)
        self._files = files
        self._denied_columns = denied_columns
        self._pages = PageCache()
        self._lock = ForkSafeLock()
        self._views: OrderedDict[str, tuple[OpenedFile, PlainFile]] = OrderedDict()

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return the types of some paths. The length of a view is not known before it is opened."""
        return [
            pafs.FileInfo(path, pafs.FileType.File) if path in self._files else info
            for path, info in zip(paths, super().get_file_info(paths), strict=True)
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open the view of a file."""
        if path not in self._files:
            raise ParquetFormatError(
                "the file was not there when the data set was opened.", path=path, hint="Open it again."
            )
        with in_use():
            opened = self._files[path]
            file = self.filesystem.open_input_file(path)
            source: ByteSource = ArrowSource(path, file, file.size())
            if not opened.location.is_local:
                source = SourceInParts(source)
            source = as_verified(opened, source)
            if opened.is_encrypted or opened.digests is not None:
                source = self._view(path, opened, source)
        return pa.PythonFile(_ViewInput(source, file), mode="r")

    def _view(self, path: str, opened: OpenedFile, source: ByteSource) -> PlainFile:
        """Return the view of a file. Arrow opens a file for its schema, and again for its data."""
        with self._lock:
            known, view = self._views.get(path, (None, None))
        if view is not None and known is opened:
            return view.over(source)
        shown = self._denied_columns if has_stand_ins(opened, self._denied_columns) else "error"
        view = PlainFile(opened, source, shown, self._pages, gap=FOOTER_READ_BYTES)
        with self._lock:
            self._views[path] = opened, view
            if len(self._views) > _MOST_VIEWS:
                self._views.popitem(last=False)
        return view


class SourceInParts:
    """A source on another machine, whose long ranges are read in parts at the same time.

    Arrow asks a file of Python for one range after the other. Of a file of its own it would read some at a time.
    """

    def __init__(self, source: ByteSource) -> None:
        self.path = source.path
        self.size_bytes = source.size_bytes
        self._source = source

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return a range."""
        if length <= PART_BYTES:
            return self._source.read_at(offset, length)
        parts = [
            (start, min(PART_BYTES, offset + length - start))
            for start in range(offset, offset + length, PART_BYTES)
        ]
        return b"".join(in_threads(lambda part: self._source.read_at(*part), parts, _PARTS_AT_A_TIME))


class _ViewInput(RangedFile):
    """A view as a file of Python. Arrow locks it: a position belongs to one read at a time."""

    read = RangedFile.read_uncopied  # type: ignore[assignment]  # Arrow takes any buffer.

    def __init__(self, source: ByteSource, file: pa.NativeFile) -> None:
        """Make one; closing it closes `file`, from which the source reads."""
        super().__init__()
        self._source = source
        self._file = file
        self.size_bytes = source.size_bytes
        share_with_arrow(self)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        if not length:
            return b""
        with in_use():
            if not isinstance(self._source, PlainFile):
                return self._source.read_at(offset, length)
            # Arrow's pool uses memory again. New memory of the operating system costs more than decryption.
            out = memoryview(pa.allocate_buffer(length)).cast("B")
            self._source.read_into(offset, out)
            return out

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
