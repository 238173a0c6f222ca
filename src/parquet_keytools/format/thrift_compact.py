"""Thrift compact protocol: a bounded reader, and a writer that gives back all that was read.

Structs are read without knowing their fields, so that fields of newer writers survive a rewrite. Whatever the
bytes, reading takes time and memory proportional to their number and ends in a `Struct` or a
`ParquetFormatError`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from parquet_keytools.errors import ParquetFormatError

MAX_DEPTH = 64
"""How deep structs, lists and maps may nest; Parquet's own nest less than ten deep."""


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


_INTEGER_BITS = {WireType.I16: 16, WireType.I32: 32, WireType.I64: 64}
_FIXED_LENGTH = {WireType.DOUBLE: 8, WireType.UUID: 16, WireType.BYTE: 1, WireType.TRUE: 1, WireType.FALSE: 1}
_LAST_WIRE_TYPE = max(WireType)
_WIRE_TYPES = [WireType(code) if code <= _LAST_WIRE_TYPE else WireType.STOP for code in range(16)]
"""By code; STOP where there is no such type."""

_LARGE = 256 * 1024
"""From how many bytes on the collector of reference cycles rests while a structure is read."""


@dataclass(slots=True)
class Struct:
    """A struct: field id -> wire type and value, in the order of the bytes.

    Values are int for I16, I32 and I64, bytes for BINARY and for what has a fixed length (DOUBLE, UUID,
    BYTE), None for TRUE and FALSE (the type is the value), `ThriftList`, `ThriftMap` and `Struct`.
    """

    fields: dict[int, tuple[WireType, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class ThriftList:
    """A list or a set. Booleans in it are one byte each."""

    element_type: WireType
    elements: list[Any]


@dataclass(slots=True)
class ThriftMap:
    """A map, as pairs in the order of the bytes; the types say nothing where it is empty."""

    key_type: WireType
    value_type: WireType
    pairs: list[tuple[Any, Any]]


def read_struct(data: bytes | memoryview, offset: int = 0) -> tuple[Struct, int]:
    """Read a struct from `data` at `offset`.

    Returns:
        The struct, and the offset of the first byte after it.

    Raises:
        ParquetFormatError: The bytes are not a struct in compact protocol, or end before it does.
    """
    reader = _Reader(data, offset)
    # Millions of new objects would make the collector look at all of them again and again; there are no cycles.
    pauses_collector = len(data) - offset >= _LARGE and gc.isenabled()
    if pauses_collector:
        gc.disable()
    try:
        struct = reader.struct(0)
    except IndexError:
        raise ParquetFormatError("a Thrift struct ends before it is complete") from None
    finally:
        if pauses_collector:
            gc.enable()
    return struct, reader.offset


def write_struct(struct: Struct) -> bytes:
    """Return the bytes of a struct in compact protocol."""
    out = bytearray()
    _write_value(out, WireType.STRUCT, struct)
    return bytes(out)


class _Reader:
    __slots__ = ("data", "end", "offset")

    def __init__(self, data: bytes | memoryview, offset: int) -> None:
        self.data = data
        self.offset = offset
        self.end = len(data)

    def struct(self, depth: int) -> Struct:
        """Read a struct; a footer is thousands of small ones, so the common types are read without a call."""
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift structs nest more than {MAX_DEPTH} deep")
        fields: dict[int, tuple[WireType, Any]] = {}
        field_id = 0
        in_order = True
        data = self.data
        offset = self.offset
        value: Any
        while header := data[offset]:
            offset += 1
            if header > 0x0F:
                field_id += header >> 4
            else:
                self.offset = offset
                field_id = self.zigzag(16)
                offset = self.offset
                in_order = False
            code = header & 0x0F
            wire_type = _WIRE_TYPES[code]
            if code == 5 or code == 6:
                value = data[offset]
                offset += 1
                if value > 0x7F:
                    value &= 0x7F
                    shift = 7
                    while (byte := data[offset]) > 0x7F:
                        value |= (byte & 0x7F) << shift
                        shift += 7
                        offset += 1
                        if shift > 63:
                            break
                    value |= byte << shift
                    offset += 1
                    if value >> (32 if code == 5 else 64):
                        raise ParquetFormatError(f"a Thrift integer of type {wire_type.name} is too long")
                value = (value >> 1) ^ -(value & 1)
            elif code == 8 and data[offset] < 0x80:
                start = offset + 1
                offset = start + data[offset]
                if offset > self.end:
                    raise ParquetFormatError(
                        f"a Thrift value of {offset - start} bytes does not fit into its bytes"
                    )
                value = bytes(data[start:offset])
            elif code == 12:
                self.offset = offset
                value = self.struct(depth + 1)
                offset = self.offset
            elif code == 1 or code == 2:
                value = None
            elif code == 0 or code > _LAST_WIRE_TYPE:
                raise ParquetFormatError(f"Thrift type {code} does not exist")
            else:
                self.offset = offset
                value = self.value(wire_type, depth + 1)
                offset = self.offset
            # Without a field id of the long form, ids only grow.
            if not in_order and field_id in fields:
                raise ParquetFormatError(f"Thrift field {field_id} comes twice")
            fields[field_id] = (wire_type, value)
        if not in_order or field_id > 32_767:
            self.check_field_ids(fields)
        self.offset = offset + 1
        return Struct(fields)

    def check_field_ids(self, fields: dict[int, tuple[WireType, Any]]) -> None:
        for field_id in fields:
            if not -32_768 <= field_id <= 32_767:
                raise ParquetFormatError(f"Thrift field {field_id} is out of range")

    def value(self, wire_type: WireType, depth: int) -> Any:
        bits = _INTEGER_BITS.get(wire_type)
        if bits is not None:
            return self.zigzag(bits)
        if wire_type is WireType.BINARY:
            return self.take(self.varint(32))
        if wire_type is WireType.STRUCT:
            return self.struct(depth)
        if wire_type is WireType.LIST or wire_type is WireType.SET:
            return self.list(depth)
        if wire_type is WireType.MAP:
            return self.map(depth)
        return self.take(_FIXED_LENGTH[wire_type])

    def list(self, depth: int) -> ThriftList:
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift lists nest more than {MAX_DEPTH} deep")
        header = self.data[self.offset]
        self.offset += 1
        count = header >> 4
        if count == 15:
            count = self.varint(32)
        element_type = _WIRE_TYPES[header & 0x0F]
        # Some writers give an empty list the element type 0.
        if element_type is WireType.STOP and count:
            raise ParquetFormatError(f"Thrift type {header & 0x0F} does not exist")
        self.check_count(count)
        read: Any
        if element_type is WireType.STRUCT:
            read, argument = self.struct, depth + 1
        elif element_type in _INTEGER_BITS:
            read, argument = self.zigzag, _INTEGER_BITS[element_type]
        else:
            return ThriftList(element_type, [self.value(element_type, depth + 1) for _ in range(count)])
        return ThriftList(element_type, [read(argument) for _ in range(count)])

    def map(self, depth: int) -> ThriftMap:
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift maps nest more than {MAX_DEPTH} deep")
        count = self.varint(32)
        if count == 0:
            return ThriftMap(WireType.STOP, WireType.STOP, [])
        types = self.data[self.offset]
        self.offset += 1
        key_type, value_type = _WIRE_TYPES[types >> 4], _WIRE_TYPES[types & 0x0F]
        if WireType.STOP in (key_type, value_type):
            raise ParquetFormatError(f"Thrift map types {types:#04x} do not exist")
        self.check_count(count)
        pairs = [(self.value(key_type, depth + 1), self.value(value_type, depth + 1)) for _ in range(count)]
        return ThriftMap(key_type, value_type, pairs)

    def check_count(self, count: int) -> None:
        # Every element takes a byte at least, so that a count can never ask for more memory than was given.
        if count > self.end - self.offset:
            raise ParquetFormatError(f"a Thrift list or map of {count} elements does not fit into its bytes")

    def take(self, length: int) -> bytes:
        start = self.offset
        if length > self.end - start:
            raise ParquetFormatError(f"a Thrift value of {length} bytes does not fit into its bytes")
        self.offset = start + length
        return bytes(self.data[start : start + length])

    def varint(self, bits: int) -> int:
        data = self.data
        offset = self.offset
        byte = data[offset]
        if byte < 0x80:
            self.offset = offset + 1
            return byte
        result = 0
        shift = 0
        while byte & 0x80:
            result |= (byte & 0x7F) << shift
            shift += 7
            offset += 1
            if shift >= bits:
                break
            byte = data[offset]
        else:
            result |= byte << shift
            if result < 1 << bits:
                self.offset = offset + 1
                return result
        raise ParquetFormatError(f"a Thrift integer has more than {bits} bits")

    def zigzag(self, bits: int) -> int:
        value = self.varint(bits)
        return (value >> 1) ^ -(value & 1)


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
    bits = _INTEGER_BITS.get(wire_type)
    if bits is not None:
        _write_zigzag(out, value, bits)
    elif wire_type is WireType.BINARY:
        _write_varint(out, len(value))
        out += value
    elif wire_type is WireType.STRUCT:
        last = 0
        for field_id, (field_type, field_value) in value.fields.items():
            delta = field_id - last
            if 0 < delta <= 15:
                out.append(delta << 4 | field_type)
            else:
                out.append(field_type)
                _write_zigzag(out, field_id, 16)
            last = field_id
            if field_type is not WireType.TRUE and field_type is not WireType.FALSE:
                _write_value(out, field_type, field_value)
        out.append(WireType.STOP)
    elif wire_type is WireType.LIST or wire_type is WireType.SET:
        count = len(value.elements)
        if count < 15:
            out.append(count << 4 | value.element_type)
        else:
            out.append(0xF0 | value.element_type)
            _write_varint(out, count)
        for element in value.elements:
            _write_value(out, value.element_type, element)
    elif wire_type is WireType.MAP:
        _write_varint(out, len(value.pairs))
        if value.pairs:
            out.append(value.key_type << 4 | value.value_type)
        for key, item in value.pairs:
            _write_value(out, value.key_type, key)
            _write_value(out, value.value_type, item)
    else:
        out += value
