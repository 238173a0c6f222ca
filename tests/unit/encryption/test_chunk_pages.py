"""The pages of chunks, many encrypted at a time: no page is confused with another, and a wrong page is named."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, MemorySource, NamedKeys, decrypted, encrypted, rekey_source

from parquet_keytools.encryption import file_rewriter
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.pages import padded_crc
from parquet_keytools.format.structs import FileMetaData, PageHeader

# The pages of one column have about the same length, the pages of the other become longer and longer.
TABLE = pa.table({"a": [f"text {i % 40}" for i in range(300)], "b": [str(3**i) for i in range(300)]})
every_algorithm = pytest.mark.parametrize("algorithm", Algorithm, ids=str)
every_piece = pytest.mark.parametrize("piece_length", [1, 900, 1 << 20])


def written(**options: Any) -> bytes:
    """Return a file with a dictionary page and several data pages in each chunk."""
    stream = io.BytesIO()
    sizes = {
        "row_group_size": 200,
        "write_batch_size": 25,
        "data_page_size": 150,
        "dictionary_pagesize_limit": 300,
    }
    pq.write_table(TABLE, stream, **sizes, **options)
    return stream.getvalue()


def body(data: bytes) -> bytes:
    return data[: -8 - int.from_bytes(data[-8:-4], "little")]


def rekeyed(data: bytes, keys: NamedKeys, encryption: FileEncryption) -> bytes:
    sink = MemorySink()
    rekey_source(MemorySource(data), sink, keys, encryption)
    return sink.contents()


def modules(data: bytes) -> list[tuple[int, int]]:
    """Return the bounds of the modules of all pages: header, page, and so on."""
    found = []
    offset, end = 4, len(body(data))
    while offset < end:
        start, offset = offset, offset + 4 + int.from_bytes(data[offset : offset + 4], "little")
        found.append((start, offset))
    return found


def pages(data: bytes) -> Iterator[tuple[int, str, int | None, int, int]]:
    """Yield the chunk of each page, its module type, its page ordinal, and the bounds of its module."""
    places = iter(modules(data)[1::2])
    for chunk, count in enumerate(PAGES_OF_CHUNK):
        yield chunk, "dictionary page", None, *next(places)
        for page_ordinal in range(count - 1):
            yield chunk, "data page", page_ordinal, *next(places)
    assert next(places, None) is None


def pages_of_chunks() -> list[int]:
    data = written()
    footer, _ = FileMetaData.read(data[len(body(data)) : -8])
    counts = []
    for chunk in (chunk for group in footer.row_groups for chunk in group.columns):
        metadata = chunk.meta_data
        assert metadata is not None and metadata.dictionary_page_offset is not None
        count, offset = 0, metadata.dictionary_page_offset
        end = offset + metadata.total_compressed_size
        while offset < end:
            header, length = PageHeader.read(data[offset:])
            offset, count = offset + length + header.compressed_page_size, count + 1
        counts.append(count)
    return counts


PAGES_OF_CHUNK = pages_of_chunks()
assert len(PAGES_OF_CHUNK) == 4 and min(PAGES_OF_CHUNK) > 3


@every_piece
@every_algorithm
@pytest.mark.parametrize("new_algorithm", Algorithm, ids=str)
@pytest.mark.parametrize("checksums", [False, True])
def test_rekeyed_pages_come_back(
    monkeypatch: pytest.MonkeyPatch,
    piece_length: int,
    algorithm: Algorithm,
    new_algorithm: Algorithm,
    checksums: bool,
) -> None:
    """Decrypted and encrypted at a time: one page, several, or the pages of all chunks."""
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", piece_length)
    data, keys = written(write_page_checksum=checksums, write_page_index=True), NamedKeys()
    copied = {("b",): ColumnEncryption.PLAINTEXT}
    stored = encrypted(data, FileEncryption(keys.new(b"old"), b"old", copied, algorithm=algorithm))
    new = rekeyed(stored, keys, FileEncryption(keys.new(b"new"), b"new", algorithm=new_algorithm))
    back = decrypted(new, keys)
    assert body(back) == body(data)
    assert pq.read_table(io.BytesIO(back), page_checksum_verification=True).equals(TABLE)


@every_piece
@every_algorithm
def test_each_module_has_its_own_nonce(
    monkeypatch: pytest.MonkeyPatch, piece_length: int, algorithm: Algorithm
) -> None:
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", piece_length)
    keys = NamedKeys()
    stored = encrypted(written(), FileEncryption(keys.new(b"kf"), b"kf", algorithm=algorithm))
    again = rekeyed(stored, keys, FileEncryption(keys.new(b"new"), b"new", algorithm=algorithm))
    nonces = [data[start + 4 : start + 16] for data in (stored, again) for start, _ in modules(data)]
    assert len(nonces) == 4 * sum(PAGES_OF_CHUNK) == len(set(nonces))


@every_piece
@pytest.mark.parametrize("is_rekeyed", [False, True])
def test_the_page_that_does_not_authenticate_is_named(
    monkeypatch: pytest.MonkeyPatch, piece_length: int, is_rekeyed: bool
) -> None:
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", piece_length)
    keys = NamedKeys()
    stored = encrypted(written(), FileEncryption(keys.new(b"kf"), b"kf"))
    for chunk, module_type, page_ordinal, _, end in pages(stored):
        damaged = bytearray(stored)
        damaged[end - 1] ^= 1
        refused(bytes(damaged), keys, is_rekeyed, "does not authenticate", chunk, module_type, page_ordinal)


@every_algorithm
@pytest.mark.parametrize("is_rekeyed", [False, True])
def test_the_length_field_of_each_page_is_checked(algorithm: Algorithm, is_rekeyed: bool) -> None:
    """No tag covers it: readers that use it would find another page than readers that use the header."""
    keys = NamedKeys()
    stored = encrypted(written(), FileEncryption(keys.new(b"kf"), b"kf", algorithm=algorithm))
    for number, (chunk, module_type, page_ordinal, start, end) in enumerate(pages(stored)):
        damaged = bytearray(stored)
        length = end - start - 4
        damaged[start : start + 4] = (length + (-1, 1, -4, 4, 8)[number % 5]).to_bytes(4, "little")
        refused(bytes(damaged), keys, is_rekeyed, "its length field says", chunk, module_type, page_ordinal)


def refused(
    data: bytes,
    keys: NamedKeys,
    is_rekeyed: bool,
    reason: str,
    chunk: int,
    module_type: str,
    page_ordinal: int | None,
) -> None:
    with pytest.raises(DecryptionError, match=reason) as caught:
        rekeyed(data, keys, FileEncryption(keys.new(b"new"))) if is_rekeyed else decrypted(data, keys)
    error = caught.value
    assert (error.row_group_ordinal, error.column_ordinal) == divmod(chunk, 2)
    assert (error.module_type, error.page_ordinal) == (module_type, page_ordinal)


@every_piece
def test_the_page_that_is_damaged_is_named_by_its_place(
    monkeypatch: pytest.MonkeyPatch, piece_length: int
) -> None:
    """Even if it is not among the first pages of a long chunk."""
    monkeypatch.setattr(file_rewriter, "SEGMENT_LENGTH", piece_length)
    data = written(write_page_checksum=True, compression="none")
    offset = 4
    while offset < len(body(data)):
        header, length = PageHeader.read(data[offset:])
        start, offset = offset + length, offset + length + header.compressed_page_size
        damaged = bytearray(data)
        damaged[offset - 1] ^= 1
        with pytest.raises(ParquetFormatError, match=f"the page at byte {start} does not have the CRC"):
            encrypted(bytes(damaged), FileEncryption(NamedKeys().new(b"kf")))


def test_a_crc_of_zero_is_checked_too() -> None:
    data = written(write_page_checksum=True)
    header, _ = PageHeader.read(data[4:])
    assert header.crc is not None
    crc = padded_crc(header.crc & 0xFFFF_FFFF)
    assert crc in data
    with pytest.raises(ParquetFormatError, match="does not have the CRC"):
        encrypted(data.replace(crc, padded_crc(0), 1), FileEncryption(NamedKeys().new(b"kf")))
