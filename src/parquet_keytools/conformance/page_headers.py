"""What the headers of pages say, read by expressions of the verifier's own where they are as writers write them.

A wide file has a header or two in each of thousands of small chunks. An expression takes a tenth of the time of
the general reader, which reads all other headers and says what is wrong with them. And how pages begin behind
their headers, and levels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.records import Record
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.format.thrift import WireType


def zigzag_int(value: bytes) -> int:
    """Return what the bytes of a zigzag varint say."""
    number = sum((byte & 0x7F) << 7 * position for position, byte in enumerate(value))
    return (number >> 1) ^ -(number & 1)


class HeaderFacts(NamedTuple):
    """What a page header says.

    Attributes:
        page_type: `PageHeader.DATA_PAGE` and so on.
        length: Of the page with framing.
        levels_length: Of the levels of a V2 page; 0 for others.
        is_compressed: Whether what follows the levels is, if the chunk has a codec.
    """

    page_type: int
    length: int
    uncompressed_length: int
    crc: int | None
    num_values: int
    levels_length: int
    is_compressed: bool


_facts = HeaderFacts._make

_MOST_TEXT = 64
"""How long a minimum or maximum in a header may be, for the expressions."""

_REQUIRED_FIELD_IDS = {
    PageHeader.DATA_PAGE: (1, 2, 3, 4),
    PageHeader.DICTIONARY_PAGE: (1, 2),
    PageHeader.DATA_PAGE_V2: (1, 2, 3, 4, 5, 6),
}
"""Page type -> the required fields of its own header, all of them I32."""

_LEVELS_LENGTH_FIELD_IDS = (5, 6)
"""Of `definition_levels_byte_length` and `repetition_levels_byte_length` in DataPageHeaderV2."""

_IS_COMPRESSED_FIELD_ID = 7
"""Of `is_compressed` there; it is true where it is not set."""


# --- Headers as writers write them ---


_Match = Callable[[bytes | memoryview], re.Match[bytes] | None]

_IS_NOT_COMPRESSED = b"\x12"
"""The header of field 7 after field 6, where it is false."""


@functools.cache
def _usual() -> Mapping[bytes, tuple[int, _Match]]:
    """Return what a header begins with -> its page type, and what matches all of it.

    The groups are the lengths without and with compression, the CRC, and the number of values; in V2 then the
    lengths of the levels and the header of `is_compressed`. No repetition is tried again, so that matching takes
    time proportional to the bytes.
    """

    def field_headers(*codes: int) -> bytes:
        return b"[" + b"".join(b"\\x%02x" % (delta << 4 | code) for code in codes for delta in range(1, 16)) + b"]"

    number = rb"(?:[\x80-\xff]{0,3}+[\x00-\x7f]|[\x80-\xff]{4}[\x00-\x0f])"
    # The lowest bit is the sign.
    last, other = (
        b"[" + b"".join(b"\\x%02x" % byte for byte in range(start, start + 128, 2)) + b"]" for start in (0, 128)
    )
    count = rb"(?:%b|%b(?:[\x80-\xff]{0,2}+[\x00-\x7f]|[\x80-\xff]{3}[\x00-\x0f]))" % (last, other)
    long_number = rb"(?:[\x80-\xff]{0,8}+[\x00-\x7f]|[\x80-\xff]{9}[\x00\x01])"
    texts = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(_MOST_TEXT + 1))
    statistic = b"|".join(
        (
            field_headers(8) + b"(?:" + texts + b")",
            field_headers(6) + long_number,
            field_headers(1, 2),
        )
    )
    statistics = b"(?>(?:" + statistic + rb"){0,16})\x00"
    field, group = rb"\x15" + count, rb"\x15(" + count + b")"

    def match(page_type: int, own: bytes) -> tuple[bytes, tuple[int, _Match]]:
        # The header of the inner struct depends on whether there is a CRC before it.
        delta = {PageHeader.DATA_PAGE: 1, PageHeader.DICTIONARY_PAGE: 3, PageHeader.DATA_PAGE_V2: 4}[page_type]
        crc = b"(?:\\x15(%b)\\x%02x|\\x%02x)" % (number, delta << 4 | 12, delta + 1 << 4 | 12)
        begins = bytes((0x15, page_type << 1))
        whole = b"\\x15\\x%02x" % begins[1] + group + group + crc + group + own + rb"\x00\x00"
        return begins, (page_type, re.compile(whole, re.DOTALL).match)

    return dict(
        (
            match(PageHeader.DATA_PAGE, field * 3 + rb"(?:\x1c" + statistics + b")?"),
            match(PageHeader.DICTIONARY_PAGE, field + rb"[\x11\x12]?"),
            match(
                PageHeader.DATA_PAGE_V2,
                field * 3 + group * 2 + rb"(?:([\x11\x12])(?:\x1c%b)?|\x2c%b)?" % (statistics, statistics),
            ),
        )
    )


def usual_header(data: bytes | memoryview) -> tuple[HeaderFacts, int] | None:
    """Return what a header says that is as writers write it, and its length; None for any other."""
    page_type, match = _usual().get(bytes(data[:2]), _NO_USUAL)
    found = match(data)
    if found is None:
        return None
    uncompressed, length, crc, num_values, *levels = found.groups()
    levels_length, is_compressed = 0, True
    if levels:
        levels_length = zigzag_int(levels[0]) + zigzag_int(levels[1])
        is_compressed = levels[2] != _IS_NOT_COMPRESSED
    facts = _facts(
        (
            page_type,
            zigzag_int(length),
            zigzag_int(uncompressed),
            None if crc is None else zigzag_int(crc),
            zigzag_int(num_values),
            levels_length,
            is_compressed,
        )
    )
    return facts, found.end()


_NO_USUAL: tuple[int, _Match] = (-1, lambda _: None)


# --- All headers ---


def read_header(data: bytes | memoryview) -> tuple[HeaderFacts | PageHeader, int]:
    """Return what a header says, or the header for `facts_of`; and its length in bytes.

    Raises:
        ParquetFormatError: There is no Thrift struct there.
    """
    return usual_header(data) or PageHeader.read(data)


def facts_of(header: PageHeader) -> HeaderFacts:
    """Return what a header of the general reader says.

    Raises:
        ParquetFormatError: The header of its type of page is missing, or a required field is, or is negative.
    """
    page_type, length = header.type, header.compressed_page_size
    uncompressed_length, crc = header.uncompressed_page_size, header.crc
    inner = _inner_facts(header, page_type)
    return HeaderFacts(page_type, length, uncompressed_length, crc, *inner)


def _inner_facts(header: PageHeader, page_type: int) -> tuple[int, int, bool]:
    """Return number of values, length of levels, and whether what follows these may be compressed."""
    if page_type == PageHeader.INDEX_PAGE:
        return 0, 0, True
    inner: Record | None = None
    if page_type == PageHeader.DATA_PAGE:
        inner = header.data_page_header
    elif page_type == PageHeader.DICTIONARY_PAGE:
        inner = header.dictionary_page_header
    elif page_type == PageHeader.DATA_PAGE_V2:
        inner = header.data_page_header_v2
    if inner is None:
        raise ParquetFormatError(f"there is no header of a page of type {page_type}.")
    fields = inner.struct.fields
    for field_id in _REQUIRED_FIELD_IDS[page_type]:
        if field_id not in fields or fields[field_id][0] is not WireType.I32:
            raise ParquetFormatError(f"the header of a page of type {page_type} lacks its field {field_id}.")
        # Counts, lengths and encodings.
        if fields[field_id][1] < 0:
            raise ParquetFormatError(f"field {field_id} of the header of a page of type {page_type} is negative.")
    num_values: int = fields[1][1]
    if page_type != PageHeader.DATA_PAGE_V2:
        return num_values, 0, True
    levels = [fields[field_id][1] for field_id in _LEVELS_LENGTH_FIELD_IDS]
    is_compressed = fields.get(_IS_COMPRESSED_FIELD_ID, (WireType.TRUE, None))[0] is WireType.TRUE
    return num_values, sum(levels), is_compressed


# --- How pages begin ---


_SNAPPY = 1
_MAGICS = {2: b"\x1f\x8b\x08", 6: b"\x28\xb5\x2f\xfd"}
"""Codec of parquet.thrift (gzip, Zstandard) -> what its output begins with. Brotli and LZ4 have no such thing."""

START_LENGTH = 5
"""How many bytes are looked at, at most."""


def can_be_told(codec: int) -> bool:
    """Return whether pages of a codec begin in a way of their own."""
    return codec == _SNAPPY or codec in _MAGICS


def begins_as_compressed(codec: int, start: bytes, length: int) -> bool:
    """Return whether a page that decompresses to `length` bytes may begin with these, at most `START_LENGTH`."""
    if codec != _SNAPPY:
        return start.startswith(_MAGICS[codec])
    # Snappy begins with the length, seven bits in each byte.
    value = 0
    for position, byte in enumerate(start):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value == length
    return False
