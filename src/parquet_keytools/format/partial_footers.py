"""Footers that say less than the footer of their file: some columns, or what may be shown of all.

A plaintext footer of a file with encrypted columns shows the fields on lists, if they have their types; so does a
view for readers who may not read every column. What is not on a list may hold values, as statistics do, and as
fields do that are not known yet.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

# --- Some columns ---


def selected_footer(
    metadata: FileMetaData,
    leaves: Sequence[LeafColumn],
    columns: Collection[tuple[str, ...]] | None,
    key_values: Mapping[str, str | None] | None,
    *,
    shows_all: bool = True,
) -> tuple[FileMetaData, tuple[int, ...]]:
    """Return a footer for some columns of the file, None for all, and their ordinals.

    Top-level columns are taken whole, and row groups still have all columns. `key_values` replaces entries of the
    key-value metadata, or drops them where the value is None. Unless it `shows_all`, the footer has what
    `shown_footer` shows; `shown_row_group` is left to the caller.
    """
    new = metadata.shallow_copy()
    kept = tuple(leaf.ordinal for leaf in leaves)
    if columns is not None:
        positions = {leaf.top_level_position for leaf in leaves if leaf.path in columns}
        kept = tuple(leaf.ordinal for leaf in leaves if leaf.top_level_position in positions)
        if len(kept) < len(leaves):
            new.schema = _selected_schema(metadata.schema, positions)
            _select_column_orders(new, kept)
    if key_values:
        _change_key_values(new, key_values)
    if not shows_all:
        new, _ = shown_footer(new)
    return new, kept


def selected_sorting_columns(struct: Struct, column_ordinals: Sequence[int]) -> None:
    """Keep the sorting columns of a row group up to the first column that is not selected."""
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


# --- Key-value metadata that says the schema only ---
# Writers put values beside the schema: pandas the ends of its index and the number of categories, Polars the
# categories themselves, Spark's ML the names of a column's values, geographic writers the box around all places.

SPARK_SCHEMA_KEY = "org.apache.spark.sql.parquet.row.metadata"
"""Key under which Spark keeps its own schema."""

_SPARK_KEYS = frozenset(
    {
        "type",
        "fields",
        "name",
        "nullable",
        "elementType",
        "containsNull",
        "keyType",
        "valueType",
        "valueContainsNull",
        "class",
        "pyClass",
        "sqlType",
    }
)
_SPARK_METADATA_KEYS = frozenset({"__CHAR_VARCHAR_TYPE_STRING"})
_CHAR_TYPE = re.compile(r"(?:var)?char\(\d{1,9}\)")
_SHORT = re.compile(r"[A-Za-z0-9_.+/:-]{0,64}")

Cleaner = Callable[[str], str | None]
"""Returns what of a value says nothing but the schema; None where that cannot be found out."""


def arrow_schema_alone(value: str) -> str | None:
    """Return Arrow's schema without the metadata of the schema and of its fields; None where it is not valid."""
    try:
        message = schema_alone(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError):
        return None
    return None if message is None else base64.b64encode(message).decode()


