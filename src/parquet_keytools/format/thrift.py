"""Thrift's compact protocol: one bounded reader, and one struct that keeps its bytes until a field is read.

A footer is thousands of structs, and most work looks at a few fields of some of them. `Struct` notes where its
fields begin and decodes a field when it is read. Fields of newer writers, and all that was not changed, are
written as the bytes that were read.

Whatever the bytes, reading takes time proportional to their number and ends in a `Struct` or a
`ParquetFormatError`. All values are checked when the outermost struct is read. Only in nested structs, a field
that occurs twice or has an id out of range is found later, when that struct is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
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


# Looking up a member of an enumeration takes as long as a call with Python 3.11.
_I32, _I64, _BINARY, _STRUCT = WireType.I32, WireType.I64, WireType.BINARY, WireType.STRUCT
_LIST, _SET, _MAP, _TRUE, _FALSE = WireType.LIST, WireType.SET, WireType.MAP, WireType.TRUE, WireType.FALSE

_LAST = max(WireType)
_WIRE_TYPES = [WireType(code) if code <= _LAST else WireType.STOP for code in range(16)]
"""By code; STOP where there is no such type."""

_INTEGER_BITS = {WireType.I16: 16, WireType.I32: 32, WireType.I64: 64}
_FIXED_LENGTH = {WireType.DOUBLE: 8, WireType.UUID: 16, WireType.BYTE: 1, WireType.TRUE: 1, WireType.FALSE: 1}

_STRUCT_BYTES, _ELEMENT_BYTES = 320, 64
"""About how much memory a struct in a list, with what its readers keep of it, and any other element take."""

Entry = tuple[WireType, Any]
"""Type and value of a field.

