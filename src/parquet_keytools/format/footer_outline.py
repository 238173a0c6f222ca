"""Reads the outer structs of a footer, and keeps the bytes of the rest; see `thrift_outline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift_compact import INTEGER_BITS, LAST_WIRE_TYPE, WIRE_TYPES
from parquet_keytools.format.thrift_outline import Outliner, outlined
from parquet_keytools.format.thrift_skim import MAX_FIELD_ID, skimmer_of
from parquet_keytools.format.thrift_values import Struct, ThriftList, WireType
from parquet_keytools.format.unread_lists import UnreadChunks, UnreadList, pass_chunks, pass_known_list

_LEVELS = 4
"""Footer, row groups in their list, and column chunks in theirs."""


def read_footer_outline(data: bytes, offset: int, row_groups_field_id: int) -> tuple[Struct, int]:
    """Read the struct of a footer: its row groups down to column chunks, and no other list.

    Args:
        data: The bytes; what is returned holds on to them.
        offset: Where the struct begins.
        row_groups_field_id: The id of the field that has them.

    Returns:
        The struct, and the offset of the first byte after it.

    Raises:
        ParquetFormatError: As `read_struct`, for what is not read, too.
    """
    return _FooterOutliner(data, offset, row_groups_field_id).whole_struct()


class _FooterOutliner(Outliner):
    """As the outliner, for a footer."""

    __slots__ = ("crypto", "row_groups_field_id")

    def __init__(self, data: bytes, offset: int, row_groups_field_id: int) -> None:
        super().__init__(data, offset, _LEVELS)
        self.row_groups_field_id = row_groups_field_id
        self.crypto: dict[int, bytes] = {}

    def struct(self, depth: int) -> Struct:
        """Read a struct; of that of the footer itself, pass over lists."""
        if depth:
            return super().struct(depth)
        fields: dict[int, tuple[WireType, Any]] = {}
        field_id = 0
        data = self.data
        while header := data[self.offset]:
            self.offset += 1
            field_id = field_id + (header >> 4) if header > 0x0F else self.zigzag(16)
            code = header & 0x0F
            if code == 0 or code > LAST_WIRE_TYPE:
                raise ParquetFormatError(f"Thrift type {code} does not exist")
            wire_type = WIRE_TYPES[code]
            value: Any = None
            if wire_type is WireType.LIST and field_id != self.row_groups_field_id:
                start = self.offset
                self.offset = pass_known_list(self.skimmer)
                value = UnreadList(data[start : self.offset])
            elif wire_type is WireType.I32 or wire_type is WireType.I64:
                value = self.varint(64)
                if value >> INTEGER_BITS[wire_type]:
                    raise ParquetFormatError(f"a Thrift integer of type {wire_type.name} is too long")
                value = (value >> 1) ^ -(value & 1)
            elif wire_type is not WireType.TRUE and wire_type is not WireType.FALSE:
                value = self.value(wire_type, 1)
            if field_id in fields:
                raise ParquetFormatError(f"Thrift field {field_id} comes twice")
            if field_id > MAX_FIELD_ID:
                raise ParquetFormatError(f"Thrift field {field_id} is out of range")
            fields[field_id] = (wire_type, value)
        self.offset += 1
        return Struct(fields)

    def unread_structs(self, count: int, depth: int) -> ThriftList:
        """Pass over column chunks."""
        skimmer = self.skimmer
        places = pass_chunks(skimmer, count, self.crypto)
        if places is None:
            return super().unread_structs(count, depth)
        self.offset = skimmer.offset
        return UnreadChunks(self.data, places, _read_chunks)


def _read_chunks(data: bytes, bounds: Sequence[int]) -> list[Struct]:
    return outlined(skimmer_of(data, bounds[0]), len(bounds) - 1, _LEVELS)[0]
