"""Which byte ranges of a file belong to a column chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import MAGIC_LENGTH
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData

_FORGOTTEN_LENGTH = 100
"""How many bytes of a dictionary page's header parquet-mr before 1.2.9 left out of `total_compressed_size`."""

_OLD_PARQUET_MR = re.compile(r"parquet-mr version 1\.(?:[01]\.|2\.[0-8](?!\d))")


class RegionKind(IntEnum):
    """What lies in a region."""

    PAGES = 0
    BLOOM_FILTER = 1
    COLUMN_INDEX = 2
    OFFSET_INDEX = 3


@dataclass(frozen=True, slots=True)
class Region:
    """A byte range of a column chunk.

    Attributes:
        kind: What lies there.
        row_group_ordinal: Of the row group of the chunk.
        column_ordinal: Of its column.
        offset: Where it begins, in bytes from the start of the file.
        length: In bytes, or None for a Bloom filter whose length is not stated.
        limit: Where it may end at most.
        next_offset: Where the next region, or the footer, begins.
    """

    kind: RegionKind
    row_group_ordinal: int
    column_ordinal: int
    offset: int
    length: int | None
    limit: int = 0
    next_offset: int = 0


def regions_of(
    chunk: ColumnChunk, metadata: ColumnMetaData, row_group_ordinal: int, column_ordinal: int
) -> list[Region]:
    """Return the regions of a chunk.

    Args:
        chunk: The chunk.
        metadata: Its full metadata, decrypted where it was encrypted.
        row_group_ordinal: Of its row group.
        column_ordinal: Of its column.

    Raises:
        ParquetFormatError: A length is negative or missing, or the data lies in another file.
    """
    if chunk.file_path is not None:
        raise ParquetFormatError(
            f"the data of column {'.'.join(metadata.path_in_schema)!r} lies in another file, "
            f"{chunk.file_path!r}: this is a summary file (_metadata).",
            hint="Take the data files themselves.",
        )
    ordinals = (row_group_ordinal, column_ordinal)
    # Writers leave 0 where there is no such page.
    offsets = (metadata.data_page_offset, metadata.dictionary_page_offset, metadata.index_page_offset)
    start = min((offset for offset in offsets if offset), default=0)
    regions = [Region(RegionKind.PAGES, *ordinals, start, metadata.total_compressed_size)]
    for kind, offset, length in (
        (RegionKind.BLOOM_FILTER, metadata.bloom_filter_offset, metadata.bloom_filter_length),
        (RegionKind.COLUMN_INDEX, chunk.column_index_offset, chunk.column_index_length),
        (RegionKind.OFFSET_INDEX, chunk.offset_index_offset, chunk.offset_index_length),
    ):
        if offset is None:
            continue
        if length is None and kind is not RegionKind.BLOOM_FILTER:
            raise ParquetFormatError(f"the {kind.name.lower().replace('_', ' ')} has no length.")
        regions.append(Region(kind, *ordinals, offset, length))
    return regions


def arranged(regions: Iterable[Region], footer_offset: int, created_by: str | None) -> list[Region]:
    """Return regions in the order of their offsets, each with its limit.

    Args:
        regions: Those of all chunks.
        footer_offset: Where the footer begins; all must lie before it.
        created_by: The writer of the file, as the footer says: some old ones forgot bytes.

    Raises:
        ParquetFormatError: A region lies outside of the file's body, or two overlap.
    """
    tolerance = _FORGOTTEN_LENGTH if created_by and _OLD_PARQUET_MR.match(created_by) else 0
    ordered = sorted(regions, key=lambda region: (region.offset, region.length or 0, region.kind))
    result: list[Region] = []
    next_offset = footer_offset
    for region in reversed(ordered):
        length = region.length
        if length == 0:
            result.append(Region(*_facts(region), region.offset, region.offset))
            continue
        end = region.offset + (1 if length is None else length)
        if region.offset < MAGIC_LENGTH or (length or 1) < 0 or end > footer_offset:
            raise ParquetFormatError(
                f"{_name(region)}: {length} bytes at {region.offset} do not lie before the footer."
            )
        if end > next_offset:
            raise ParquetFormatError(f"{_name(region)} overlaps with what begins at byte {next_offset}.")
        if length is None:
            limit = next_offset
        else:
            limit = min(next_offset, end + (tolerance if region.kind is RegionKind.PAGES else 0))
        result.append(Region(*_facts(region), limit, next_offset))
        next_offset = region.offset
    result.reverse()
    return result


def _facts(region: Region) -> tuple[RegionKind, int, int, int, int | None]:
    return region.kind, region.row_group_ordinal, region.column_ordinal, region.offset, region.length


def _name(region: Region) -> str:
    kind = region.kind.name.lower().replace("_", " ")
    return f"row group {region.row_group_ordinal}, column {region.column_ordinal}, {kind}"