Values are int for I16, I32 and I64, bytes for BINARY, MAP (Parquet has none) and what has a fixed length (DOUBLE,
UUID, BYTE), None for TRUE and FALSE (the type is the value), `ThriftList`, and `Struct`. A struct that is only
written may be its bytes.
"""

Changes = Mapping[int, Entry | None]
"""Field id -> its new type and value; None removes the field."""

IntegerFields = Sequence[tuple[int, WireType]]
"""Ids and types of fields that are integers, and are looked at together."""


@dataclass(slots=True)
class ThriftList:
    """A list or a set. Booleans in it are one byte each."""

    element_type: WireType
    elements: list[Any] | Structs


# --- Reading -----------------------------------------------------------------------------------------------


def read_struct(
    data: bytes | bytearray | memoryview,
    offset: int = 0,
    path: Sequence[int] | None = None,
    max_memory: int | None = None,
) -> tuple[Struct, int]:
    """Read the struct at `offset` of `data`; returns it and the offset of the first byte after it.

    The struct holds on to `bytes`, and copies others. The structs in fields along the path of ids are found on the
    way; if the last is a list, its structs are only located. `max_memory` is about what all that is read, now and
    later, may take in bytes.
    """
    document = _Document(data, max_memory)
    try:
        struct, end = document.struct(offset, 0, path)
    except IndexError:
        raise ParquetFormatError("a Thrift struct ends before it is complete") from None
    if type(data) is not bytes:
        document.data = bytes(data[offset:end])
        struct._start = 0
    return struct, end


def pass_value(data: bytes | bytearray | memoryview, code: int, at: int, depth: int) -> int:
    """Return where a value ends that begins at `at`; raises IndexError if that is after the end of the bytes."""
    if depth > MAX_DEPTH:
        raise ParquetFormatError(f"Thrift values nest more than {MAX_DEPTH} deep")
    if code == 12:
        # Structs in structs are passed over by the same loop: calls would take most of the time.
        innermost = depth
        while True:
            header = data[at]
            at += 1
            if not header:
                if innermost == depth:
                    return at
                innermost -= 1
                continue
            if header < 0x10:
                at = _after_varint(data, at, 16)
            code = header & 0x0F
            if code == 9 and data[at] == 0x18 and innermost < MAX_DEPTH:
                # A list of one text, as the path of most columns.
                at += 1
                code = 8
            if code == 8:
                length = data[at]
                if length > 0x7F:
                    following = data[at + 1]
                    if following < 0x80:
                        at += length + 2 + ((following - 1) << 7)
                    else:
                        length, at = read_varint(data, at)
                        at += length
                else:
                    at += length + 1
            elif code == 5 or code == 6:
                if data[at] > 0x7F:
                    at = _after_varint(data, at, 32 if code == 5 else 64)
                else:
                    at += 1
            elif code == 12 and innermost < MAX_DEPTH:
                innermost += 1
            elif code > 2 or code == 0:
                at = pass_value(data, code, at, innermost + 1)
    if code == 9 or code == 10:
        header = data[at]
        at += 1
        count, code = header >> 4, header & 0x0F
        if count == 15:
            count, code, at = _list_header(data, at - 1)
        if code == 5:
            for _ in range(count):
                at = _after_varint(data, at, 32) if data[at] > 0x7F else at + 1
            return at
        if code in _FIXED_LENGTH:
            return at + count * _FIXED_LENGTH[_WIRE_TYPES[code]]
        for _ in range(count):
            if code == 8 and data[at] < 0x80:
                at += 1 + data[at]
            else:
                at = pass_value(data, code, at, depth + 1)
        return at
    if code == 8:
        length, at = read_varint(data, at)
        return at + length
    if code == 11:
        count, types, at = _map_header(data, at)
        for _ in range(count):
            at = pass_value(data, types >> 4, at, depth + 1)
            at = pass_value(data, types & 0x0F, at, depth + 1)
        return at
    if code in _INTEGER_BITS:
        return _after_varint(data, at, _INTEGER_BITS[_WIRE_TYPES[code]])
    if code == 0 or code > _LAST:
        raise ParquetFormatError(f"Thrift type {code} does not exist")
    return at + _FIXED_LENGTH[_WIRE_TYPES[code]]


def _after_varint(data: Any, at: int, bits: int) -> int:
    """Return where an integer ends."""
    start = at
    while data[at] > 0x7F:
        at += 1
    shift = 7 * (at - start)
    if shift >= bits or data[at] >> bits - shift:
        raise ParquetFormatError(f"a Thrift integer has more than {bits} bits")
    return at + 1


def read_varint(data: Any, at: int, bits: int = 32) -> tuple[int, int]:
    """Return an integer without a sign, and where it ends."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while (byte := data[at]) > 0x7F and shift < bits:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    value |= byte << shift
    if value >> bits:
        raise ParquetFormatError(f"a Thrift integer has more than {bits} bits")
    return value, at + 1


def read_integer(data: Any, at: int, bits: int) -> tuple[int, int]:
    """Return an integer with a sign, and where it ends."""
    value, at = read_varint(data, at, bits)
    return (value >> 1) ^ -(value & 1), at


def _list_header(data: Any, at: int) -> tuple[int, int, int]:
    """Return the number of elements, the code of their type, and where the first one begins."""
    header = data[at]
    count, at = header >> 4, at + 1
    if count == 15:
        count, at = read_varint(data, at)
    return _checked_count(data, at, count), header & 0x0F, at


def _map_header(data: Any, at: int) -> tuple[int, int, int]:
    """Return the number of pairs, the byte with the types of keys and values, and where the first pair begins."""
    count, at = read_varint(data, at)
    if count == 0:
        return 0, 0, at
    return _checked_count(data, at, count), data[at], at + 1


def _checked_count(data: Any, at: int, count: int) -> int:
    # Each element takes one byte at least.
    if count > len(data) - at:
        raise ParquetFormatError(f"a Thrift list or map of {count} elements does not fit into its bytes")
    return count


