"""Page headers: the fast reader and the general one agree, and sizes and CRCs are replaced exactly."""

from __future__ import annotations

import itertools
import zlib

import pytest

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.pages import (
    crc_position,
    padded_crc,
    read_page_header,
    with_sizes,
)
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.format.thrift import (
    Struct,
    ThriftList,
    WireType,
    varint,
)


def _header(
    page_type: int = 0, length: int = 1_000, crc: int | None = None, extra: dict[int, object] | None = None
) -> PageHeader:
    header = PageHeader()
    header.type = page_type
    header.uncompressed_page_size = 3 * length
    header.compressed_page_size = length
    header.crc = crc
    nested = Struct({1: (WireType.I32, 17), 2: (WireType.I32, 0), **(extra or {})})  # type: ignore[dict-item]
    if page_type in _INNER_IDS:
        header.struct.set_entry(_INNER_IDS[page_type], (WireType.STRUCT, nested))
    return header


_INNER_IDS = {PageHeader.DATA_PAGE: 5, PageHeader.DICTIONARY_PAGE: 7, PageHeader.DATA_PAGE_V2: 8}
"""Page type -> the field with the header of its own."""


_STATISTICS = Struct(
    {1: (WireType.BINARY, b"max"), 2: (WireType.BINARY, b""), 3: (WireType.I64, 5), 7: (WireType.TRUE, None)}
)
_LONG_STATISTICS = Struct({5: (WireType.BINARY, b"x" * 300), 6: (WireType.BINARY, b"y" * 70)})
_UNKNOWN = ThriftList(WireType.I32, [1, 2, 3])


_LENGTHS = (0, 63, 64, 8_191, 8_192, 1 << 20, (1 << 28) - 1, 2**31 - 1)
_CRCS = (None, 0, -1, 1, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("page_type", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {5: (WireType.STRUCT, _STATISTICS)},
        {5: (WireType.STRUCT, _LONG_STATISTICS)},
        {99: (WireType.LIST, _UNKNOWN)},
    ],
    ids=["plain", "statistics", "long statistics", "unknown list"],
)
def test_sizes_and_crcs_are_read_and_replaced(page_type: int, extra: dict[int, object]) -> None:
    for length, crc in itertools.product(_LENGTHS, _CRCS):
        record = _header(page_type, 1, crc, extra)
        record.compressed_page_size = length
        data = b"before" + record.serialise() + b"\xff" * 50
        facts = read_page_header(memoryview(data), 6)
        header = with_sizes(facts, facts.page_length, facts.crc)
        assert header == record.serialise()
        assert facts.page_type == page_type
        assert facts.page_length == length
        assert facts.length == len(header)
        assert facts.crc == (None if crc is None else crc & 0xFFFF_FFFF)
        # Replaced, it equals the general writer's output.
        record.compressed_page_size = 77
        if crc is not None:
            record.crc = 123_456_789
        assert with_sizes(facts, 77, 123_456_789) == record.serialise()
        # With room for the CRC, which is filled in afterwards.
        padded = with_sizes(facts, 77)
        if crc is not None:
            position = crc_position(facts, 77)
            padded = padded[:position] + padded_crc(0xFEDC_BA98) + padded[position + 5 :]
            record.crc = 0xFEDC_BA98 - 2**32
        assert PageHeader.read(padded)[0].struct == record.struct


def test_a_header_with_its_fields_in_another_order_is_brought_into_order() -> None:
    record = _header(crc=5)
    shuffled = PageHeader(Struct(dict(reversed(list(record.struct.fields.items())))))
    data = shuffled.serialise()
    facts = read_page_header(data, 0)
    assert facts.length == len(data)
    assert with_sizes(facts, facts.page_length, facts.crc) == record.serialise()
    assert (facts.page_length, facts.crc) == (1_000, 5)


def test_a_header_with_padded_integers_is_read() -> None:
    usual = _header().serialise()
    padded = usual.replace(b"\x15" + varint(2_000), b"\x15" + bytes((0xD0, 0x8F, 0x80, 0x00)), 1)
    facts = read_page_header(padded, 0)
    assert facts.page_length == 1_000
    assert facts.length == len(padded)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x15\x00\x15\x00\x00",
        b"\x15\x08\x15\x00\x15\x00\x00",
        b"\x15\x00\x15\x00\x15\x01\x00",
        b"\x16\x00\x15\x00\x15\x00\x00",
        _header().serialise()[:-1],
        b"\xff" * 40,
    ],
)
def test_what_is_no_page_header_is_refused(data: bytes) -> None:
    with pytest.raises(ParquetFormatError):
        read_page_header(memoryview(data), 0)


def test_a_padded_crc_is_a_varint_of_five_bytes() -> None:
    for crc in (0, 1, zlib.crc32(b"x"), 0xFFFF_FFFF, 0x8000_0000):
        record = PageHeader.read(b"\x45" + padded_crc(crc) + b"\x00")[0]
        assert record.crc is not None and record.crc & 0xFFFF_FFFF == crc


@pytest.mark.parametrize("value", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**28, 2**35, 2**63])
def test_varints_have_their_shortest_form(value: int) -> None:
    encoded = varint(value)
    assert sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(encoded)) == value
    assert len(encoded) == max(1, -(-value.bit_length() // 7))
