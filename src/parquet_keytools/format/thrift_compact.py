"""A bounded reader of Thrift's compact protocol.

Structs are read without knowing their fields, so that fields of newer writers survive a rewrite. Whatever the
bytes, reading takes time and memory proportional to their number and ends in a `Struct` or a
`ParquetFormatError`.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.collector import paused_collector
from parquet_keytools.format.thrift_values import (
    FIXED_LENGTH,
    INTEGER_BITS,
    Struct,
    ThriftList,
    ThriftMap,
    WireType,
)

MAX_DEPTH = 64
"""How deep structs, lists and maps may nest; Parquet's own nest less than ten deep."""


LAST_WIRE_TYPE = max(WireType)
WIRE_TYPES = [WireType(code) if code <= LAST_WIRE_TYPE else WireType.STOP for code in range(16)]
"""By code; STOP where there is no such type."""

_STRUCT_BYTES, _FIELD_BYTES, _LIST_BYTES, _ELEMENT_BYTES, _PAIR_BYTES = 112, 104, 100, 32, 96
"""About what is built takes, without the bytes of texts."""

_LARGE = 256 * 1024
"""From how many bytes on the collector of reference cycles rests while a structure is read."""


def read_struct(data: bytes | memoryview, offset: int = 0, max_memory: int | None = None) -> tuple[Struct, int]:
    """Read a struct from `data` at `offset`; returns it and the offset of the first byte after it.

    Args:
        data: The bytes.
        offset: Where the struct begins.
        max_memory: About how many bytes what is built may take; that is up to 200 times the bytes of the struct.
            None for as many as it takes.

    Raises:
        ParquetFormatError: The bytes are not a struct in compact protocol, or end before it does, or it takes
            too much memory.
    """
    return ThriftReader(data, offset, max_memory).whole_struct()


class ThriftReader:
    """Reads value after value; `offset` is where the next one begins."""

    __slots__ = ("data", "end", "left", "most", "offset")

    EXCESS: ClassVar[str] = "takes more than {:,} bytes of memory"

    def __init__(self, data: bytes | memoryview, offset: int, most: int | None = None) -> None:
        self.data = data
        self.offset = offset
        self.end = len(data)
        self.left = self.most = most

    def whole_struct(self) -> tuple[Struct, int]:
        """Read the struct that begins here; returns it and the offset of the first byte after it."""
        is_large = self.end - self.offset >= _LARGE
        try:
            with paused_collector() if is_large else contextlib.nullcontext():
                return self.struct(0), self.offset
        except IndexError:
            raise ParquetFormatError("a Thrift struct ends before it is complete") from None

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
            wire_type = WIRE_TYPES[code]
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
            elif code == 0 or code > LAST_WIRE_TYPE:
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
            for found in fields:
                if not -32_768 <= found <= 32_767:
                    raise ParquetFormatError(f"Thrift field {found} is out of range")
        if self.left is not None:
            self.charge(_STRUCT_BYTES + len(fields) * _FIELD_BYTES)
        self.offset = offset + 1
        return Struct(fields)

    def value(self, wire_type: WireType, depth: int) -> Any:
        """Read a value of a type."""
        bits = INTEGER_BITS.get(wire_type)
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
        return self.take(FIXED_LENGTH[wire_type])

    def list(self, depth: int) -> ThriftList:
        """Read a list or a set."""
        element_type, count = self.list_header(depth)
        self.charge(_LIST_BYTES + count * _ELEMENT_BYTES)
        read: Any
        if element_type is WireType.STRUCT:
            read, argument = self.struct, depth + 1
        elif element_type in INTEGER_BITS:
            read, argument = self.zigzag, INTEGER_BITS[element_type]
        else:
            return ThriftList(element_type, [self.value(element_type, depth + 1) for _ in range(count)])
        return ThriftList(element_type, [read(argument) for _ in range(count)])

    def list_header(self, depth: int) -> tuple[WireType, int]:
        """Read of what type the elements of a list are, and how many there are."""
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift lists nest more than {MAX_DEPTH} deep")
        header = self.data[self.offset]
        self.offset += 1
        count = header >> 4
        if count == 15:
            count = self.varint(32)
        element_type = WIRE_TYPES[header & 0x0F]
        if element_type is WireType.STOP and count:  # Some writers give an empty list the element type 0.
            raise ParquetFormatError(f"Thrift type {header & 0x0F} does not exist")
        self.check_count(count)
        return element_type, count

    def map(self, depth: int) -> ThriftMap:
        """Read a map."""
        key_type, value_type, count = self.map_header(depth)
        self.charge(_LIST_BYTES + count * _PAIR_BYTES)
        pairs = [(self.value(key_type, depth + 1), self.value(value_type, depth + 1)) for _ in range(count)]
        return ThriftMap(key_type, value_type, pairs)

    def map_header(self, depth: int) -> tuple[WireType, WireType, int]:
        """Read of what types keys and values of a map are, and how many pairs there are."""
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift maps nest more than {MAX_DEPTH} deep")
        count = self.varint(32)
        if count == 0:
            return WireType.STOP, WireType.STOP, 0
        types = self.data[self.offset]
        self.offset += 1
        key_type, value_type = WIRE_TYPES[types >> 4], WIRE_TYPES[types & 0x0F]
        if WireType.STOP in (key_type, value_type):
            raise ParquetFormatError(f"Thrift map types {types:#04x} do not exist")
        self.check_count(count)
        return key_type, value_type, count

    def charge(self, amount: int) -> None:
        """Take an amount of what may be used, and refuse to go on where there is less."""
        if self.left is not None:
            self.left -= amount
            if self.left < 0:
                raise ParquetFormatError(f"a Thrift struct {self.EXCESS.format(self.most)}")

    def check_count(self, count: int) -> None:
        """Refuse a list or map of more elements than bytes follow: each takes one at least."""
        if count > self.end - self.offset:
            raise ParquetFormatError(f"a Thrift list or map of {count} elements does not fit into its bytes")

    def take(self, length: int) -> bytes:
        """Read some bytes."""
        start = self.offset
        if length > self.end - start:
            raise ParquetFormatError(f"a Thrift value of {length} bytes does not fit into its bytes")
        self.offset = start + length
        return bytes(self.data[start : start + length])

    def varint(self, bits: int) -> int:
        """Read an integer without a sign."""
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
        """Read an integer with a sign."""
        value = self.varint(bits)
        return (value >> 1) ^ -(value & 1)
