"""The end of a view: its footer, and the pages that take the place of columns with refused keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parquet_keytools.encryption.module_cipher import GCM_FRAMING
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.files.denied_columns import shown_key_values
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.format.file_layout import MAGIC, TAIL_LENGTH, with_trailer
from parquet_keytools.format.pages import generated_chunk, null_page
from parquet_keytools.format.partial_footers import (
    ARROW_SCHEMA_KEY,
    selected_footer,
    selected_sorting_columns,
    shown_row_group,
)
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, RowGroup, SchemaElement
from parquet_keytools.format.thrift import WireType
from parquet_keytools.view.digests import (
    REPETITION_FIELD_ID,
    StandIn,
    digest_arrow_schema,
    digest_kind,
    digest_schema,
    highest_levels,
    leaf_chains,
    repetition,
)

_REQUIRED, _OPTIONAL = 0, 1

_REFUSED_PAGE = b"\xff" * 8
"""Lies at the place of a refused column: no page header begins with these bytes."""

Chunks = Sequence[Sequence[ColumnMetaData | None]]
"""`[row group ordinal][column ordinal]`: full metadata; None if the column cannot be read."""


@dataclass(frozen=True)
class PlainTail:
    """The end of a view, behind pages and indexes.

    Attributes:
        offset: Where it begins, with a place for each column that is shown and cannot be read.
        data: The bytes from there to the end.
        refused_paths: Paths of these columns, in the order of their places.
        footer_offset: Where the footer begins.
    """

    offset: int
    data: bytes
    refused_paths: tuple[tuple[str, ...], ...]
    footer_offset: int

    def refused_in(self, offset: int, end: int) -> tuple[tuple[str, ...], ...]:
        """Return the paths of refused columns that a reader asks for: the range begins or ends at their places.

        Other reads, such as blocks of round lengths and the last bytes of a file, only pass over these places.
        """
        stop = self.offset + len(self.refused_paths) * len(_REFUSED_PAGE)
        if offset >= stop or end <= self.offset or end > self.footer_offset:
            return ()
        is_begin = offset >= self.offset and (offset - self.offset) % len(_REFUSED_PAGE) == 0
        is_end = end <= stop and (end - self.offset) % len(_REFUSED_PAGE) == 0
        if not is_begin and not is_end:
            return ()
        first = max(offset - self.offset, 0) // len(_REFUSED_PAGE)
        last = (min(end, stop) - 1 - self.offset) // len(_REFUSED_PAGE)
        return self.refused_paths[first : last + 1]


def plain_tail(
    opened: OpenedFile,
    chunks: Chunks,
    denied_columns: str,
    offset: int,
    stand_ins: Mapping[tuple[int, int], StandIn],
) -> PlainTail:
    """Return the end of the view of an encrypted file, from `offset`.

    Without digests, the view is as long as the file: its footer is shorter, and zeros fill the difference.

    Of columns that cannot be read, `denied_columns` `hide` leaves out the whole top-level columns, and `null`
    makes them null. With other values they are shown, and reading them fails. The keys of `stand_ins` are row
    group ordinal and column ordinal.
    """
    footer = opened.footer
    builder = _TailBuilder(opened, denied_columns, offset, stand_ins)
    metadata = builder.selection.metadata
    metadata.row_groups = [
        builder.row_group(ordinal, row_group, all_metadata)
        for ordinal, (row_group, all_metadata) in enumerate(zip(footer.row_groups, chunks, strict=True))
    ]
    if builder.nulls:
        metadata.schema = builder.schema()
    metadata.encryption_algorithm = None
    metadata.footer_signing_key_metadata = None
    data = metadata.serialise()
    trailer = with_trailer(data, MAGIC)
    generated = bytes(builder.generated)
    # Readers take the last bytes of a file, for its footer: no digests should be made for that.
    least = TAIL_LENGTH if stand_ins else 0
    filling = bytes(max(opened.tail.size_bytes - offset - len(generated) - len(trailer), least))
    return PlainTail(
        offset,
        generated + filling + trailer,
        tuple(builder.refused),
        offset + len(generated) + len(filling),
    )


class _TailBuilder:
    """Makes the row groups of the new footer, and pages that are not in the file.

    Attributes:
        selection: The footer with the columns that are shown.
        generated: The first bytes of the tail.
        refused: Path of each column that is shown and cannot be read -> its place.
        nulls: Column ordinal -> highest definition and repetition level, of columns that are made null.
    """

    def __init__(
        self,
        opened: OpenedFile,
        denied_columns: str,
        offset: int,
        stand_ins: Mapping[tuple[int, int], StandIn],
    ) -> None:
        footer = opened.footer
        self._opened = opened
        self._offset = offset
        self._stand_ins = stand_ins
        digested = frozenset(() if opened.digests is None else opened.digests.columns)
        self._denied = opened.denied_top_level
        self._null_names: frozenset[str] = frozenset()
        self.generated = bytearray()
        self.refused: dict[tuple[str, ...], int] = {}
        self.nulls: dict[int, tuple[int, int]] = {}
        names = {column.path[0] for column in footer.columns}
        # Where digests are shown, columns keep their ordinals.
        hidden = {path[0] for path in opened.not_wanted} if opened.digests is None else set()
        if denied_columns == "hide":
            hidden |= self._denied
        if denied_columns == "null":
            failing = {path[0] for path in opened.denied.keys() - opened.refused}
            self._null_names = frozenset(path[0] for path in opened.refused) - failing - hidden
            self.nulls = _levels(
                footer.metadata.schema, self._null_names, [column.path for column in footer.columns]
            )
        shown = names - hidden
        columns = [column.path for column in footer.columns if column.path[0] in shown] if hidden else None
        key_values = shown_key_values(opened, shown, self._null_names) if self._denied else None
        for column in footer.columns:
            is_stand_in = column.path[0] in self._null_names or (column.path in opened.refused and bool(digested))
            if column.path in opened.denied and column.path[0] in shown and not is_stand_in:
                self.refused[column.path] = offset + len(self.generated)
                self.generated += _REFUSED_PAGE
        chains = leaf_chains(footer.metadata.schema) if digested else []
        kinds = {c.ordinal: digest_kind(chains[c.ordinal][-1]) for c in footer.columns if c.path in digested}
        if kinds and key_values is not None and (arrow_schema := key_values.get(ARROW_SCHEMA_KEY)) is not None:
            key_values[ARROW_SCHEMA_KEY] = digest_arrow_schema(arrow_schema, footer.leaves, kinds)
        self.selection = selected_footer(
            footer.metadata, footer.leaves, columns, None, key_values, shows_all=not self._denied
        )
        if kinds:
            self.selection.metadata.schema = digest_schema(self.selection.metadata.schema, kinds)
        self._is_digested = bool(kinds)
        self._refused_positions = {
            position
            for position, ordinal in enumerate(self.selection.column_ordinals)
            if footer.columns[ordinal].path in self.refused
        }

    @functools.cached_property
    def _types(self) -> list[int]:
        # Only needed for refused columns: otherwise the schema is not parsed.
        metadata = self.selection.metadata if self._is_digested else self._opened.footer.metadata
        return [element.type or 0 for element in metadata.schema[1:] if element.type is not None]

    def row_group(
        self,
        row_group_ordinal: int,
        row_group: RowGroup,
        all_metadata: Sequence[ColumnMetaData | None],
    ) -> RowGroup:
        """Return a row group for the new footer."""
        new: RowGroup = row_group.shallow_copy()
        new.columns = columns = [
            self._digests(row_group_ordinal, ordinal)
            if (row_group_ordinal, ordinal) in self._stand_ins
            else self._chunk(row_group_ordinal, ordinal, row_group.num_rows, all_metadata[ordinal])
            for ordinal in self.selection.column_ordinals
        ]
        if not self._denied:
            return new
        if self.nulls or self._opened.digests is not None:
            selected_sorting_columns(new.struct, [])
        elif len(columns) < len(all_metadata):
            selected_sorting_columns(new.struct, self.selection.column_ordinals)
        described = [chunk.meta_data for chunk in columns if chunk.meta_data is not None]
        new.total_byte_size = sum(metadata.total_uncompressed_size for metadata in described)
        if new.total_compressed_size is not None:
            new.total_compressed_size = sum(metadata.total_compressed_size for metadata in described)
        # The first column may not be shown.
        new.file_offset = None
        shown, _ = shown_row_group(new, self._refused_positions)
        return shown

    def _digests(self, row_group_ordinal: int, ordinal: int) -> ColumnChunk:
        stand_in = self._stand_ins[row_group_ordinal, ordinal]
        return generated_chunk(
            self._types[ordinal],
            self._opened.footer.columns[ordinal].path,
            stand_in.metadata.num_values,
            stand_in.offset,
            stand_in.length,
            has_levels=highest_levels(stand_in.chain) != (0, 0),
        )

    def _chunk(
        self, row_group_ordinal: int, ordinal: int, num_rows: int, metadata: ColumnMetaData | None
    ) -> ColumnChunk:
        column = self._opened.footer.columns[ordinal]
        if ordinal in self.nulls:
            page = null_page(num_rows, *self.nulls[ordinal])
            offset = self._offset + len(self.generated)
            self.generated += page
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(page), is_null=True)
        if metadata is None:
            offset = self.refused[column.path]
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(_REFUSED_PAGE))
        chunk = self._opened.footer.chunks[row_group_ordinal][ordinal]
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
        top_level = {id(chain[0]) for chain in leaf_chains(schema)}
        for position, element in enumerate(schema):
            if id(element) in top_level and element.name in self._null_names and repetition(element) == _REQUIRED:
                schema[position] = element.shallow_copy()
                schema[position].struct.set_entry(REPETITION_FIELD_ID, (WireType.I32, _OPTIONAL))
        return schema


def _shorter(length: int, modules: int) -> int:
    if length < modules * GCM_FRAMING:
        raise ParquetFormatError(f"{length} bytes are too short for an encrypted module.")
    return length - modules * GCM_FRAMING


def _levels(
    schema: Sequence[SchemaElement], names: frozenset[str], paths: Sequence[tuple[str, ...]]
) -> dict[int, tuple[int, int]]:
    """Return the highest definition and repetition levels of the leaves of columns that are made null."""
    found = {}
    for ordinal, chain in enumerate(leaf_chains(schema)):
        if paths[ordinal][0] in names:
            definition, repeated = highest_levels(chain)
            # A required column is optional for this reader.
            found[ordinal] = definition + (repetition(chain[0]) == _REQUIRED), repeated
    return found