def spark_schema_alone(value: str) -> str | None:
    """Return Spark's schema without the metadata of its columns, apart from the lengths of CHAR and VARCHAR."""
    try:
        return json.dumps(_spark_type_alone(json.loads(value)), separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return None


def short_word(value: str) -> str | None:
    """Return the value if it is a short word, such as a version or the name of a time zone."""
    return value if _SHORT.fullmatch(value) else None


SCHEMA_KEYS: Mapping[str, Cleaner] = {
    ARROW_SCHEMA_KEY: arrow_schema_alone,
    SPARK_SCHEMA_KEY: spark_schema_alone,
    "org.apache.spark.version": short_word,
    "org.apache.spark.timeZone": short_word,
    "org.apache.spark.legacyDateTime": short_word,
    "org.apache.spark.legacyINT96": short_word,
    "writer.model.name": short_word,
    "writer.time.zone": short_word,
}
"""Key -> what makes of its value one that says the schema only. Not Avro's schema, which holds default values and
the symbols of enums, nor Iceberg's, which holds default values: readers do without both."""


@dataclass(frozen=True)
class VisibleKeyValues:
    """Which key-value metadata a plaintext footer shows: values of `kept` keys, and what says the schema only."""

    kept: frozenset[str] = frozenset()
    refuses: bool = False

    def shown(self, entry: KeyValue) -> KeyValue | None:
        """Return what may be shown of an entry; None for nothing."""
        key, value = entry.key, entry.value
        if key in self.kept:
            return entry
        cleaner = SCHEMA_KEYS.get(key)
        if cleaner is None or value is None:
            return None
        cleaned = cleaner(value)
        if cleaned is None:
            return None
        shown = KeyValue()
        shown.key, shown.value = key, cleaned
        return shown

    def hides(self, entry: KeyValue) -> bool:
        """Return whether an entry has anything that may not be shown."""
        shown = self.shown(entry)
        return shown is None or shown.value != entry.value


def _spark_type_alone(of: Any) -> Any:
    """Return a type of Spark's JSON: a name, or an object with fields."""
    if isinstance(of, str):
        return of
    if isinstance(of, list):
        return [_spark_type_alone(item) for item in of]
    if not isinstance(of, dict):
        if isinstance(of, bool):
            return of
        raise TypeError("no type of Spark")
    alone = {key: _spark_type_alone(item) for key, item in of.items() if key in _SPARK_KEYS}
    if "metadata" in of:
        metadata = of["metadata"]
        alone["metadata"] = {
            key: item
            for key, item in metadata.items()
            if key in _SPARK_METADATA_KEYS and isinstance(item, str) and _CHAR_TYPE.fullmatch(item)
        }
    return alone


_CONTINUATION = 0xFFFF_FFFF
_SCHEMA = 1
"""Type of the message's header."""

_MAX_DEPTH = 64
_TIMESTAMP, _UNION, _LAST_TYPE = 10, 14, 26
_EXTENSION_KEYS = (b"ARROW:extension:name", b"ARROW:extension:metadata")
_CANONICAL = b"arrow."


def schema_alone(message: bytes) -> bytes | None:
    """Return an encapsulated schema, with metadata of canonical extension types only; None where it is none."""
    try:
        prefix = 8 if struct.unpack_from("<I", message)[0] == _CONTINUATION else 4
        (length,) = struct.unpack_from("<I", message, prefix - 4)
        if length == 0 or prefix + length > len(message):
            return None
        return message[:prefix] + _Schema(message[prefix : prefix + length]).alone()
    except (struct.error, ValueError, RecursionError):
        return None


class _Schema:
    """Copies a flatbuffer part by part."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._out = bytearray(len(data))
        self._seen: set[int] = set()
        self._entries_left = len(data)  # A sound one names each part once.

    def alone(self) -> bytes:
        """Return the flatbuffer without metadata; raise `ValueError` or `struct.error` if it is not sound."""
        self._keep(0, 4)
        message = self._follow(0)
        self._table(message)
        kind = self._place(message, 1)
        schema = self._target(message, 2)
        if kind is None or self._number("<B", kind) != _SCHEMA or schema is None:
            raise ValueError("no schema")
        self._metadata(message, 4)
        self._table(schema)
        self._metadata(schema, 2)
        self._scalars(schema, 3, 8)
        self._fields(schema, 1, 0)
        return bytes(self._out)

    def _field(self, field: int, depth: int) -> None:
        if depth > _MAX_DEPTH or field in self._seen:
            raise ValueError("fields nest too deep, or are shared")
        self._seen.add(field)
        self._table(field)
        self._string(self._target(field, 0))
        kind, of = self._place(field, 2), self._target(field, 3)
        if kind is None or of is None or not 0 < self._number("<B", kind) <= _LAST_TYPE:
            raise ValueError("a type that is not known")
        self._table(of)
        if self._number("<B", kind) == _TIMESTAMP:
            self._string(self._target(of, 1))
        elif self._number("<B", kind) == _UNION:
            self._scalars(of, 1, 4)
        dictionary = self._target(field, 4)
        if dictionary is not None:
            self._table(dictionary)
            index_type = self._target(dictionary, 1)
            if index_type is not None:
                self._table(index_type)
        self._fields(field, 5, depth + 1)
        self._metadata(field, 6)

    def _fields(self, table: int, slot: int, depth: int) -> None:
        for field in self._vector(table, slot):
            self._field(field, depth)

    def _metadata(self, table: int, slot: int) -> None:
        """Keep of a list of keys and values those that say a canonical extension type."""
        entries = {self._text(entry, 0): entry for entry in self._vector(table, slot)}
        name = entries.get(_EXTENSION_KEYS[0])
        kept: list[int] = []
        if name is not None and self._text(name, 1).startswith(_CANONICAL):
            kept = [entries[key] for key in _EXTENSION_KEYS if key in entries]
        vector = self._target(table, slot)
        if vector is None:
            return
        length = 4 + 4 * self._count(vector)
        self._out[vector : vector + length] = bytes(length)
        struct.pack_into("<I", self._out, vector, len(kept))
        for position, entry in enumerate(kept):
            place = vector + 4 + 4 * position
            struct.pack_into("<I", self._out, place, entry - place)
            self._table(entry)
            self._string(self._target(entry, 0))
            self._string(self._target(entry, 1))

    # --- Flatbuffers ---------------------------------------------------------------------------------------

    def _number(self, layout: str, offset: int) -> int:
        if offset < 0:
            raise ValueError("before the beginning")
        number: int = struct.unpack_from(layout, self._data, offset)[0]
        return number

    def _keep(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > len(self._data):
            raise ValueError("outside")
        self._out[offset : offset + length] = self._data[offset : offset + length]

    def _follow(self, place: int) -> int:
        return place + self._number("<I", place)

    def _place(self, table: int, slot: int) -> int | None:
        """Return where a field of a table lies; None where it is not there."""
        described = table - self._number("<i", table)
        at = 4 + 2 * slot
        if at >= self._number("<H", described):
            return None
        return table + inside if (inside := self._number("<H", described + at)) else None

    def _target(self, table: int, slot: int) -> int | None:
        place = self._place(table, slot)
        return None if place is None else self._follow(place)

    def _table(self, table: int) -> None:
        described = table - self._number("<i", table)
        self._keep(described, self._number("<H", described))
        self._keep(table, self._number("<H", described + 2))

    def _count(self, vector: int) -> int:
        count = self._number("<I", vector)
        self._entries_left -= count
        if vector + 4 + 4 * count > len(self._data) or self._entries_left < 0:
            raise ValueError("a list is too long")
        return count

    def _vector(self, table: int, slot: int) -> list[int]:
        """Keep a list of tables, and return where these lie."""
        vector = self._target(table, slot)
        if vector is None:
            return []
        count = self._count(vector)
        self._keep(vector, 4 + 4 * count)
        return [self._follow(vector + 4 + 4 * position) for position in range(count)]

    def _scalars(self, table: int, slot: int, width: int) -> None:
        vector = self._target(table, slot)
        if vector is not None:
            self._keep(vector, 4)
            # Vectors of eight-byte values are aligned already.
            self._keep(vector + 4, width * self._number("<I", vector))

    def _text(self, table: int, slot: int) -> bytes:
        at = self._target(table, slot)
        return b"" if at is None else self._data[at + 4 : at + 4 + self._number("<I", at)]

    def _string(self, at: int | None) -> None:
        if at is not None:
            self._keep(at, 4 + self._number("<I", at))