class _Document:
    """The bytes that structs are read from, and how much memory these may still take."""

    __slots__ = ("data", "left", "most")

    def __init__(self, data: Any, most: int | None = None) -> None:
        self.data = data
        self.left = self.most = most

    def charge(self, amount: int) -> None:
        """Take an amount of the memory that may be used; raise `ParquetFormatError` if there is less."""
        if self.left is not None:
            self.left -= amount
            if self.left < 0:
                raise ParquetFormatError(f"a Thrift struct takes more than {self.most:,} bytes of memory")

    def struct(self, at: int, depth: int, path: Sequence[int] | None = None) -> tuple[Struct, int]:
        """Return the struct at `at`, and where it ends; see `read_struct`."""
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift structs nest more than {MAX_DEPTH} deep")
        data = self.data
        start = at
        ids: list[int] = []
        places: list[int] = []
        values: dict[int, Entry | None] | None = None
        wanted = path[0] if path else None
        field_id = 0
        in_order = True
        while header := data[at]:
            places.append(at - start)
            at += 1
            if header > 0x0F:
                field_id += header >> 4
            else:
                field_id, at = read_integer(data, at, 16)
                in_order = False
            ids.append(field_id)
            code = header & 0x0F
            if code == 5 or code == 6:
                if data[at] > 0x7F:
                    at = _after_varint(data, at, 32 if code == 5 else 64)
                else:
                    at += 1
            elif code == 8:
                length = data[at]
                at += 1
                if length > 0x7F:
                    length, at = read_varint(data, at - 1)
                at += length
            elif field_id == wanted and (code == 9 or code == 12):
                assert path is not None
                value: Any
                if code == 12:
                    self.charge(_STRUCT_BYTES)
                    value, at = self.struct(at, depth + 1, path[1:])
                else:
                    value, at = self.value(code, at, depth + 1, path[1:])
                values = values or {}
                values[field_id] = (_WIRE_TYPES[code], value)
            elif code > 2 or code == 0:
                at = pass_value(data, code, at, depth + 1)
        length = at - start
        places.append(length)
        # Without a field id of the long form, ids only grow.
        if not in_order and len(set(ids)) < len(ids):
            raise ParquetFormatError("a Thrift field comes twice")
        its_ids: bytes | array[int]
        try:
            its_ids = bytes(ids)
        except ValueError:
            try:
                its_ids = array("h", ids)
            except OverflowError:
                raise ParquetFormatError("a Thrift field has an id that is out of range") from None
        if self.left is not None:
            self.charge(8 * len(ids))
        struct = Struct.__new__(Struct)
        struct._document = self
        struct._start = start
        struct._ids = its_ids
        struct._places = bytes(places) if length < 256 else array("I", places)
        struct._values = values
        return struct, at + 1

    def value(self, code: int, at: int, depth: int, path: Sequence[int] | None = None) -> tuple[Any, int]:
        """Return a value of a type, and where it ends; what it has of structs is charged."""
        data = self.data
        if code == 5 or code == 6:
            return read_integer(data, at, 32 if code == 5 else 64)
        if code == 8:
            length, at = read_varint(data, at)
            return bytes(data[at : at + length]), at + length
        if code == 12:
            self.charge(_STRUCT_BYTES)
            return self.struct(at, depth, path)
        if depth > MAX_DEPTH:
            raise ParquetFormatError(f"Thrift values nest more than {MAX_DEPTH} deep")
        if code == 9 or code == 10:
            count, code, at = _list_header(data, at)
            if count and _WIRE_TYPES[code] is WireType.STOP:  # Some writers give an empty list the type 0.
                raise ParquetFormatError(f"Thrift type {code} does not exist")
            self.charge(_ELEMENT_BYTES * count)
            elements: list[Any] = []
            if code == 12:
                self.charge(_STRUCT_BYTES * count)
                if path is not None and not path:
                    places = array("Q", (at,))
                    for _ in range(count):
                        at = pass_value(data, 12, at, depth + 1)
                        places.append(at)
                    return ThriftList(_STRUCT, Structs(self, places, depth + 1)), at
            for _ in range(count):
                if code == 12:
                    value, at = self.struct(at, depth + 1, path)
                else:
                    value, at = self.value(code, at, depth + 1)
                elements.append(value)
            return ThriftList(_WIRE_TYPES[code], elements), at
        if code == 11:
            end = pass_value(data, code, at, depth)
            self.charge(end - at)
            return bytes(data[at:end]), end
        if code == 4:
            return read_integer(data, at, 16)
        length = _FIXED_LENGTH.get(_WIRE_TYPES[code], 0)
        if not length:
            raise ParquetFormatError(f"Thrift type {code} does not exist")
        return bytes(data[at : at + length]), at + length


