"""Checks that bytes are a Thrift struct, without building it: for what is not authenticated yet.

What `read_struct` builds takes 40 to 200 times as much memory as its bytes. Skimming takes some kilobytes for each
level of nesting, accepts what `read_struct` accepts, and says of the rest what it says.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift_compact import LAST_WIRE_TYPE, MAX_DEPTH, WIRE_TYPES, ThriftReader
from parquet_keytools.format.thrift_grammar import Match, usual
from parquet_keytools.format.thrift_values import FIXED_LENGTH, INTEGER_BITS, WireType

Span = tuple[WireType, int, int, re.Match[bytes] | None]
"""The type of a field, where its value begins and ends, and what matched it if it is column metadata."""

Spans = dict[int, Span]
"""Field id -> where it is."""

MAX_FIELD_ID = 32_767

_MANY_BYTES = 256 * 1024
"""After how many bytes an expression passes over usual structs at once; it takes a while to compile."""

_skimmed_bytes = 0

_NESTING = 8
"""More than the expression's levels of nesting, so that it never passes over what nests too deep."""


def skim_struct(
    data: bytes, offset: int = 0, keep: Collection[int] = ()
) -> tuple[dict[int, tuple[WireType, int, int]], int]:
    """Check a struct in `data` at `offset`.

    Args:
        data: The bytes.
        offset: Where the struct begins.
        keep: The ids of its own fields whose places are wanted.

    Returns:
        Those places, of the fields that are there; and the offset of the first byte after the struct.

    Raises:
        ParquetFormatError: `read_struct` could not read it.
    """
    skimmer = skimmer_of(data, offset)
    spans: Spans = {}
    try:
        skimmer.struct_fields(0, spans)
    except IndexError:
        raise ParquetFormatError("a Thrift struct ends before it is complete") from None
    return {field_id: spans[field_id][:3] for field_id in keep if field_id in spans}, skimmer.offset


def skimmer_of(data: bytes, offset: int) -> Skimmer:
    """Return what passes over the values of `data` from `offset` on."""
    global _skimmed_bytes
    _skimmed_bytes += len(data) - offset
    return Skimmer(data, offset, uses_expression=_skimmed_bytes >= _MANY_BYTES)


def column_at(data: bytes, offset: int) -> re.Match[bytes] | None:
    """Return what matches column metadata at `offset`; None where it is not usual, or too little was read."""
    global _skimmed_bytes
    if _skimmed_bytes < _MANY_BYTES:
        _skimmed_bytes += len(data) - offset
        return None
    return usual()[2](data, offset)


def _no_match(data: bytes, offset: int) -> None:
    return None


