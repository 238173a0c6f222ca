"""The metadata of column chunks: decrypted, and compared with what a plaintext footer shows (spec 5.3, 5.5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parquet_keytools.conformance.chunk_ciphers import ChunkCiphers, check_module, check_padding
from parquet_keytools.conformance.chunk_entries import ChunkNumbers
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import Column, OpenFooter, chunk_place
from parquet_keytools.conformance.nonce_ledger import nonce_entry
from parquet_keytools.conformance.rules import Scope
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.envelope import Envelope
from parquet_keytools.encryption.module_cipher import GCM_FRAMING
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.partial_footers import shown_metadata
from parquet_keytools.format.structs import ColumnMetaData
from parquet_keytools.format.thrift_values import WireType

_MOST_LEFT_BYTES = 64 * 1024

_ENCODINGS_FIELD_ID = 2
"""Of `encodings` in ColumnMetaData, which is required and of no use here."""

_REQUIRED = {
    ColumnMetaData.type.field_id: WireType.I32,
    _ENCODINGS_FIELD_ID: WireType.LIST,
    ColumnMetaData.path_in_schema.field_id: WireType.LIST,
    ColumnMetaData.codec.field_id: WireType.I32,
    ColumnMetaData.num_values.field_id: WireType.I64,
    ColumnMetaData.total_uncompressed_size.field_id: WireType.I64,
    ColumnMetaData.total_compressed_size.field_id: WireType.I64,
    ColumnMetaData.data_page_offset.field_id: WireType.I64,
}
"""Ids of the required fields, and their types."""


_AUTHENTIC = (ModuleType.COLUMN_META_DATA, "authentic")
_BROKEN = (ModuleType.COLUMN_META_DATA, "broken")


class MetadataReader:
    """Reads the metadata of chunks, and checks the rules about it."""

    def __init__(self, envelope: Envelope, footer: OpenFooter, book: RuleBook) -> None:
        self._envelope = envelope
        self._footer = footer
        self._book = book
        self._modules = 0
        self._right_paths: dict[int, bytes] = {}
        self._first_offset = envelope.footer_offset + envelope.footer_length

    def read(self, chunk: ChunkCiphers, *, is_readable: bool) -> ChunkNumbers | None:
        """Return what the metadata of a chunk says, its own where it can be decrypted, else what is visible."""
        row_group_ordinal, ciphers = chunk.row_group_ordinal, chunk.ciphers
        column = ciphers.column
        unusable = self._footer.unusable
        if unusable and (row_group_ordinal, column.ordinal) in unusable:
            self._book.scope_not_checked(Scope.COLUMN, f"{column.name!r}: a chunk cannot be checked")
            return None
        stored = self._footer.chunks[row_group_ordinal][column.ordinal]
        hidden, visible = stored.hidden, stored.visible
        found: ColumnMetaData | None = visible
        numbers: ChunkNumbers | None = None
        try:
            if visible is not None:
                numbers = self._check_metadata(visible, column)
            # Beside metadata in the place where it belongs, a second copy is a breach of its own.
            is_in_place = (
                self._envelope.mode is FooterMode.ENCRYPTED_FOOTER
                and column.encryption is ColumnEncryption.FOOTER_KEY
                and visible is not None
            )
            if hidden is not None and ciphers.cipher is not None and is_readable and not is_in_place:
                found = self._decrypted(chunk, hidden)
                numbers = None if found is None else self._check_metadata(found, column)
        except ParquetFormatError as error:
            place = chunk_place(row_group_ordinal, column.ordinal)
            self._book.broken("metadata-path", str(error), place)
            numbers = None
        if numbers is None:
            self._book.scope_not_checked(Scope.COLUMN, f"{column.name!r}: the metadata of a chunk cannot be read")
            return None
        ciphers.held.add("metadata-path")
        if visible is None or found is None or found is visible:
            return numbers
        if self._envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            self._check_agreement(visible, found, chunk)
        return numbers

    def _decrypted(self, chunk: ChunkCiphers, module: bytes) -> ColumnMetaData | None:
        ciphers = chunk.ciphers
        # It lies somewhere in the footer; a number after its end tells it apart from all others.
        self._modules += 1
        if len(module) >= GCM_FRAMING:
            offset = self._first_offset + self._modules
            ciphers.nonces.add(nonce_entry(module[4:16], offset, module[-4:]))
        plaintext = check_module(chunk, ModuleType.COLUMN_META_DATA, module, None, self._book)
        ciphers.counts[_BROKEN if plaintext is None else _AUTHENTIC] += 1
        if plaintext is None:
            return None
        metadata, end = ColumnMetaData.read(plaintext)
        check_padding(plaintext, end, chunk.place(ModuleType.COLUMN_META_DATA), self._book)
        return metadata

    def _check_metadata(self, metadata: ColumnMetaData, column: Column) -> ChunkNumbers:
        """Raise `ParquetFormatError` if a required field is missing, or the metadata is another column's."""
        if not metadata.struct.has_types(_REQUIRED):
            _refuse_incomplete(metadata)
        numbers = ChunkNumbers.of(metadata)
        if numbers.type != column.type:
            raise ParquetFormatError(f"its type is {metadata.type}, and that of its column {column.type}.")
        # Byte for byte the same in every row group, as a rule.
        path = metadata.bytes_of(ColumnMetaData.path_in_schema)
        if path is None or path != self._right_paths.get(column.ordinal):
            if tuple(metadata.path_in_schema) != column.path:
                raise ParquetFormatError(f"the metadata is that of column {'.'.join(metadata.path_in_schema)!r}.")
            assert path is not None
            self._right_paths[column.ordinal] = path
        return numbers

    def _check_agreement(self, visible: ColumnMetaData, found: ColumnMetaData, chunk: ChunkCiphers) -> None:
        written, full_bytes = visible.struct.as_bytes(), found.struct.as_bytes()
        if written is not None and full_bytes is not None and full_bytes.startswith(written[:-1]):
            # The same fields, and then perhaps others: so most writers leave out what must not be shown.
            chunk.ciphers.held.add("metadata-agrees")
            return
        full = found.struct.fields
        shown, _ = shown_metadata(visible)  # What is not to be shown is a breach of its own.
        differing = sorted(
            field_id for field_id, value in shown.struct.fields.items() if full.get(field_id) != value
        )
        message = f"the fields {differing} differ."
        place = chunk_place(chunk.row_group_ordinal, chunk.ciphers.column.ordinal)
        self._book.check("metadata-agrees", not differing, message, place)


