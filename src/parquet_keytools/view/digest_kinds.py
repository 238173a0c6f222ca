"""Which digests a column has: the canonical bytes of its values by their type, and the column in both schemas.

Values are equal here where SQL says so: whatever the width of integers, the scale of decimals, the unit of times.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import SchemaElement
from parquet_keytools.format.thrift import Struct, WireType

_TYPE_LENGTH, REPETITION_FIELD_ID, _CONVERTED_TYPE, _SCALE, _PRECISION, _LOGICAL_TYPE = 2, 3, 6, 7, 8, 10
"""Field ids of SchemaElement."""

_BOOLEAN, INT32, INT64, INT96, _FLOAT, _DOUBLE, _BYTE_ARRAY, _FIXED = range(8)
"""Physical types."""

_STRING_TYPE, _ENUM_TYPE, _DECIMAL_TYPE, _DATE_TYPE, _TIME_TYPE, _TIMESTAMP_TYPE = 1, 4, 5, 6, 7, 8
_INTEGER_TYPE, _JSON_TYPE, _FLOAT16_TYPE, _VARIANT_TYPE = 10, 12, 15, 16
"""Field ids of the union LogicalType."""

_OF_CONVERTED = {
    0: (_STRING_TYPE, 0),
    4: (_ENUM_TYPE, 0),
    5: (_DECIMAL_TYPE, 0),
    6: (_DATE_TYPE, 0),
    7: (_TIME_TYPE, 1),
    8: (_TIME_TYPE, 2),
    9: (_TIMESTAMP_TYPE, 1),
    10: (_TIMESTAMP_TYPE, 2),
    **dict.fromkeys((11, 12, 13, 14), (_INTEGER_TYPE, 0)),
    19: (_JSON_TYPE, 0),
}
"""ConvertedType -> logical type, and unit: 1 for milliseconds, 2 for microseconds. Others mean nothing here."""

_NANOSECONDS = {1: 1_000_000, 2: 1_000, 3: 1}
"""Field id in the union TimeUnit -> nanoseconds."""

_MOST_DIGITS = 4_300
"""Of decimals: integers of Python have no longer texts either."""

Canonical = Callable[[Any], bytes]
"""Returns the bytes of a value, which is as it is stored: an int, a float, a bool, or bytes."""


@dataclass(frozen=True)
class DigestKind:
    """What the values of a column are, for their digests.

    Attributes:
        name: Values of kinds with other names never have the same digest.
        canonical: Makes the bytes of a value.
    """

    name: str
    canonical: Canonical

    @property
    def is_binary(self) -> bool:
        """Whether digests are shown as bytes; else as hexadecimal digits."""
        return self.name == "binary"


def leaf_chains(schema: Sequence[SchemaElement]) -> list[list[SchemaElement]]:
    """Return for each leaf the elements that lead to it: the top-level column first, the leaf last."""
    chains: list[list[SchemaElement]] = []
    above: list[SchemaElement] = []
    waiting: list[int] = []
    for element in schema[1:]:
        while waiting and waiting[-1] == 0:
            waiting.pop()
            above.pop()
        if waiting:
            waiting[-1] -= 1
        if element.num_children:
            above.append(element)
            waiting.append(element.num_children)
        elif element.type is not None:
            chains.append([*above, element])
    return chains


def repetition(element: SchemaElement) -> int:
    """Return 0 for required, 1 for optional, 2 for repeated."""
    return _number(element.struct, REPETITION_FIELD_ID) or 0


def highest_levels(chain: Sequence[SchemaElement]) -> tuple[int, int]:
    """Return the highest definition and repetition level of a leaf."""
    kinds = [repetition(element) for element in chain]
    return sum(kind != 0 for kind in kinds), kinds.count(2)


def digest_kind(leaf: SchemaElement) -> DigestKind:
    """Return what the values of a leaf column are; a decimal with a scale that none has is refused."""
    physical, of = leaf.type or 0, leaf.struct
    logical, facts, unit = _logical_type(of)
    if physical == _BOOLEAN:
        return DigestKind("boolean", lambda value: b"true" if value else b"false")
    if physical in (_FLOAT, _DOUBLE):
        return DigestKind("float", _float)
    if physical == INT96:
        return DigestKind("timestamp", bytes)  # It comes as decimal digits.
    if logical == _DECIMAL_TYPE and physical in (INT32, INT64, _BYTE_ARRAY, _FIXED):
        scale = _number(facts, 1) if facts is not None else _number(of, _SCALE)
        return DigestKind("number", _decimal(scale or 0))
    if physical in (INT32, INT64):
        if logical == _DATE_TYPE:
            return DigestKind("date", _decimal_text)
        if logical in (_TIME_TYPE, _TIMESTAMP_TYPE):
            nanoseconds = _NANOSECONDS[unit]
            name = "time" if logical == _TIME_TYPE else "timestamp"
            return DigestKind(name, lambda value: _decimal_text(value * nanoseconds))
        if logical == _INTEGER_TYPE and not _is_signed(facts):
            mask = (1 << (32 if physical == INT32 else 64)) - 1
            return DigestKind("number", lambda value: _decimal_text(value & mask))
        return DigestKind("number", _decimal_text)
    if logical == _FLOAT16_TYPE and physical == _FIXED and _number(of, _TYPE_LENGTH) == 2:
        return DigestKind("float", lambda value: _float(struct.unpack("<e", value)[0]))
    if logical in (_STRING_TYPE, _ENUM_TYPE, _JSON_TYPE) and physical == _BYTE_ARRAY:
        return DigestKind("string", bytes)
    return DigestKind("binary", bytes)


def digest_schema(schema: Sequence[SchemaElement], kinds: Mapping[int, DigestKind]) -> list[SchemaElement]:
    """Return a file's schema in which columns hold digests: those whose leaf ordinals have kinds."""
    changed: dict[int, SchemaElement] = {}
    for ordinal, chain in enumerate(leaf_chains(schema)):
        if ordinal not in kinds:
            continue
        changed[id(chain[-1])] = _digest_leaf(chain[-1], kinds[ordinal])
        for group in chain[:-1]:
            logical, _, _ = _logical_type(group.struct)
            if logical == _VARIANT_TYPE:  # Digests are no parts of one.
                changed[id(group)] = without_annotations(group)
    return [changed.get(id(element), element) for element in schema]


