"""What Thrift's compact protocol carries, as Python values, and how they are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from parquet_keytools.errors import ParquetFormatError


class WireType(IntEnum):
    """Type of a value on the wire, as its field header or list header says."""

    STOP = 0
    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    MAP = 11
    STRUCT = 12
    UUID = 13


# Looking up a member of an enumeration takes as long as a call with Python 3.11.
_I64, _BINARY, _STRUCT = WireType.I64, WireType.BINARY, WireType.STRUCT
_LIST, _SET, _MAP, _TRUE, _FALSE = WireType.LIST, WireType.SET, WireType.MAP, WireType.TRUE, WireType.FALSE

_MOST_I64 = 1 << 63
INTEGER_BITS = {WireType.I16: 16, WireType.I32: 32, WireType.I64: 64}
FIXED_LENGTH = {WireType.DOUBLE: 8, WireType.UUID: 16, WireType.BYTE: 1, WireType.TRUE: 1, WireType.FALSE: 1}


Entry = tuple[WireType, Any]
"""Type and value of a field."""

Changes = Mapping[int, Entry | None]
"""Field id -> its new type and value; None removes the field."""


class IntegerFields:
    """Fields of a struct that are integers, and are looked at together.

    Attributes:
        types: Ids and types.
        groups: See `thrift_grammar.column_groups`; empty until they were asked for.
    """

    __slots__ = ("groups", "types")

    def __init__(self, *types: tuple[int, WireType]) -> None:
        self.types = types
        self.groups: tuple[int, ...] = ()


class Struct:
    """A struct: field id -> wire type and value, in the order of the bytes.

    Values are int for I16, I32 and I64, bytes for BINARY and for what has a fixed length (DOUBLE, UUID,
    BYTE), None for TRUE and FALSE (the type is the value), `ThriftList`, `ThriftMap` and `Struct`.
    """

    __slots__ = ("fields",)

    fields: dict[int, tuple[WireType, Any]]

    def __init__(self, fields: dict[int, tuple[WireType, Any]] | None = None) -> None:
        self.fields = {} if fields is None else fields

    def as_bytes(self) -> bytes | None:
        """Return its bytes where they need not be made of its fields; see `thrift_outline.UnreadStruct`."""
        return None

    def copy(self) -> Struct:
        """Return a struct whose fields can be set without changing this one; what is in them is shared."""
        return Struct(dict(self.fields))

    def types(self) -> dict[int, WireType]:
        """Return the types of all fields, by id."""
        return {field_id: wire_type for field_id, (wire_type, _) in self.fields.items()}

    def has_types(self, wanted: Mapping[int, WireType]) -> bool:
        """Return whether it has fields with these types, by id."""
        return self.types().items() >= wanted.items()

    def entry(self, field_id: int) -> tuple[WireType, Any] | None:
        """Return type and value of a field, to be looked at only."""
        return self.fields.get(field_id)

    def numbers(self, fields: IntegerFields) -> list[int | None]:
        """Return the values of fields that are integers; None where there is none, or of another type."""
        entries = [(self.entry(field_id), wire_type) for field_id, wire_type in fields.types]
        return [entry[1] if entry is not None and entry[0] is wire_type else None for entry, wire_type in entries]

    def entry_to_change(self, field_id: int) -> tuple[WireType, Any] | None:
        """Return type and value of a field; what is changed in the value is changed in this struct."""
        return self.fields.get(field_id)

    def entry_bytes(self, field_id: int) -> tuple[WireType, bytes] | None:
        """Return type and bytes of a field."""
        entry = self.fields.get(field_id)
        return None if entry is None else (entry[0], write_value(*entry))

    def set_entry(self, field_id: int, entry: tuple[WireType, Any] | None) -> None:
        """Set a field, at its place or in the order of ids; or remove it."""
        fields = self.fields
        if entry is None:
            fields.pop(field_id, None)
            return
        is_new = field_id not in fields
        fields[field_id] = entry
        if is_new and any(other > field_id for other in fields):
            self.fields = dict(sorted(fields.items()))

    def changed_bytes(self, changes: Changes) -> bytes:
        """Return the bytes that the struct would have with some entries set or removed; it is not changed.

        Args:
            changes: The new entries. A struct may be given as its bytes.
        """
        changed = self.copy()
        for field_id, entry in changes.items():
            changed.set_entry(field_id, entry)
        return changed.as_bytes() or write_struct(changed)

    def lacks(self, field_ids: Collection[int]) -> bool:
        """Return whether it has none of these fields."""
        return self.types().keys().isdisjoint(field_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Struct({self.fields!r})"


@dataclass(slots=True, eq=False)
class ThriftList:
    """A list or a set. Booleans in it are one byte each. Structs may be bytes in one that is only written."""

    element_type: WireType
    elements: list[Any]

    def as_bytes(self) -> bytes | None:
        """Return its bytes where they need not be made of its elements; see `footer_outline.UnreadList`."""
        return None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ThriftList)
            and self.element_type == other.element_type
            and self.elements == other.elements
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class ThriftMap:
    """A map, as pairs in the order of the bytes; the types say nothing where it is empty."""

    key_type: WireType
    value_type: WireType
    pairs: list[tuple[Any, Any]]


def write_struct(struct: Struct) -> bytes:
    """Return the bytes of a struct in compact protocol."""
    _write_value(out := bytearray(), _STRUCT, struct)
    return bytes(out)


def write_value(wire_type: WireType, value: Any) -> bytes:
    """Return the bytes of a value; a boolean field has none."""
    if wire_type is _I64 and 0 <= value < _MOST_I64:
        return varint(value << 1)
    if value is None:
        return b""
    if wire_type is _BINARY:
        return b"".join((varint(len(value)), value))
    if wire_type is _STRUCT:
        written: bytes | None = value if isinstance(value, bytes) else value.as_bytes()
        if written is not None:
            return written
    _write_value(out := bytearray(), wire_type, value)
    return bytes(out)


FIELD_HEADERS = tuple(bytes((header,)) for header in range(256))
"""What comes before the value of a field: by the id less that of the field before, times 16, and the type."""


def far_header(field_id: int, wire_type: WireType) -> bytes:
    """Return it for a field whose id is not 1 to 15 more than that of the field before."""
    out = bytearray((wire_type,))
    _write_zigzag(out, field_id, 16)
    return bytes(out)


def varint(value: int) -> bytes:
    """Return an unsigned integer as a varint."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    if value < 0x1000_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
    _write_varint(out := bytearray(), value)
    return bytes(out)


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_zigzag(out: bytearray, value: int, bits: int) -> None:
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ParquetFormatError(f"{value} does not fit into {bits} bits")
    _write_varint(out, (value << 1) ^ (value >> 63))


