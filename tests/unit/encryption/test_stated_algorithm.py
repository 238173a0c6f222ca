"""A file that states AES_GCM_CTR_V1: honest files are read, and a file written with AES_GCM_V1 is refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, MemorySource, NamedKeys, decrypted, encrypted, rekey_source

from parquet_keytools.encryption.file_encryption import (
    ColumnKey,
    FileEncryption,
    KeyChoice,
    column_deks,
    decrypt_columns,
)
from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.encryption.module_cipher import ChunkCipher
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import DecryptionError
from parquet_keytools.format.structs import FileCryptoMetaData, PageHeader

GCM, CTR = Algorithm.AES_GCM_V1, Algorithm.AES_GCM_CTR_V1

TABLE = pa.table(
    {
        "n": list(range(2_000)),
        # Long enough that Snappy encodes its length in two bytes: by chance, every 256th run begins right.
        "s": [f"city {i % 700}" for i in range(2_000)],
        "o": [i if i % 3 else None for i in range(2_000)],
    }
)

PROVABLE: dict[str, dict[str, Any]] = {
    "dictionary": {},
    "no dictionary": {"use_dictionary": False},
    "row groups": {"row_group_size": 500},
    "small pages": {"data_page_size": 1, "write_batch_size": 50},
    "pages V2": {"data_page_version": "2.0"},
    "pages V2, no dictionary": {"data_page_version": "2.0", "use_dictionary": False},
    "pages V2, uncompressed": {"data_page_version": "2.0", "compression": "none", "use_dictionary": False},
    "uncompressed": {"compression": "none"},
    "zstd": {"compression": "zstd"},
    "gzip": {"compression": "gzip"},
}
"""Files that show their algorithm even if an attacker has damaged every page."""

UNPROVABLE: dict[str, dict[str, Any]] = {"lz4": {"compression": "lz4"}, "brotli": {"compression": "brotli"}}

EVERY_CHOICE: dict[str, dict[tuple[str, ...], KeyChoice]] = {
    "footer key": {},
    "first column plaintext": {("n",): ColumnEncryption.PLAINTEXT},
}


def written(table: pa.Table = TABLE, **options: Any) -> bytes:
    """Return a plaintext file."""
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    return stream.getvalue()


def sealed(
    data: bytes, keys: NamedKeys, algorithm: Algorithm, columns: dict[tuple[str, ...], KeyChoice] | None = None
) -> bytes:
    """Return it encrypted."""
    return encrypted(data, FileEncryption(keys.new(b"kf"), b"kf", columns or {}, algorithm=algorithm))


def swapped(data: bytes) -> bytes:
    """Return a file that states the other algorithm."""
    start = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    crypto, end = FileCryptoMetaData.read(data[start:-8])
    stored = crypto.encryption_algorithm
    stored.aes_gcm_ctr_v1, stored.aes_gcm_v1 = stored.aes_gcm_v1, stored.aes_gcm_ctr_v1
    footer = crypto.serialise() + data[start:-8][end:]
    return data[:start] + footer + struct.pack("<I", len(footer)) + data[-4:]


def with_damaged_pages(data: bytes, keys: NamedKeys, *, row_groups: range | None = None) -> bytes:
    """Return a file written with AES-GCM, with one bit flipped in every page, but not in its header."""
    source, changed = MemorySource(data), bytearray(data)
    footer = read_footer(source, keys)
    deks = column_deks(footer, keys)
    for column in footer.columns:
        cipher = footer.cipher_of(column, deks.get(column.path))
        for row_group_ordinal in row_groups or range(len(footer.row_groups)):
            if cipher is None:
                continue
            metadata = footer.chunk_metadata(row_group_ordinal, column, cipher)
            start = metadata.dictionary_page_offset or metadata.data_page_offset
            end = start + metadata.total_compressed_size
            reader = ChunkCipher(cipher, GCM, row_group_ordinal, column.ordinal)
            pages = walk_chunk(
                source,
                start,
                end,
                limit=end,
                reader=reader,
                writer=None,
                expects_dictionary_page=bool(metadata.dictionary_page_offset),
            )
            for header_length, page_length, *_ in pages.each(0, pages.count):
                changed[start + header_length + page_length - 1] ^= 1
                start += header_length + page_length
    return bytes(changed)


def opened(data: bytes, keys: NamedKeys) -> tuple[MemorySource, Footer]:
    """Return a source without any reads so far, and the footer of its file."""
    return MemorySource(data), read_footer(MemorySource(data), keys)


@pytest.mark.parametrize("name", [*PROVABLE, *UNPROVABLE])
@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_an_honest_file_is_read(name: str, choice: str) -> None:
    keys, data = NamedKeys(), written(**(PROVABLE | UNPROVABLE)[name])
    back = decrypted(sealed(data, keys, CTR, EVERY_CHOICE[choice]), keys)
    assert pq.read_table(io.BytesIO(back)).equals(TABLE)


@pytest.mark.parametrize("name", [*PROVABLE, *UNPROVABLE])
@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_gcm_that_is_called_ctr_is_refused(name: str, choice: str) -> None:
    keys, data = NamedKeys(), written(**(PROVABLE | UNPROVABLE)[name])
    data, sink = swapped(sealed(data, keys, GCM, EVERY_CHOICE[choice])), MemorySink()
    source, footer = opened(data, keys)
    with pytest.raises(
        DecryptionError, match=r"is encrypted with AES-GCM.* states AES_GCM_CTR_V1.*restore"
    ) as caught:
        decrypt_columns(source, sink, footer, {})
    assert sink.reserved_bytes is None  # No byte was written.
    assert caught.value.row_group_ordinal == 0
    assert caught.value.column_ordinal == (1 if choice == "first column plaintext" else 0)
    assert caught.value.module_type in ("data page", "dictionary page")
    assert "memory.parquet" in str(caught.value)


@pytest.mark.parametrize("name", PROVABLE)
def test_damaged_pages_do_not_hide_it(name: str) -> None:
    keys = NamedKeys()
    data = with_damaged_pages(sealed(written(**PROVABLE[name]), keys, GCM), keys)
    source, footer = opened(swapped(data), keys)
    with pytest.raises(DecryptionError, match="states AES_GCM_CTR_V1"):
        check_stated_algorithm(source, footer, {})


@pytest.mark.parametrize("compression", ["snappy", "zstd", "lz4", "brotli"])
def test_one_row_group_that_is_left_is_enough(compression: str) -> None:
    keys = NamedKeys()
    data = sealed(written(compression=compression, row_group_size=500), keys, GCM)
    data = swapped(with_damaged_pages(data, keys, row_groups=range(1)))
    source, footer = opened(data, keys)
    with pytest.raises(DecryptionError, match="is encrypted with AES-GCM") as caught:
        check_stated_algorithm(source, footer, {})
    assert caught.value.row_group_ordinal == 1


def test_lz4_pages_that_are_all_damaged_hide_it() -> None:
    """No check can detect this: the test documents it, and so does docs/attacks.md."""
    keys = NamedKeys()
    data = with_damaged_pages(sealed(written(compression="lz4", use_dictionary=False), keys, GCM), keys)
    check_stated_algorithm(*opened(swapped(data), keys), {})


def test_columns_whose_keys_are_missing_are_passed_over() -> None:
    keys = NamedKeys()
    columns: dict[tuple[str, ...], KeyChoice] = {
        ("n",): ColumnKey(keys.new(b"kn"), b"kn"),
        ("s",): ColumnKey(keys.new(b"ks"), b"ks"),
        ("o",): ColumnEncryption.PLAINTEXT,
    }
    data = swapped(sealed(written(), keys, GCM, columns))
    source, footer = opened(data, keys)
    check_stated_algorithm(source, footer, {})  # No page is readable by anyone.
    with pytest.raises(DecryptionError) as caught:
        check_stated_algorithm(source, footer, {("s",): keys.deks[b"ks"]})
    assert caught.value.column_ordinal == 1


def test_a_plaintext_footer_is_checked_alike() -> None:
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", plaintext_footer=True, algorithm=CTR)
    assert pq.read_table(io.BytesIO(decrypted(encrypted(written(), encryption), keys))).equals(TABLE)


def test_rekey_refuses_it_before_it_writes() -> None:
    keys, sink = NamedKeys(), MemorySink()
    data = swapped(sealed(written(), keys, GCM))
    new = FileEncryption(keys.new(b"new"), b"new")
    with pytest.raises(DecryptionError, match="is encrypted with AES-GCM"):
        rekey_source(MemorySource(data), sink, keys, new)
    assert sink.reserved_bytes is None


def test_ctr_that_is_called_gcm_is_refused() -> None:
    keys = NamedKeys()
    with pytest.raises(DecryptionError, match="does not authenticate"):
        decrypted(swapped(sealed(written(), keys, CTR)), keys)


@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0"}, {"compression": "none"}, {"compression": "lz4"}]
)
@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": pa.array([], pa.int64())}),
        pa.table({"a": [1], "b": ["x"], "c": [True]}),
        pa.table({"a": pa.nulls(5, pa.string()), "b": pa.nulls(5)}),
        pa.table({"a": [b""]}),
        pa.table({"a": [[7] * 40, [7] * 40]}),
        # V2 pages stay uncompressed where a codec makes them longer, and their headers say so.
        pa.table({"a": [bytes(range(256))]}),
    ],
    ids=["no rows", "one row", "only nulls", "empty text", "lists", "incompressible"],
)
def test_honest_files_with_few_values_are_read(table: pa.Table, options: dict[str, Any]) -> None:
    keys = NamedKeys()
    for dictionary in (True, False):
        data = sealed(written(table, use_dictionary=dictionary, **options), keys, CTR)
        assert pq.read_table(io.BytesIO(decrypted(data, keys))).equals(table)


def test_a_page_that_its_codec_made_longer_is_read() -> None:
    """By as many bytes as AES-GCM needs more than AES-CTR: the length of compressed data shows nothing."""
    table = pa.table({"a": [True] * 56}, schema=pa.schema([pa.field("a", pa.bool_(), nullable=False)]))
    data, keys = written(table, use_dictionary=False, compression="gzip"), NamedKeys()
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    header, _ = PageHeader.read(data[column.data_page_offset :])
    assert header.compressed_page_size == header.uncompressed_page_size + 16
    assert pq.read_table(io.BytesIO(decrypted(sealed(data, keys, CTR), keys))).equals(table)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_gcm_with_few_values_is_refused(compression: str, version: str) -> None:
    """An empty dictionary page, too, which is as long as the framing."""
    keys = NamedKeys()
    tables = [{"a": [1]}, {"a": ["x"]}, {"a": pa.nulls(5, pa.string())}, {"a": [b""]}, {"a": [[7] * 40] * 2}]
    for columns in tables:
        for dictionary in (True, False):
            table = pa.table(columns)
            options = {"compression": compression, "data_page_version": version, "use_dictionary": dictionary}
            data = swapped(sealed(written(table, **options), keys, GCM))
            with pytest.raises(DecryptionError, match="states AES_GCM_CTR_V1"):
                check_stated_algorithm(*opened(data, keys), {})


def first_page(footer: Footer) -> int:
    """Return the offset of the header of a file's first page."""
    metadata = footer.chunk_metadata(0, footer.columns[0], footer.cipher)
    return metadata.dictionary_page_offset or metadata.data_page_offset


