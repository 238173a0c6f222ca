"""Every public plain file, encrypted in every sensible way, comes back equal."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySink, MemorySource, NamedKeys, decrypted, encrypted, rekey_source
from soak import SOAK

from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.encryption.page_walk import source_offsets, walk_chunk
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption
from parquet_keytools.format.pages import read_page_header, with_sizes
from parquet_keytools.format.structs import BloomFilterHeader, ColumnMetaData, OffsetIndex
from parquet_keytools.format.thrift import WireType

# Offsets and sizes that a rewrite changes: in ColumnMetaData, and in ColumnChunk.
_METADATA_OFFSETS = {7, 9, 10, 11, 14, 15}
_CHUNK_OFFSETS = {2, 3, 4, 5, 6, 7}

KEY_LENGTHS = (128, 192, 256)
WAYS = list(
    itertools.product(
        Algorithm, KEY_LENGTHS, (False, True), ("uniform", "own", "part"), ("none", "stored", "supplied")
    )
)


def _encryption(
    footer: Footer, keys: NamedKeys, way: tuple[Algorithm, int, bool, str, str]
) -> tuple[FileEncryption, bytes | None]:
    algorithm, length_bits, plaintext_footer, layout, prefix = way
    columns = {}
    for leaf in footer.leaves:
        name = b"k%d" % leaf.ordinal
        if layout == "own" or (layout == "part" and leaf.ordinal % 2 == 0):
            columns[leaf.path] = ColumnKey(keys.new(name, length_bits), name)
    encryption = FileEncryption(
        keys.new(b"kf", length_bits),
        b"kf",
        columns,
        ColumnEncryption.PLAINTEXT if layout == "part" else ColumnEncryption.FOOTER_KEY,
        algorithm,
        plaintext_footer,
        None if prefix == "none" else b"table/part-0",
        prefix != "supplied",
    )
    return encryption, b"table/part-0" if prefix == "supplied" else None


def modules(data: bytes) -> list[Any]:
    """Return the contents of a plaintext file without positions."""
    footer = read_footer(MemorySource(data), None)
    source = MemorySource(data)
    result: list[Any] = [
        {field: value for field, value in footer.metadata.struct.fields.items() if field != 4},
    ]
    for row_group, chunks in zip(footer.row_groups, footer.chunks, strict=True):
        result.append({k: v for k, v in row_group.struct.fields.items() if k not in (1, 5, 6, 7)})
        for chunk in chunks:
            metadata = chunk.meta_data
            assert metadata is not None
            result.append({k: v for k, v in chunk.struct.fields.items() if k not in _CHUNK_OFFSETS})
            result.append({k: v for k, v in metadata.struct.fields.items() if k not in _METADATA_OFFSETS})
            result.append(_pages(source, metadata))
            if chunk.column_index_offset is not None and chunk.column_index_length is not None:
                start = chunk.column_index_offset
                result.append(data[start : start + chunk.column_index_length])
            if chunk.offset_index_offset is not None:
                index, _ = OffsetIndex.read(data, chunk.offset_index_offset)
                result.append([(p.compressed_page_size, p.first_row_index) for p in index.page_locations])
            if metadata.bloom_filter_offset is not None:
                start = metadata.bloom_filter_offset
                header, bitset_start = BloomFilterHeader.read(data, start)
                result.append(data[start : bitset_start + header.num_bytes])
    return result


def _pages(source: MemorySource, metadata: ColumnMetaData) -> list[tuple[bytes, bytes]]:
    offsets = (metadata.data_page_offset, metadata.dictionary_page_offset)
    start = min((offset for offset in offsets if offset), default=0)
    end = start + metadata.total_compressed_size
    pages = walk_chunk(source, start, end, limit=end, reader=None, writer=None, expects_dictionary_page=False)
    result = []
    each = pages.each(0, pages.count)
    for offset, (header_length, page_length, *_) in zip(source_offsets(pages), each, strict=True):
        facts = read_page_header(source.data, offset)
        page_start = offset + header_length
        header = with_sizes(facts, facts.page_length, facts.crc)
        result.append((header, bytes(source.data[page_start : page_start + page_length])))
    return result


_KEY_VALUES = 5
_SORTING_COLUMNS = 4
_SCHEMA_KEYS = {
    b"ARROW:schema",
    b"org.apache.spark.sql.parquet.row.metadata",
    b"org.apache.spark.version",
    b"writer.model.name",
}
"""Keys of the public files whose values describe the schema, and are shown without anything else."""


def _shown(found: list[Any], *ways: tuple[Algorithm, int, bool, str, str]) -> list[Any]:
    """Return the comparable parts of a file that had a plaintext footer.

    These are all but its key-value metadata, and the columns that its rows are sorted by.
    """
    if not any(way[2] for way in ways):
        return found
    footer, *others = found
    return [
        {k: v for k, v in footer.items() if k != _KEY_VALUES},
        *(
            {k: v for k, v in item.items() if k != _SORTING_COLUMNS or v[0] is not WireType.LIST}
            if isinstance(item, dict)
            else item
            for item in others
        ),
    ]


def plain_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


@pytest.fixture(scope="module")
def files(parquet_test_data: Path) -> dict[str, tuple[bytes, Footer, list[Any], pa.Table]]:
    result = {}
    for path in plain_files(parquet_test_data):
        data = path.read_bytes()
        table = pq.read_table(pa.BufferReader(data))
        result[path.name] = (data, read_footer(MemorySource(data), None), modules(data), table)
    return result


def _has_length(number: int, way: tuple[Algorithm, int, bool, str, str]) -> bool:
    """Return whether a file is encrypted this way outside of a soak.

    The length of a key changes only a file's ciphertext: each way with its length is used for a twelfth
    of all files, and each file uses a quarter of the ways, with one key length each.
    """
    algorithm, length_bits, plaintext_footer, layout, prefix = way
    first = WAYS.index((algorithm, KEY_LENGTHS[0], plaintext_footer, layout, prefix))
    # The prefix varies fastest in it, and then the layout.
    turn = number + first + first // 3
    return KEY_LENGTHS.index(length_bits) == turn % len(KEY_LENGTHS) and turn // len(KEY_LENGTHS) % 4 == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(str(getattr(w, "name", w)) for w in way))
def test_every_file_comes_back_equal(
    files: dict[str, tuple[bytes, Footer, list[Any], pa.Table]], way: tuple[Algorithm, int, bool, str, str]
) -> None:
    is_small_way = way[1] == 128 and way[4] == "stored"
    for number, (name, (data, footer, expected, table)) in enumerate(files.items()):
        # The large files have many small pages, and add nothing new in each way.
        is_for_large = SOAK or (way[3] == "own" and way[2] is (way[0] is Algorithm.AES_GCM_CTR_V1))
        if len(data) > 50_000 and not (is_small_way and is_for_large):
            continue
        # Every other file in each small way, and each large file in one.
        is_chosen = is_small_way and (number + WAYS.index(way)) % 2 == 0
        if not (is_chosen or SOAK or _has_length(number, way)):
            continue
        keys = NamedKeys()
        encryption, aad_prefix = _encryption(footer, keys, way)
        stored = encrypted(data, encryption)
        back = decrypted(stored, keys, aad_prefix)
        assert _shown(modules(back), way) == _shown(expected, way), name
        found = pq.read_table(pa.BufferReader(back))
        if way[2]:
            assert set(found.schema.metadata or {}) <= _SCHEMA_KEYS, name
            found, table = found.replace_schema_metadata(), table.replace_schema_metadata()
        assert _same(found, table), name


def test_files_of_current_writers_come_back_byte_for_byte(
    files: dict[str, tuple[bytes, Footer, list[Any], pa.Table]],
) -> None:
    for name, (data, footer, _, _) in files.items():
        created_by = footer.metadata.created_by or ""
        if created_by.startswith("parquet-mr version 1.13") and "bloom" not in name:
            keys = NamedKeys()
            encryption, _ = _encryption(footer, keys, WAYS[0])
            assert decrypted(encrypted(data, encryption), keys) == data, name


def test_rekeyed_files_have_the_same_modules(
    files: dict[str, tuple[bytes, Footer, list[Any], pa.Table]],
) -> None:
    for number, (name, (data, footer, expected, _)) in enumerate(files.items()):
        keys, new_keys = NamedKeys(), NamedKeys()
        way, new_way = WAYS[number * 7 % len(WAYS)], WAYS[(number * 11 + 50) % len(WAYS)]
        encryption, aad_prefix = _encryption(footer, keys, way)
        new_encryption, new_aad_prefix = _encryption(footer, new_keys, new_way)
        sink = MemorySink(takes_any_order=number % 2 == 0)
        rekey_source(MemorySource(encrypted(data, encryption)), sink, keys, new_encryption, aad_prefix)
        found = modules(decrypted(sink.contents(), new_keys, new_aad_prefix))
        assert _shown(found, way, new_way) == _shown(expected, way, new_way), name


def _same(one: pa.Table, other: pa.Table) -> bool:
    return bool(one.schema.equals(other.schema, check_metadata=True)) and (
        one.equals(other) or one.to_pydict().__repr__() == other.to_pydict().__repr__()  # NaN
    )
