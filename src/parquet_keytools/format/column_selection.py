"""A footer for some of the columns and row groups of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import FileMetaData, KeyValue, SchemaElement
from parquet_keytools.format.thrift_compact import Struct, ThriftList, WireType

ARROW_SCHEMA_KEY = "ARROW:schema"
"""Key under which Arrow keeps its own schema; readers apply it to columns by their position."""

_COLUMN_ORDERS_FIELD_ID = 7
_SORTING_COLUMNS_FIELD_ID = 4


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
) -> Selection:
    """Return a footer for some columns and row groups.

    Args:
        metadata: The footer of the file. Not changed.
        leaves: Its leaf columns.
        columns: Paths of leaf columns; None for all. Top-level columns are taken whole.
        row_group_ordinals: Which row groups; None for all.
        key_values: Entries of the key-value metadata to replace, or to drop where the value is None.

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
    return Selection(new, chosen, kept)


def selected_sorting_columns(struct: Struct, column_ordinals: Sequence[int]) -> None:
    """Make the sorting columns of a row group's struct those of its selected columns.

    Rows that are sorted by several columns are still sorted by the first ones of them, but no longer by those
    after one that was left out.
    """
    entry = struct.fields.get(_SORTING_COLUMNS_FIELD_ID)
    if entry is None or not isinstance(entry[1], ThriftList):
        return
    new_ordinals = {old: new for new, old in enumerate(column_ordinals)}
    elements: list[Struct] = []
    for element in entry[1].elements:
        column = element.fields.get(1) if isinstance(element, Struct) else None
        if column is None or column[0] is not WireType.I32 or column[1] not in new_ordinals:
            break
        elements.append(Struct({**element.fields, 1: (WireType.I32, new_ordinals[column[1]])}))
    if elements:
        struct.fields[_SORTING_COLUMNS_FIELD_ID] = (entry[0], ThriftList(WireType.STRUCT, elements))
    else:
        del struct.fields[_SORTING_COLUMNS_FIELD_ID]


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
    entry = metadata.struct.fields.get(_COLUMN_ORDERS_FIELD_ID)
    if entry is None or not isinstance(entry[1], ThriftList):
        return
    orders = entry[1]
    if any(o >= len(orders.elements) for o in column_ordinals):
        raise ParquetFormatError("the file does not have one column order for each column.")
    elements = [orders.elements[ordinal] for ordinal in column_ordinals]
    metadata.struct.fields[_COLUMN_ORDERS_FIELD_ID] = (entry[0], ThriftList(orders.element_type, elements))


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
