"""Page headers, offset indexes; and pages and chunks that stand for others, which a reader does not get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    DataPageHeader,
    OffsetIndex,
    PageHeader,
    PageLocation,
)
from parquet_keytools.format.thrift import (
    IntegerFields,
    Struct,
    ThriftList,
    WireType,
    pass_value,
    read_integer,
    read_struct,
    varint,
)

MAX_PAGE_LENGTH = 2**31 - 1
"""`compressed_page_size` is a signed 32-bit integer."""


class PageHeaderFacts(NamedTuple):
    """What is to be known of a page header, whose own length is `length`.

    `before` is the header in the usual shape, up to the value of `compressed_page_size`; `rest` follows the CRC.
    """

    page_type: int
    page_length: int
    crc: int | None
    length: int
    before: bytes
    rest: bytes


_facts = PageHeaderFacts._make  # Twice as fast as calling the class.


def read_page_header(data: bytes | bytearray | memoryview, offset: int) -> PageHeaderFacts:
    """Read the page header at `offset`."""
    try:
        facts = _usual_header(data, offset)
    except IndexError:
        facts = None  # The general reader finds words for what is wrong.
    return facts or _any_header(data, offset)


def _usual_header(data: bytes | bytearray | memoryview, offset: int) -> PageHeaderFacts | None:
    """Read a header that begins as all known ones do, in a third of the time of `_any_header`; else None."""
    if data[offset] != _I32_FOLLOWS:
        return None
    page_type, at = read_integer(data, offset + 1, 32)
    if data[at] != _I32_FOLLOWS:
        return None
    _, at = read_integer(data, at + 1, 32)
    if data[at] != _I32_FOLLOWS:
        return None
    start_of_length = at + 1
    page_length, at = read_integer(data, start_of_length, 32)
    crc = None
    if data[at] == _I32_FOLLOWS:
        crc, at = read_integer(data, at + 1, 32)
        crc &= 0xFFFF_FFFF
    rest = at
    while header := data[at]:
        if header < 0x10:
            return None
        code = header & 0x0F
        # The value of a boolean field is in its type: 1 or 2.
        at = at + 1 if code in (1, 2) else pass_value(data, code, at + 1, 1)
    if not 0 <= page_type <= PageHeader.DATA_PAGE_V2 or page_length < 0:
        return None
    end = at + 1
    before = bytes(data[offset:start_of_length])
    return _facts((page_type, page_length, crc, end - offset, before, bytes(data[rest:end])))


_I32_FOLLOWS = 0x15
"""Header of an I32 whose id is one more than the id of the field before."""


def _any_header(data: bytes | bytearray | memoryview, offset: int) -> PageHeaderFacts:
    header, end = PageHeader.read(data, offset)
    struct = header.struct
    page_type, uncompressed_length, page_length, crc = struct.numbers(_NUMBERS)
    if page_type is None or uncompressed_length is None or page_length is None:
        # One of them says what is missing.
        page_type, _, page_length = header.type, header.uncompressed_page_size, header.compressed_page_size
    if not 0 <= page_type <= PageHeader.DATA_PAGE_V2:
        raise ParquetFormatError(f"a page has type {page_type}, which does not exist.")
    if page_length < 0:
        raise ParquetFormatError(f"a page has a length of {page_length} bytes.")
    ids = struct.ids()
    if ids[:3] != _FIRST_IDS and ids != sorted(ids):
        struct, _ = read_struct(Struct(struct.fields).as_bytes())
    before, _, rest = struct.cut(_PAGE_LENGTH)
    if crc is not None:
        _, _, rest = struct.cut(_CRC)
        crc &= 0xFFFF_FFFF
    return _facts((page_type, page_length, crc, end - offset, before, rest))


_NUMBERS: IntegerFields = [(field_id, WireType.I32) for field_id in (1, 2, 3, 4)]
_FIRST_IDS = [1, 2, 3]
_PAGE_LENGTH, _CRC = PageHeader.compressed_page_size.field_id, PageHeader.crc.field_id


def with_sizes(facts: PageHeaderFacts, page_length: int, crc: int | None = None) -> bytes:
    """Return a header in the usual shape with another page length, and another CRC where it has one.

    Without the new CRC, the field takes 6 bytes from `crc_position` on, to be filled in by `padded_crc`: the
    length of a header is known before its page is encrypted.
    """
    size = varint(page_length << 1)
    if facts.crc is None:
        return facts.before + size + facts.rest
    field = b"\x15" + (padded_crc(0) if crc is None else varint(_zigzag32(crc)))
    return facts.before + size + field + facts.rest


class PageContents(NamedTuple):
    """What a page header says of the content of its page: nulls are values, and an index page has none."""

    uncompressed_length: int
    num_values: int
    levels_length: int
    is_compressed: bool


_contents = PageContents._make

_INNER_IDS = {
    PageHeader.DATA_PAGE: PageHeader.data_page_header.field_id,
    PageHeader.INDEX_PAGE: 6,
    PageHeader.DICTIONARY_PAGE: 7,
    PageHeader.DATA_PAGE_V2: 8,
}
"""Page type -> the field with the header of its own."""

_REQUIRED_COUNT = {PageHeader.DATA_PAGE: 4, PageHeader.DICTIONARY_PAGE: 2, PageHeader.DATA_PAGE_V2: 6}
"""Page type -> how many fields of that header are required: the first ones, all I32."""

_IS_COMPRESSED, _IS_NOT_COMPRESSED = 0x11, 0x12
"""Headers of field 7 of DataPageHeaderV2 after field 6. A boolean is in its header; a missing one stands for true.
`is_sorted` of a dictionary page is such a field, too."""

_STRUCT_FOLLOWS = 0x1C
"""Header of a struct whose id is one more than the id of the field before."""


def read_page_contents(facts: PageHeaderFacts) -> PageContents:
    """Return what a header says of the content of its page."""
    page_type, _, crc, _, before, rest = facts
    if page_type == PageHeader.INDEX_PAGE:
        return _any_contents(facts)
    # As `_usual_header`: a wide file has thousands of small chunks.
    if before[0] == _I32_FOLLOWS and before[1] == page_type << 1 and before[2] == _I32_FOLLOWS:
        uncompressed_length, _ = read_integer(before, 3, 32)
        delta = _INNER_IDS[page_type] - (3 if crc is None else 4)
        numbers: list[int] = []
        at = 1
        if rest[0] == delta << 4 | WireType.STRUCT:
            while rest[at] == _I32_FOLLOWS:
                number = rest[at + 1]
                if number > 0x7F:
                    number, at = read_integer(rest, at + 1, 32)
                else:
                    number = (number >> 1) ^ -(number & 1)
                    at += 2
                numbers.append(number)
        is_whole = len(numbers) == _REQUIRED_COUNT[page_type] and _ends_as_usual(rest, at, page_type)
        if is_whole and min(uncompressed_length, *numbers) >= 0:
            if page_type == PageHeader.DATA_PAGE_V2:
                is_compressed = rest[at] != _IS_NOT_COMPRESSED
                return _contents((uncompressed_length, numbers[0], numbers[4] + numbers[5], is_compressed))
            return _contents((uncompressed_length, numbers[0], 0, True))
    return _any_contents(facts)


def _ends_as_usual(rest: bytes, at: int, page_type: int) -> bool:
    """Return whether known optional fields follow, each once and in order, and the ends of both structs."""
    header = rest[at]
    statistics = _STRUCT_FOLLOWS
    if page_type != PageHeader.DATA_PAGE and header in (_IS_COMPRESSED, _IS_NOT_COMPRESSED):
        at += 1
        header = rest[at]
    elif page_type == PageHeader.DATA_PAGE_V2:
        statistics += 0x10
    if page_type != PageHeader.DICTIONARY_PAGE and header == statistics:
        at = pass_value(rest, WireType.STRUCT, at + 1, 2)
    return rest[at:] == b"\0\0"


def _any_contents(facts: PageHeaderFacts) -> PageContents:
    header, _ = PageHeader.read(with_sizes(facts, facts.page_length, facts.crc))
    page_type, uncompressed_length = facts.page_type, header.uncompressed_page_size
    if uncompressed_length < 0:
        raise ParquetFormatError(f"a page has a length of {uncompressed_length} bytes without compression.")
    if page_type == PageHeader.INDEX_PAGE:
        return PageContents(uncompressed_length, 0, 0, True)
    inner = header.struct.entry(_INNER_IDS[page_type], (WireType.STRUCT,))
    if inner is None or inner[0] is not WireType.STRUCT:
        raise ParquetFormatError(f"there is no header of a page of type {page_type}.")
    fields: Struct = inner[1]
    required = range(1, _REQUIRED_COUNT[page_type] + 1)
    numbers = fields.numbers([(field_id, WireType.I32) for field_id in required])
    for field_id, number in zip(required, numbers, strict=True):
        if number is None:
            raise ParquetFormatError(f"the header of a page of type {page_type} lacks its field {field_id}.")
        if number < 0:
            raise ParquetFormatError(f"field {field_id} of the header of a page of type {page_type} is negative.")
    num_values, *_ = found = [number or 0 for number in numbers]
    if page_type != PageHeader.DATA_PAGE_V2:
        return PageContents(uncompressed_length, num_values, 0, True)
    is_compressed = fields.types().get(7) is not WireType.FALSE
    return PageContents(uncompressed_length, num_values, found[4] + found[5], is_compressed)


_SNAPPY, _GZIP, _ZSTD = 1, 2, 6
"""Codecs, as column metadata names them."""


def compressed_beginning(codec: int, length: int) -> bytes:
    """Return how compressed data begins whose length without compression is known; empty where that varies."""
    if codec == _SNAPPY:
        return varint(length) if length >= 0 else b""
    if codec == _GZIP:
        return b"\x1f\x8b\x08"
    if codec == _ZSTD:
        return b"\x28\xb5\x2f\xfd"
    return b""


_PADDING_ID = 100
_PADDING_HEADER = b"\x08\xc8\x01"
"""Field header of a binary field with the id 100, which no Parquet reader knows: all pass over it."""


def padded_header(header: bytes, length: int) -> bytes:
    """Return a header, as `with_sizes` returns it, that takes `length` bytes: at least five more than it has."""
    if _PADDING_HEADER in header:
        # A copy of a view that was encrypted has padding already.
        header = read_struct(header)[0].changed_bytes({_PADDING_ID: None})
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


def move_pages(data: bytes | memoryview, moves: Mapping[int, tuple[int, int]]) -> bytes:
    """Return an offset index for pages that lie elsewhere: `moves` has old offset -> new offset and new length."""
    index, _ = OffsetIndex.read(data)
    moved: list[bytes] = []
    for location in index.page_locations:
        move = moves.get(location.offset)
        if move is None:
            raise ParquetFormatError(
                f"the offset index names a page at byte {location.offset}, and no page begins there."
            )
        changes = {_OFFSET: (WireType.I64, move[0]), _LENGTH: (WireType.I32, move[1])}
        moved.append(location.struct.changed_bytes(changes))
    locations = (WireType.LIST, ThriftList(WireType.STRUCT, moved))
    return index.struct.changed_bytes({OffsetIndex.page_locations.field_id: locations})


_OFFSET, _LENGTH = PageLocation.offset.field_id, PageLocation.compressed_page_size.field_id


# --- Pages and chunks that stand for others ---


_PLAIN, _RLE = 0, 3
_ENCODINGS_FIELD_ID = 2
_STATISTICS_FIELD_ID = 12
_NULL_COUNT_FIELD_ID = 3


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
    """Return a plaintext chunk without compression; `length` covers its pages and their headers."""
    metadata = ColumnMetaData()
    metadata.type = physical_type
    encodings = [_PLAIN, _RLE] if is_null or has_levels else [_PLAIN]
    metadata.struct.set_entry(_ENCODINGS_FIELD_ID, (WireType.LIST, ThriftList(WireType.I32, encodings)))
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


def null_page(num_rows: int, max_definition_level: int, max_repetition_level: int) -> bytes:
    """Return a V1 data page of rows in each of which the outermost field is null or empty."""
    levels = b"".join(_zeros(num_rows, level) for level in (max_repetition_level, max_definition_level) if level)
    header = plain_page_header(num_rows, len(levels))
    return header.serialise() + levels


def plain_page_header(num_values: int, length: int) -> PageHeader:
    """Return the header of a V1 data page that is neither compressed nor encoded by a dictionary."""
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
