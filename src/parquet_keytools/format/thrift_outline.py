"""Reads the outer structs of a footer, and keeps of the inner ones where they lie; these are read when looked at.

A footer is thousands of column chunks, and most work looks at a few of them. A struct that nobody looked at is its
bytes: compared, copied and written as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift_compact import ThriftReader
from parquet_keytools.format.thrift_grammar import ALWAYS_MATCHED, COLUMN_FIELDS, COLUMN_GROUPS, column_groups
from parquet_keytools.format.thrift_skim import Skimmer, Span, Spans, column_at, skimmer_of
from parquet_keytools.format.thrift_values import (
    FIELD_HEADERS,
    INTEGER_BITS,
    Changes,
    IntegerFields,
    Struct,
    ThriftList,
    WireType,
    far_header,
    varint,
    write_value,
)

# Looking up a member of an enumeration takes as long as a call with Python 3.11.
_I32, _I64, _BINARY, _STRUCT = WireType.I32, WireType.I64, WireType.BINARY, WireType.STRUCT
_TRUE, _FALSE = WireType.TRUE, WireType.FALSE

_UNREAD_BYTES = 1_500
"""About what the places of the fields of a struct take."""


_Changes = dict[int, tuple[WireType, Any] | None]

_NOTHING: _Changes = {}
"""The changes of all structs that have none; never changed itself."""


class UnreadStruct(Struct):
    """A struct whose bytes are valid: fields are read from them when they are looked at, and one by one.

    Fields that are set are kept apart, and the rest is written as it is.
    """

    __slots__ = ("_changes", "_column", "_data", "_end", "_spans", "_start")

    def __init__(
        self, data: bytes, start: int, end: int, spans: Spans | None, column: re.Match[bytes] | None = None
    ) -> None:
        self._data: bytes | None = data
        self._start = start
        self._end = end
        self._spans = spans
        self._column = column
        self._changes = _NOTHING

    def as_bytes(self) -> bytes | None:
        """Return its bytes, with what was set; None once somebody took all fields, to change them perhaps."""
        data = self._data
        if data is None:
            return None
        # A copy of the changes: another thread may look at a field of a footer that both share.
        return self._changed(data, dict(self._changes)) if self._changes else data[self._start : self._end]

    def copy(self) -> Struct:
        """Return a struct whose fields can be set without changing this one."""
        data = self._data
        if data is None:
            return super().copy()
        spans = self._spans if self._column is not None else self._places(data)
        copied = UnreadStruct(data, self._start, self._end, spans, self._column)
        if self._changes:
            copied._changes = dict(self._changes)
        return copied

    def types(self) -> dict[int, WireType]:
        """Return the types of all fields, by id."""
        data = self._data
        if data is None or self._changes:
            return super().types()
        return {field_id: place[0] for field_id, place in self._places(data).items()}

    def has_types(self, wanted: Mapping[int, WireType]) -> bool:
        """Return whether it has fields with these types, by id."""
        is_usual = self._data is not None and self._column is not None and not self._changes
        return (is_usual and wanted.items() <= ALWAYS_MATCHED.items()) or super().has_types(wanted)

    def entry(self, field_id: int) -> tuple[WireType, Any] | None:
        """Return type and value of a field, to be looked at only: it is read for this call alone."""
        data, changes = self._data, self._changes
        if data is None:
            return super().entry(field_id)
        if field_id in changes:
            return changes[field_id]
        place = (self._spans or self._places(data)).get(field_id)
        if place is None:
            return None
        wire_type, start, end, column = place
        if wire_type is _I64 or wire_type is _I32:
            return wire_type, _number_at(data, start, end)
        if column is not None:
            return wire_type, UnreadStruct(data, start, end, None, column)
        return wire_type, _value_at(data, wire_type, start, end)

    def numbers(self, fields: IntegerFields) -> list[int | None]:
        """Return the values of fields that are integers; None where there is none, or of another type."""
        data, column, changes = self._data, self._column, self._changes
        if data is None or changes:
            return super().numbers(fields)
        if column is None:
            spans = self._spans or self._places(data)
            places = [(spans.get(field_id, _NO_SPAN), wire_type) for field_id, wire_type in fields.types]
            return [
                _number_at(data, start, end) if its_type is wire_type else None
                for (its_type, start, end, _), wire_type in places
            ]
        groups = fields.groups or column_groups(fields)
        return [None if group == 0 or (value := column[group]) is None else zigzag_int(value) for group in groups]

    def entry_to_change(self, field_id: int) -> tuple[WireType, Any] | None:
        """Return type and value of a field; what is changed in the value is changed in this struct."""
        entry = self.entry(field_id)
        if entry is not None and entry[0] in _CHANGEABLE and self._data is not None:
            self.set_entry(field_id, entry)
        return entry

    def entry_bytes(self, field_id: int) -> tuple[WireType, bytes] | None:
        """Return type and bytes of a field."""
        data, changes, column = self._data, self._changes, self._column
        if data is None:
            return super().entry_bytes(field_id)
        if field_id in changes:
            changed = changes[field_id]
            return None if changed is None else (changed[0], write_value(*changed))
        if column is None:
            wire_type, start, end, _ = (self._spans or self._places(data)).get(field_id, _NO_SPAN)
            return (wire_type, data[start:end]) if end else None
        group, wire_type = COLUMN_GROUPS.get(field_id, _NO_GROUP)
        value = column[group] if group else None
        return None if value is None else (wire_type, value)

    def set_entry(self, field_id: int, entry: tuple[WireType, Any] | None) -> None:
        """Set a field, at its place or in the order of ids; or remove it."""
        if self._data is None:
            super().set_entry(field_id, entry)
        elif self._changes is _NOTHING:
            self._changes = {field_id: entry}
        else:
            self._changes[field_id] = entry

    def changed_bytes(self, changes: Changes) -> bytes:
        """Return the bytes that the struct would have with some entries set or removed; it is not changed."""
        data = self._data
        if data is None:
            return super().changed_bytes(changes)
        return self._changed(data, {**self._changes, **changes} if self._changes else changes)

    def lacks(self, field_ids: Collection[int]) -> bool:
        """Return whether it has none of these fields."""
        data = self._data
        if data is None or self._changes:
            return super().lacks(field_ids)
        return (self._spans or self._places(data)).keys().isdisjoint(field_ids)

    def _places(self, data: bytes) -> Spans:
        spans = self._spans
        if spans is None:
            spans = {}
            column = self._column
            if column is None:
                skimmer_of(data, self._start).struct_fields(1, spans)
            else:
                for (field_id, wire_type), (start, end) in zip(COLUMN_FIELDS, column.regs[1:], strict=True):
                    if start >= 0:
                        spans[field_id] = (wire_type, start, end, None)
                self._spans = spans
                self._column = None
            self._spans = spans
        return spans

    def _changed(self, data: bytes, changes: Changes) -> bytes:
        pieces: list[bytes] = []
        column = self._column
        if column is not None:
            at = self._start
            for field_id in sorted(changes):
                changed = changes[field_id]
                group, its_type = COLUMN_GROUPS.get(field_id, _NO_GROUP)
                start, end = column.span(group)
                if changed is None or changed[0] is not its_type or start < at:
                    break
                # The header stays what it is, and what lies between two of these fields is copied at once.
                value = changed[1]
                is_usual = its_type is _I64 and value >= 0
                pieces += data[at:start], varint(value << 1) if is_usual else write_value(its_type, value)
                at = end
            else:
                pieces.append(data[at : self._end])
                return b"".join(pieces)
            pieces.clear()
        spans = self._spans or self._places(data)
        order = list(spans)
        new = [field_id for field_id in changes if field_id not in spans and changes[field_id] is not None]
        if new:
            new.sort()
            is_sorted = bool(order) and max(order) > new[0]
            order += new
            if is_sorted:
                order.sort()
        last = 0
        for field_id in order:
            if field_id in changes:
                changed = changes[field_id]
                if changed is None:
                    continue
                wire_type, value = changed
                if wire_type is not _STRUCT or type(value) is not bytes:
                    value = write_value(wire_type, value)
            else:
                wire_type, start, end, _ = spans[field_id]
                value = data[start:end]
            delta = field_id - last
            header = FIELD_HEADERS[delta << 4 | wire_type] if 0 < delta <= 15 else far_header(field_id, wire_type)
            pieces += header, value
            last = field_id
        pieces.append(b"\0")
        return b"".join(pieces)

    def __getattr__(self, name: str) -> Any:
        # Python comes here for `fields` only as long as they are not set.
        if name != "fields":
            raise AttributeError(name)
        data = self._data
        if data is None:
            # Another thread has just read them: footers are shared.
            return object.__getattribute__(self, name)
        struct = Struct(
            {
                field_id: (wire_type, _value_at(data, wire_type, start, end))
                for field_id, (wire_type, start, end, _) in self._places(data).items()
            }
        )
        for field_id, changed in list(self._changes.items()):
            struct.set_entry(field_id, changed)
        self.fields = struct.fields
        self._data = self._spans = self._column = None
        return struct.fields


_NO_GROUP = (0, WireType.STOP)
_NO_SPAN: Span = (WireType.STOP, 0, 0, None)

_CHANGEABLE = frozenset({WireType.STRUCT, WireType.LIST, WireType.SET, WireType.MAP})


def _number_at(data: bytes, start: int, end: int) -> int:
    """Return a zigzag varint; most are of few bytes."""
    length = end - start
    if length == 1:
        value = data[start]
    elif length == 2:
        value = data[start] & 0x7F | data[start + 1] << 7
    elif length == 3:
        value = data[start] & 0x7F | (data[start + 1] & 0x7F) << 7 | data[start + 2] << 14
    else:
        value = shift = 0
        for byte in data[start:end]:
            value |= (byte & 0x7F) << shift
            shift += 7
    return (value >> 1) ^ -(value & 1)


def zigzag_int(value: bytes) -> int:
    """Return what the bytes of a zigzag varint say."""
    if len(value) == 4:
        # Offsets in most files.
        a, b, c, d = value
        number = a & 0x7F | (b & 0x7F) << 7 | (c & 0x7F) << 14 | d << 21
    elif len(value) == 2:
        number = value[0] & 0x7F | value[1] << 7
    else:
        return _number_at(value, 0, len(value))
    return (number >> 1) ^ -(number & 1)


def _value_at(data: bytes, wire_type: WireType, start: int, end: int) -> Any:
    """Return a value whose place is known, and whose bytes are valid."""
    if wire_type in INTEGER_BITS:
        return _number_at(data, start, end)
    if wire_type is _BINARY:
        while data[start] > 0x7F:
            start += 1
        return data[start + 1 : end]
    if wire_type is _STRUCT:
        return UnreadStruct(data, start, end, None)
    if wire_type is _TRUE or wire_type is _FALSE:
        return None
    return Outliner(data, start, 0).value(wire_type, 1)


def read_outline(data: bytes, offset: int, levels: int, max_memory: int | None = None) -> tuple[Struct, int]:
    """Read a struct from `data` at `offset`, and of what lies deeper where it is.

    Args:
        data: The bytes; what is returned holds on to them.
        offset: Where the struct begins.
        levels: How many levels of structs and lists are built; structs below are `UnreadStruct`.
        max_memory: About how many bytes what is built may take; None for as many as it takes.

    Returns:
        The struct, and the offset of the first byte after it.

    Raises:
        ParquetFormatError: As `read_struct`, for what lies deeper, too.
    """
    if levels == 0 and max_memory is None:
        column = column_at(data, offset)
        if column is not None:
            return UnreadStruct(data, offset, column.end(), None, column), column.end()
        skimmer = skimmer_of(data, offset)
        spans: Spans = {}
        try:
            skimmer.struct_fields(0, spans)
        except IndexError:
            raise ParquetFormatError("a Thrift struct ends before it is complete") from None
        return UnreadStruct(data, offset, skimmer.offset, spans), skimmer.offset
    return Outliner(data, offset, levels, max_memory).whole_struct()


class Outliner(ThriftReader):
    """As the reader, down to a level."""

    __slots__ = ("_skimmer", "levels")

    data: bytes

    def __init__(self, data: bytes, offset: int, levels: int, most: int | None = None) -> None:
        super().__init__(data, offset, most)
        self.levels = levels
        self._skimmer: Skimmer | None = None

    @property
    def skimmer(self) -> Skimmer:
        """What passes over values, from where this reader is."""
        skimmer = self._skimmer
        if skimmer is None:
            skimmer = self._skimmer = skimmer_of(self.data, self.offset)
        skimmer.offset = self.offset
        return skimmer

    def struct(self, depth: int) -> Struct:
        """Read a struct, or pass over it."""
        if depth < self.levels:
            return super().struct(depth)
        struct: Struct = self.unread_structs(1, depth).elements[0]
        return struct

    def list(self, depth: int) -> ThriftList:
        """Read a list or a set; of one of structs below the level, where these lie."""
        if depth + 1 < self.levels:
            return super().list(depth)
        start = self.offset
        element_type, count = self.list_header(depth)
        if element_type is not _STRUCT:
            self.offset = start
            return super().list(depth)
        return self.unread_structs(count, depth + 1)

    def unread_structs(self, count: int, depth: int) -> ThriftList:
        """Pass over structs, and keep where they are."""
        self.charge(_UNREAD_BYTES * count)
        structs, self.offset = outlined(self.skimmer, count, depth)
        return ThriftList(WireType.STRUCT, structs)


def outlined(skimmer: Skimmer, count: int, depth: int) -> tuple[list[Struct], int]:
    """Pass over structs; return them, with the places of their fields, and where the last one ends."""
    data = skimmer.data
    end = skimmer.offset
    structs: list[Struct] = []
    for position in range(count):
        skimmer.position = position
        start = end
        spans: Spans = {}
        skimmer.struct_fields(depth, spans)
        end = skimmer.offset
        structs.append(UnreadStruct(data, start, end, spans))
    return structs, end
