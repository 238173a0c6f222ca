"""The rules about what lies where in a file (spec 5.2): in range, disjoint, without gaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import OpenFooter, chunk_place
from parquet_keytools.format.file_layout import MAGIC_LENGTH, RegionKind
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData


class ChunkRegion(NamedTuple):
    """A byte range of a column chunk.

    Attributes:
        length: In bytes; None for a Bloom filter whose length is not stated.
    """

    kind: RegionKind
    row_group_ordinal: int
    column_ordinal: int
    offset: int
    length: int | None

    @property
    def title(self) -> str:
        """The kind for people."""
        return self.kind.name.lower().replace("_", " ")


def chunk_regions(
    chunk: ColumnChunk, metadata: ColumnMetaData, row_group_ordinal: int, column_ordinal: int, book: RuleBook
) -> list[ChunkRegion]:
    """Return the regions of a chunk; what cannot be one is reported and left out."""
    place = chunk_place(row_group_ordinal, column_ordinal)
    if not book.check("layout-range", chunk.file_path is None, "its data lies in another file.", place):
        return []
    ordinals = (row_group_ordinal, column_ordinal)
    starts = (metadata.data_page_offset, metadata.dictionary_page_offset, metadata.index_page_offset)
    start = min((offset for offset in starts if offset), default=0)
    regions = [ChunkRegion(RegionKind.PAGES, *ordinals, start, metadata.total_compressed_size)]
    for kind, offset, length in (
        (RegionKind.BLOOM_FILTER, metadata.bloom_filter_offset, metadata.bloom_filter_length),
        (RegionKind.COLUMN_INDEX, chunk.column_index_offset, chunk.column_index_length),
        (RegionKind.OFFSET_INDEX, chunk.offset_index_offset, chunk.offset_index_length),
    ):
        if offset is not None:
            stated = length if kind is RegionKind.BLOOM_FILTER or length is not None else -1
            regions.append(ChunkRegion(kind, *ordinals, offset, stated))
    return regions


def check_layout(regions: Iterable[ChunkRegion], footer_offset: int, book: RuleBook) -> set[ChunkRegion]:
    """Check that regions lie in the file's body and do not overlap; returns those that may be looked into."""
    in_range = [region for region in regions if _is_in_range(region, footer_offset, book)]
    ordered = sorted(in_range, key=lambda region: (region.offset, region.length or 0))
    usable = set(ordered)
    furthest: ChunkRegion | None = None
    end = 0
    for region in ordered:
        if region.length == 0:
            continue
        if furthest is not None and region.offset < end:
            usable -= {region, furthest}
            book.broken(
                "layout-overlap",
                f"the {region.title} begins before the {furthest.title} of row group "
                f"{furthest.row_group_ordinal}, column {furthest.column_ordinal} ends at {end}.",
                chunk_place(region.row_group_ordinal, region.column_ordinal),
                region.offset,
            )
        region_end = region.offset + (1 if region.length is None else region.length)
        if region_end > end:
            furthest, end = region, region_end
    book.holds("layout-overlap")
    return usable


def _is_in_range(region: ChunkRegion, footer_offset: int, book: RuleBook) -> bool:
    if region.length == 0 and region.kind is RegionKind.PAGES:
        return True
    length = 1 if region.length is None else region.length
    is_in_range = region.offset >= MAGIC_LENGTH and length > 0 and region.offset + length <= footer_offset
    message = f"the {region.title} of {region.length} bytes at {region.offset} does not lie before the footer at "
    place = chunk_place(region.row_group_ordinal, region.column_ordinal)
    return book.check("layout-range", is_in_range, f"{message}{footer_offset}.", place, region.offset)


def check_gaps(ranges: Sequence[tuple[int, int]], footer_offset: int, book: RuleBook) -> list[tuple[int, int]]:
    """Check that nothing lies between what is known; returns offset and length of what does."""
    gaps: list[tuple[int, int]] = []
    at = MAGIC_LENGTH
    for offset, length in [*sorted(ranges), (footer_offset, 0)]:
        if offset > at:
            gaps.append((at, offset - at))
            book.broken("layout-gap", f"{offset - at} bytes belong to nothing.", offset=at)
        at = max(at, offset + length)
    book.holds("layout-gap")
    return gaps


def check_row_groups(
    footer: OpenFooter,
    metadata: Mapping[tuple[int, int], ColumnMetaData],
    regions: Iterable[ChunkRegion],
    book: RuleBook,
) -> None:
    """Compare what row groups say of their offset and size with their chunks, where all of these are known."""
    starts: dict[int, int] = {}
    for region in regions:
        if region.kind is RegionKind.PAGES and region.length:
            ordinal = region.row_group_ordinal
            starts[ordinal] = min(starts.get(ordinal, region.offset), region.offset)
    for ordinal, row_group in enumerate(footer.row_groups):
        chunks = [metadata.get((ordinal, column.ordinal)) for column in footer.columns]
        known = [chunk for chunk in chunks if chunk is not None]
        if len(known) < len(chunks):
            continue
        start, size = starts.get(ordinal), sum(chunk.total_compressed_size for chunk in known)
        if row_group.file_offset and start is not None:
            message = f"that of row group {ordinal} is {row_group.file_offset}, and its pages begin at {start}."
            book.check("row-group-offset", row_group.file_offset == start, message)
        stated = row_group.total_compressed_size
        if stated is not None:
            message = f"that of row group {ordinal} is {stated}, and its chunks have {size} bytes."
            book.check("row-group-size", stated == size, message)
