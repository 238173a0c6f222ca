"""The file system through which Arrow reads: it serves files that were opened, and only as they were then.

Arrow looks at the metadata of columns that nobody asked for: in a filter by position, in fragments of a data set,
in `metadata`. Where it asks for a key then and gets an exception, it aborts or hangs. So a file with columns whose
keys are unavailable is shown redacted, and Arrow has no reason to ask: the footer, under its own key, says that
these columns are plaintext, without statistics, and lie where reading raises our error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.callbacks import DelegatingHandler, called_by_arrow, is_thread_of_arrow, wait_for_start
from parquet_keytools.arrow.read_options import arrow_read_limits, has_stand_ins
from parquet_keytools.encryption.aad import FOOTER_PLACE
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import KeytoolsError, ParquetFormatError
from parquet_keytools.files.denied_columns import shown_key_values
from parquet_keytools.files.files_ahead import FilesAhead
from parquet_keytools.files.opened_file import OpenedFile, as_verified
from parquet_keytools.format.byte_ranges import ByteSource, RangedFile
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, with_trailer
from parquet_keytools.format.pages import generated_chunk
from parquet_keytools.format.partial_footers import selected_footer, shown_row_group
from parquet_keytools.runtime.endings import in_use, share_with_arrow
from parquet_keytools.runtime.working_threads import in_threads
from parquet_keytools.storage.sources import ArrowSource
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile

PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_A_TIME = 4

_MOST_REDACTED = 256
"""Files whose redacted footers are kept."""

_GAP = 1 << 20
"""Bytes around the chunks that cannot be read: Arrow reads what lies close together at once."""

_CHUNK_LENGTH = 64


@called_by_arrow
class VerifiedHandler(DelegatingHandler):
    """Serves files whose footers were verified.

    Arrow accepts a plaintext file in place of an encrypted one: a file that is not the one that was verified is
    refused here. A file that Arrow cannot decrypt is decrypted as it is read; of a file with columns that cannot
    be read Arrow does not see that these are encrypted. A path that is not among the files is refused.

    Attributes:
        denied_columns: What the configuration says of columns that cannot be read. If they are null, or digests of
            values are shown, Arrow sees a view of the file.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        files: Mapping[str, OpenedFile] | FilesAhead,
        *,
        denied_columns: str = "error",
    ) -> None:
        super().__init__(filesystem)
        self._files = files
        self.denied_columns = denied_columns
        self._redacted: dict[str, RedactedFooter] = {}
        self._pages = PageCache()

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return what is known of some paths; a decrypted file has another size, which nobody knows yet."""
        return [
            pafs.FileInfo(path, pafs.FileType.File) if path in self._files else info
            for path, info in zip(paths, super().get_file_info(paths), strict=True)
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open one of the files; an error may come from reading it, see `callbacks`."""
        if is_thread_of_arrow(inspect.currentframe()):
            return pa.PythonFile(self._open(path), mode="r")
        try:
            file = self._open(path)
        except Exception as error:
            file = _SourceFile(_Unreadable(path, error), None)
        file.waits = True
        return pa.PythonFile(file, mode="r")

    def _open(self, path: str) -> _SourceFile:
        if path not in self._files:
            raise ParquetFormatError(
                "the file was not there when the data set was opened.", path=path, hint="Open it again."
            )
        with in_use():  # Not as a decorator: its code would be taken for code that Arrow calls.
            opened = self._files[path]
            file = self.filesystem.open_input_file(path)
        source: ByteSource = ArrowSource(path, file, file.size())
        if not opened.location.is_local:
            source = SourceInParts(source)
        verified = as_verified(opened, source)
        if has_stand_ins(opened, self.denied_columns):
            return _SourceFile(PlainFile(opened, verified, self.denied_columns, self._pages), file)
        if opened.is_encrypted and not self.is_left_to_arrow(opened):
            # Arrow fills a column that a file lacks with nulls: one that cannot be read raises our error instead.
            return _SourceFile(PlainFile(opened, verified, "error", self._pages), file)
        if opened.denied and opened.is_encrypted:
            # Arrow opens a file more than once.
            redacted = self._redacted.get(path)
            if redacted is None:
                redacted = redacted_footer(opened)
                if len(self._redacted) >= _MOST_REDACTED:
                    self._redacted.clear()
                self._redacted[path] = redacted
            return _SourceFile(RedactedSource(opened, verified, redacted), file)
        return _SourceFile(verified, file)

    def is_left_to_arrow(self, opened: OpenedFile) -> bool:
        """Tell whether Arrow decrypts an encrypted file; else it gets one that is decrypted."""
        # Where digests are shown, no key is in anything that callers get from Arrow.
        return self.denied_columns != "hash" and not arrow_read_limits(opened)


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


@dataclass(frozen=True)
class _Unreadable:
    """What is read of a file that could not be opened."""

    path: str
    error: Exception
    size_bytes: int = 1 << 16

    def read_at(self, offset: int, length: int) -> bytes:
        raise self.error


