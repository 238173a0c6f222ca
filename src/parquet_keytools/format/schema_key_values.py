"""Key-value metadata that says the schema only, and is made to: what a plaintext footer shows of it.

Writers put values beside the schema: pandas the ends of its index and the number of categories, Polars the
categories themselves, Spark's ML the names of a column's values, geographic writers the box around all places.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parquet_keytools.format.partial_footers import ARROW_SCHEMA_KEY
from parquet_keytools.format.structs import KeyValue

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
    """Which key-value metadata of the file a plaintext footer shows, beside what says the schema only.

    Attributes:
        kept: Keys whose values are shown as they are.
        refuses: Whether a file is refused that has more than may be shown; else the rest is dropped.
    """

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
    """Return an encapsulated schema without metadata; None where it is none.

    Names and parameters of canonical extension types (`arrow.uuid`) stay: they belong to the type.
    """
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
        """Return the flatbuffer without metadata.

        Raises:
            ValueError: It holds no schema, or is not sound.
            struct.error: Something lies outside of it.
        """
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
            # Those of eight bytes each are aligned by themselves.
            self._keep(vector + 4, width * self._number("<I", vector))

    def _text(self, table: int, slot: int) -> bytes:
        at = self._target(table, slot)
        return b"" if at is None else self._data[at + 4 : at + 4 + self._number("<I", at)]

    def _string(self, at: int | None) -> None:
        if at is not None:
            self._keep(at, 4 + self._number("<I", at))
