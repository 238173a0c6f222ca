"""Whole files decrypted, or some columns and row groups of them, without decoding a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from parquet_keytools.encryption.file_rewriter import ChunkRewrite, RowGroupRewrite, new_row_group, rewrite_file
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.module_cipher import ChunkCipher
from parquet_keytools.encryption.protection import ColumnEncryption, KeyRetriever
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import ColumnAccessDeniedError, KeytoolsError, ParquetFormatError
from parquet_keytools.format.byte_ranges import Bytes, ByteSink, ByteSource
from parquet_keytools.format.file_layout import MAGIC
from parquet_keytools.format.partial_footers import (
    Selection,
    selected_footer,
    selected_sorting_columns,
)
from parquet_keytools.format.structs import ColumnChunk, FileMetaData
from parquet_keytools.format.thrift import Struct, WireType
from parquet_keytools.secret_bytes import SecretBytes

_STRUCT = WireType.STRUCT
_META_DATA = ColumnChunk.meta_data.field_id
_CRYPTO_METADATA = ColumnChunk.crypto_metadata.field_id
_ENCRYPTED_COLUMN_METADATA = ColumnChunk.encrypted_column_metadata.field_id

Deks = Mapping[tuple[str, ...], SecretBytes]
"""DEKs of columns with a column key, by path."""


def decrypt_columns(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    deks: Deks,
    *,
    columns: Collection[tuple[str, ...]] | None = None,
    row_group_ordinals: Sequence[int] | None = None,
    key_values: Mapping[str, str | None] | None = None,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write a plaintext file of some columns and row groups; only their bytes are read.

    Args:
        source: The file that the footer is from.
        sink: Where the plaintext file goes.
        footer: Its footer, opened. A file that is not encrypted will do as well.
        deks: DEKs of the columns that have a column key.
        columns: Paths of leaf columns; None for all. Top-level columns are taken whole: one leaf of a nested
            column brings the others with it, so that its structure stays what it was.
        row_group_ordinals: Which row groups, in the order wanted; None for all.
        key_values: Entries of the key-value metadata to replace, or to drop where the value is None. Where
            columns are left out, `ARROW:schema` is dropped unless it is given here: it would describe columns
            that are not there, by position.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        KeyNotAvailableError: A wanted column has a column key and no DEK is given.
        DecryptionError: A wanted part does not authenticate, or pages are not encrypted as the file states.
        ParquetFormatError: It is not what the format says, a page is damaged, or there is no such column or row
            group.
    """
    try:
        selection = selected_footer(footer.metadata, footer.leaves, columns, row_group_ordinals, key_values)
    except ParquetFormatError as error:
        raise ParquetFormatError(str(error), path=source.path) from None
    check_stated_algorithm(source, footer, deks)
    row_groups = open_chunks(
        footer, deks, lambda *_: None, selection.row_group_ordinals, selection.column_ordinals
    )
    rewrite_file(
        source,
        sink,
        row_groups,
        footer_offset=footer.envelope.footer_offset,
        created_by=footer.metadata.created_by,
        magic=MAGIC,
        make_footer=lambda: _plaintext_footer(footer, selection, row_groups),
        threads=threads,
        on_progress=on_progress,
    )


def authenticate_columns(
    source: ByteSource,
    footer: Footer,
    deks: Deks,
    *,
    columns: Collection[tuple[str, ...]] | None = None,
    threads: int = 2,
) -> None:
    """Decrypt what `decrypt_columns` would, and write nothing; one thread finds the first thing that is wrong."""
    decrypt_columns(source, _Nowhere(), footer, deks, columns=columns, threads=threads)


class _Nowhere:
    """Takes what is decrypted for the sake of its authentication."""

    takes_any_order = True

    def reserve(self, length: int) -> None:
        pass

    def write_at(self, offset: int, data: Bytes) -> None:
        pass