_NOTHING = _Document(b"\0")
_EMPTY: Mapping[int, Any] = {}


class Structs(Sequence["Struct"]):
    """The structs of a list, each of which is read when it is asked for."""

    __slots__ = ("_depth", "_document", "_places", "_read")

    def __init__(self, document: _Document, places: array[int], depth: int) -> None:
        """Take the place of each struct, and behind them the place where the last one ends."""
        self._document = document
        self._places = places
        self._depth = depth
        self._read: dict[int, Struct] = {}

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, position: Any) -> Any:
        return self.read(position)

    def read(self, position: int, path: Sequence[int] | None = None) -> Struct:
        """Return the struct at a position; see `read_struct` for `path`."""
        struct = self._read.get(position)
        if struct is None:
            position = range(len(self))[position]
            struct, _ = self._document.struct(self._places[position], self._depth, path)
            struct = self._read.setdefault(position, struct)
        return struct

    def passing(self) -> Iterator[Struct]:
        """Yield the structs; those that are read for this are not kept."""
        for position in range(len(self)):
            struct = self._read.get(position)
            yield self._document.struct(self._places[position], self._depth)[0] if struct is None else struct

    def written(self) -> Iterator[bytes]:
        """Yield the bytes of each struct."""
        data, places, read = self._document.data, self._places, self._read
        for position in range(len(places) - 1):
            struct = read.get(position)
            yield bytes(data[places[position] : places[position + 1]]) if struct is None else struct.as_bytes()


