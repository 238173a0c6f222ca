"""The rules about what lies where in a file (spec 5.2): in range, disjoint, without gaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parquet_keytools.conformance.chunk_entries import ChunkEntry, ChunkNumbers
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import OpenFooter, chunk_place
from parquet_keytools.format.file_layout import MAGIC_LENGTH, RegionKind


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


def is_in_file(chunk: ChunkEntry, row_group_ordinal: int, column_ordinal: int, book: RuleBook) -> bool:
    """Check that the data of a chunk lies in the file that says so; returns whether it does."""
    if chunk.is_elsewhere:
        place = chunk_place(row_group_ordinal, column_ordinal)
        book.broken("layout-range", "its data lies in another file.", place)
    return not chunk.is_elsewhere


def chunk_regions(
    chunk: ChunkEntry, numbers: ChunkNumbers, row_group_ordinal: int, column_ordinal: int
) -> list[ChunkRegion]:
    """Return the regions of a chunk that lies in this file."""
    start = numbers.data_page_offset
    for offset in (numbers.dictionary_page_offset, numbers.index_page_offset):
        if offset and (offset < start or not start):
            start = offset
    ordinals = (row_group_ordinal, column_ordinal)
    regions = [_region((RegionKind.PAGES, *ordinals, start, numbers.total_compressed_size))]
    if numbers.bloom_filter_offset is not None:
        lies = (numbers.bloom_filter_offset, numbers.bloom_filter_length)
        regions.append(_region((RegionKind.BLOOM_FILTER, *ordinals, *lies)))
    indexes = chunk.indexes
    if indexes is None:
        return regions
    for kind, offset, length in (
        (RegionKind.COLUMN_INDEX, indexes.column_index_offset, indexes.column_index_length),
        (RegionKind.OFFSET_INDEX, indexes.offset_index_offset, indexes.offset_index_length),
    ):
        if offset is not None:
            regions.append(_region((kind, *ordinals, offset, -1 if length is None else length)))
    return regions


_region = ChunkRegion._make


def check_layout(regions: Sequence[ChunkRegion], footer_offset: int, book: RuleBook) -> frozenset[ChunkRegion]:
    """Check that regions lie in the file's body and do not overlap; returns those that must not be looked into."""
    unusable = {region for region in regions if not _is_in_range(region, footer_offset, book)}
    if regions:
        book.holds("layout-range")
    furthest: ChunkRegion | None = None
    end = 0
    in_range = (region for region in regions if region not in unusable) if unusable else regions
    for region in sorted(in_range, key=lambda region: (region.offset, region.length or 0)):
        _, _, _, offset, length = region
        if length == 0:
            continue
        if furthest is not None and offset < end:
            unusable |= {region, furthest}
            book.broken(
                "layout-overlap",
                f"the {region.title} begins before the {furthest.title} of row group "
                f"{furthest.row_group_ordinal}, column {furthest.column_ordinal} ends at {end}.",
                chunk_place(region.row_group_ordinal, region.column_ordinal),
                offset,
            )
        region_end = offset + (1 if length is None else length)
        if region_end > end:
            furthest, end = region, region_end
    book.holds("layout-overlap")
    return frozenset(unusable)


def _is_in_range(region: ChunkRegion, footer_offset: int, book: RuleBook) -> bool:
    kind, row_group_ordinal, column_ordinal, offset, stated = region
    length = 1 if stated is None else stated
    if length == 0 and kind is RegionKind.PAGES:
        return True
    if offset >= MAGIC_LENGTH and length > 0 and offset + length <= footer_offset:
        return True
    message = (
        f"the {region.title} of {stated} bytes at {offset} does not lie before the footer at {footer_offset}."
    )
    book.broken("layout-range", message, chunk_place(row_group_ordinal, column_ordinal), offset)
    return False


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
    metadata: Mapping[tuple[int, int], ChunkNumbers],
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