def test_a_guess_that_is_right_for_one_page_does_not_hide_it() -> None:
    """Snappy begins a short page with one known byte: one of 256 ciphertexts has it."""
    keys = NamedKeys()
    table = pa.table({"a": ["text " * 20], "b": ["text " * 20]})
    data = bytearray(swapped(sealed(written(table, use_dictionary=False), keys, GCM)))
    start = first_page(opened(bytes(data), keys)[1])
    (header_length,) = struct.unpack_from("<I", data, start)
    passed = 0
    for value in range(256):
        data[start + 4 + header_length + 16] = value
        with pytest.raises(DecryptionError, match="is encrypted with AES-GCM") as caught:
            check_stated_algorithm(*opened(bytes(data), keys), {})
        passed += caught.value.column_ordinal == 1
    # One value passes as Snappy's first byte. Random ciphertext makes another page pass now and then.
    assert passed > 200


def test_one_known_byte_is_no_proof() -> None:
    """In a file with one short page, Snappy's first byte is right by chance in one of 256 files."""
    keys = NamedKeys()
    plain = written(pa.table({"a": ["text " * 20]}), use_dictionary=False)
    for _ in range(400):
        data = swapped(sealed(plain, keys, GCM))
        with pytest.raises(DecryptionError, match="is encrypted with AES-GCM"):
            check_stated_algorithm(*opened(data, keys), {})