def without_annotations(element: SchemaElement) -> SchemaElement:
    """Return an element without what says more of its values than their physical type."""
    new = element.shallow_copy()
    for field_id in (_CONVERTED_TYPE, _SCALE, _PRECISION, _LOGICAL_TYPE):
        new.struct.set_entry(field_id, None)
    return new


def _digest_leaf(leaf: SchemaElement, kind: DigestKind) -> SchemaElement:
    new = without_annotations(leaf)
    new.struct.set_entry(_TYPE_LENGTH, None)
    new.type = _BYTE_ARRAY
    if not kind.is_binary:
        new.struct.set_entry(_CONVERTED_TYPE, (WireType.I32, 0))
        string = Struct({_STRING_TYPE: (WireType.STRUCT, Struct())})
        new.struct.set_entry(_LOGICAL_TYPE, (WireType.STRUCT, string))
    return new


def _logical_type(of: Struct) -> tuple[int | None, Struct | None, int]:
    """Return the logical type of an element, its facts where it has any, and the unit of a time."""
    entry = of.entry(_LOGICAL_TYPE)
    if entry is not None and entry[0] is WireType.STRUCT:
        for logical, (wire_type, facts) in entry[1].fields.items():
            if wire_type is WireType.STRUCT:
                return _known(logical, facts)
    converted = _number(of, _CONVERTED_TYPE)
    logical, unit = _OF_CONVERTED.get(-1 if converted is None else converted, (None, 0))
    return logical, None, unit


def _known(logical: int, facts: Struct) -> tuple[int | None, Struct, int]:
    unit = facts.entry(2)
    if logical not in (_TIME_TYPE, _TIMESTAMP_TYPE):
        return logical, facts, 0
    found = next(iter(unit[1].fields), 0) if unit is not None and unit[0] is WireType.STRUCT else 0
    # A unit that nobody knows: the numbers as they are.
    return (logical, facts, found) if found in _NANOSECONDS else (None, facts, 0)


def _is_signed(facts: Struct | None) -> bool:
    entry = None if facts is None else facts.entry(2)
    return entry is not None and entry[0] is WireType.TRUE


def _number(of: Struct, field_id: int) -> int | None:
    entry = of.entry(field_id)
    return entry[1] if entry is not None and entry[0] is WireType.I32 else None


def _decimal_text(value: int) -> bytes:
    return b"%d" % value


def _decimal(scale: int) -> Canonical:
    if not 0 <= scale <= _MOST_DIGITS:
        raise ParquetFormatError(f"a decimal column that is shown as digests has a scale of {scale}.")

    def canonical(value: int | bytes) -> bytes:
        unscaled = int.from_bytes(value, "big", signed=True) if isinstance(value, bytes) else value
        digits = str(abs(unscaled)).rjust(scale + 1, "0")
        whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :].rstrip("0")
        sign = "-" if unscaled < 0 else ""
        return f"{sign}{whole}.{fraction}".rstrip(".").encode()

    return canonical


def _float(value: float) -> bytes:
    """Return the big-endian bytes of a double: one for both zeros, and one for all NaN."""
    return struct.pack(">d", math.nan if math.isnan(value) else value + 0.0)


def digest_arrow_schema(value: str, leaves: Sequence[LeafColumn], kinds: Mapping[int, DigestKind]) -> str | None:
    """Return Arrow's schema with types of digests, or None where it does not fit the columns.

    Some readers compare it with the schema of the file.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except (pa.ArrowException, ValueError, OSError):
        return None
    fields = []
    for position, field in enumerate(schema):
        ordinals = [leaf.ordinal for leaf in leaves if leaf.top_level_position == position]
        if not kinds.keys().isdisjoint(ordinals):
            rest = iter(ordinals)
            try:
                field = field.with_type(_with_digests(field.type, rest, kinds))
            except StopIteration:
                return None
            if next(rest, None) is not None:
                return None
        fields.append(field)
    return base64.b64encode(pa.schema(fields, schema.metadata).serialize()).decode()


def _with_digests(of: pa.DataType, ordinals: Iterator[int], kinds: Mapping[int, DigestKind]) -> pa.DataType:
    """Return a type with those of digests in its leaves, which are taken from the ordinals one by one."""
    if isinstance(of, pa.BaseExtensionType):
        return _with_digests(of.storage_type, ordinals, kinds)
    if pa.types.is_struct(of):
        fields = [of.field(position) for position in range(of.num_fields)]
        return pa.struct([field.with_type(_with_digests(field.type, ordinals, kinds)) for field in fields])
    if pa.types.is_map(of):
        key = of.key_field.with_type(_with_digests(of.key_type, ordinals, kinds))
        return pa.map_(key, of.item_field.with_type(_with_digests(of.item_type, ordinals, kinds)))
    if pa.types.is_nested(of) and of.num_fields == 1:
        # Whatever kind of list: readers make the one that they want.
        return pa.list_(of.value_field.with_type(_with_digests(of.value_type, ordinals, kinds)))
    kind = kinds.get(next(ordinals))
    if kind is None:
        return of
    return pa.binary() if kind.is_binary else pa.string()