class Skimmer(ThriftReader):
    """As the reader, step by step, with nothing kept."""

    __slots__ = ("known", "match", "match_column", "match_list", "position", "uses_expression")

    data: bytes

    def __init__(self, data: bytes, offset: int, *, uses_expression: bool) -> None:
        super().__init__(data, offset)
        self.match = self.match_list = None
        self.match_column: Match = _no_match
        self.uses_expression = uses_expression
        if uses_expression:
            self.match, self.match_list, self.match_column, *_ = usual()
        self.known: dict[int, bytes] = {}
        self.position = 0

    def struct_fields(self, depth: int, spans: Spans | None = None) -> None:
        """Pass over a struct, field by field, and say where these lie."""
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift structs nest more than {MAX_DEPTH} deep")
        data = self.data
        offset = self.offset
        field_id = 0
        # A bit for each id: a set of all would take a hundred times as much as fields of one byte.
        seen = seen_negative = 0
        match_list = self.match_list if depth <= MAX_DEPTH - _NESTING else None
        match_column = self.match_column
        column = None
        while header := data[offset]:
            offset += 1
            if header > 0x0F:
                field_id += header >> 4
            else:
                self.offset = offset
                field_id = self.zigzag(16)
                offset = self.offset
            start = offset
            code = header & 0x0F
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
                        raise ParquetFormatError(f"a Thrift integer of type {WIRE_TYPES[code].name} is too long")
            elif code == 8:
                length = data[offset]
                offset += 1
                if length > 0x7F:
                    if data[offset] > 0x7F:
                        self.offset = start
                        length = self.varint(32)
                        offset = self.offset
                    else:
                        length = length & 0x7F | data[offset] << 7
                        offset += 1
                if length > self.end - offset:
                    raise ParquetFormatError(f"a Thrift value of {length} bytes does not fit into its bytes")
                offset += length
            elif code == 12:
                if match_list is None or spans is None or (column := match_column(data, offset)) is None:
                    self.offset = offset
                    self.pass_struct(depth + 1)
                    offset = self.offset
                else:
                    offset = column.end()
            elif code == 1 or code == 2:
                pass
            elif code == 9 and match_list is not None and (found := match_list(data, offset)) is not None:
                offset = found.end()
            elif code == 0 or code > LAST_WIRE_TYPE:
                raise ParquetFormatError(f"Thrift type {code} does not exist")
            else:
                self.offset = offset
                self.pass_value(WIRE_TYPES[code], depth + 1)
                offset = self.offset
            if field_id >= 0:
                if field_id > MAX_FIELD_ID:
                    raise ParquetFormatError(f"Thrift field {field_id} is out of range")
                bit = 1 << field_id
                is_second = seen & bit
                seen |= bit
            else:
                bit = 1 << -field_id
                is_second = seen_negative & bit
                seen_negative |= bit
            if is_second:
                raise ParquetFormatError(f"Thrift field {field_id} comes twice")
            if spans is not None:
                spans[field_id] = (WIRE_TYPES[code], start, offset, column)
                column = None
        self.offset = offset + 1

    def pass_struct(self, depth: int) -> None:
        """Pass over a struct, at once if it is a usual one, or one that was met before at this place of a list."""
        if self.match is None or depth > MAX_DEPTH - _NESTING:
            self.struct_fields(depth)
            return
        offset = self.offset
        place = self.position << 7 | depth
        known = self.known.get(place)
        if known is not None and self.data.startswith(known, offset):
            self.offset = offset + len(known)
            return
        found = self.match(self.data, offset)
        if found is not None:
            self.offset = found.end()
            return
        self.struct_fields(depth)
        if self.offset - offset > 127:
            self.known[place] = self.data[offset : self.offset]

    def pass_value(self, wire_type: WireType, depth: int) -> None:
        """Pass over a value of a type."""
        if wire_type is WireType.BINARY:
            self.pass_bytes(self.varint(32))
        elif wire_type is WireType.STRUCT:
            self.pass_struct(depth)
        elif wire_type is WireType.LIST or wire_type is WireType.SET:
            self.pass_list(depth)
        elif wire_type is WireType.MAP:
            self.pass_map(depth)
        elif wire_type in FIXED_LENGTH:
            self.pass_bytes(FIXED_LENGTH[wire_type])
        else:
            self.varint(INTEGER_BITS[wire_type])

    def pass_bytes(self, length: int) -> None:
        """Pass over some bytes."""
        if length > self.end - self.offset:
            raise ParquetFormatError(f"a Thrift value of {length} bytes does not fit into its bytes")
        self.offset += length

    def pass_list(self, depth: int) -> None:
        """Pass over a list or a set."""
        element_type, count = self.list_header(depth)
        if element_type is WireType.STRUCT:
            data = self.data
            for _ in range(count):
                if data[self.offset] == 0 and depth < MAX_DEPTH:
                    self.offset += 1
                else:
                    self.pass_struct(depth + 1)
        elif element_type in FIXED_LENGTH:
            length = FIXED_LENGTH[element_type]
            if count * length > self.end - self.offset:
                raise ParquetFormatError(f"a Thrift value of {length} bytes does not fit into its bytes")
            self.offset += count * length
        elif element_type in INTEGER_BITS:
            varint, bits = self.varint, INTEGER_BITS[element_type]
            for _ in range(count):
                varint(bits)
        else:
            for _ in range(count):
                self.pass_value(element_type, depth + 1)

    def pass_map(self, depth: int) -> None:
        """Pass over a map."""
        key_type, value_type, count = self.map_header(depth)
        for _ in range(count):
            self.pass_value(key_type, depth + 1)
            self.pass_value(value_type, depth + 1)


def check_value_count(data: bytes | memoryview, offset: int, max_values: int) -> None:
    """Check that a struct has not too many values, at all depths, before one of them is built.

    Raises:
        ParquetFormatError: It has. What else is wrong is found by the reader, which gets no further.
    """
    counter = _Counter(data, offset, max_values)
    try:
        counter.walk(WireType.STRUCT, 0)
    except (IndexError, ParquetFormatError):
        if counter.left is not None and counter.left < 0:
            raise


class _Counter(ThriftReader):
    """Walks through a struct without building anything, and stops at too many values."""

    __slots__ = ()

    EXCESS = "has more than {:,} values"

    def walk(self, wire_type: WireType, depth: int) -> None:
        self.charge(1)
        if depth > MAX_DEPTH:
            raise ParquetFormatError("too deep")
        if wire_type is WireType.STRUCT:
            while header := self.data[self.offset]:
                self.offset += 1
                if header <= 0x0F:
                    self.zigzag(16)
                field_type = WIRE_TYPES[header & 0x0F]
                if field_type is WireType.TRUE or field_type is WireType.FALSE:
                    self.charge(1)
                else:
                    self.walk(field_type, depth + 1)
            self.offset += 1
        elif wire_type is WireType.LIST or wire_type is WireType.SET:
            header = self.data[self.offset]
            self.offset += 1
            count = header >> 4
            for _ in range(self.varint(32) if count == 15 else count):
                self.walk(WIRE_TYPES[header & 0x0F], depth + 1)
        elif wire_type is WireType.MAP:
            if count := self.varint(32):
                types = self.data[self.offset]
                self.offset += 1
                for _ in range(count):
                    self.walk(WIRE_TYPES[types >> 4], depth + 1)
                    self.walk(WIRE_TYPES[types & 0x0F], depth + 1)
        elif wire_type is WireType.BINARY:
            length = self.varint(32)
            self.offset += length
        elif wire_type in INTEGER_BITS:
            self.varint(INTEGER_BITS[wire_type])
        elif wire_type is WireType.STOP:
            raise ParquetFormatError("no such type")
        else:
            self.offset += FIXED_LENGTH[wire_type]
