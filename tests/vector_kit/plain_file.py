"""The small plaintext file that all vectors are made from, and its parts."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow_versions import bloom_filters, rows_per_page

from parquet_keytools.format.file_layout import read_footer_bytes
from parquet_keytools.format.structs import (
    BloomFilterHeader,
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
)
from parquet_keytools.storage.locations import BufferSource

ROWS = 60
ROW_GROUP_ROWS = 30
PAGE_ROWS = 10

TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "name": [f"name {number % 5}" for number in range(ROWS)],
        "price": [None if number % 7 == 0 else number / 4 for number in range(ROWS)],
    }
)


@dataclass
class PlainPage:
    """A page: its header, and its content."""

    header: PageHeader
    body: bytes

    @property
    def is_dictionary(self) -> bool:
        return self.header.type == PageHeader.DICTIONARY_PAGE

    @property
    def is_index(self) -> bool:
        return self.header.type == PageHeader.INDEX_PAGE


@dataclass
class PlainChunk:
    """A column chunk, taken apart."""

    chunk: ColumnChunk
    metadata: ColumnMetaData
    pages: list[PlainPage]
    column_index: bytes | None
    offset_index: bytes | None
    bloom_filter_header: bytes | None
    bloom_filter_bitset: bytes | None


@dataclass
class PlainFile:
    """A plaintext file, taken apart: `chunks[row group ordinal][column ordinal]`."""

    footer: FileMetaData
    chunks: list[list[PlainChunk]]


@functools.cache
def plain_bytes(
    *, crc: bool = False, compression: str = "none", v2: bool = False, nested: bool = False, rows: int = ROWS
) -> bytes:
    """Return the file, as pyarrow writes it: the same bytes each time."""
    table = TABLE.slice(0, rows)
    if nested:
        tags = [[f"tag {n}" for n in range(number % 3)] for number in range(rows)]
        table = table.append_column("tags", pa.array(tags, pa.list_(pa.field("element", pa.string()))))
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression=compression,
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=["name"],
        write_page_index=True,
        write_page_checksum=crc,
        data_page_version="2.0" if v2 else "1.0",
        **rows_per_page(PAGE_ROWS),
        **bloom_filters({"name": {"ndv": 5, "fpp": 0.1}}),
    )
    return sink.getvalue()


def summary_bytes(names: Sequence[str]) -> bytes:
    """Return a summary file that lists files, with one row group of each."""
    footer, _ = FileMetaData.read(read_footer_bytes(BufferSource("plain", plain_bytes())).data)
    row_groups = []
    for name in names:
        row_group = footer.row_groups[0].shallow_copy()
        chunks = [chunk.shallow_copy() for chunk in row_group.columns]
        for chunk in chunks:
            chunk.file_path = name
        row_group.columns = chunks
        row_groups.append(row_group)
    footer.row_groups = row_groups
    footer.num_rows = ROW_GROUP_ROWS * len(names)
    data = footer.serialise()
    return b"PAR1" + data + struct.pack("<I", len(data)) + b"PAR1"


def take_apart(data: bytes) -> PlainFile:
    """Return the parts of a plaintext file."""
    footer, _ = FileMetaData.read(read_footer_bytes(BufferSource("plain", data)).data)
    return PlainFile(
        footer,
        [[_chunk(data, chunk) for chunk in row_group.columns] for row_group in footer.row_groups],
    )


def _chunk(data: bytes, chunk: ColumnChunk) -> PlainChunk:
    metadata = chunk.meta_data
    assert metadata is not None
    start = metadata.dictionary_page_offset or metadata.data_page_offset
    end = start + metadata.total_compressed_size
    pages = []
    while start < end:
        header, start = PageHeader.read(data, start)
        pages.append(PlainPage(header, data[start : start + header.compressed_page_size]))
        start += header.compressed_page_size
    bloom_header = bitset = None
    if metadata.bloom_filter_offset is not None:
        header_start = metadata.bloom_filter_offset
        bloom, header_end = BloomFilterHeader.read(data, header_start)
        bloom_header, bitset = data[header_start:header_end], data[header_end : header_end + bloom.num_bytes]
    return PlainChunk(
        chunk,
        metadata,
        pages,
        _range(data, chunk.column_index_offset, chunk.column_index_length),
        _range(data, chunk.offset_index_offset, chunk.offset_index_length),
        bloom_header,
        bitset,
    )


def _range(data: bytes, offset: int | None, length: int | None) -> bytes | None:
    return None if offset is None or length is None else data[offset : offset + length]
