"""An encrypted file as Arrow gets to see it where the keys of some columns cannot be had.

Arrow looks at the metadata of columns that nobody asked for: in a filter by position, in fragments of a data
set, in `metadata`. Where it asks for a key then and gets an exception, it aborts or hangs. Here it has no
reason to ask: the footer, under its own key, says that these columns are plaintext, without statistics, and
lie where reading raises our error.
"""

from __future__ import annotations

import os
import struct

from parquet_keytools.encryption.aes import NONCE_LENGTH
from parquet_keytools.encryption.footer import Footer, FooterMode
from parquet_keytools.encryption.module_cipher import FOOTER_PLACE
from parquet_keytools.errors import ColumnAccessDeniedError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, read_footer_bytes
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, FileCryptoMetaData, RowGroup
from parquet_keytools.format.thrift_compact import ThriftList, WireType
from parquet_keytools.opened_file import OpenedFile

_GAP = 1 << 20
"""Bytes around the chunks that cannot be read: Arrow reads what lies close together at once."""

_CHUNK_LENGTH = 64
_PLAIN_ENCODING = 0


def redacted_source(opened: OpenedFile, source: ByteSource) -> ByteSource:
    """Return the file without its denied columns' metadata; whoever reads their values gets our error."""
    footer = opened.footer
    footer_offset = footer.envelope.footer_offset
    chunks_offset = footer_offset + _GAP
    denied = {column.ordinal: column.path for column in footer.columns if column.path in opened.denied}
    types = [element.type for element in footer.metadata.schema if element.type is not None]
    metadata = footer.metadata.shallow_copy()
    row_groups = []
    for row_group, chunks in zip(footer.row_groups, footer.chunks, strict=True):
        redacted: RowGroup = row_group.shallow_copy()
        redacted.columns = [
            _chunk(
                types[ordinal] or 0, denied[ordinal], row_group.num_rows, chunks_offset + ordinal * _CHUNK_LENGTH
            )
            if ordinal in denied
            else chunk
            for ordinal, chunk in enumerate(chunks)
        ]
        row_groups.append(redacted)
    metadata.row_groups = row_groups
    tail = _tail(footer, metadata.serialise(), source)
    chunks_end = chunks_offset + len(footer.columns) * _CHUNK_LENGTH
    return _RedactedSource(opened, source, range(chunks_offset, chunks_end), tail, chunks_end + _GAP)


def _chunk(physical_type: int, path: tuple[str, ...], num_values: int, offset: int) -> ColumnChunk:
    metadata = ColumnMetaData()
    metadata.type = physical_type
    metadata.struct.fields[2] = (WireType.LIST, ThriftList(WireType.I32, [_PLAIN_ENCODING]))
    metadata.path_in_schema = list(path)
    metadata.codec = 0
    metadata.num_values = num_values
    metadata.total_uncompressed_size = metadata.total_compressed_size = _CHUNK_LENGTH
    metadata.data_page_offset = offset
    chunk = ColumnChunk()
    chunk.file_offset = 0
    chunk.meta_data = metadata
    return chunk


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


class _RedactedSource:
    """The pages of the file, then the chunks that cannot be read, then the redacted footer."""

    def __init__(
        self, opened: OpenedFile, source: ByteSource, refused: range, tail: bytes, tail_offset: int
    ) -> None:
        self.path = source.path
        self.size_bytes = tail_offset + len(tail)
        self._opened = opened
        self._source = source
        self._refused = refused
        self._tail = tail
        self._tail_offset = tail_offset

    def read_at(self, offset: int, length: int) -> bytes:
        end = offset + length
        if offset < self._refused.stop and end > self._refused.start:
            raise self._error(offset, end)
        pages_end = self._opened.footer.envelope.footer_offset
        pages = b""
        if offset < pages_end:
            pages = bytes(self._source.read_at(offset, min(end, pages_end) - offset))
        footer = self._tail[max(0, offset - self._tail_offset) : max(0, end - self._tail_offset)]
        return pages + bytes(length - len(pages) - len(footer)) + footer

    def _error(self, start: int, end: int) -> ColumnAccessDeniedError:
        """Return the error for the columns whose made-up chunks are read."""
        first = max(0, start - self._refused.start) // _CHUNK_LENGTH
        last = (min(end, self._refused.stop) - 1 - self._refused.start) // _CHUNK_LENGTH
        paths = [column.path for column in self._opened.footer.columns[first : last + 1]]
        denied = {path: self._opened.denied[path] for path in paths if path in self._opened.denied}
        return ColumnAccessDeniedError([".".join(path) for path in denied], list(denied.values()))
