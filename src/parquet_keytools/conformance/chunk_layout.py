"""Column chunks as a footer has them, and the rules about what lies where (spec 5.2): in range, disjoint, no gaps.

What a footer says of chunks is taken from it once: chunks are many, and rules look at the same fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parquet_keytools.conformance.report import RuleBook
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.format.file_layout import INDEX_PLACES, MAGIC_LENGTH, Region, RegionKind, regions_at
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, FileMetaData, RowGroup
from parquet_keytools.format.thrift import IntegerFields, WireType

_I32, _I64 = WireType.I32, WireType.I64

_META_DATA = ColumnChunk.meta_data.field_id
_FILE_PATH = ColumnChunk.file_path.field_id
_HIDDEN = ColumnChunk.encrypted_column_metadata.field_id

_USUAL_TYPES = {
    _FILE_PATH: WireType.BINARY,
    ColumnChunk.file_offset.field_id: _I64,
    _META_DATA: WireType.STRUCT,
    ColumnChunk.offset_index_offset.field_id: _I64,
    ColumnChunk.offset_index_length.field_id: _I32,
    ColumnChunk.column_index_offset.field_id: _I64,
    ColumnChunk.column_index_length.field_id: _I32,
    ColumnChunk.crypto_metadata.field_id: WireType.STRUCT,
    _HIDDEN: WireType.BINARY,
}

_INDEX_IDS = frozenset(field_id for field_id, _ in INDEX_PLACES)

_NUMBERS: IntegerFields = (
    (ColumnMetaData.type.field_id, _I32),
    (ColumnMetaData.codec.field_id, _I32),
    (ColumnMetaData.num_values.field_id, _I64),
    (ColumnMetaData.total_compressed_size.field_id, _I64),
    (ColumnMetaData.data_page_offset.field_id, _I64),
    (ColumnMetaData.index_page_offset.field_id, _I64),
    (ColumnMetaData.dictionary_page_offset.field_id, _I64),
    (ColumnMetaData.bloom_filter_offset.field_id, _I64),
    (ColumnMetaData.bloom_filter_length.field_id, _I32),
)


class ChunkEntry(NamedTuple):
    """What a row group says of one of its chunks.

    Attributes:
        chunk: All of it.
        crypto: The bytes of what it says of its encryption; None where it says nothing.
        hidden: The module of its metadata.
        visible: Its metadata, where that is not encrypted, or is repeated for readers without keys.
        other_types: Names of fields that have another type than ours, and so are not read.
        is_elsewhere: Whether its data lies in another file.
        indexes: Offset and length of its column index, and of its offset index; None where it has none of these.
    """

    chunk: ColumnChunk
    crypto: bytes | None
    hidden: bytes | None
    visible: ColumnMetaData | None
    other_types: tuple[str, ...]
    is_elsewhere: bool
    indexes: list[int | None] | None

    @classmethod
    def of(cls, chunk: ColumnChunk) -> ChunkEntry:
        """Take what is looked at out of an entry of a footer with which `check_required` found nothing wrong."""
        struct = chunk.struct
        types = struct.types()
        hidden = struct.entry(_HIDDEN) if _HIDDEN in types else None
        visible = struct.entry(_META_DATA) if types.get(_META_DATA) is WireType.STRUCT else None
        return _entry(
            (
                chunk,
                chunk.bytes_of(ColumnChunk.crypto_metadata),
                None if hidden is None else hidden[1],
                None if visible is None else ColumnMetaData(visible[1]),
                () if types.items() <= _USUAL_TYPES.items() else tuple(chunk.fields_of_other_types()),
                types.get(_FILE_PATH) is WireType.BINARY and bool(chunk.file_path),
                None if types.keys().isdisjoint(_INDEX_IDS) else struct.numbers(INDEX_PLACES),
            )
        )


_entry = ChunkEntry._make


NOT_STATED = -1


class ChunkNumbers(NamedTuple):
    """What the metadata of a chunk says.

    Attributes:
        type: Its physical type; `NOT_STATED` where it is missing, and so is `codec`.
    """

    type: int
    codec: int
    num_values: int
    total_compressed_size: int
    data_page_offset: int
    index_page_offset: int | None
    dictionary_page_offset: int | None
    bloom_filter_offset: int | None
    bloom_filter_length: int | None

    @classmethod
    def of(cls, metadata: ColumnMetaData) -> ChunkNumbers:
        """Take the numbers out of metadata.

        Raises:
            ParquetFormatError: It does not say how many values there are, or where they lie.
        """
        physical_type, codec, num_values, size, *offsets = metadata.struct.numbers(_NUMBERS)
        if num_values is None or size is None or offsets[0] is None:
            _ = metadata.data_page_offset, metadata.total_compressed_size, metadata.num_values  # raises
        if physical_type is None or codec is None:
            physical_type = NOT_STATED if physical_type is None else physical_type
            codec = NOT_STATED if codec is None else codec
        return _numbers((physical_type, codec, num_values, size, *offsets))


_numbers = ChunkNumbers._make


@dataclass(frozen=True)
class Column:
    """A leaf column of a file that is verified.

    Attributes:
        is_flat: Whether it has one value, or null, for each row: neither it nor a group around it repeats.
    """

    path: tuple[str, ...]
    ordinal: int
    encryption: ColumnEncryption
    key_metadata: bytes | None
    is_flat: bool = False
    type: int | None = None

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)


@dataclass(frozen=True)
class OpenFooter:
    """A footer that was opened, and its parts.

    Attributes:
        chunks: `chunks[row group ordinal][column ordinal]`.
        unusable: (row group ordinal, column ordinal) of chunks that cannot be looked into.
    """

    metadata: FileMetaData
    row_groups: Sequence[RowGroup]
    chunks: Sequence[Sequence[ChunkEntry]]
    columns: Sequence[Column]
    unusable: frozenset[tuple[int, int]]


def chunk_place(row_group_ordinal: int, column_ordinal: int) -> ModulePlace:
    """Return the place that stands for a chunk: the place of its metadata."""
    return ModulePlace(ModuleType.COLUMN_META_DATA, row_group_ordinal, column_ordinal)


# --- Where chunks lie ---


ChunkKey = tuple[int, int]
"""Row group ordinal and column ordinal."""


def chunk_regions(
    chunk: ChunkEntry, numbers: ChunkNumbers, row_group_ordinal: int, column_ordinal: int, book: RuleBook
) -> list[Region]:
    """Return the regions of a chunk; none if its data lies in another file."""
    if chunk.is_elsewhere:
        place = chunk_place(row_group_ordinal, column_ordinal)
        book.broken("layout-range", "its data lies in another file.", place)
        return []
    places = (
        numbers.data_page_offset,
        numbers.dictionary_page_offset,
        numbers.index_page_offset,
        numbers.total_compressed_size,
        numbers.bloom_filter_offset,
        numbers.bloom_filter_length,
    )
    regions = regions_at(places, chunk.indexes or _NO_INDEXES, row_group_ordinal, column_ordinal)
    for position, region in enumerate(regions):
        if region.length is None and region.kind is not RegionKind.BLOOM_FILTER:
            regions[position] = region._replace(length=NOT_STATED)
    return regions


_NO_INDEXES = (None, None, None, None)


def check_layout(regions: Sequence[Region], footer_offset: int, book: RuleBook) -> frozenset[Region]:
    """Check that regions lie in the file's body and do not overlap; returns those that must not be looked into."""
    unusable = {region for region in regions if not _is_in_range(region, footer_offset, book)}
    if regions:
        book.holds("layout-range")
    furthest: Region | None = None
    end = 0
    in_range = (region for region in regions if region not in unusable) if unusable else regions
    for region in sorted(in_range, key=lambda region: (region.offset, region.length or 0)):
        _, _, _, offset, length, _ = region
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


def _is_in_range(region: Region, footer_offset: int, book: RuleBook) -> bool:
    kind, row_group_ordinal, column_ordinal, offset, stated, _ = region
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
    regions: Iterable[Region],
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
            message = f"row group {ordinal} states {row_group.file_offset}, and its pages begin at {start}."
            book.check("row-group-offset", row_group.file_offset == start, message)
        stated = row_group.total_compressed_size
        if stated is not None:
            message = f"row group {ordinal} states {stated} bytes, and its chunks have {size}."
            book.check("row-group-size", stated == size, message)
