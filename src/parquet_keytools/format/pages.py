"""What a file says of its pages: their headers, parsed no further than is needed, and offset indexes.

And pages and column chunks that stand for others, whose metadata or values a reader does not get.

Files have many pages, and whoever re-enciphers one needs three facts of its header: how long the header is, how
long the page, and its CRC. Headers of the usual shape (the first fields in order, as all current writers write
them) are read by hand; any other goes through the generic reader and is brought into that shape.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    DataPageHeader,
    OffsetIndex,
    PageHeader,
    path_bytes,
)
from parquet_keytools.format.thrift_outline import zigzag_int
from parquet_keytools.format.thrift_skim import skim_struct
from parquet_keytools.format.thrift_values import Struct, ThriftList, WireType, varint, write_struct, write_value

MAX_PAGE_LENGTH = 2**31 - 1
"""`compressed_page_size` is a signed 32-bit integer."""

_MAX_SHORT_BINARY = 64
"""Longest value, such as a minimum in statistics, in a header that is of the usual shape."""


@functools.cache
def _usual_header() -> re.Pattern[bytes]:
    """Return the grammar of a page header as writers write it, in Thrift compact protocol.

    It is a struct of integers, booleans, short values and two levels of structs, whose first fields are type,
    uncompressed size, compressed size and perhaps the CRC. No alternative begins like another one and no
    repetition is tried again, so that matching takes time proportional to the length of the header. The groups are
    atomic: Python before 3.11.5 matches possessive repetitions of groups wrongly (python/cpython#106052).
    """

    def field_headers(wire_type: int) -> bytes:
        return b"[" + b"".join(b"\\x%02x" % (delta << 4 | wire_type) for delta in range(1, 16)) + b"]"

    varint32 = rb"(?:[\x80-\xff]{0,3}+[\x00-\x7f]|[\x80-\xff]{4}[\x00-\x0f])"
    varint64 = rb"[\x80-\xff]{0,8}+[\x00-\x7f]"
    lengths = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(_MAX_SHORT_BINARY + 1))
    leaf = b"|".join(
        (
            field_headers(5) + varint32,
            field_headers(6) + varint64,
            field_headers(1),
            field_headers(2),
            field_headers(8) + b"(?:" + lengths + b")",
        )
    )
    inner = field_headers(12) + b"(?>(?:" + leaf + rb"){0,16})\x00"
    nested = field_headers(12) + b"(?>(?:" + leaf + b"|" + inner + rb"){0,16})\x00"
    return re.compile(
        rb"(\x15[\x00\x02\x04\x06]"
        + (rb"\x15" + varint32)
        + (rb"\x15)(" + varint32 + b")")
        # Field 4 is the CRC or nothing.
        + (rb"(?:\x15(" + varint32 + rb")|(?![\x10-\x1f]))")
        + (b"((?>(?:" + leaf + b"|" + nested + rb"){0,16})\x00)"),
        re.DOTALL,
    )


class PageHeaderFacts(NamedTuple):
    """What is to be known of a page header.

    Attributes:
        page_type: `PageHeader.DATA_PAGE` and so on.
        page_length: `compressed_page_size` in bytes.
        crc: The CRC-32 that it states, as an unsigned integer, or None.
        length: Length of the header in bytes, as it was read.
        before: The header in the usual shape, up to the value of `compressed_page_size`.
        rest: What follows this value and the CRC.
    """

    page_type: int
    page_length: int
    crc: int | None
    length: int
    before: bytes
    rest: bytes


_facts = PageHeaderFacts._make  # Twice as fast as calling the class.


def read_page_header(data: bytes | bytearray | memoryview, offset: int) -> PageHeaderFacts:
    """Read the page header at `offset`.

    Raises:
        ParquetFormatError: There is no page header there, or it goes on after the end of `data`.
    """
    match = _usual_header().match(data, offset)
    if match is not None:
        before, size_bytes, crc_bytes, rest = match.groups()
        page_length = zigzag_int(size_bytes)
        crc = None if crc_bytes is None else zigzag_int(crc_bytes) & 0xFFFF_FFFF
        if page_length >= 0:
            return _facts((before[1] >> 1, page_length, crc, match.end() - offset, before, rest))
    record, end = PageHeader.read(memoryview(data), offset)
    return _in_usual_shape(record, end - offset)


def _in_usual_shape(header: PageHeader, length: int) -> PageHeaderFacts:
    page_type, page_length, crc = header.type, header.compressed_page_size, header.crc
    _ = header.uncompressed_page_size
    if not 0 <= page_type <= PageHeader.DATA_PAGE_V2:
        raise ParquetFormatError(f"a page has type {page_type}, which does not exist.")
    if page_length < 0:
        raise ParquetFormatError(f"a page has a length of {page_length} bytes.")
    fields = sorted(header.struct.fields.items())

    def length_up_to(field_id: int) -> int:
        return len(write_struct(Struct(dict(item for item in fields if item[0] <= field_id)))) - 1

    usual = write_struct(Struct(dict(fields)))
    before, rest = usual[: length_up_to(2) + 1], usual[length_up_to(3 if crc is None else 4) :]
    return PageHeaderFacts(
        page_type, page_length, None if crc is None else crc & 0xFFFF_FFFF, length, before, rest
    )


def with_sizes(facts: PageHeaderFacts, page_length: int, crc: int | None = None) -> bytes:
    """Return a header in the usual shape with another page length, and another CRC where it has one.

    Args:
        facts: Of the header.
        page_length: The new `compressed_page_size` in bytes.
        crc: The new CRC. Where it is None and the header has a CRC, the field takes 6 bytes from `crc_position`
            on: its header, and five bytes to be filled in by `padded_crc`. The length of a header is then known
            before its page is encrypted.
    """
    size = varint(page_length << 1)
    if facts.crc is None:
        return facts.before + size + facts.rest
    field = b"\x15" + (padded_crc(0) if crc is None else varint(_zigzag32(crc)))
    return facts.before + size + field + facts.rest


_PADDING_ID = 100
_PADDING_HEADER = b"\x08\xc8\x01"
"""Field header of a binary field with the id 100, which no Parquet reader knows: all pass over it."""


def padded_header(header: bytes, length: int) -> bytes:
    """Return a header, as `with_sizes` returns it, that takes a length of at least five bytes more.

    Args:
        header: Ends with the end of the struct.
        length: How many bytes it shall take.
    """
    if _PADDING_HEADER in header:
        # A copy of a view that was encrypted has padding already.
        fields = PageHeader.read(memoryview(header), 0)[0].struct.fields
        header = write_struct(
            Struct({number: fields[number] for number in sorted(fields) if number != _PADDING_ID})
        )
    room = length - len(header) - len(_PADDING_HEADER)
    # Where the varint of the length grows by a byte, it has one more than it needs: readers take it.
    width = 1
    while room - width >= 1 << 7 * width:
        width += 1
    size = [(room - width) >> 7 * position & 0x7F | 0x80 for position in range(width)]
    size[-1] &= 0x7F
    return b"".join((header[:-1], _PADDING_HEADER, bytes(size), bytes(room - width), b"\x00"))


def crc_position(facts: PageHeaderFacts, page_length: int) -> int:
    """Return where in a header from `with_sizes` the five bytes of `padded_crc` lie."""
    return len(facts.before) + len(varint(page_length << 1)) + 1


def padded_crc(crc: int) -> bytes:
    """Return a CRC as a zigzag varint of five bytes, whatever its value; any varint reader takes it."""
    value = _zigzag32(crc)
    return bytes(
        (
            value & 0x7F | 0x80,
            value >> 7 & 0x7F | 0x80,
            value >> 14 & 0x7F | 0x80,
            value >> 21 & 0x7F | 0x80,
            value >> 28,
        )
    )


def _zigzag32(value: int) -> int:
    signed = value - (1 << 32) if value >> 31 else value
    return (signed << 1) ^ (signed >> 31)


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


# --- Pages and chunks that stand for others ---


_PLAIN, _RLE = 0, 3
_ENCODINGS_FIELD_ID = 2
_STATISTICS_FIELD_ID = 12
_NULL_COUNT_FIELD_ID = 3
_METADATA_FIELDS = (
    ColumnChunk.meta_data.field_id,
    ColumnMetaData.path_in_schema.field_id,
    ColumnMetaData.data_page_offset.field_id,
)


def generated_chunk(
    physical_type: int,
    path: tuple[str, ...],
    num_values: int,
    offset: int,
    length: int,
    *,
    is_null: bool = False,
    has_levels: bool = False,
) -> ColumnChunk:
    """Return a plaintext chunk without compression.

    Args:
        physical_type: Of its column.
        path: Of its column.
        num_values: How many values it has, nulls included.
        offset: Where its first page begins.
        length: Of its pages with their headers, in bytes.
        is_null: Whether all values are null.
        has_levels: Whether its pages have levels, where not all values are null.
    """
    metadata = ColumnMetaData()
    metadata.type = physical_type
    encodings = [_PLAIN, _RLE] if is_null or has_levels else [_PLAIN]
    metadata.struct.fields[_ENCODINGS_FIELD_ID] = (WireType.LIST, ThriftList(WireType.I32, encodings))
    metadata.path_in_schema = list(path)
    metadata.codec = 0
    metadata.num_values = num_values
    metadata.total_uncompressed_size = metadata.total_compressed_size = length
    metadata.data_page_offset = offset
    if is_null:
        statistics = Struct({_NULL_COUNT_FIELD_ID: (WireType.I64, num_values)})
        metadata.struct.set_entry(_STATISTICS_FIELD_ID, (WireType.STRUCT, statistics))
    chunk = ColumnChunk()
    chunk.file_offset = 0
    chunk.meta_data = metadata
    return chunk


class ChunkTemplate:
    """A generated chunk of which only path and offset differ between columns."""

    def __init__(self, physical_type: int, num_values: int, length: int) -> None:
        """Make one; see `generated_chunk`."""
        written = generated_chunk(physical_type, ("",), num_values, 0, length).serialise()
        metadata = skim_struct(written, keep=_METADATA_FIELDS)[0][ColumnChunk.meta_data.field_id]
        places = skim_struct(written, metadata[1], keep=_METADATA_FIELDS)[0]
        _, path_start, path_end = places[ColumnMetaData.path_in_schema.field_id]
        _, offset_start, offset_end = places[ColumnMetaData.data_page_offset.field_id]
        self._pieces = written[:path_start], written[path_end:offset_start], written[offset_end:]

    def chunk(self, path: tuple[str, ...], offset: int) -> bytes:
        """Return the bytes of a chunk."""
        before, between, after = self._pieces
        return b"".join((before, path_bytes(path), between, write_value(WireType.I64, offset), after))


def null_page(num_rows: int, max_definition_level: int, max_repetition_level: int) -> bytes:
    """Return a V1 data page of rows in each of which the outermost field is null or empty.

    Args:
        num_rows: How many.
        max_definition_level: Of the column; at least 1.
        max_repetition_level: Of the column.
    """
    levels = b"".join(_zeros(num_rows, level) for level in (max_repetition_level, max_definition_level) if level)
    header = plain_page_header(num_rows, len(levels))
    return header.serialise() + levels


def plain_page_header(num_values: int, length: int) -> PageHeader:
    """Return the header of a V1 data page that is neither compressed nor encoded by a dictionary.

    Args:
        num_values: How many values it has.
        length: Of the page in bytes, without this header.
    """
    data_page = DataPageHeader()
    data_page.num_values = num_values
    for field_id, encoding in ((2, _PLAIN), (3, _RLE), (4, _RLE)):
        data_page.struct.set_entry(field_id, (WireType.I32, encoding))
    header = PageHeader()
    header.type = PageHeader.DATA_PAGE
    header.uncompressed_page_size = header.compressed_page_size = length
    header.data_page_header = data_page
    return header


def _zeros(count: int, max_level: int) -> bytes:
    """Return one run of zeros, as levels lie in a V1 page: their length, and then the run."""
    run = varint(count << 1) + bytes((max_level.bit_length() + 7) // 8) if count else b""
    return len(run).to_bytes(4, "little") + run
