"""Column chunks laid out again: where the footer says that everything lies, and Bloom filters that lie."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, NamedKeys, decrypted, encrypted

from parquet_keytools.encryption.chunk_rewrite import ChunkRewrite, PagesMemory
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.file_rewriter import in_order
from parquet_keytools.encryption.footer import open_footer, read_envelope
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import BloomFilterHeader, ColumnMetaData, FileMetaData


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("duckdb") / "file.parquet"
    # DuckDB writes Bloom filters for columns with dictionaries.
    duckdb.sql(
        f"copy (select i % 10 as a, 'x' || (i % 100) as b from range(2000) t(i)) to '{path}' (format parquet)"
    )
    return path.read_bytes()


def footer_of(data: bytes) -> FileMetaData:
    footer, _ = FileMetaData.read(data[-8 - int.from_bytes(data[-8:-4], "little") : -8])
    return footer


def columns_of(footer: FileMetaData) -> list[ColumnMetaData]:
    return [
        chunk.meta_data for group in footer.row_groups for chunk in group.columns if chunk.meta_data is not None
    ]


def with_footer(data: bytes, change: Callable[[ColumnMetaData], object]) -> bytes:
    footer = footer_of(data)
    for column in columns_of(footer):
        change(column)
    serialised = footer.serialise()
    body = data[: -8 - int.from_bytes(data[-8:-4], "little")]
    return body + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"


def without_length(column: ColumnMetaData) -> None:
    column.bloom_filter_length = None


PLACES = (
    "data_page_offset",
    "dictionary_page_offset",
    "total_compressed_size",
    "bloom_filter_offset",
    "bloom_filter_length",
)


def places(columns: list[ColumnMetaData]) -> list[list[Any]]:
    return [[getattr(column, name) for name in PLACES] for column in columns]


@pytest.mark.parametrize("copied", [(), ("a",), ("a", "b")])
@pytest.mark.parametrize("remembers", [True, False])
def test_everything_lies_where_it_lay(
    file: bytes, copied: tuple[str, ...], remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted and decrypted, or copied; also where pages are found again, as there are too many to remember."""
    if not remembers:
        monkeypatch.setattr(PagesMemory, "take", lambda *_: False)
    keys = NamedKeys()
    columns = {(name,): ColumnEncryption.PLAINTEXT for name in copied}
    back = decrypted(encrypted(file, FileEncryption(keys.new(b"kf"), b"kf", columns)), keys)
    found = columns_of(footer_of(file))
    assert all(column.bloom_filter_offset and column.bloom_filter_length for column in found)
    assert all(column.dictionary_page_offset for column in found)
    assert places(columns_of(footer_of(back))) == places(found)
    assert pq.read_table(io.BytesIO(back)).equals(pq.read_table(io.BytesIO(file)))


@pytest.mark.parametrize(
    ("offset_index", "column_index", "order"),
    [
        (10, 40, [RegionKind.COLUMN_INDEX, RegionKind.PAGES, RegionKind.OFFSET_INDEX]),
        (200, 40, [RegionKind.COLUMN_INDEX, RegionKind.PAGES, RegionKind.OFFSET_INDEX]),
        (200, 300, [RegionKind.PAGES, RegionKind.OFFSET_INDEX, RegionKind.COLUMN_INDEX]),
    ],
)
def test_an_offset_index_is_laid_out_after_its_pages(
    offset_index: int, column_index: int, order: list[RegionKind]
) -> None:
    """It says where they are in the output; all else is read in the order of the source."""
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), stream, use_dictionary=False)
    (row_group,) = footer_of(stream.getvalue()).row_groups
    (chunk,) = row_group.columns
    assert chunk.meta_data is not None
    chunk.meta_data.data_page_offset, chunk.meta_data.total_compressed_size = 100, 50
    chunk.offset_index_offset, chunk.offset_index_length = offset_index, 20
    chunk.column_index_offset, chunk.column_index_length = column_index, 10
    rewrite = ChunkRewrite(chunk, chunk.meta_data, None, None)
    found = in_order(MemorySource(bytes(1_000)), [(row_group, [rewrite])], 500, None)
    assert [region.kind for region, _ in found] == order