def _plaintext_footer(footer: Footer, selection: Selection, row_groups: list[RowGroupRewrite]) -> bytes:
    new_row_groups = []
    for ordinal, (row_group, chunks) in enumerate(row_groups):
        columns: list[bytes | Struct] = []
        for chunk in chunks:
            shown = (_STRUCT, chunk.new_metadata())
            columns.append(
                chunk.new_chunk({_META_DATA: shown, _CRYPTO_METADATA: None, _ENCRYPTED_COLUMN_METADATA: None})
            )
        new = new_row_group(ordinal, row_group, chunks, columns)
        if len(chunks) < len(footer.leaves):
            selected_sorting_columns(new.struct, selection.column_ordinals)
            new.total_byte_size = sum(chunk.metadata.total_uncompressed_size for chunk in chunks)
        new_row_groups.append(new)
    metadata: FileMetaData = selection.metadata
    metadata.row_groups = new_row_groups
    metadata.encryption_algorithm = None
    metadata.footer_signing_key_metadata = None
    return metadata.serialise()


def column_deks(footer: Footer, retriever: KeyRetriever) -> dict[tuple[str, ...], SecretBytes]:
    """Return the DEKs of all columns that have a column key, asked for together.

    Raises:
        ColumnAccessDeniedError: Some are unavailable.
    """
    columns = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    if not columns:
        return {}
    outcomes = retriever.column_deks([(column.path, column.key_metadata) for column in columns])
    deks: dict[tuple[str, ...], SecretBytes] = {}
    denied: list[tuple[str, KeytoolsError]] = []
    for column, outcome in zip(columns, outcomes, strict=True):
        if isinstance(outcome, KeytoolsError):
            denied.append((".".join(column.path), outcome))
        else:
            deks[column.path] = outcome
    if denied:
        raise ColumnAccessDeniedError([name for name, _ in denied], [cause for _, cause in denied])
    return deks


def open_chunks(
    footer: Footer,
    deks: Deks,
    writer_of: Callable[[int, int], ChunkCipher | None],
    row_group_ordinals: Sequence[int] | None = None,
    column_ordinals: Sequence[int] | None = None,
) -> list[RowGroupRewrite]:
    """Decrypt the metadata of chunks and make them ready to be rewritten.

    Args:
        footer: The footer of their file.
        deks: DEKs of the columns that have a column key.
        writer_of: Returns the cipher for the output, by row group ordinal and column ordinal.
        row_group_ordinals: Which row groups; None for all.
        column_ordinals: Which columns; None for all.

    Raises:
        KeyNotAvailableError: A column has a column key and no DEK is given.
        DecryptionError: The metadata of a chunk does not authenticate.
        ParquetFormatError: It is not what the format says.
    """
    wanted = range(len(footer.columns)) if column_ordinals is None else column_ordinals
    columns = [footer.columns[ordinal] for ordinal in wanted]
    ciphers = [footer.cipher_of(column, deks.get(column.path)) for column in columns]
    row_groups: list[RowGroupRewrite] = []
    ordinals = range(len(footer.row_groups)) if row_group_ordinals is None else row_group_ordinals
    for row_group_ordinal in ordinals:
        chunks: list[ChunkRewrite] = []
        row_group = footer.row_groups[row_group_ordinal]
        num_rows = row_group.num_rows
        for column, cipher in zip(columns, ciphers, strict=True):
            reader = None
            if cipher is not None:
                reader = ChunkCipher(cipher, footer.algorithm, row_group_ordinal, column.ordinal)
            chunks.append(
                ChunkRewrite(
                    footer.chunks[row_group_ordinal][column.ordinal],
                    footer.chunk_metadata(row_group_ordinal, column, cipher),
                    reader,
                    writer_of(row_group_ordinal, column.ordinal),
                    num_rows=num_rows,
                    is_flat=footer.leaves[column.ordinal].is_flat,
                )
            )
        row_groups.append((row_group, chunks))
    return row_groups
