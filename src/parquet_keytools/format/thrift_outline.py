"""Reads the outer structs of a footer, and keeps of the inner ones where they lie; these are read when looked at.

A footer is thousands of column chunks, and most work looks at a few of them. A struct that nobody looked at is its
bytes: compared, copied and written as they are.
"""

from __future__ import annotations

from typing import Any

from parquet_keytools.format.thrift_compact import Struct, ThriftList, ThriftReader, WireType
from parquet_keytools.format.thrift_skim import Skimmer, Spans, skimmer_of

_UNREAD_BYTES = 1_000
"""About what the places of the fields of a struct take."""


class UnreadStruct(Struct):
    """A struct whose bytes are valid. Its fields are read when they are first looked at, and can be changed."""

    __slots__ = ("_data", "_end", "_spans", "_start")

    def __init__(self, data: bytes, start: int, end: int, spans: Spans | None) -> None:
        self._data: bytes | None = data
        self._start = start
        self._end = end
        self._spans = spans

    @property
    def unread(self) -> bytes | None:
        """Its bytes; None as soon as somebody looked at its fields, who may have changed them."""
        data = self._data
        return None if data is None else data[self._start : self._end]

    def entry(self, field_id: int) -> tuple[WireType, Any] | None:
        """Return type and value of a field, to be looked at only: it is read for this call alone."""
        data, spans = self._data, self._spans
        if data is None or spans is None:
            return super().entry(field_id)
        if field_id not in spans:
            return None
        wire_type, start, end = spans[field_id]
        return wire_type, _Outliner(data, 0, 0).value_in(wire_type, start, end)

    def entry_bytes(self, field_id: int) -> tuple[WireType, bytes] | None:
        """Return type and bytes of a field."""
        data, spans = self._data, self._spans
        if data is None or spans is None:
            return super().entry_bytes(field_id)
        if field_id not in spans:
            return None
        wire_type, start, end = spans[field_id]
        return wire_type, data[start:end]

    def __getattr__(self, name: str) -> Any:
        # Python comes here for `fields` only as long as they are not set.
        if name != "fields":
            raise AttributeError(name)
        data, spans = self._data, self._spans
        if data is None:
            # Another thread has just read them: footers are shared.
            return object.__getattribute__(self, name)
        if spans is None:
            fields = _Outliner(data, self._start, 1).struct(0).fields
        else:
            reader = _Outliner(data, 0, 0)
            fields = {
                field_id: (wire_type, reader.value_in(wire_type, start, end))
                for field_id, (wire_type, start, end) in spans.items()
            }
        self.fields = fields
        self._data = self._spans = None
        return fields


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
    return _Outliner(data, offset, levels, max_memory).whole_struct()


class _Outliner(ThriftReader):
    """As the reader, down to a level."""

    __slots__ = ("levels", "skimmer")

    data: bytes

    def __init__(self, data: bytes, offset: int, levels: int, most: int | None = None) -> None:
        super().__init__(data, offset, most)
        self.levels = levels
        self.skimmer: Skimmer | None = None

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
        if element_type is not WireType.STRUCT:
            self.offset = start
            return super().list(depth)
        return self.unread_structs(count, depth + 1)

    def unread_structs(self, count: int, depth: int) -> ThriftList:
        """Pass over structs, and keep where they are."""
        data = self.data
        skimmer = self.skimmer
        if skimmer is None:
            skimmer = self.skimmer = skimmer_of(data, self.offset)
        skimmer.offset = end = self.offset
        structs = ThriftList(WireType.STRUCT, [])
        append = structs.elements.append
        for position in range(count):
            skimmer.position = position
            start = end
            spans: Spans = {}
            skimmer.struct_fields(depth, spans)
            end = skimmer.offset
            if self.left is not None:
                self.charge(_UNREAD_BYTES)
            append(UnreadStruct(data, start, end, spans))
        self.offset = end
        return structs

    def value_in(self, wire_type: WireType, start: int, end: int) -> Any:
        """Read a value whose place is known."""
        if wire_type is WireType.STRUCT:
            return UnreadStruct(self.data, start, end, None)
        if wire_type is WireType.TRUE or wire_type is WireType.FALSE:
            return None
        self.offset = start
        if wire_type is WireType.I32:
            return self.zigzag(64)  # Which fits: it may have more bytes than it needs.
        return self.value(wire_type, 1)