def test_only_chunks_with_a_dictionary_page_say_that_they_have_one() -> None:
    """Readers take the type of the first page, and with it its AAD, from there."""
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": ["x"] * 100, "b": list(range(100))}), stream, use_dictionary=["a"])
    keys = NamedKeys()
    stored = encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf"))
    columns = columns_of(open_footer(read_envelope(MemorySource(stored)), keys, None).metadata)
    assert [column.dictionary_page_offset is None for column in columns] == [False, True]
    assert places(columns_of(footer_of(decrypted(stored, keys)))) == places(
        columns_of(footer_of(stream.getvalue()))
    )


def test_the_page_that_is_damaged_is_named() -> None:
    """Of the pages of many chunks, which are decrypted in one go."""
    stream = io.BytesIO()
    table = pa.table({"a": list(range(1_000)), "b": list(range(1_000)), "c": list(range(1_000))})
    pq.write_table(table, stream, use_dictionary=False, data_page_size=1_000, write_batch_size=100)
    keys = NamedKeys()
    stored = encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf"))
    columns = columns_of(open_footer(read_envelope(MemorySource(stored)), keys, None).metadata)
    for ordinal, column in enumerate(columns):
        damaged = bytearray(stored)
        damaged[column.data_page_offset + column.total_compressed_size - 1] ^= 1
        with pytest.raises(DecryptionError) as caught:
            decrypted(bytes(damaged), keys)
        error = caught.value
        assert (error.row_group_ordinal, error.column_ordinal, error.module_type) == (0, ordinal, "data page")
        assert error.page_ordinal is not None and error.page_ordinal > 3


def test_pages_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[bool] = []
    take = PagesMemory.take

    def noted(self: PagesMemory, pages: Any) -> bool:
        before = self.left_bytes
        outcomes.append(take(self, pages))
        assert (self.left_bytes < before) == outcomes[-1] and self.left_bytes >= 0
        return outcomes[-1]

    monkeypatch.setattr(PagesMemory, "take", noted)
    monkeypatch.setattr(PagesMemory.__init__, "__defaults__", (5_400,))
    stream = io.BytesIO()
    pq.write_table(pa.table({name: list(range(10)) for name in "abcdefgh"}), stream)
    keys = NamedKeys()
    back = decrypted(encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf")), keys)
    assert outcomes == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4
    assert pq.read_table(io.BytesIO(back)).equals(pq.read_table(stream))


def test_an_encrypted_bloom_filter_says_how_long_it_is(file: bytes) -> None:
    """It is two modules, which readers must tell apart; plaintext that is copied stays as it is."""
    keys = NamedKeys()
    source = with_footer(file, without_length)
    encryption = FileEncryption(keys.new(b"kf"), b"kf", {("a",): ColumnEncryption.PLAINTEXT})
    envelope = read_envelope(MemorySource(encrypted(source, encryption)))
    written = columns_of(open_footer(envelope, keys, None).metadata)
    lengths = [(column.path_in_schema[0], column.bloom_filter_length) for column in written]
    assert ("a", None) in lengths and all(length for name, length in lengths if name == "b")


def with_bloom_header(data: bytes, num_bytes: int) -> bytes:
    """Say another length in the header of the last Bloom filter; it takes as many bytes."""
    offset = columns_of(footer_of(data))[-1].bloom_filter_offset
    assert offset is not None
    header, length = BloomFilterHeader.read(data[offset:])
    header.num_bytes = num_bytes
    serialised = header.serialise()
    assert len(serialised) == length
    return data[:offset] + serialised + data[offset + length :]


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize(("num_bytes", "reason"), [(-100, "has -100 bytes"), (8_000, "and its place")])
def test_a_bloom_filter_that_says_another_length_is_refused(
    file: bytes, has_length: bool, num_bytes: int, reason: str
) -> None:
    """Else what lies behind it, which may be of another column, would become its own."""
    source = with_bloom_header(file if has_length else with_footer(file, without_length), num_bytes)
    with pytest.raises(ParquetFormatError, match=reason) as caught:
        encrypted(source, FileEncryption(NamedKeys().new(b"kf"), b"kf"))
    assert caught.value.path == "memory.parquet"