class Struct:
    """A struct: bytes whose fields are decoded when they are read, and fields that were set; for any thread.

    What is changed in nested structs and lists that were read is changed in it.
    """

    __slots__ = ("_document", "_ids", "_places", "_start", "_values")

    _document: _Document
    _start: int
    _ids: bytes | array[int]
    """Of the fields in the bytes, in their order; as an array where one is not 0 to 255."""
    _places: bytes | array[int]
    """Where the header of each field begins, from the start; and where the last one ends."""
    _values: dict[int, Entry | None] | None
    """Fields that were set, None for those removed; and values that were read and can be changed."""

    def __init__(self, fields: Changes | None = None) -> None:
        self._document = _NOTHING
        self._start = 0
        self._ids = b""
        self._places = b"\0"
        self._values = dict(fields) if fields else None

    @property
    def fields(self) -> Mapping[int, Entry]:
        """All fields, to be looked at only: `set_entry` changes one."""
        found = {field_id: entry for field_id in self.ids() if (entry := self.entry(field_id)) is not None}
        return MappingProxyType(found)

    def ids(self) -> list[int]:
        """Return the ids of all fields, in their order."""
        values = self._values
        if not values:
            return list(self._ids)
        kept = [field_id for field_id in self._ids if values.get(field_id, 0) is not None]
        new = [field_id for field_id, entry in list(values.items()) if entry is not None and field_id not in kept]
        return _in_order(kept, new)

    def types(self) -> dict[int, WireType]:
        """Return the types of all fields, by id."""
        data, start = self._document.data, self._start
        types = {
            field_id: _WIRE_TYPES[data[start + place] & 0x0F]
            for field_id, place in zip(self._ids, self._places, strict=False)
        }
        values = self._values
        if not values:
            return types
        return {
            field_id: types[field_id] if (entry := values.get(field_id)) is None else entry[0]
            for field_id in self.ids()
        }

    def has(self, field_id: int) -> bool:
        """Return whether it has a field."""
        if self._values and field_id in self._values:
            return self._values[field_id] is not None
        return self._position(field_id) >= 0

    def has_types(self, wanted: Mapping[int, WireType]) -> bool:
        """Return whether it has fields with these types, by id."""
        return self.types().items() >= wanted.items()

    def entry(
        self, field_id: int, wanted: Collection[WireType] | None = None, path: Sequence[int] | None = None
    ) -> Entry | None:
        """Return type and value of a field; what is changed in the value is changed in this struct.

        Of a value whose type is not wanted, the type alone is returned. `path` is as in `read_struct`, from this
        field on.
        """
        values = self._values
        if values and field_id in values:
            return values[field_id]
        ids = self._ids
        usual = isinstance(ids, bytes) and 0 <= field_id <= 255
        position = ids.find(field_id) if usual else self._position(field_id)  # type: ignore[union-attr]
        if position < 0:
            return None
        document = self._document
        data = document.data
        at = self._start + self._places[position]
        header = data[at]
        code = header & 0x0F
        wire_type = _WIRE_TYPES[code]
        if code == 1 or code == 2 or (wanted is not None and wire_type not in wanted):
            return wire_type, None
        at = at + 1 if header > 0x0F else _after_varint(data, at + 1, 16)
        value, _ = document.value(code, at, 1, path)
        if 9 <= code <= 12:
            if values is None:
                values = self._values = {}
            values[field_id] = (wire_type, value)
        return wire_type, value

    def _position(self, field_id: int) -> int:
        """Return the position of a field in the bytes; -1 where it is not there."""
        ids = self._ids
        if type(ids) is bytes:
            return ids.find(field_id) if 0 <= field_id <= 255 else -1
        return ids.index(field_id) if field_id in ids else -1

    def numbers(self, fields: IntegerFields) -> list[int | None]:
        """Return the values of fields that are integers; None where there is none, or of another type."""
        found: list[int | None] = []
        data, start, ids, places = self._document.data, self._start, self._ids, self._places
        values = self._values or _EMPTY
        for field_id, wire_type in fields:
            if field_id in values or type(ids) is not bytes:
                entry = self.entry(field_id, (wire_type,))
                found.append(entry[1] if entry is not None and entry[0] is wire_type else None)
                continue
            position = ids.find(field_id)
            at = start + places[position]
            header = data[at]
            if position < 0 or header & 0x0F != wire_type:
                found.append(None)
                continue
            at = at + 1 if header > 0x0F else _after_varint(data, at + 1, 16)
            value = data[at]
            if value > 0x7F:
                value, _ = read_varint(data, at, 64)
            found.append((value >> 1) ^ -(value & 1))
        return found

    def entry_bytes(self, field_id: int) -> tuple[WireType, bytes] | None:
        """Return type and bytes of a field."""
        if self._values and field_id in self._values:
            entry = self._values[field_id]
            return None if entry is None else (entry[0], write_value(*entry))
        position = self._position(field_id)
        if position < 0:
            return None
        data, start, places = self._document.data, self._start, self._places
        at = start + places[position]
        header = data[at]
        at = at + 1 if header > 0x0F else _after_varint(data, at + 1, 16)
        return _WIRE_TYPES[header & 0x0F], data[at : start + places[position + 1]]

    def set_entry(self, field_id: int, entry: Entry | None) -> None:
        """Set a field, at its place or in the order of ids; or remove it."""
        if self._values is None:
            self._values = {}
        self._values[field_id] = entry

    def copy(self) -> Struct:
        """Return a struct whose fields can be set without changing this one; what is in them is shared."""
        copied = Struct(self._values)
        copied._document, copied._start = self._document, self._start
        copied._ids, copied._places = self._ids, self._places
        return copied

    def as_bytes(self) -> bytes:
        """Return its bytes."""
        return self.changed_bytes({})

    def changed_bytes(self, changes: Changes) -> bytes:
        """Return the bytes that it would have with some fields set or removed; it is not changed."""
        data, start, ids, places = self._document.data, self._start, self._ids, self._places
        if self._values:
            changes = {**self._values, **changes}
        if not changes:
            return bytes(data[start : start + places[-1] + 1])
        positions = {field_id: position for position, field_id in enumerate(ids)}
        pieces: list[bytes] = []
        run = start  # Where bytes begin that are copied, but not yet.
        for position in sorted([positions.get(field_id, -1) for field_id in changes]):
            entry = changes[ids[position]] if position >= 0 else None
            place = start + places[position]
            if entry is None or data[place] & 0x0F != entry[0] or data[place] < 0x10:
                break
            # Only the value changes: no header does.
            pieces += data[run : place + 1], write_value(*entry)
            run = start + places[position + 1]
        else:
            pieces.append(data[run : start + places[-1] + 1])
            return b"".join(pieces)
        return self._changed_in_order(changes, positions)

    def _changed_in_order(self, changes: Changes, positions: Mapping[int, int]) -> bytes:
        """Do it field by field: some are new, removed or of another type."""
        data, start, ids, places = self._document.data, self._start, self._ids, self._places
        pieces: list[bytes] = []
        new = [i for i, entry in changes.items() if entry is not None and i not in positions]
        order = [(positions.get(i, -1), i) for i in _in_order(list(ids), new)] if new else enumerate(ids)
        last = 0
        run = end = start  # Where bytes begin and end that are copied, but not yet.
        for position, field_id in order:
            entry: Entry | None
            if field_id not in changes:
                place, following = start + places[position], start + places[position + 1]
                if last == (ids[position - 1] if position else 0):
                    # The field follows the one that it followed before: its header is still right.
                    if place != end:
                        pieces.append(data[run:end])
                        run = place
                    end = following
                    last = field_id
                    continue
                entry, end_of_field = self.entry_bytes(field_id), following
            else:
                entry, end_of_field = changes[field_id], start + places[position + 1] if position >= 0 else end
                if entry is None:
                    continue
                entry = entry[0], write_value(*entry)
            assert entry is not None
            pieces += data[run:end], _field_header(field_id - last, field_id, entry[0]), entry[1]
            run = end = end_of_field
            last = field_id
        pieces += data[run:end], b"\0"
        return b"".join(pieces)

    def cut(self, field_id: int) -> tuple[bytes, bytes | None, bytes]:
        """Return its bytes before the value of a field, the value (None if it has none), and the bytes after."""
        if self._values:
            return read_struct(self.as_bytes())[0].cut(field_id)
        data, start, places = self._document.data, self._start, self._places
        position = self._position(field_id)
        if position < 0:
            return self.as_bytes(), None, b""
        _, value = self.entry_bytes(field_id) or (_STRUCT, b"")
        end = start + places[position + 1]
        return data[start : end - len(value)], value, data[end : start + places[-1] + 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and (self.as_bytes() == other.as_bytes() or self.fields == other.fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Struct({self.fields!r})"


def _in_order(ids: list[int], new: list[int]) -> list[int]:
    """Return ids with new ones: at their places, or at the end."""
    new.sort()
    return sorted(ids + new) if ids and new and max(ids) > new[0] else ids + new


# --- Writing -----------------------------------------------------------------------------------------------


def write_value(wire_type: WireType, value: Any) -> bytes:
    """Return the bytes of a value; a boolean field has none."""
    if wire_type in _INTEGER_BITS:
        bits = _INTEGER_BITS[wire_type]
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise ParquetFormatError(f"{value} does not fit into {bits} bits")
        return varint((value << 1) ^ (value >> 63))
    if value is None:
        return b""
    written: bytes
    if wire_type is _BINARY:
        written = varint(len(value)) + value
        return written
    if wire_type is _STRUCT:
        written = value if isinstance(value, bytes) else value.as_bytes()
        return written
    if wire_type is _LIST or wire_type is _SET:
        count, element_type = len(value.elements), value.element_type
        header = (
            bytes((count << 4 | element_type,)) if count < 15 else bytes((0xF0 | element_type,)) + varint(count)
        )
        if isinstance(value.elements, Structs):
            return header + b"".join(value.elements.written())
        return header + b"".join([write_value(element_type, element) for element in value.elements])
    return bytes(value)


_FIELD_HEADERS = tuple(bytes((header,)) for header in range(256))


def _field_header(delta: int, field_id: int, wire_type: WireType) -> bytes:
    """Return what comes before the value of a field whose id is `delta` more than the id of the field before."""
    if 0 < delta <= 15:
        return _FIELD_HEADERS[delta << 4 | wire_type]
    return _FIELD_HEADERS[wire_type] + write_value(WireType.I16, field_id)


def varint(value: int) -> bytes:
    """Return an unsigned integer as a varint."""
    if value < 0x80:
        return _FIELD_HEADERS[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
