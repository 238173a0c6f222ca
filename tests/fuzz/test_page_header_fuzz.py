"""Page headers and offset indexes from any bytes."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import MemorySource
from soak import how_many

from parquet_keytools.encryption.module_cipher import ChunkCipher, ModuleCipher
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.pages import (
    PageContents,
    move_pages,
    read_page_contents,
    read_page_header,
    with_sizes,
)
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.format.thrift import WireType
from parquet_keytools.secret_bytes import SecretBytes

_USUAL = bytes.fromhex("15001580201580202c158004150015061506" + "1c180801020304050607081600000000")

_MUTANTS = st.builds(
    lambda data, changes: bytes(data[i] if i not in changes else changes[i] for i in range(len(data))),
    st.just(_USUAL * 3),
    st.dictionaries(st.integers(0, 3 * len(_USUAL) - 1), st.integers(0, 255), max_size=6),
)


def _general(data: bytes) -> PageHeader | None:
    try:
        header, _ = PageHeader.read(data)
        facts = (header.type, header.uncompressed_page_size, header.compressed_page_size, header.crc)
    except ParquetFormatError:
        return None
    return header if 0 <= facts[0] <= 3 and facts[2] >= 0 else None


@given(st.one_of(st.binary(max_size=120), _MUTANTS))
@settings(max_examples=how_many(100, 20_000))
def test_what_a_header_says_is_what_its_record_says(data: bytes) -> None:
    expected = _general(data)
    try:
        facts = read_page_header(memoryview(data), 0)
    except ParquetFormatError:
        assert expected is None
        return
    assert expected is not None
    assert facts.page_type == expected.type
    assert facts.page_length == expected.compressed_page_size
    assert facts.crc == (None if expected.crc is None else expected.crc & 0xFFFF_FFFF)
    assert facts.length == PageHeader.read(data)[1]
    changed = PageHeader.read(with_sizes(facts, 99, 7))[0]
    expected.compressed_page_size = 99
    if expected.crc is not None:
        expected.crc = 7
    with contextlib.suppress(ParquetFormatError):  # A field of a nested struct is repeated.
        assert changed.struct.fields == expected.struct.fields


_AS_WRITTEN = {
    "data page": "15001580201580202c15800415001506150600" + "00",
    "data page with a CRC and statistics": "1500158020158020159bcbe3b70c1c158004150015061506"
    + "1c3600280803000000000000001808010000000000000011110000"
    + "00",
    "dictionary page": "1504158020158020" + "4c15c801150400" + "00",
    "sorted dictionary page with a CRC": "1504158020158020159bcbe3b70c" + "3c15c80115041100" + "00",
    "data page V2": "15061580201580205c158004150015800415001502150200" + "00",
    "data page V2 with a CRC, statistics, not compressed": "1506158020158020159bcbe3b70c"
    + "4c1580041500158004150015061502121c360028040300000018040100000000"
    + "00"
    + "00",
    "data page V2 with statistics alone": "15061580201580205c158004150015800415001506150a2c360200" + "00" + "00",
}

_LIKE_WRITTEN = st.builds(
    lambda text, changes: bytes(changes.get(at, byte) for at, byte in enumerate(bytes.fromhex(text))),
    st.sampled_from(list(_AS_WRITTEN.values())),
    st.dictionaries(st.integers(0, 60), st.one_of(st.integers(0, 255), st.integers(0x10, 0x2C)), max_size=3),
)


def _contents_of(data: bytes) -> PageContents | None:
    """Return a header's statement about its page's content; None where that is impossible."""
    header, _ = PageHeader.read(data)
    length = header.uncompressed_page_size
    if header.type == PageHeader.INDEX_PAGE:
        return PageContents(length, 0, 0, True) if length >= 0 else None
    ids = {PageHeader.DATA_PAGE: 5, PageHeader.DICTIONARY_PAGE: 7, PageHeader.DATA_PAGE_V2: 8}
    wire_type, inner = header.struct.entry(ids[header.type]) or (None, None)
    if wire_type is not WireType.STRUCT:
        return None
    required = {PageHeader.DATA_PAGE: 4, PageHeader.DICTIONARY_PAGE: 2, PageHeader.DATA_PAGE_V2: 6}[header.type]
    numbers = inner.numbers([(field_id, WireType.I32) for field_id in range(1, required + 1)])
    if length < 0 or any(number is None or number < 0 for number in numbers):
        return None
    if header.type != PageHeader.DATA_PAGE_V2:
        return PageContents(length, numbers[0] or 0, 0, True)
    is_compressed = inner.types().get(7) is not WireType.FALSE
    return PageContents(length, numbers[0] or 0, (numbers[4] or 0) + (numbers[5] or 0), is_compressed)


@pytest.mark.parametrize("name", _AS_WRITTEN)
def test_the_contents_of_pages_as_writers_write_them(name: str) -> None:
    data = bytes.fromhex(_AS_WRITTEN[name])
    facts = read_page_header(data, 0)
    assert facts.length == len(data)
    assert read_page_contents(facts) == _contents_of(data)


@pytest.mark.parametrize(
    "header",
    {
        "data page, num_values twice": "1500 1508 1508 2c 1502 1500 1500 1500 05020a 00 00",
        "dictionary page, num_values twice": "1504 1508 1508 4c 1502 1500 05020a 00 00",
        "V2, num_nulls twice": "1506 1508 1508 5c 1502 1500 1502 1500 1500 1500 050400 00 00",
    }.values(),
)
def test_a_field_of_the_inner_header_that_comes_twice_is_refused(header: str) -> None:
    """Readers may take the first value, or the last."""
    with pytest.raises(ParquetFormatError, match="twice"):
        read_page_contents(read_page_header(bytes.fromhex(header), 0))


@pytest.mark.parametrize(
    ("is_compressed", "field"),
    {
        "left out": (True, ""),
        "true": (True, "11"),
        "false": (False, "12"),
        "false, long form": (False, "020e"),
    }.values(),
)
def test_whether_the_values_of_a_v2_page_are_compressed(is_compressed: bool, field: str) -> None:
    header = bytes.fromhex(f"1506 1508 1508 5c 1502 1500 1502 1500 1500 1500 {field} 00 00")
    assert read_page_contents(read_page_header(header, 0)).is_compressed is is_compressed


@given(st.one_of(st.binary(max_size=120), _MUTANTS, _LIKE_WRITTEN))
@settings(max_examples=how_many(80, 20_000))
def test_the_contents_of_a_page_are_what_its_records_say(data: bytes) -> None:
    try:
        facts = read_page_header(memoryview(data), 0)
        expected = _contents_of(data)
    except ParquetFormatError:
        return
    try:
        assert read_page_contents(facts) == expected
    except ParquetFormatError:
        assert expected is None


@given(st.one_of(st.binary(max_size=400), _MUTANTS), st.booleans())
@settings(max_examples=how_many(100, 20_000))
def test_any_chunk_is_walked_or_refused(data: bytes, is_encrypted: bool) -> None:
    cipher = ChunkCipher(ModuleCipher(SecretBytes(bytes(16)), b""), Algorithm.AES_GCM_V1, 0, 0)
    try:
        pages = walk_chunk(
            MemorySource(data),
            0,
            len(data),
            limit=len(data),
            reader=cipher if is_encrypted else None,
            writer=None,
            expects_dictionary_page=False,
        )
    except (ParquetFormatError, DecryptionError):
        return
    lengths = [header + page for header, page, *_ in pages.each(0, pages.count)]
    assert sum(lengths) == len(data) == pages.source_end


@given(st.binary(max_size=200))
@settings(max_examples=how_many(100, 20_000))
def test_any_offset_index_is_moved_or_refused(data: bytes) -> None:
    with contextlib.suppress(ParquetFormatError):
        move_pages(data, {0: (4, 1), 1: (5, 1)})


def test_a_chunk_of_headers_that_never_end_takes_time_in_proportion() -> None:
    start = time.process_time()
    for data in (
        b"\x15\x00" * 500_000,
        b"\x15\x00\x15\x00\x15\x00" + b"\x18\xff\xff\x7f" * 200_000,
        b"\xff" * 1_000_000,
    ):
        try:
            walk_chunk(
                MemorySource(data), 0, len(data), limit=len(data), reader=None, writer=None,
                expects_dictionary_page=False,
            )  # fmt: skip
        except ParquetFormatError:
            continue
        raise AssertionError("no chunk was taken for one")
    assert time.process_time() - start < 10
