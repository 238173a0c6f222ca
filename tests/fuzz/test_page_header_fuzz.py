"""The fast reader of page headers and the general one agree on any bytes."""

from __future__ import annotations

import contextlib
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_files import MemorySource
from soak import how_many

from parquet_keytools.encryption.module_cipher import ChunkCipher, ModuleCipher
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.pages import move_pages, read_page_header, with_sizes
from parquet_keytools.format.structs import PageHeader
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
@settings(max_examples=how_many(1_000, 20_000), deadline=None)
def test_both_readers_agree(data: bytes) -> None:
    expected = _general(data)
    try:
        facts, header = read_page_header(memoryview(data), 0)
    except ParquetFormatError:
        assert expected is None
        return
    assert expected is not None
    assert facts.page_type == expected.type
    assert facts.page_length == expected.compressed_page_size
    assert facts.crc == (None if expected.crc is None else expected.crc & 0xFFFF_FFFF)
    assert facts.length == PageHeader.read(data)[1]
    changed = PageHeader.read(with_sizes(header, facts, 99, 7))[0]
    expected.compressed_page_size = 99
    if expected.crc is not None:
        expected.crc = 7
    assert dict(changed.struct.fields) == dict(expected.struct.fields)


@given(st.one_of(st.binary(max_size=400), _MUTANTS), st.booleans())
@settings(max_examples=1_000, deadline=None)
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
    assert sum(pages.header_lengths) + sum(pages.page_lengths) == len(data) == pages.source_end


@given(st.binary(max_size=200))
@settings(max_examples=1_000, deadline=None)
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