def _write_value(out: bytearray, wire_type: WireType, value: Any) -> None:
    bits = INTEGER_BITS.get(wire_type)
    if bits is not None:
        _write_zigzag(out, value, bits)
    elif wire_type is _BINARY:
        _write_varint(out, len(value))
        out += value
    elif wire_type is _STRUCT:
        written = value if isinstance(value, bytes) else value.as_bytes()
        if written is not None:
            out += written
            return
        last = 0
        for field_id, (field_type, field_value) in value.fields.items():
            delta = field_id - last
            out += FIELD_HEADERS[delta << 4 | field_type] if 0 < delta <= 15 else far_header(field_id, field_type)
            last = field_id
            if field_type is not _TRUE and field_type is not _FALSE:
                _write_value(out, field_type, field_value)
        out.append(WireType.STOP)
    elif wire_type is _LIST or wire_type is _SET:
        written = value.as_bytes()
        if written is not None:
            out += written
            return
        count = len(value.elements)
        if count < 15:
            out.append(count << 4 | value.element_type)
        else:
            out.append(0xF0 | value.element_type)
            _write_varint(out, count)
        if value.element_type is _STRUCT and all(type(element) is bytes for element in value.elements):
            out += b"".join(value.elements)
            return
        for element in value.elements:
            _write_value(out, value.element_type, element)
    elif wire_type is _MAP:
        _write_varint(out, len(value.pairs))
        if value.pairs:
            out.append(value.key_type << 4 | value.value_type)
        for key, item in value.pairs:
            _write_value(out, value.key_type, key)
            _write_value(out, value.value_type, item)
    else:
        out += value