@called_by_arrow
class _SourceFile(RangedFile):
    """A file that has the bytes of a source. Arrow locks it: a position belongs to one read at a time.

    Attributes:
        waits: Whether it was opened on a thread of Python: see `callbacks`.
    """

    def __init__(self, source: ByteSource, file: pa.NativeFile | None) -> None:
        """Make one; it closes `file`, from which the source reads."""
        super().__init__()
        self.waits = False
        self._source = source
        self._file = file
        self.size_bytes = source.size_bytes
        share_with_arrow(self)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        with in_use():
            return self._source.read_at(offset, length) if length else b""

    def read(self, size: int | None = -1, /) -> bytes:
        # Whether a thread of Arrow calls shows in this frame only.
        if self.waits:
            wait_for_start(inspect.currentframe())
            self.waits = False
        return super().read(size)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


@dataclass(frozen=True)
class RedactedFooter:
    """The footer without its denied columns' metadata, and what lies before it in place of their values.

    Attributes:
        refused: Where their values seem to lie: whoever reads there gets our error.
        offset: Where the footer begins.
        data: The footer, its length and the magic.
    """

    refused: range
    offset: int
    data: bytes


def redacted_footer(opened: OpenedFile) -> RedactedFooter:
    """Return what ends a file of which only some columns can be read."""
    footer = opened.footer
    footer_offset = footer.envelope.footer_offset
    chunks_offset = footer_offset + _GAP
    denied = [column.path if column.path in opened.denied else None for column in footer.columns]
    types = [leaf.physical_type for leaf in footer.leaves]
    key_values = shown_key_values(opened, {column.path[0] for column in footer.columns})
    metadata = selected_footer(footer.metadata, footer.leaves, None, None, key_values, shows_all=False).metadata
    denied_ordinals = {column.ordinal for column in footer.columns if column.path in opened.denied}

    @functools.cache
    def redacted_chunks(num_rows: int) -> list[bytes | None]:
        return [
            None
            if path is None
            else generated_chunk(
                of, path, num_rows, chunks_offset + ordinal * _CHUNK_LENGTH, _CHUNK_LENGTH
            ).serialise()
            for ordinal, (path, of) in enumerate(zip(denied, types, strict=True))
        ]

    metadata.row_groups = [
        shown_row_group(row_group.with_chunks(redacted_chunks(row_group.num_rows)), denied_ordinals)[0]
        for row_group in footer.row_groups
    ]
    tail = _tail(opened, metadata.serialise())
    chunks_end = chunks_offset + len(footer.columns) * _CHUNK_LENGTH
    return RedactedFooter(range(chunks_offset, chunks_end), chunks_end + _GAP, tail)


def _tail(opened: OpenedFile, serialised: bytes) -> bytes:
    """Return footer, length and magic; the footer encrypted or signed with its own key, in memory only."""
    footer = opened.footer
    cipher = footer.cipher
    assert cipher is not None
    if footer.mode is FooterMode.ENCRYPTED_FOOTER:
        envelope = footer.envelope
        crypto_metadata_length = envelope.footer_length - len(envelope.body)
        body = envelope.tail[:crypto_metadata_length] + cipher.encrypt(serialised, FOOTER_PLACE)
        magic = MAGIC_ENCRYPTED_FOOTER
    else:
        body, magic = cipher.signed(serialised), MAGIC
    return with_trailer(body, magic)


class RedactedSource:
    """The pages of the file, then the chunks that cannot be read, then the redacted footer."""

    def __init__(self, opened: OpenedFile, source: ByteSource, footer: RedactedFooter) -> None:
        self.path = source.path
        self.size_bytes = footer.offset + len(footer.data)
        self._opened = opened
        self._source = source
        self._footer = footer

    def read_at(self, offset: int, length: int) -> bytes:
        """Read some bytes; those of a column that cannot be read raise `ColumnAccessDeniedError`."""
        end = offset + length
        if offset < self._footer.refused.stop and end > self._footer.refused.start:
            raise self._error(offset, end)
        pages_end = self._opened.footer.envelope.footer_offset
        pages = b""
        if offset < pages_end:
            pages = bytes(self._source.read_at(offset, min(end, pages_end) - offset))
        start = self._footer.offset
        footer = self._footer.data[max(0, offset - start) : max(0, end - start)]
        return pages + bytes(length - len(pages) - len(footer)) + footer

    def _error(self, start: int, end: int) -> KeytoolsError:
        """Return the error for the columns whose made-up chunks are read."""
        first = max(0, start - self._footer.refused.start) // _CHUNK_LENGTH
        last = (min(end, self._footer.refused.stop) - 1 - self._footer.refused.start) // _CHUNK_LENGTH
        paths = [column.path for column in self._opened.footer.columns[first : last + 1]]
        return self._opened.denial([path for path in paths if path in self._opened.denied])
