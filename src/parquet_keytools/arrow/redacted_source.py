"""An encrypted file as Arrow gets to see it where the keys of some columns are unavailable.

Arrow looks at the metadata of columns that nobody asked for: in a filter by position, in fragments of a data
set, in `metadata`. Where it asks for a key then and gets an exception, it aborts or hangs. Here it has no
reason to ask: the footer, under its own key, says that these columns are plaintext, without statistics, and
lie where reading raises our error.
"""

from __future__ import annotations

import functools
import os
import struct
from dataclasses import dataclass

from parquet_keytools.encryption.aad import FOOTER_PLACE
from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import ColumnAccessDeniedError
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.files.shown_key_values import shown_key_values
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.column_selection import selected_footer
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, read_footer_bytes
from parquet_keytools.format.generated_chunks import generated_chunk
from parquet_keytools.format.structs import ColumnChunk, FileCryptoMetaData, RowGroup

_GAP = 1 << 20
"""Bytes around the chunks that cannot be read: Arrow reads what lies close together at once."""

_CHUNK_LENGTH = 64


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


def redacted_footer(opened: OpenedFile, source: ByteSource) -> RedactedFooter:
    """Return what ends a file of which only some columns can be read."""
    footer = opened.footer
    footer_offset = footer.envelope.footer_offset
    chunks_offset = footer_offset + _GAP
    denied = {column.ordinal: column.path for column in footer.columns if column.path in opened.denied}
    types = [element.type for element in footer.metadata.schema if element.type is not None]
    key_values = shown_key_values(opened, {column.path[0] for column in footer.columns})
    metadata = selected_footer(footer.metadata, footer.leaves, None, None, key_values).metadata

    @functools.cache
    def redacted_chunk(ordinal: int, num_rows: int) -> ColumnChunk:
        offset = chunks_offset + ordinal * _CHUNK_LENGTH
        return generated_chunk(types[ordinal] or 0, denied[ordinal], num_rows, offset, _CHUNK_LENGTH).as_read()

    row_groups = []
    for row_group, chunks in zip(footer.row_groups, footer.chunks, strict=True):
        num_rows = row_group.num_rows
        redacted: RowGroup = row_group.shallow_copy()
        redacted.columns = [
            redacted_chunk(ordinal, num_rows) if ordinal in denied else chunk
            for ordinal, chunk in enumerate(chunks)
        ]
        row_groups.append(redacted)
    metadata.row_groups = row_groups
    tail = _tail(footer, metadata.serialise(), source)
    chunks_end = chunks_offset + len(footer.columns) * _CHUNK_LENGTH
    return RedactedFooter(range(chunks_offset, chunks_end), chunks_end + _GAP, tail)


def _tail(footer: Footer, serialised: bytes, source: ByteSource) -> bytes:
    """Return footer, length and magic; the footer encrypted or signed with its own key, in memory only."""
    cipher = footer.cipher
    assert cipher is not None
    if footer.mode is FooterMode.ENCRYPTED_FOOTER:
        stored = read_footer_bytes(source).data
        _, end = FileCryptoMetaData.read(stored)
        body = stored[:end] + cipher.encrypt(serialised, FOOTER_PLACE)
        magic = MAGIC_ENCRYPTED_FOOTER
    else:
        cipher.reserve(1)
        nonce = os.urandom(NONCE_LENGTH)
        body = serialised + nonce + cipher.gcm.tag(nonce, serialised, FOOTER_PLACE.aad(cipher.file_aad))
        magic = MAGIC
    return body + struct.pack("<I", len(body)) + magic


class RedactedSource:
    """The pages of the file, then the chunks that cannot be read, then the redacted footer."""

    def __init__(self, opened: OpenedFile, source: ByteSource, footer: RedactedFooter) -> None:
        self.path = source.path
        self.size_bytes = footer.offset + len(footer.data)
        self._opened = opened
        self._source = source
        self._footer = footer

    def read_at(self, offset: int, length: int) -> bytes:
        """Read some bytes.

        Raises:
            ColumnAccessDeniedError: They are among the values of a column that cannot be read.
        """
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

    def _error(self, start: int, end: int) -> ColumnAccessDeniedError:
        """Return the error for the columns whose made-up chunks are read."""
        first = max(0, start - self._footer.refused.start) // _CHUNK_LENGTH
        last = (min(end, self._footer.refused.stop) - 1 - self._footer.refused.start) // _CHUNK_LENGTH
        paths = [column.path for column in self._opened.footer.columns[first : last + 1]]
        denied = {path: self._opened.denied[path] for path in paths if path in self._opened.denied}
        return ColumnAccessDeniedError([".".join(path) for path in denied], list(denied.values()))
