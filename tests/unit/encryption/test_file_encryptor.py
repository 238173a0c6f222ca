"""Whole files: the output of today's writers, limits, damage, and the readers of the result."""

from __future__ import annotations

import decimal
import io
import random
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from memory_files import MemorySink, MemorySource, NamedKeys, decrypt_source, decrypted, encrypted, rekey_source
from soak import SOAK

from parquet_keytools.encryption import aad
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption, decrypt_columns, encrypt_source
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.encryption.module_cipher import ChunkCipher, ModuleCipher
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.errors import (
    AadPrefixError,
    AlreadyEncryptedError,
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    FormatLimitError,
    KeytoolsError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
    RowGroup,
    SchemaElement,
)
from parquet_keytools.format.thrift import Struct, ThriftList, WireType
from parquet_keytools.secret_bytes import SecretBytes


def _table(rows: int = 1_000) -> pa.Table:
    numbers = random.Random(7)
    return pa.table(
        {
            "a.b": pa.array([numbers.random() for _ in range(rows)]),
            "city": pa.array([f"city {numbers.randrange(20)}" for _ in range(rows)]).dictionary_encode(),
            "list": pa.array([[i, None] if i % 3 else None for i in range(rows)]),
            "struct": pa.array([{"x": i, "y": {"z": str(i)}} for i in range(rows)]),
            "map": pa.array([[(str(i), i)] for i in range(rows)], pa.map_(pa.string(), pa.int64())),
            "empty": pa.nulls(rows),
            "decimal": pa.array([decimal.Decimal(i) / 100 for i in range(rows)], pa.decimal128(20, 2)),
            "binary": pa.array([bytes([i % 256]) * (i % 50) for i in range(rows)]),
        }
    ).replace_schema_metadata({"owner": "tests"})


