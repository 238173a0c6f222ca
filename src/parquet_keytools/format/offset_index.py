"""Offset indexes with other offsets: pages move when their chunk is enciphered."""

from __future__ import annotations

from collections.abc import Mapping

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.page_headers import varint
from parquet_keytools.format.structs import OffsetIndex

_LIST_OF_STRUCTS = 0x0C
_FIRST_FIELD_LIST = 0x19


def move_pages(data: bytes | memoryview, moves: Mapping[int, tuple[int, int]]) -> bytes:
    """Return an offset index for pages that lie elsewhere.

    Args:
        data: The offset index as it was.
        moves: Offset of a page as it was -> its offset now, and its length now with header and framing.

    Raises:
        ParquetFormatError: It is no offset index, or names an offset where no page begins.
    """
    try:
        usual = _move_usual(bytes(data), moves)
    except IndexError:
        usual = None  # The general reader finds words for what is wrong.
    except KeyError as error:
        raise _no_page(error.args[0]) from None
    return _move_any(data, moves) if usual is None else usual


def _no_page(offset: int) -> ParquetFormatError:
    return ParquetFormatError(f"the offset index names a page at byte {offset}, and no page begins there.")


def _move_any(data: bytes | memoryview, moves: Mapping[int, tuple[int, int]]) -> bytes:
    index, _ = OffsetIndex.read(data)
    for location in index.page_locations:
        move = moves.get(location.offset)
        if move is None:
            raise _no_page(location.offset)
        location.offset, location.compressed_page_size = move
    return index.serialise()


def _move_usual(data: bytes, moves: Mapping[int, tuple[int, int]]) -> bytes | None:
    """Do it for an index as all writers write it; None for any other. Pages are many, and this is fast."""
    if data[0] != _FIRST_FIELD_LIST or data[1] & 0x0F != _LIST_OF_STRUCTS:
        return None
    count = data[1] >> 4
    at = 2
    if count == 15:
        count, at = _read_varint(data, 2)
    out = [data[:at]]
    for _ in range(count):
        if data[at] != 0x16:
            return None
        offset, at = _read_varint(data, at + 1)
        if data[at] != 0x15:
            return None
        _, at = _read_varint(data, at + 1)
        row_start = at
        if data[at] != 0x16:
            return None
        _, at = _read_varint(data, at + 1)
        if data[at] != 0 or offset & 1:
            return None
        at += 1
        new_offset, new_length = moves[offset >> 1]
        out.append(b"\x16" + varint(new_offset << 1) + b"\x15" + varint(new_length << 1) + data[row_start:at])
    _ = data[at]  # At least the end of the structure must follow.
    out.append(data[at:])
    return b"".join(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value > 0x7F:
        value &= 0x7F
        shift = 7
        while (byte := data[at]) > 0x7F:
            value |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > 63:
                raise ParquetFormatError("an integer of the offset index has too many bytes.")
        value |= byte << shift
        at += 1
    return value, at
