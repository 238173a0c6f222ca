"""Whole files rewritten: every module of a chunk read, laid out again, and written as plaintext or encrypted."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from parquet_keytools.encryption.aad import MAX_ORDINAL
from parquet_keytools.encryption.chunk_rewrite import BytesPart, ChunkRewrite, PagesMemory, Part, write_parts
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.file_layout import (
    MAGIC_LENGTH,
    ChunkPlaces,
    Region,
    RegionKind,
    arranged,
    regions_of,
    with_trailer,
)
from parquet_keytools.format.structs import RowGroup
from parquet_keytools.format.thrift import Struct, ThriftList, WireType
from parquet_keytools.runtime.presentation import warn_caller

_PAGES = RegionKind.PAGES
_INDEXES = (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX)
_MOST_NAMED = 3

RowGroupRewrite = tuple[RowGroup, Sequence[ChunkRewrite]]
"""A row group of the source, and its chunks that go into the output."""


def rewrite_file(
    source: ByteSource,
    sink: ByteSink,
    row_groups: Sequence[RowGroupRewrite],
    *,
    footer_offset: int,
    created_by: str | None,
    magic: bytes,
    make_footer: Callable[[], bytes],
    threads: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Write a file with the chunks given.

    The layout of the whole output is made first: all limits are checked and all that the footer says is known
    before the first byte is written.

    Args:
        source: The source.
        sink: Where the output goes.
        row_groups: What goes into it.
        footer_offset: Where the source's footer begins.
        created_by: The source's writer.
        magic: Begins and ends the output.
        make_footer: Makes the output's footer, with what follows it up to the footer's length, when all chunks are
            laid out.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write.

    Raises:
        KeytoolsError: The source is not what it should be, or the output would break a limit.
        OSError: The sink cannot be written.
    """
    parts: list[Part] = [BytesPart(MAGIC_LENGTH, lambda: magic)]
    offset = MAGIC_LENGTH
    memory = PagesMemory()
    regions = in_order(source, row_groups, footer_offset, created_by)
    read_ahead = ReadAhead(source, regions)
    for region in regions:
        try:
            part = chunk_of(region, row_groups).lay_out(read_ahead, region, offset, memory)
        except ParquetFormatError as error:
            raise _with_path(error, source.path) from None
        parts.append(part)
        offset += part.length
    warn_of_dropped_indexes(source.path, row_groups)
    footer = make_footer()
    trailer = with_trailer(footer, magic)
    parts.append(BytesPart(len(trailer), lambda: trailer))
    sink.reserve(offset + len(trailer))
    write_parts(parts, sink, threads=threads, on_progress=on_progress)


def in_order(
    source: ByteSource, row_groups: Sequence[RowGroupRewrite], footer_offset: int, created_by: str | None
) -> list[Region]:
    """Return all regions in the order of the source, but page indexes after the pages that they are about."""
    regions: list[Region] = []
    try:
        for row_group_ordinal, (_, row_group_chunks) in enumerate(row_groups):
            for column_ordinal, chunk in enumerate(row_group_chunks):
                chunk.places = ChunkPlaces.of(chunk.metadata)
                regions += regions_of(chunk.chunk, chunk.metadata, row_group_ordinal, column_ordinal, chunk.places)
        ordered = arranged(regions, footer_offset, created_by)
    except ParquetFormatError as error:
        raise _with_path(error, source.path) from None
    early: list[Region] = []
    laid_out: set[ChunkRewrite] = set()
    result: list[Region] = []
    for region in ordered:
        chunk = chunk_of(region, row_groups)
        kind = region[0]
        if kind is _PAGES:
            laid_out.add(chunk)
        elif kind in _INDEXES and chunk not in laid_out:
            early.append(region)
            continue
        result.append(region)
    return result + early


def chunk_of(region: Region, row_groups: Sequence[RowGroupRewrite]) -> ChunkRewrite:
    """Return the chunk of a region."""
    return row_groups[region[1]][1][region[2]]


def warn_of_dropped_indexes(path: str, row_groups: Sequence[RowGroupRewrite]) -> None:
    """Warn once for a file that wrong page indexes are not in the output: readers find values without them."""
    dropped = [text for _, chunks in row_groups for chunk in chunks for text in chunk.dropped_indexes]
    if dropped:
        more = f", and {len(dropped) - _MOST_NAMED} more" if len(dropped) > _MOST_NAMED else ""
        warn_caller(
            f"{path}: page indexes that do not fit their pages are left out of the output: "
            f"{' '.join(dropped[:_MOST_NAMED])}{more}"
        )


def new_row_group(
    ordinal: int, row_group: RowGroup, chunks: Sequence[ChunkRewrite], columns: list[bytes | Struct]
) -> RowGroup:
    """Return a row group for the output; readers split files by the offsets and sizes that it states.

    Args:
        ordinal: Its ordinal.
        row_group: That of the source.
        chunks: Its chunks, laid out.
        columns: What the output's footer has of them, as bytes or structs.
    """
    new = row_group.shallow_copy()
    set_columns(new, columns)
    if chunks:
        new.file_offset = min([chunk.start for chunk in chunks])
    new.total_compressed_size = sum([chunk.length for chunk in chunks])
    if forgotten := sum([chunk.forgotten_length for chunk in chunks]):
        new.total_byte_size += forgotten
    if ordinal <= MAX_ORDINAL:
        new.ordinal = ordinal
    return new


def set_columns(row_group: RowGroup, columns: list[bytes | Struct]) -> None:
    """Set the chunks of a row group that is written only."""
    entry = (WireType.LIST, ThriftList(WireType.STRUCT, columns))
    row_group.struct.set_entry(RowGroup.columns.field_id, entry)


def _with_path(error: ParquetFormatError, path: str) -> ParquetFormatError:
    return error if error.path is not None else type(error)(str(error), path=path)


_SMALL = 64 * 1024
"""Longer regions are read as they are asked for."""

_READ_LENGTH = 256 * 1024
"""How much is read at once, at most."""


class ReadAhead:
    """A source that reads small regions ahead, as far as they follow one another; for any number of threads.

    No byte outside of the regions is read for it.

    Args:
        source: The file.
        regions: What will be read of it, by offset.
    """

    def __init__(self, source: ByteSource, regions: Iterable[Region]) -> None:
        self.path = source.path
        self.size_bytes = source.size_bytes
        self._source = source
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._held = threading.local()
        for region in regions:
            if not 0 < region.limit - region.offset <= _SMALL:
                continue
            if self._ends and self._ends[-1] == region.offset:
                self._ends[-1] = region.limit
            else:
                self._starts.append(region.offset)
                self._ends.append(region.limit)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """Return exactly `length` bytes from `offset`.

        Raises:
            ParquetFormatError: The file ends before.
        """
        start, data = getattr(self._held, "window", _NOTHING)
        position = offset - start
        if 0 <= position <= len(data) - length:
            return data[position : position + length]
        run = bisect_right(self._starts, offset) - 1
        if run < 0 or offset + length > self._ends[run] or length >= _READ_LENGTH:
            return self._source.read_at(offset, length)
        data = memoryview(self._source.read_at(offset, min(_READ_LENGTH, self._ends[run] - offset)))
        self._held.window = (offset, data)
        return data[:length]


_NOTHING = (0, memoryview(b""))
