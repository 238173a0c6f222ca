"""Column chunks with a new layout: the offsets in the footer, and Bloom filters with wrong lengths."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, NamedKeys, decrypted, encrypted

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.file_encryption import FileEncryption
from parquet_keytools.encryption.file_rewriter import ChunkRewrite, PagesMemory, in_order
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.encryption.module_cipher import ChunkCipher
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import DecryptionError, FormatLimitError, ParquetFormatError
from parquet_keytools.format.file_layout import Region, RegionKind, places_of
from parquet_keytools.format.structs import (
    BloomFilterHeader,
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    OffsetIndex,
    PageHeader,
)


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


def body(data: bytes) -> bytes:
    return data[: -8 - int.from_bytes(data[-8:-4], "little")]


def with_footer(data: bytes, change: Callable[[ColumnMetaData], object]) -> bytes:
    footer = footer_of(data)
    for column in columns_of(footer):
        change(column)
    serialised = footer.serialise()
    return body(data) + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"


def without_length(column: ColumnMetaData) -> None:
    column.bloom_filter_length = None


PLACES = (
    "data_page_offset",
    "dictionary_page_offset",
    "index_page_offset",
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
    """Encrypted and decrypted, or copied; also where pages are read again, as there are too many to remember."""
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
        (10, 40, [RegionKind.PAGES, RegionKind.OFFSET_INDEX, RegionKind.COLUMN_INDEX]),
        (200, 40, [RegionKind.PAGES, RegionKind.OFFSET_INDEX, RegionKind.COLUMN_INDEX]),
        (200, 300, [RegionKind.PAGES, RegionKind.OFFSET_INDEX, RegionKind.COLUMN_INDEX]),
    ],
)
def test_page_indexes_are_laid_out_after_their_pages(
    offset_index: int, column_index: int, order: list[RegionKind]
) -> None:
    """They are compared with the pages; everything else is read in the order of the source."""
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), stream, use_dictionary=False)
    (row_group,) = footer_of(stream.getvalue()).row_groups
    (chunk,) = row_group.columns
    assert chunk.meta_data is not None
    chunk.meta_data.data_page_offset, chunk.meta_data.total_compressed_size = 100, 50
    chunk.offset_index_offset, chunk.offset_index_length = offset_index, 20
    chunk.column_index_offset, chunk.column_index_length = column_index, 10
    rewrite = ChunkRewrite(chunk.struct, chunk.meta_data.struct, None, None)
    found = in_order([(row_group, [rewrite])], 500, None)
    assert [region.kind for region in found] == order


def test_only_chunks_with_a_dictionary_page_say_that_they_have_one() -> None:
    """Readers take the type of the first page, and so its AAD, from there."""
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": ["x"] * 100, "b": list(range(100))}), stream, use_dictionary=["a"])
    keys = NamedKeys()
    stored = encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf"))
    columns = columns_of(read_footer(MemorySource(stored), keys).metadata)
    assert [column.dictionary_page_offset is None for column in columns] == [False, True]
    assert places(columns_of(footer_of(decrypted(stored, keys)))) == places(
        columns_of(footer_of(stream.getvalue()))
    )


def test_the_page_that_is_damaged_is_named() -> None:
    """One of the pages of many chunks, which are decrypted together."""
    stream = io.BytesIO()
    table = pa.table({"a": list(range(1_000)), "b": list(range(1_000)), "c": list(range(1_000))})
    pq.write_table(table, stream, use_dictionary=False, data_page_size=1_000, write_batch_size=100)
    keys = NamedKeys()
    stored = encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf"))
    columns = columns_of(read_footer(MemorySource(stored), keys).metadata)
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
    """It is two modules, which readers must distinguish; plaintext that is copied stays as it is."""
    keys = NamedKeys()
    source = with_footer(file, without_length)
    encryption = FileEncryption(keys.new(b"kf"), b"kf", {("a",): ColumnEncryption.PLAINTEXT})
    written = columns_of(read_footer(MemorySource(encrypted(source, encryption)), keys).metadata)
    lengths = [(column.path_in_schema[0], column.bloom_filter_length) for column in written]
    assert ("a", None) in lengths and all(length for name, length in lengths if name == "b")


def with_bloom_header(data: bytes, num_bytes: int) -> bytes:
    """Change the length in the header of the last Bloom filter; the header keeps its size."""
    offset = columns_of(footer_of(data))[-1].bloom_filter_offset
    assert offset is not None
    header, length = BloomFilterHeader.read(data[offset:])
    header.num_bytes = num_bytes
    serialised = header.serialise()
    assert len(serialised) == length
    return data[:offset] + serialised + data[offset + length :]


@pytest.mark.parametrize(
    ("num_bytes", "reason", "has_length"),
    [
        (-100, "has -100 bytes", True),
        (-100, "has -100 bytes", False),
        (8_000, "and its place", True),
        (8_000, "and its place", False),
        # Without a stated length, the length is unknown.
        (64, "and its place", True),
    ],
)
def test_a_bloom_filter_that_says_another_length_is_refused(
    file: bytes, num_bytes: int, reason: str, has_length: bool
) -> None:
    """Otherwise, the bytes behind it, perhaps of another column, would become part of it."""
    source = with_bloom_header(file if has_length else with_footer(file, without_length), num_bytes)
    with pytest.raises(ParquetFormatError, match=reason) as caught:
        encrypted(source, FileEncryption(NamedKeys().new(b"kf"), b"kf"))
    assert caught.value.path == "memory.parquet"


# --- The metadata of an encrypted chunk besides its pages ---


@pytest.fixture(scope="module")
def indexed() -> bytes:
    """Chunks with a dictionary and without, of several pages each, with page index and Bloom filters."""
    stream = io.BytesIO()
    table = pa.table({"a": [f"text {i % 9}" for i in range(200)], "b": list(range(200))})
    pq.write_table(
        table,
        stream,
        use_dictionary=["a"],
        data_page_size=100,
        write_batch_size=20,
        write_page_index=True,
        bloom_filter_options={"a": {"ndv": 9}, "b": {"ndv": 20}},
    )
    return stream.getvalue()


def readers(stored: bytes, keys: NamedKeys) -> list[tuple[ColumnChunk, ColumnMetaData, ChunkCipher]]:
    footer = read_footer(MemorySource(stored), keys)
    found = []
    for ordinal, (column, chunk) in enumerate(zip(footer.columns, footer.chunks[0], strict=True)):
        cipher = footer.cipher_of(column, None)
        assert cipher is not None and chunk.meta_data is not None
        found.append((chunk, chunk.meta_data, ChunkCipher(cipher, footer.algorithm, 0, ordinal)))
    return found


def test_an_encrypted_index_names_the_encrypted_pages(indexed: bytes) -> None:
    """Readers that search for a value use these to start reading in the middle of a chunk."""
    keys = NamedKeys()
    stored = encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf"))
    for chunk, metadata, reader in readers(stored, keys):
        assert chunk.offset_index_offset and chunk.offset_index_length
        module = stored[chunk.offset_index_offset :][: chunk.offset_index_length]
        index, _ = OffsetIndex.read(reader.decrypt(module, ModuleType.OFFSET_INDEX))
        at = metadata.data_page_offset
        assert len(index.page_locations) > 3
        for ordinal, location in enumerate(index.page_locations):
            length = 4 + int.from_bytes(stored[at : at + 4], "little")
            header, _ = PageHeader.read(
                reader.cipher.decrypt(stored[at : at + length], reader.header_place(ordinal))
            )
            assert (location.offset, location.compressed_page_size) == (at, length + header.compressed_page_size)
            at += location.compressed_page_size
        assert chunk.column_index_offset and chunk.column_index_length
        module = stored[chunk.column_index_offset :][: chunk.column_index_length]
        assert reader.decrypt(module, ModuleType.COLUMN_INDEX)


def test_every_module_is_counted(indexed: bytes) -> None:
    """A key may encrypt a limited number of modules: pages, indexes, Bloom filters and the footer."""
    keys = NamedKeys()
    stored = encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf"))
    modules, offset = 1, 4
    footer_offset = read_envelope(MemorySource(stored)).footer_offset
    while offset < footer_offset:
        offset += 4 + int.from_bytes(stored[offset : offset + 4], "little")
        modules += 1
    assert encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf", invocation_limit=modules))
    with pytest.raises(FormatLimitError, match=f"would encrypt {modules} modules"):
        encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf", invocation_limit=modules - 1))


def _changed_offset(index: OffsetIndex) -> bytes:
    index.page_locations[1].offset += 1
    return index.serialise()


def _changed_length(index: OffsetIndex) -> bytes:
    index.page_locations[1].compressed_page_size += 1
    return index.serialise()


def _changed_rows(index: OffsetIndex) -> bytes:
    index.page_locations[1].first_row_index += 1
    return index.serialise()


@pytest.mark.parametrize("change", [_changed_offset, _changed_length, _changed_rows, lambda _: None])
def test_a_page_index_that_is_wrong_is_dropped_with_a_warning(indexed: bytes, change: Any) -> None:
    """`verify` would report a copy of it as wrong; values can be read without it."""
    chunk = footer_of(indexed).row_groups[0].columns[0]
    is_column_index = change(OffsetIndex.read(indexed[chunk.offset_index_offset or 0 :])[0]) is None
    offset = chunk.column_index_offset if is_column_index else chunk.offset_index_offset
    assert offset is not None
    data = indexed[offset:]
    if is_column_index:
        # The number of elements of its first list.
        new, length = bytes([data[0], data[1] ^ 0x10]), 2
    else:
        index, length = OffsetIndex.read(data)
        new = change(index)
        assert len(new) == length
    source = indexed[:offset] + new + indexed[offset + length :]
    keys = NamedKeys()
    title = "column index" if is_column_index else "offset index"
    with pytest.warns(
        UserWarning, match=f"memory.parquet: page indexes .* left out .* the {title} at byte {offset}: "
    ):
        stored = encrypted(source, FileEncryption(keys.new(b"kf"), b"kf"))
    left = [
        (chunk.column_index_offset is None, chunk.offset_index_offset is None)
        for row_group in read_footer(MemorySource(stored), keys).metadata.row_groups
        for chunk in row_group.columns
    ]
    assert left[0] == (is_column_index, not is_column_index)
    assert set(left[1:]) == {(False, False)}
    assert pq.read_table(io.BytesIO(decrypted(stored, keys))).equals(pq.read_table(io.BytesIO(indexed)))


@pytest.mark.parametrize("kind", [RegionKind.COLUMN_INDEX, RegionKind.BLOOM_FILTER])
@pytest.mark.parametrize("length", [0, 3, 27])
def test_a_place_that_no_module_fits_into(indexed: bytes, kind: RegionKind, length: int) -> None:
    keys = NamedKeys()
    stored = encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf"))
    chunk, metadata, reader = readers(stored, keys)[0]
    offset = {
        RegionKind.COLUMN_INDEX: chunk.column_index_offset,
        RegionKind.BLOOM_FILTER: metadata.bloom_filter_offset,
    }[kind]
    assert offset is not None
    region = Region(kind, 0, 0, offset, length, offset + length)
    rewrite = ChunkRewrite(chunk.struct, metadata.struct, reader, None)
    rewrite.places = places_of(metadata)
    with pytest.raises(DecryptionError, match=r"too (short|few)|its length field says"):
        rewrite.lay_out(MemorySource(stored), region, 4, PagesMemory())


@pytest.mark.parametrize("new_length", [0, 27, 1 << 31])
@pytest.mark.parametrize("is_bitset", [False, True])
def test_a_bloom_filter_with_another_length_field_is_refused(
    indexed: bytes, is_bitset: bool, new_length: int
) -> None:
    keys = NamedKeys()
    stored = bytearray(encrypted(indexed, FileEncryption(keys.new(b"kf"), b"kf")))
    _, metadata, _ = readers(stored, keys)[0]
    offset = metadata.bloom_filter_offset
    assert offset is not None
    if is_bitset:
        offset += 4 + int.from_bytes(stored[offset : offset + 4], "little")
    stored[offset : offset + 4] = new_length.to_bytes(4, "little")
    with pytest.raises(DecryptionError) as caught:
        decrypted(bytes(stored), keys)
    assert caught.value.module_type == ("bloom filter bitset" if is_bitset else "bloom filter header")


# --- Statements of odd writers ---


@pytest.mark.parametrize(
    "places",
    [
        {"dictionary_page_offset": 0, "index_page_offset": 0},
        {"dictionary_page_offset": 0},
        {},
    ],
)
def test_a_page_offset_of_zero_is_none(indexed: bytes, places: dict[str, int]) -> None:
    """Readers of an encrypted chunk take the type of its first page from there; copies state the same."""

    def change(column: ColumnMetaData) -> None:
        if column.path_in_schema == ["b"]:
            for name, value in places.items():
                setattr(column, name, value)

    keys, source = NamedKeys(), with_footer(indexed, change)
    stored = encrypted(source, FileEncryption(keys.new(b"kf"), b"kf"))
    assert readers(stored, keys)[1][1].dictionary_page_offset is None
    plaintext = {("b",): ColumnEncryption.PLAINTEXT}
    copied = encrypted(source, FileEncryption(keys.new(b"kf"), b"kf", plaintext))
    column = columns_of(read_footer(MemorySource(copied), keys).metadata)[1]
    assert column.dictionary_page_offset is None and column.index_page_offset is None


@pytest.mark.parametrize("copied", [False, True])
def test_places_that_name_no_page(indexed: bytes, copied: bool) -> None:
    """Afterwards only the first page and the first data page are named; 0 names no data page."""
    footer = footer_of(indexed)
    (column, *_) = columns_of(footer)
    start, end = column.dictionary_page_offset, column.data_page_offset
    assert start is not None and start + 1 < end
    keys = NamedKeys()
    plaintext = {("a",): ColumnEncryption.PLAINTEXT} if copied else {}
    encryption = FileEncryption(keys.new(b"kf"), b"kf", plaintext, unlisted_columns=ColumnEncryption.FOOTER_KEY)

    def now(data_page_offset: int, dictionary_page_offset: int | None, index_page_offset: int | None) -> list[Any]:
        column.data_page_offset, column.dictionary_page_offset = data_page_offset, dictionary_page_offset
        column.index_page_offset = index_page_offset
        serialised = footer.serialise()
        source = body(indexed) + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"
        stored = read_footer(MemorySource(encrypted(source, encryption)), keys)
        metadata = stored.chunks[0][0].meta_data
        assert metadata is not None
        return places([metadata])[0][:3]

    data_page, dictionary_page, none = now(end, start, None)
    assert dictionary_page == start and data_page > start and none is None
    assert now(end, start, end) == [data_page, start, None]
    assert now(end, start, end + 1) == [data_page, start, None]
    assert now(start + 1, start, None) == [data_page, start, None]
    assert now(0, start, None) == [0, start, None]
    assert now(start, start + 1, None) == [data_page, start, None]


def test_a_chunk_without_pages_names_no_index_page() -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), stream)
    keys = NamedKeys()
    stored = encrypted(stream.getvalue(), FileEncryption(keys.new(b"kf"), b"kf"))
    metadata = read_footer(MemorySource(stored), keys).metadata
    assert all(column.index_page_offset is None for column in columns_of(metadata))
    back = footer_of(decrypted(stored, keys)).row_groups[0]
    plain = footer_of(stream.getvalue()).row_groups[0]
    assert [chunk.serialise() for chunk in back.columns] == [chunk.serialise() for chunk in plain.columns]


def test_a_chunk_says_where_it_begins_or_nothing(indexed: bytes) -> None:
    """Early writers put another copy of the metadata after the pages, and state its offset; it is not copied."""
    footer = footer_of(indexed)
    first, second = footer.row_groups[0].columns
    assert first.meta_data is not None and second.meta_data is not None
    start = second.meta_data.data_page_offset
    places = (
        ("file_offset", start),
        ("file_offset", start + second.meta_data.total_compressed_size),
        ("file_offset", start + 1),
        ("file_offset", 0),
    )
    keys = NamedKeys()
    encryption = FileEncryption(keys.new(b"kf"), b"kf", {("b",): ColumnEncryption.PLAINTEXT})
    for name, value in places:
        second.file_offset = value
        serialised = footer.serialise()
        source = body(indexed) + serialised + len(serialised).to_bytes(4, "little") + b"PAR1"
        chunk = read_footer(MemorySource(encrypted(source, encryption)), keys).chunks[0][1]
        assert chunk.meta_data is not None
        moved = chunk.meta_data.data_page_offset - start
        assert moved > 0
        assert getattr(chunk, name) == (value + moved if value == start else 0)
