"""Footers that say less than the footer of their file: some columns and row groups, or what may be shown of all.

A plaintext footer of a file with encrypted columns shows the fields on lists, if they have their types; so does a
view for readers who may not read every column. What is not on a list may hold values, as statistics do, and as
fields do that are not known yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import ColumnMetaData, FileMetaData, KeyValue, RowGroup, SchemaElement
from parquet_keytools.format.thrift import Struct, ThriftList, WireType

ARROW_SCHEMA_KEY = "ARROW:schema"
"""Key under which Arrow keeps its own schema; readers apply it to columns by their position."""

_SORTING_COLUMNS_FIELD_ID = 4
_COLUMN_ORDERS_FIELD_ID = 7

# --- Some columns and row groups ---


@dataclass(frozen=True)
class Selection:
    """Some columns and row groups of a file.

    Attributes:
        metadata: A footer for them; its row groups are still those of the file, with all columns.
        row_group_ordinals: The row groups.
        column_ordinals: The leaf columns.
    """

    metadata: FileMetaData
    row_group_ordinals: tuple[int, ...]
    column_ordinals: tuple[int, ...]


def selected_footer(
    metadata: FileMetaData,
    leaves: Sequence[LeafColumn],
    columns: Collection[tuple[str, ...]] | None,
    row_group_ordinals: Sequence[int] | None,
    key_values: Mapping[str, str | None] | None,
    *,
    shows_all: bool = True,
) -> Selection:
    """Return a footer for some columns and row groups.

    Args:
        metadata: The footer of the file. Not changed.
        leaves: Its leaf columns.
        columns: Paths of leaf columns; None for all. Top-level columns are taken whole.
        row_group_ordinals: Which row groups; None for all.
        key_values: Entries of the key-value metadata to replace, or to drop where the value is None.
        shows_all: Whether its readers may see everything; others see what `shown_footer` shows, as in a plaintext
            footer. `shown_row_group` is left to the caller.

    Raises:
        ParquetFormatError: There is no such column or row group.
    """
    new = metadata.shallow_copy()
    row_groups = metadata.row_groups
    chosen = tuple(range(len(row_groups)) if row_group_ordinals is None else row_group_ordinals)
    if not all(0 <= ordinal < len(row_groups) for ordinal in chosen) or len(set(chosen)) != len(chosen):
        raise ParquetFormatError(f"row groups {list(chosen)} are not some of the file's {len(row_groups)}.")
    changes = dict(key_values or {})
    if row_group_ordinals is not None:
        new.num_rows = sum(row_groups[ordinal].num_rows for ordinal in chosen)
    kept = tuple(leaf.ordinal for leaf in leaves)
    if columns is not None:
        unknown = set(columns) - {leaf.path for leaf in leaves}
        if unknown:
            names = ", ".join(repr(".".join(path)) for path in sorted(unknown))
            raise ParquetFormatError(f"the file has no columns {names}.")
        positions = {leaf.top_level_position for leaf in leaves if leaf.path in columns}
        kept = tuple(leaf.ordinal for leaf in leaves if leaf.top_level_position in positions)
        if len(kept) < len(leaves):
            new.schema = _selected_schema(metadata.schema, positions)
            _select_column_orders(new, kept)
            changes.setdefault(ARROW_SCHEMA_KEY, None)
    if changes:
        _change_key_values(new, changes)
    if not shows_all:
        new, _ = shown_footer(new)
    return Selection(new, chosen, kept)


def selected_sorting_columns(struct: Struct, column_ordinals: Sequence[int]) -> None:
    """Make the sorting columns of a row group's struct those of its selected columns.

    Rows that are sorted by several columns are still sorted by the first ones of them, but no longer by those
    after one that was left out.
    """
    entry = struct.entry(_SORTING_COLUMNS_FIELD_ID)
    if entry is None or not isinstance(entry[1], ThriftList):
        return
    new_ordinals = {old: new for new, old in enumerate(column_ordinals)}
    elements: list[Struct] = []
    for element in entry[1].elements:
        column = element.entry(1) if isinstance(element, Struct) else None
        if column is None or column[0] is not WireType.I32 or column[1] not in new_ordinals:
            break
        elements.append(element.copy())
        elements[-1].set_entry(1, (WireType.I32, new_ordinals[column[1]]))
    _set_sorting_columns(struct, elements)


def _set_sorting_columns(struct: Struct, elements: list[Struct]) -> None:
    wire_type = struct.types()[_SORTING_COLUMNS_FIELD_ID]
    sorting_columns = (wire_type, ThriftList(WireType.STRUCT, elements))
    struct.set_entry(_SORTING_COLUMNS_FIELD_ID, sorting_columns if elements else None)


def _selected_schema(schema: list[SchemaElement], positions: Collection[int]) -> list[SchemaElement]:
    """Return the root with those of its children, and what is below them, that stand at `positions`."""
    root = schema[0].shallow_copy()
    kept: list[SchemaElement] = []
    position = -1
    waiting = 0  # How many elements of the present child are still to come, as far as is known.
    for element in schema[1:]:
        if waiting == 0:
            position += 1
            waiting = 1
        waiting += (element.num_children or 0) - 1
        if position in positions:
            kept.append(element)
    root.num_children = len(positions)
    return [root, *kept]


def _select_column_orders(metadata: FileMetaData, column_ordinals: Sequence[int]) -> None:
    entry = metadata.struct.entry(_COLUMN_ORDERS_FIELD_ID, path=())
    if entry is None or not isinstance(entry[1], ThriftList):
        return
    orders = entry[1]
    if any(o >= len(orders.elements) for o in column_ordinals):
        raise ParquetFormatError("the file does not have one column order for each column.")
    elements = [orders.elements[ordinal] for ordinal in column_ordinals]
    metadata.struct.set_entry(_COLUMN_ORDERS_FIELD_ID, (entry[0], ThriftList(orders.element_type, elements)))


def _change_key_values(metadata: FileMetaData, changes: Mapping[str, str | None]) -> None:
    present = metadata.key_value_metadata or []
    entries = [entry for entry in present if entry.key not in changes]
    for key, value in changes.items():
        if value is not None:
            entry = KeyValue()
            entry.key, entry.value = key, value
            entries.append(entry)
    if present or entries:
        metadata.key_value_metadata = entries or None


# --- What may be shown of encrypted columns ---


@dataclass(frozen=True)
class _List:
    """A list of elements of one shape."""

    element: _Shape


_Shape = WireType | tuple[WireType, ...] | _List | Mapping[int, Any]
"""Of a value: its type, several, a list, or the fields of a struct."""

_I32, _I64, _BYTE, _BINARY = WireType.I32, WireType.I64, WireType.BYTE, WireType.BINARY
_BOOL = (WireType.TRUE, WireType.FALSE)
_ANY_STRUCT = WireType.STRUCT
_EMPTY: Mapping[int, Any] = {}

_COLUMN_META_DATA: Mapping[int, Any] = {
    1: _I32,  # type
    2: _List(_I32),  # encodings
    3: _List(_BINARY),  # path_in_schema
    4: _I32,  # codec
    5: _I64,  # num_values
    6: _I64,  # total_uncompressed_size
    7: _I64,  # total_compressed_size
    9: _I64,  # data_page_offset
    10: _I64,  # index_page_offset
    11: _I64,  # dictionary_page_offset
}
"""What the format requires, and where pages lie: not 8 (key-value metadata), 12, 13, 16, 17 (statistics of all
kinds) and 14, 15 (Bloom filters)."""

_COLUMN_CHUNK: Mapping[int, Any] = {
    1: _BINARY,  # file_path
    2: _I64,  # file_offset
    3: _ANY_STRUCT,  # meta_data, which is looked at by itself
    4: _I64,  # offset_index_offset
    5: _I32,  # offset_index_length
    6: _I64,  # column_index_offset
    7: _I32,  # column_index_length
    8: _ANY_STRUCT,  # crypto_metadata
    9: _BINARY,  # encrypted_column_metadata
}

_SORTING_COLUMN: Mapping[int, Any] = {1: _I32, 2: _BOOL, 3: _BOOL}

_ROW_GROUP: Mapping[int, Any] = {
    1: WireType.LIST,  # columns, which are looked at one by one
    2: _I64,  # total_byte_size
    3: _I64,  # num_rows
    4: _List(_SORTING_COLUMN),  # sorting_columns
    5: _I64,  # file_offset
    6: _I64,  # total_compressed_size
    7: WireType.I16,  # ordinal
}

_TIME_UNIT: Mapping[int, Any] = {1: _EMPTY, 2: _EMPTY, 3: _EMPTY}
_TIME: Mapping[int, Any] = {1: _BOOL, 2: _TIME_UNIT}
_LOGICAL_TYPE: Mapping[int, Any] = {
    **dict.fromkeys((1, 2, 3, 4, 6, 11, 12, 13, 14, 15), _EMPTY),
    5: {1: _I32, 2: _I32},  # DECIMAL
    7: _TIME,
    8: _TIME,  # TIMESTAMP
    10: {1: _BYTE, 2: _BOOL},  # INTEGER
    16: {1: _BYTE},  # VARIANT
    17: {1: _BINARY},  # GEOMETRY
    18: {1: _BINARY, 2: _I32},  # GEOGRAPHY
}
_SCHEMA_ELEMENT: Mapping[int, Any] = {
    1: _I32,  # type
    2: _I32,  # type_length
    3: _I32,  # repetition_type
    4: _BINARY,  # name
    5: _I32,  # num_children
    6: _I32,  # converted_type
    7: _I32,  # scale
    8: _I32,  # precision
    9: _I32,  # field_id
    10: _LOGICAL_TYPE,
}
_LOGICAL_TYPE_FIELD_ID = 10

_FILE_META_DATA: Mapping[int, Any] = {
    1: _I32,  # version
    2: WireType.LIST,  # schema, whose elements are looked at one by one
    3: _I64,  # num_rows
    4: WireType.LIST,  # row_groups, likewise
    5: _List({1: _BINARY, 2: _BINARY}),  # key_value_metadata, whose keys are looked at one by one
    6: _BINARY,  # created_by
    7: _List({1: _EMPTY, 2: _EMPTY}),  # column_orders
    8: _ANY_STRUCT,  # encryption_algorithm
    9: _BINARY,  # footer_signing_key_metadata
}


def shown_metadata(metadata: ColumnMetaData) -> tuple[ColumnMetaData, list[int]]:
    """Return what may be shown of an encrypted column's metadata, and the ids of the fields that may not."""
    return _record(metadata, _COLUMN_META_DATA)