def test_a_damaged_page_header_does_not_hide_it() -> None:
    keys = NamedKeys()
    data = bytearray(swapped(sealed(written(row_group_size=1_000), keys, GCM)))
    data[first_page(opened(bytes(data), keys)[1]) + 20] ^= 1
    with pytest.raises(DecryptionError, match="is encrypted with AES-GCM") as caught:
        check_stated_algorithm(*opened(bytes(data), keys), {})
    assert (caught.value.row_group_ordinal, caught.value.column_ordinal) == (0, 1)


def test_one_damaged_page_header_does_not_make_an_honest_file_unreadable() -> None:
    keys = NamedKeys()
    data = bytearray(sealed(written(row_group_size=1_000), keys, CTR))
    data[first_page(opened(bytes(data), keys)[1]) + 20] ^= 1
    check_stated_algorithm(*opened(bytes(data), keys), {})


def test_one_damaged_page_does_not_make_an_honest_file_unreadable() -> None:
    """Only the damaged data is lost; `decrypt --salvage` may need the rest."""
    keys = NamedKeys()
    data = bytearray(sealed(written(compression="zstd", row_group_size=500), keys, CTR))
    _, footer = opened(bytes(data), keys)
    metadata = footer.chunk_metadata(0, footer.columns[0], footer.cipher)
    start = metadata.dictionary_page_offset or metadata.data_page_offset
    (header_length,) = struct.unpack_from("<I", data, start)
    page = start + 4 + header_length
    data[page + 16] ^= 1
    check_stated_algorithm(*opened(bytes(data), keys), {})


def test_little_is_read_of_an_honest_file() -> None:
    keys = NamedKeys()
    numbers = pa.table({"n": list(range(300_000))})
    data = sealed(written(numbers, use_dictionary=False, row_group_size=30_000, compression="zstd"), keys, CTR)
    source, footer = opened(data, keys)
    check_stated_algorithm(source, footer, {})
    assert len(source.reads) == 1
    assert sum(length for _, length in source.reads) <= 64 * 1024


def test_nothing_is_read_of_a_file_that_says_gcm() -> None:
    keys = NamedKeys()
    source, footer = opened(sealed(written(), keys, GCM), keys)
    check_stated_algorithm(source, footer, {})
    assert source.reads == []


def test_a_header_that_does_not_say_how_long_its_page_is() -> None:
    """Such headers prove nothing, but the page still does."""
    data = written(pa.table({"n": [1, 2, 3, 4]}), use_dictionary=False, compression="none")
    negative = data.replace(b"\x2c\x15\x08", b"\x2c\x15\x01", 1)
    assert negative != data
    keys = NamedKeys()
    with pytest.raises(DecryptionError, match="encrypted with AES-GCM"):
        decrypted(swapped(sealed(negative, keys, GCM)), keys)