def _written(table: pa.Table, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    return stream.getvalue()


def _polars_file() -> bytes:
    stream = io.BytesIO()
    polars.DataFrame({"a": list(range(5_000)), "b": [str(i % 7) for i in range(5_000)]}).write_parquet(stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def duckdb_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("duckdb") / "file.parquet"
    # DuckDB writes Bloom filters for columns with dictionaries.
    duckdb.sql(
        f"copy (select i, i % 10 as small, 'x' || (i % 100) as text from range(20000) t(i)) "
        f"to '{path}' (format parquet, row_group_size 5000)"
    )
    return path.read_bytes()


FILES: dict[str, dict[str, Any]] = {
    "default": {},
    "several row groups": {"row_group_size": 300},
    "pages V2": {"data_page_version": "2.0", "data_page_size": 500},
    "page index": {"write_page_index": True, "data_page_size": 500, "row_group_size": 500},
    "checksums": {"write_page_checksum": True, "data_page_size": 500},
    "checksums and index": {"write_page_checksum": True, "write_page_index": True, "data_page_size": 300},
    "no dictionary": {"use_dictionary": False},
    "no statistics": {"write_statistics": False},
    "uncompressed": {"compression": "none"},
    "gzip": {"compression": "gzip"},
    "zstd": {"compression": "zstd"},
    "lz4": {"compression": "lz4"},
    "brotli": {"compression": "brotli"},
    "no arrow schema": {"store_schema": False},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_what_arrow_writes_comes_back(name: str, algorithm: Algorithm, plaintext_footer: bool) -> None:
    table = _table()
    data = _written(table, **FILES[name])
    keys = NamedKeys()
    columns = {("city",): ColumnKey(keys.new(b"kc", 256), b"kc"), ("a.b",): ColumnEncryption.PLAINTEXT}
    encryption = FileEncryption(
        keys.new(b"kf"),
        b"kf",
        columns,
        algorithm=algorithm,
        plaintext_footer=plaintext_footer,
    )
    back = decrypted(encrypted(data, encryption), keys)
    assert pq.read_table(io.BytesIO(back)).equals(pq.read_table(io.BytesIO(data)))
    assert back[: _footer_offset(data)] == data[: _footer_offset(data)]
    metadata = pq.read_metadata(io.BytesIO(data)).metadata
    # The owner says nothing about the schema, and a plaintext footer does not show it; nor is it restored.
    kept = (metadata or {}).keys() - ({b"owner"} if plaintext_footer else set())
    assert (pq.read_metadata(io.BytesIO(back)).metadata or {}).keys() == kept
    if not plaintext_footer:
        assert pq.read_metadata(io.BytesIO(back)).metadata == metadata


def _footer_offset(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


@pytest.mark.parametrize("rows", [0, 1])
def test_files_with_next_to_nothing_come_back(rows: int) -> None:
    for options in ({}, {"write_page_index": True}, {"use_dictionary": False}):
        data, keys = _written(_table(rows), **options), NamedKeys()
        back = decrypted(encrypted(data, FileEncryption(keys.new(b"kf"), b"kf")), keys)
        assert pq.read_table(io.BytesIO(back)).equals(pq.read_table(io.BytesIO(data)))


def test_a_file_without_columns_comes_back() -> None:
    data, keys = _written(pa.table({"a": [1, 2]}).select([])), NamedKeys()
    back = decrypted(encrypted(data, FileEncryption(keys.new(b"kf"), b"kf")), keys)
    assert pq.read_metadata(io.BytesIO(back)).num_columns == 0


@pytest.mark.parametrize("plaintext_footer", [False, True])
@pytest.mark.parametrize("options", [{}, {"write_page_index": True}, {"write_page_checksum": True}])
def test_arrow_reads_what_we_encrypt(plaintext_footer: bool, options: dict[str, Any]) -> None:
    table = _table().drop_columns(["a.b"])
    dek = SecretBytes.random(128)
    data = encrypted(
        _written(table, data_page_size=500, row_group_size=500, **options),
        FileEncryption(dek, b"kf", plaintext_footer=plaintext_footer, aad_prefix=b"prefix"),
    )
    properties = pe.create_decryption_properties(dek.reveal(), aad_prefix=b"prefix")
    for checksums in (False, True):
        read = pq.read_table(
            io.BytesIO(data), decryption_properties=properties, page_checksum_verification=checksums
        )
        assert read.equals(table)


@pytest.mark.parametrize("length_bits", [128, 192, 256])
def test_we_decrypt_what_arrow_encrypts(length_bits: int) -> None:
    table, keys = _table(), NamedKeys()
    dek = keys.new(b"kf", length_bits)
    properties = pe.create_encryption_properties(dek.reveal(), aad_prefix=b"prefix", store_aad_prefix=False)
    data = _written(table, encryption_properties=properties, data_page_size=500, write_page_checksum=True)
    keys.deks[read_envelope(MemorySource(data)).key_metadata] = dek
    with pytest.raises(AadPrefixError, match="not stored"):
        decrypted(data, keys)
    with pytest.raises(DecryptionError):
        decrypted(data, keys, b"another prefix")
    assert pq.read_table(io.BytesIO(decrypted(data, keys, b"prefix"))).equals(table)


def test_what_polars_writes_comes_back_and_polars_reads_it() -> None:
    data, keys = _polars_file(), NamedKeys()
    back = decrypted(encrypted(data, FileEncryption(keys.new(b"kf"), b"kf")), keys)
    assert polars.read_parquet(io.BytesIO(back)).equals(polars.read_parquet(io.BytesIO(data)))


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_what_duckdb_writes_comes_back_with_its_bloom_filters(duckdb_file: bytes, plaintext_footer: bool) -> None:
    footer = read_footer(MemorySource(duckdb_file), None)
    filters = [chunk.meta_data.bloom_filter_offset for chunk in footer.chunks[0] if chunk.meta_data]
    assert any(filters)
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", plaintext_footer=plaintext_footer)
    back = decrypted(encrypted(duckdb_file, encryption), keys)
    assert back[: _footer_offset(duckdb_file)] == duckdb_file[: _footer_offset(duckdb_file)]


# --- Metadata ----------------------------------------------------------------------------------------------


def test_a_plaintext_footer_shows_nothing_sensitive_of_encrypted_columns() -> None:
    keys = NamedKeys()
    encryption = FileEncryption(
        keys.new(b"kf"),
        b"kf",
        {("a.b",): ColumnKey(keys.new(b"kc"), b"kc"), ("city",): ColumnEncryption.PLAINTEXT},
        plaintext_footer=True,
    )
    data = encrypted(_written(_table(), write_page_index=True), encryption)
    footer = read_footer(MemorySource(data), keys)
    for column in footer.columns:
        metadata = footer.chunks[0][column.ordinal].meta_data
        assert metadata is not None
        shown = set(metadata.struct.fields) & {8, 12, 13, 14, 15, 16, 17}
        assert bool(shown) == (column.encryption is ColumnEncryption.PLAINTEXT)
        assert metadata.total_compressed_size > 0


def test_the_footer_key_alone_shows_no_metadata_of_columns_with_other_keys() -> None:
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka")}
    table = pa.table({"a": ["CANARY"] * 10, "b": ["shown"] * 10})
    data = encrypted(_written(table), FileEncryption(keys.new(b"kf"), b"kf", columns))
    footer = read_footer(MemorySource(data), keys)
    assert footer.chunks[0][0].meta_data is None
    shown = footer.metadata.serialise()
    assert b"CANARY" not in shown and b"shown" in shown


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_what_the_source_said_of_its_encryption_does_not_stay(plaintext_footer: bool) -> None:
    """Readers would look for keys that the file no longer has, or use outdated metadata."""
    keys, sink, table = NamedKeys(), MemorySink(), pa.table({"a": [1, 2], "b": ["x", "y"]})
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka"), ("b",): ColumnKey(keys.new(b"kb"), b"kb")}
    old = FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=plaintext_footer)
    new = FileEncryption(keys.new(b"new"), b"new", {("b",): ColumnEncryption.PLAINTEXT})
    rekey_source(MemorySource(encrypted(_written(table), old)), sink, keys, new)

    footer = read_footer(MemorySource(sink.contents()), keys)
    assert footer.metadata.encryption_algorithm is None
    assert footer.metadata.footer_signing_key_metadata is None
    for chunk in footer.chunks[0]:
        assert chunk.encrypted_column_metadata is None
        assert chunk.meta_data is not None
    assert [column.encryption for column in footer.columns] == [
        ColumnEncryption.FOOTER_KEY,
        ColumnEncryption.PLAINTEXT,
    ]
    assert pq.read_table(io.BytesIO(decrypted(sink.contents(), keys))).equals(table)


def test_row_groups_say_where_they_are_and_how_large() -> None:
    dek = SecretBytes.random(128)
    data = encrypted(_written(_table(), row_group_size=250), FileEncryption(dek))
    footer = read_envelope(MemorySource(data)).open(dek)
    offset = 4
    for ordinal, row_group in enumerate(footer.row_groups):
        assert row_group.ordinal == ordinal
        assert row_group.file_offset == offset
        assert row_group.total_compressed_size is not None
        offset += row_group.total_compressed_size
    assert offset == footer.envelope.footer_offset


def test_fields_of_newer_writers_survive() -> None:
    data = _written(pa.table({"a": [1]}))
    metadata, _ = FileMetaData.read(data[_footer_offset(data) : -8])
    unknown = (WireType.LIST, ThriftList(WireType.I64, [1, 2]))
    metadata.struct.set_entry(99, unknown)
    row_groups = metadata.row_groups
    chunks = row_groups[0].columns
    assert chunks[0].meta_data is not None
    for record in (row_groups[0], chunks[0], chunks[0].meta_data):
        record.struct.set_entry(77, unknown)
    serialised = metadata.serialise()
    changed = data[: _footer_offset(data)] + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"
    keys = NamedKeys()
    for plaintext_footer in (False, True):
        encryption = FileEncryption(keys.new(b"kf"), b"kf", plaintext_footer=plaintext_footer)
        back = decrypted(encrypted(changed, encryption), keys)
        footer = read_footer(MemorySource(back), None)
        # A plaintext footer must not show fields that we do not know; the column's own metadata is encrypted.
        for record, field_id in ((footer.metadata, 99), (footer.row_groups[0], 77), (footer.chunks[0][0], 77)):
            assert record.struct.fields.get(field_id) == (None if plaintext_footer else unknown)
        assert footer.chunks[0][0].meta_data.struct.fields[77] == unknown  # type: ignore[union-attr]


# --- Refusals ----------------------------------------------------------------------------------------------


def _refused(data: bytes, encryption: FileEncryption, error: type[KeytoolsError], match: str) -> None:
    sink = MemorySink()
    with pytest.raises(error, match=match):
        encrypt_source(MemorySource(data), sink, encryption)
    assert sink.reserved_bytes is None and sink.written_bytes == 0


def test_the_invocation_limit_is_checked_before_anything_is_written() -> None:
    dek, data = SecretBytes.random(128), _written(pa.table({"a": [1], "b": [2]}))
    # Two columns, each with a dictionary page and a data page, and the footer.
    _refused(data, FileEncryption(dek, invocation_limit=8), FormatLimitError, "no key may encrypt more than 8")
    assert encrypted(data, FileEncryption(dek, invocation_limit=9))
    # The same key under two names is one key.
    columns = {("a",): ColumnKey(SecretBytes(dek.reveal()), b"a")}
    _refused(data, FileEncryption(dek, columns=columns, invocation_limit=8), FormatLimitError, "no key")
    columns = {("a",): ColumnKey(SecretBytes.random(128), b"a")}
    assert encrypted(data, FileEncryption(dek, columns=columns, invocation_limit=5))
    # The metadata of a column with its own key is a module, too.
    plaintext = ColumnEncryption.PLAINTEXT
    encryption = FileEncryption(dek, columns=columns, unlisted_columns=plaintext, invocation_limit=4)
    _refused(data, encryption, FormatLimitError, "would encrypt 5 modules")


def test_a_key_for_a_column_that_is_not_there_is_refused() -> None:
    columns = {("nope", "x"): ColumnKey(SecretBytes.random(128))}
    encryption = FileEncryption(SecretBytes.random(128), columns=columns)
    _refused(_written(pa.table({"a": [1]})), encryption, ConfigurationError, "'nope.x'")


def test_a_plaintext_file_is_not_decrypted_or_rekeyed() -> None:
    data, keys = _written(pa.table({"a": [1]})), NamedKeys()
    with pytest.raises(NotEncryptedError):
        decrypt_source(MemorySource(data), MemorySink(), keys)
    with pytest.raises(NotEncryptedError, match="encrypt"):
        rekey_source(MemorySource(data), MemorySink(), keys, FileEncryption(SecretBytes.random(128)))


@pytest.mark.parametrize("of", ["columns", "row groups"])
def test_no_file_has_more_columns_or_row_groups_than_readers_count(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aad, "MAX_COUNT", 5)

    def data(count: int) -> bytes:
        columns, row_groups = (count, 1) if of == "columns" else (1, count)
        table = pa.table({f"c{number}": list(range(row_groups)) for number in range(columns)})
        return _written(table, row_group_size=1)

    encrypted(data(5), FileEncryption(SecretBytes.random(128)))
    _refused(
        data(6), FileEncryption(SecretBytes.random(128)), FormatLimitError, "at most 5 row groups and 5 columns"
    )


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_not_encrypted_again(plaintext_footer: bool) -> None:
    keys, sink = NamedKeys(), MemorySink()
    data = encrypted(_written(_table(10)), FileEncryption(keys.new(b"kf"), plaintext_footer=plaintext_footer))
    with pytest.raises(AlreadyEncryptedError, match="encrypted already") as caught:
        encrypt_source(MemorySource(data), sink, FileEncryption(keys.new(b"new")))
    assert caught.value.hint is not None and "Use rekey" in caught.value.hint
    assert sink.reserved_bytes is None


def test_a_signed_file_without_encrypted_columns_says_where_its_pages_are() -> None:
    """Its pages are shorter than those in its encrypted source."""
    keys, sink, table = NamedKeys(), MemorySink(), _table(100)
    data = encrypted(_written(table, row_group_size=30), FileEncryption(keys.new(b"kf"), b"kf"))
    encryption = FileEncryption(
        keys.new(b"new"), b"new", unlisted_columns=ColumnEncryption.PLAINTEXT, plaintext_footer=True
    )
    rekey_source(MemorySource(data), sink, keys, encryption)
    assert pq.read_table(io.BytesIO(sink.contents())).equals(table)
    assert pq.read_table(io.BytesIO(decrypted(sink.contents(), keys))).equals(table)


def test_columns_whose_keys_are_missing_are_named() -> None:
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka"), ("b", "x"): ColumnKey(keys.new(b"kb"), b"kb")}
    table = pa.table({"a": [1], "b": [{"x": 2}], "c": [3]})
    data = encrypted(_written(table), FileEncryption(keys.new(b"kf"), b"kf", columns))
    del keys.deks[b"kb"]
    with pytest.raises(ColumnAccessDeniedError, match=r"'b\.x'") as caught:
        decrypted(data, keys)
    assert caught.value.columns == ("b.x",)


def test_a_summary_file_is_refused() -> None:
    stream = io.BytesIO()
    metadata = pq.read_metadata(io.BytesIO(_written(pa.table({"a": [1]}))))
    metadata.set_file_path("part-0.parquet")
    metadata.write_metadata_file(stream)
    _refused(stream.getvalue(), FileEncryption(SecretBytes.random(128)), ParquetFormatError, "another file")


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_damaged_page_is_an_error_and_no_fresh_crc(is_encrypted: bool) -> None:
    values = pa.table({"a": pa.array(range(1_000), pa.int64())})
    data = bytearray(_written(values, write_page_checksum=True, use_dictionary=False, compression="none"))
    if not is_encrypted:
        data[2_000] ^= 1
        _refused_late(bytes(data), FileEncryption(SecretBytes.random(128)))
        return
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", algorithm=Algorithm.AES_GCM_CTR_V1)
    stored = bytearray(encrypted(bytes(data), encryption))
    stored[2_000] ^= 1
    with pytest.raises(ParquetFormatError, match="damaged"):
        decrypted(bytes(stored), keys)
    with pytest.raises(ParquetFormatError, match="damaged"):
        rekey_source(MemorySource(stored), MemorySink(), keys, FileEncryption(SecretBytes.random(128)))


def _refused_late(data: bytes, encryption: FileEncryption) -> None:
    with pytest.raises(ParquetFormatError, match="damaged"):
        encrypt_source(MemorySource(data), MemorySink(), encryption)


def test_a_flipped_bit_anywhere_makes_decryption_fail() -> None:
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka")}
    table = pa.table({"a": list(range(50)), "b": [str(i % 5) for i in range(50)]})
    for plaintext_footer in (False, True):
        encryption = FileEncryption(
            keys.new(b"kf"), b"kf", columns, plaintext_footer=plaintext_footer, aad_prefix=b"prefix"
        )
        data = encrypted(_written(table, write_page_index=True), encryption)
        numbers = random.Random(5)
        for position in sorted(numbers.sample(range(len(data)), 400)):
            altered = bytearray(data)
            altered[position] ^= 1 << numbers.randrange(8)
            with pytest.raises(KeytoolsError):
                decrypted(bytes(altered), keys)


# --- Files built by hand -----------------------------------------------------------------------------------


def _file_of_pages(pages_per_column: int, columns: int) -> bytes:
    """Return a file of empty pages, each with a header of 17 bytes."""
    header = PageHeader()
    header.type, header.uncompressed_page_size, header.compressed_page_size = 0, 0, 0
    inner = Struct({1: (WireType.I32, 0), 2: (WireType.I32, 0), 3: (WireType.I32, 3), 4: (WireType.I32, 3)})
    header.struct.set_entry(5, (WireType.STRUCT, inner))
    chunk_bytes = header.serialise() * pages_per_column
    chunks = []
    for number in range(columns):
        metadata = ColumnMetaData(Struct({2: (WireType.LIST, ThriftList(WireType.I32, [0]))}))
        metadata.type, metadata.path_in_schema, metadata.codec, metadata.num_values = 1, [f"c{number}"], 0, 0
        metadata.total_uncompressed_size = metadata.total_compressed_size = len(chunk_bytes)
        metadata.data_page_offset = 4 + number * len(chunk_bytes)
        chunk = ColumnChunk()
        chunk.file_offset, chunk.meta_data = 0, metadata
        chunks.append(chunk)
    row_group = RowGroup()
    row_group.columns, row_group.total_byte_size, row_group.num_rows = chunks, len(chunk_bytes) * columns, 0
    schema = [SchemaElement()]
    schema[0].name, schema[0].num_children = "root", columns
    for number in range(columns):
        element = SchemaElement()
        element.type, element.name = 1, f"c{number}"
        schema.append(element)
    footer = FileMetaData()
    footer.version, footer.schema, footer.num_rows, footer.row_groups = 1, schema, 0, [row_group]
    serialised = footer.serialise()
    return b"PAR1" + chunk_bytes * columns + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"


def test_all_modules_of_a_file_have_nonces_of_their_own() -> None:
    """Tens of thousands of pages, and a million in a soak."""
    dek, pages, columns = SecretBytes.random(128), *((32_000, 16) if SOAK else (8_000, 2))
    stored = encrypted(_file_of_pages(pages, columns), FileEncryption(dek))
    footer = read_envelope(MemorySource(stored)).open(dek)
    nonces = set()
    modules, offset = 0, 4
    while offset < footer.envelope.footer_offset:
        nonces.add(stored[offset + 4 : offset + 16])
        modules += 1
        offset += 4 + int.from_bytes(stored[offset : offset + 4], "little")
    assert modules == len(nonces) == 2 * pages * columns


def _with_page_type(data: bytes, page: int, page_type: int) -> bytes:
    """Return a file of empty pages with one page of another type."""
    changed = bytearray(data)
    changed[4 + 17 * page + 1] = 2 * page_type
    return bytes(changed)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("page", [0, 3, 9])
def test_index_pages_come_back(algorithm: Algorithm, page: int) -> None:
    data, keys = _with_page_type(_file_of_pages(10, 2), page, PageHeader.INDEX_PAGE), NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", algorithm=algorithm)
    stored = encrypted(data, encryption)
    assert decrypted(stored, keys)[: 4 + 17 * 20] == data[: 4 + 17 * 20]
    # Page ordinals count only data pages.
    cipher = ModuleCipher(encryption.footer_dek, encryption.file_aad)
    length = 17 + 32 + (32 if algorithm is Algorithm.AES_GCM_V1 else 16)
    for position in set(range(10)) - {page}:
        start = 4 + length * position
        place = ModulePlace(ModuleType.DATA_PAGE_HEADER, 0, 0, position - (position > page))
        assert cipher.decrypt(stored[start : start + 17 + 32], place)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_dictionary_page_is_the_first_page_or_an_error(algorithm: Algorithm) -> None:
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", algorithm=algorithm)
    data = _with_page_type(_file_of_pages(10, 1), 0, PageHeader.DICTIONARY_PAGE)
    stored = encrypted(data, encryption)
    # This file's writer named no dictionary page, like early writers; ours does, since readers need it.
    metadata = read_footer(MemorySource(stored), keys).chunks[0][0].meta_data
    assert metadata is not None
    page_framing = 32 if algorithm is Algorithm.AES_GCM_V1 else 16
    assert metadata.dictionary_page_offset == 4
    assert metadata.data_page_offset == 4 + 17 + 32 + page_framing
    assert decrypted(stored, keys)[: 4 + 170] == data[: 4 + 170]
    data = _with_page_type(_file_of_pages(10, 1), 1, PageHeader.DICTIONARY_PAGE)
    _refused(data, encryption, ParquetFormatError, "not the first page")


def test_a_page_that_would_be_too_long_is_refused() -> None:
    header = PageHeader()
    header.type, header.uncompressed_page_size, header.compressed_page_size = 0, 0, 2**31 - 10

    class Huge(MemorySource):
        def read_at(self, offset: int, length: int) -> memoryview:
            return memoryview(header.serialise().ljust(length, b"\0"))

    cipher = ChunkCipher(ModuleCipher(SecretBytes.random(128), b""), Algorithm.AES_GCM_V1, 0, 0)
    with pytest.raises(FormatLimitError, match="more than 2147483647"):
        walk_chunk(Huge(b""), 0, 2**32, limit=2**32, reader=None, writer=cipher, expects_dictionary_page=False)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("data_page_offset", 3, "are not before"),
        ("data_page_offset", 10**9, "are not before"),
        ("data_page_offset", -5, "are not before"),
        ("total_compressed_size", 10**9, "are not before"),
        ("total_compressed_size", -1, "are not before"),
        ("total_compressed_size", 10, "ends before it is complete"),
        ("total_compressed_size", 200, "overlaps"),
    ],
)
def test_chunks_that_lie_where_they_cannot_are_refused(field: str, value: int, reason: str) -> None:
    data = _file_of_pages(10, 2)
    metadata, _ = FileMetaData.read(data[_footer_offset(data) : -8])
    column = metadata.row_groups[0].columns[0].meta_data
    assert column is not None
    setattr(column, field, value)
    serialised = metadata.serialise()
    changed = data[: _footer_offset(data)] + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"
    _refused(changed, FileEncryption(SecretBytes.random(128)), ParquetFormatError, reason)


def test_chunks_out_of_order_with_gaps_between_them_are_put_together() -> None:
    """Early writers leave copies of column metadata in the gaps: they must not reach the output."""
    table = pa.table({"a": pa.array(range(100)), "b": pa.array(range(100, 200))})
    data = _written(table, use_dictionary=False, compression="none")
    metadata, _ = FileMetaData.read(data[_footer_offset(data) : -8])
    parts = [b"PAR1"]
    offset = 4
    for chunk in reversed(metadata.row_groups[0].columns):
        column = chunk.meta_data
        assert column is not None
        start = column.data_page_offset
        pages = data[start : start + column.total_compressed_size]
        parts += [b"GAP!" * 5, pages]
        column.data_page_offset = offset + 20
        offset += 20 + len(pages)
        chunk.file_offset = offset  # The offset of a copy of the metadata.
        parts.append(b"COPY" * 9)
        offset += 36
    serialised = metadata.serialise()
    changed = b"".join([*parts, serialised, len(serialised).to_bytes(4, "little"), b"PAR1"])
    assert pq.read_table(io.BytesIO(changed)).equals(table)
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", {("a",): ColumnEncryption.PLAINTEXT})
    stored = encrypted(changed, encryption)
    back = decrypted(stored, keys)
    assert b"GAP!" not in stored and b"COPY" not in stored and b"COPY" not in back
    assert pq.read_table(io.BytesIO(back)).equals(table)
    assert all(chunk.file_offset == 0 for chunk in read_footer(MemorySource(back), None).chunks[0])


# --- Some row groups ---


def test_only_the_row_groups_wanted_are_decrypted() -> None:
    table, keys = _table(), NamedKeys()
    written = _written(table, row_group_size=250, write_page_index=True, compression="none")
    data = encrypted(written, FileEncryption(keys.new(b"kf"), b"kf"))
    footer = read_footer(MemorySource(data), keys)
    source, sink = MemorySource(data), MemorySink(takes_any_order=False)
    decrypt_columns(source, sink, footer, {}, row_group_ordinals=[2, 0])
    read = pq.read_table(io.BytesIO(sink.contents()))
    assert read.equals(pa.concat_tables([table.slice(500, 250), table.slice(0, 250)]))
    assert read.schema.metadata == {b"owner": b"tests"}
    # Nothing of the other row groups was touched.
    unwanted = footer.chunks[1][0].meta_data
    assert unwanted is not None
    start, end = unwanted.data_page_offset, unwanted.data_page_offset + unwanted.total_compressed_size
    assert all(offset + length <= start or offset >= end for offset, length in source.reads)
