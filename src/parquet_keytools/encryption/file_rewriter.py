"""A whole file rewritten: every module read, laid out anew, and written as plaintext or encrypted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from parquet_keytools.encryption.aad import MAX_ORDINAL
from parquet_keytools.encryption.chunk_rewrite import ChunkRewrite, PagesMemory
from parquet_keytools.encryption.output_parts import BytesPart, Part
from parquet_keytools.encryption.output_writer import write_parts
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.chunk_regions import Region, RegionKind, arranged, regions_of
from parquet_keytools.format.file_layout import MAGIC_LENGTH
from parquet_keytools.format.structs import RowGroup

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
    make_footer: Callable[[list[RowGroup]], bytes],
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
        make_footer: Makes the output's footer, with what follows it up to the footer's length, from its row
            groups. It sets the columns' encryption in their chunks.
        threads: How many threads work.
        on_progress: Called with the number of bytes after each write.

    Raises:
        KeytoolsError: The source is not what it should be, or the output would break a limit.
        OSError: The sink cannot be written.
    """
    parts: list[Part] = [BytesPart(MAGIC_LENGTH, lambda: magic)]
    offset = MAGIC_LENGTH
    memory = PagesMemory()
    for region, chunk in _in_order(source, row_groups, footer_offset, created_by):
        try:
            part = chunk.lay_out(source, region, offset, memory)
        except ParquetFormatError as error:
            raise _with_path(error, source.path) from None
        parts.append(part)
        offset += part.length
    footer = make_footer([_new_row_group(ordinal, *row_group) for ordinal, row_group in enumerate(row_groups)])
    trailer = footer + struct.pack("<I", len(footer)) + magic
    parts.append(BytesPart(len(trailer), lambda: trailer))
    sink.reserve(offset + len(trailer))
    write_parts(parts, sink, threads=threads, on_progress=on_progress)


def _in_order(
    source: ByteSource, row_groups: Sequence[RowGroupRewrite], footer_offset: int, created_by: str | None
) -> list[tuple[Region, ChunkRewrite]]:
    """Return all regions in the order of the source, but offset indexes after the pages that they are about."""
    regions: list[Region] = []
    chunks: dict[tuple[int, int], ChunkRewrite] = {}
    try:
        for row_group_ordinal, (_, row_group_chunks) in enumerate(row_groups):
            for column_ordinal, chunk in enumerate(row_group_chunks):
                chunks[row_group_ordinal, column_ordinal] = chunk
                regions += regions_of(chunk.chunk, chunk.metadata, row_group_ordinal, column_ordinal)
        ordered = arranged(regions, footer_offset, created_by)
    except ParquetFormatError as error:
        raise _with_path(error, source.path) from None
    result: list[tuple[Region, ChunkRewrite]] = []
    early: list[tuple[Region, ChunkRewrite]] = []
    laid_out: set[tuple[int, int]] = set()
    for region in ordered:
        key = (region.row_group_ordinal, region.column_ordinal)
        if region.kind is RegionKind.PAGES:
            laid_out.add(key)
        is_early = region.kind is RegionKind.OFFSET_INDEX and key not in laid_out
        (early if is_early else result).append((region, chunks[key]))
    return result + early


def _new_row_group(ordinal: int, row_group: RowGroup, chunks: Sequence[ChunkRewrite]) -> RowGroup:
    """Return a row group for the output; readers split files by the offsets and sizes that it states."""
    new = row_group.shallow_copy()
    new.columns = [chunk.new_chunk for chunk in chunks]
    starts = [chunk.start for chunk in chunks if chunk.start is not None]
    if starts:
        new.file_offset = min(starts)
    new.total_compressed_size = sum(chunk.new_metadata.total_compressed_size for chunk in chunks)
    if ordinal <= MAX_ORDINAL:
        new.ordinal = ordinal
    return new


def _with_path(error: ParquetFormatError, path: str) -> ParquetFormatError:
    return error if error.path is not None else type(error)(str(error), path=path)