def check_left_metadata(
    source: ByteSource, gaps: Iterable[tuple[int, int]], columns: Iterable[Column], book: RuleBook
) -> None:
    """Check that no metadata of encrypted columns was left in plaintext behind their chunks (spec 5.3).

    Some writers repeat the metadata of a chunk behind it, as the first versions of the format wanted it.
    """
    encrypted = {column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT}
    for offset, length in gaps:
        data = bytes(source.read_at(offset, min(length, _MOST_LEFT_BYTES)))
        for at, path in _left_metadata(data):
            if path in encrypted:
                message = f"the metadata of column {'.'.join(path)!r} can be read there."
                book.broken("metadata-leaked", message, offset=offset + at)
    book.holds("metadata-leaked")


def _left_metadata(data: bytes) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield where column metadata begins, and of which column it is; as long as there is nothing else."""
    at = 0
    while at < len(data):
        try:
            metadata, end = ColumnMetaData.read(data, at)
            path = tuple(metadata.path_in_schema)
        except ParquetFormatError:
            return
        yield at, path
        at = end


def _refuse_incomplete(metadata: ColumnMetaData) -> None:
    """Raise `ParquetFormatError` if a required field is missing or has another type; it says which."""
    _ = metadata.type, metadata.codec, metadata.num_values, metadata.total_uncompressed_size
    _ = metadata.total_compressed_size, metadata.data_page_offset
    if metadata.struct.entry(_ENCODINGS_FIELD_ID) is None:
        raise ParquetFormatError("ColumnMetaData.encodings: is missing")
