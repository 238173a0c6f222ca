"""The end of an encrypted file as plaintext Parquet: its footer, and what stands for columns with refused keys."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from parquet_keytools.encryption.module_cipher import GCM_FRAMING
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.files.shown_key_values import shown_key_values
from parquet_keytools.format.column_selection import selected_footer, selected_sorting_columns
from parquet_keytools.format.file_layout import MAGIC
from parquet_keytools.format.generated_chunks import generated_chunk, null_page
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, RowGroup, SchemaElement
from parquet_keytools.format.thrift_compact import WireType

_REPETITION_FIELD_ID = 3
_REQUIRED, _OPTIONAL, _REPEATED = 0, 1, 2

_REFUSED_PAGE = b"\xff" * 8
"""Stands where a refused column seems to lie: no header of a page begins so."""

Chunks = Sequence[Sequence[ColumnMetaData | None]]
"""`[row group ordinal][column ordinal]`: full metadata; None where a column cannot be read."""


@dataclass(frozen=True)
class PlainTail:
    """What follows the pages and indexes.

    Attributes:
        offset: Where it begins.
        data: From there to the end.
        refused_start: Where columns seem to lie that are shown and cannot be read.
        refused_paths: Their paths, in the order in which they seem to lie there.
        footer_offset: Where the footer begins.
    """

    offset: int
    data: bytes
    refused_start: int
    refused_paths: tuple[tuple[str, ...], ...]
    footer_offset: int

    @property
    def size_bytes(self) -> int:
        """Length of the whole file."""
        return self.offset + len(self.data)

    def refused_in(self, offset: int, end: int) -> tuple[tuple[str, ...], ...]:
        """Return the paths of refused columns that a range would read.

        Readers take the last bytes of a file at once, to have its footer: they do not mean what lies before it.
        """
        stop = self.refused_start + len(self.refused_paths) * len(_REFUSED_PAGE)
        if offset >= stop or end <= self.refused_start or end > self.footer_offset:
            return ()
        first = max(offset - self.refused_start, 0) // len(_REFUSED_PAGE)
        last = (min(end, stop) - 1 - self.refused_start) // len(_REFUSED_PAGE)
        return self.refused_paths[first : last + 1]


def plain_tail(opened: OpenedFile, chunks: Chunks, denied_columns: str) -> PlainTail:
    """Return the end of the view of an encrypted file.

    The view is as long as the file: its footer is shorter, and the difference is filled with zeros before it.

    Args:
        opened: The file.
        chunks: The metadata of its chunks.
        denied_columns: What happens to columns that cannot be read: `hide` leaves out the top-level columns that
            they are of, `null` makes these null, and with any other value they are shown and reading them fails.
    """
    footer = opened.footer
    builder = _TailBuilder(opened, denied_columns)
    metadata = builder.selection.metadata
    metadata.row_groups = [
        builder.row_group(row_group, old_chunks, all_metadata)
        for row_group, old_chunks, all_metadata in zip(footer.row_groups, footer.chunks, chunks, strict=True)
    ]
    if builder.nulls:
        metadata.schema = builder.schema()
    metadata.encryption_algorithm = None
    metadata.footer_signing_key_metadata = None
    data = metadata.serialise()
    trailer = data + struct.pack("<I", len(data)) + MAGIC
    offset = footer.envelope.footer_offset
    generated = bytes(builder.generated)
    filling = bytes(max(opened.tail.size_bytes - offset - len(generated) - len(trailer), 0))
    return PlainTail(
        offset,
        generated + filling + trailer,
        offset,
        tuple(builder.refused),
        offset + len(generated) + len(filling),
    )


class _TailBuilder:
    """Makes the row groups of the new footer, and the pages that are not in the file.

    Attributes:
        selection: The footer with the columns that are shown.
        generated: What begins the tail.
        refused: Paths of columns that are shown and cannot be read, and where each seems to lie.
        nulls: Column ordinal -> highest definition and repetition level, of columns that are made null.
    """

    def __init__(self, opened: OpenedFile, denied_columns: str) -> None:
        footer = opened.footer
        self._opened = opened
        self._denied = opened.denied_top_level
        self.generated = bytearray()
        self.refused: dict[tuple[str, ...], int] = {}
        self.nulls: dict[int, tuple[int, int]] = {}
        self._types = [element.type or 0 for element in footer.metadata.schema if element.type is not None]
        names = {column.path[0] for column in footer.columns}
        columns = key_values = None
        if self._denied and denied_columns == "hide":
            shown = names - self._denied
            columns = [column.path for column in footer.columns if column.path[0] in shown]
            key_values = shown_key_values(opened, shown)
        elif self._denied and denied_columns == "null":
            self.nulls = _levels(footer.metadata.schema, self._denied, [column.path for column in footer.columns])
            key_values = shown_key_values(opened, names, self._denied)
        elif self._denied:
            key_values = shown_key_values(opened, names)
            for column in footer.columns:
                if column.path in opened.denied:
                    self.refused[column.path] = footer.envelope.footer_offset + len(self.generated)
                    self.generated += _REFUSED_PAGE
        self.selection = selected_footer(footer.metadata, footer.leaves, columns, None, key_values)

    def row_group(
        self, row_group: RowGroup, chunks: Sequence[ColumnChunk], all_metadata: Sequence[ColumnMetaData | None]
    ) -> RowGroup:
        """Return a row group for the new footer."""
        new: RowGroup = row_group.shallow_copy()
        new.columns = columns = [
            self._chunk(ordinal, row_group.num_rows, chunks[ordinal], all_metadata[ordinal])
            for ordinal in self.selection.column_ordinals
        ]
        if not self._denied:
            return new
        if self.nulls:
            selected_sorting_columns(new.struct, [])
        elif len(columns) < len(chunks):
            selected_sorting_columns(new.struct, self.selection.column_ordinals)
        described = [chunk.meta_data for chunk in columns if chunk.meta_data is not None]
        new.total_byte_size = sum(metadata.total_uncompressed_size for metadata in described)
        if new.total_compressed_size is not None:
            new.total_compressed_size = sum(metadata.total_compressed_size for metadata in described)
        # Where its first column lay, which may be one of those that are not shown.
        new.file_offset = None
        return new

    def _chunk(
        self, ordinal: int, num_rows: int, chunk: ColumnChunk, metadata: ColumnMetaData | None
    ) -> ColumnChunk:
        column = self._opened.footer.columns[ordinal]
        if ordinal in self.nulls:
            page = null_page(num_rows, *self.nulls[ordinal])
            offset = self._opened.footer.envelope.footer_offset + len(self.generated)
            self.generated += page
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(page), is_null=True)
        if metadata is None:
            offset = self.refused[column.path]
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(_REFUSED_PAGE))
        if column.encryption is ColumnEncryption.PLAINTEXT:
            return chunk
        new: ColumnChunk = chunk.shallow_copy()
        bloom_filter_length = metadata.bloom_filter_length
        if bloom_filter_length is not None:
            metadata = metadata.shallow_copy()
            metadata.bloom_filter_length = _shorter(bloom_filter_length, 2)
        if new.column_index_length is not None:
            new.column_index_length = _shorter(new.column_index_length, 1)
        if new.offset_index_length is not None:
            new.offset_index_length = _shorter(new.offset_index_length, 1)
        new.meta_data = metadata
        new.crypto_metadata = None
        new.encrypted_column_metadata = None
        return new

    def schema(self) -> list[SchemaElement]:
        """Return the schema in which columns that are made null may be null."""
        schema = list(self.selection.metadata.schema)
        for position in _top_level_positions(schema):
            if schema[position].name in self._denied and _repetition(schema[position]) == _REQUIRED:
                schema[position] = schema[position].shallow_copy()
                schema[position].struct.set_entry(_REPETITION_FIELD_ID, (WireType.I32, _OPTIONAL))
        return schema


def _shorter(length: int, modules: int) -> int:
    if length < modules * GCM_FRAMING:
        raise ParquetFormatError(f"{length} bytes are too few for what is encrypted there.")
    return length - modules * GCM_FRAMING


def _repetition(element: SchemaElement) -> int:
    entry = element.struct.entry(_REPETITION_FIELD_ID)
    return entry[1] if entry is not None and entry[0] is WireType.I32 else _REQUIRED


def _top_level_positions(schema: Sequence[SchemaElement]) -> list[int]:
    """Return where in a flattened schema the children of the root are."""
    positions = []
    waiting = 0
    for position, element in enumerate(schema[1:], 1):
        if waiting == 0:
            positions.append(position)
            waiting = 1
        waiting += (element.num_children or 0) - 1
    return positions


def _levels(
    schema: Sequence[SchemaElement], denied: frozenset[str], paths: Sequence[tuple[str, ...]]
) -> dict[int, tuple[int, int]]:
    """Return the highest definition and repetition levels of leaves of top-level columns that are made null."""
    found: list[tuple[int, int]] = []
    rest = iter(schema[1:])

    def descend(element: SchemaElement, depth: int, definition: int, repetition: int) -> None:
        kind = _repetition(element)
        if depth == 0 and kind == _REQUIRED:
            kind = _OPTIONAL
        definition += kind in (_OPTIONAL, _REPEATED)
        repetition += kind == _REPEATED
        for _ in range(element.num_children or 0):
            descend(next(rest), depth + 1, definition, repetition)
        if element.type is not None:
            found.append((definition, repetition))

    for _ in range(schema[0].num_children or 0):
        descend(next(rest), 0, 0, 0)
    return {ordinal: levels for ordinal, levels in enumerate(found) if paths[ordinal][0] in denied}