def hidden_chunk_fields(struct: Struct) -> list[int]:
    """Return the ids of fields of an encrypted column's chunk that may not be shown."""
    return [field_id for field_id, wire_type in struct.types().items() if _COLUMN_CHUNK.get(field_id) != wire_type]


def shown_row_group(row_group: RowGroup, encrypted: Collection[int]) -> tuple[RowGroup, list[str]]:
    """Return what may be shown of a row group, and what may not, a phrase each.

    Rows are said to be sorted by the columns before the first encrypted one only: how the values of one column
    follow one another says much of them where another column is known.

    Args:
        row_group: The row group.
        encrypted: Ordinals of the encrypted columns.
    """
    shown, hidden_ids = _record(row_group, _ROW_GROUP)
    hidden = [f"field {field_id} of a row group" for field_id in hidden_ids]
    entry = shown.struct.entry(_SORTING_COLUMNS_FIELD_ID)
    if entry is not None:
        kept: list[Struct] = []
        for element in entry[1].elements:
            ordinal = element.entry(1)
            if ordinal is None or ordinal[1] in encrypted:
                hidden.append("that rows are sorted by an encrypted column")
                break
            kept.append(element)
        _set_sorting_columns(shown.struct, kept)
    return shown, hidden


def wrongly_shown(metadata: FileMetaData, row_groups: Iterable[RowGroup], encrypted: Collection[int]) -> list[str]:
    """Return what a footer shows beside its columns and must not, a phrase each."""
    _, hidden = shown_footer(metadata)
    for row_group in row_groups:
        hidden += shown_row_group(row_group, encrypted)[1]
    return list(dict.fromkeys(hidden))


def shown_footer(metadata: FileMetaData) -> tuple[FileMetaData, list[str]]:
    """Return what may be shown of a footer apart from its row groups and keys, and what may not, a phrase each."""
    shown, hidden_ids = _record(metadata, _FILE_META_DATA)
    hidden = [f"field {field_id} of the footer" for field_id in hidden_ids]
    elements: list[SchemaElement] = []
    for element in metadata.schema:
        shown_element, element_ids = _record(element, _SCHEMA_ELEMENT)
        logical_type = shown_element.struct.entry(_LOGICAL_TYPE_FIELD_ID)
        if logical_type is not None and _LOGICAL_TYPE_FIELD_ID in element_ids and not logical_type[1].types():
            # A union of which nothing is set stops readers.
            shown_element.struct.set_entry(_LOGICAL_TYPE_FIELD_ID, None)
        hidden += [f"field {field_id} of the schema's element {element.name!r}" for field_id in element_ids]
        elements.append(shown_element)
    shown.schema = elements
    return shown, hidden


def _record(record: Any, shape: Mapping[int, Any]) -> tuple[Any, list[int]]:
    struct, hidden = _shown_struct(record.struct, shape)
    return type(record)(struct), hidden


def _shown_struct(struct: Struct, shape: Mapping[int, Any]) -> tuple[Struct, list[int]]:
    """Return what may be shown of a struct, and the ids of fields of which not all may be."""
    hidden: list[int] = []
    shown = struct.copy()
    for field_id, wire_type in struct.types().items():
        allowed = shape.get(field_id)
        if allowed is wire_type:
            continue
        entry = None if allowed is None else struct.entry(field_id)
        found = None if allowed is None or entry is None else _shown(allowed, *entry)
        if found is None or not found[1]:
            hidden.append(field_id)
            shown.set_entry(field_id, None if found is None else (wire_type, found[0]))
    return shown, hidden


def _shown(shape: _Shape, wire_type: WireType, value: Any) -> tuple[Any, bool] | None:
    """Return what may be shown of a value, and whether that is all of it; None where it has another type."""
    if isinstance(shape, WireType):
        return (value, True) if wire_type is shape else None
    if isinstance(shape, tuple):
        return (value, True) if wire_type in shape else None
    if isinstance(shape, _List):
        return _shown_list(shape.element, value) if wire_type is WireType.LIST else None
    if wire_type is not WireType.STRUCT:
        return None
    struct, hidden = _shown_struct(value, shape)
    return struct, not hidden


def _shown_list(element: _Shape, value: ThriftList) -> tuple[Any, bool] | None:
    if not value.elements:
        return ThriftList(value.element_type, []), True
    found = [_shown(element, value.element_type, item) for item in value.elements]
    kept = [item[0] for item in found if item is not None]
    if len(kept) < len(found):
        return None
    return ThriftList(value.element_type, kept), all(item is not None and item[1] for item in found)
