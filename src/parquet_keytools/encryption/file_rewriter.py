"""Whole files rewritten: every module of a chunk read, laid out again, and written as plaintext or encrypted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from parquet_keytools.encryption.aad import MAX_ORDINAL, ModuleType
from parquet_keytools.encryption.chunk_pages import ChunkPages, output_lengths, source_offsets
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ChunkCipher, check_length_field
from parquet_keytools.encryption.output_parts import BytesPart, PagesPart, Part, write_parts
from parquet_keytools.encryption.page_walk import walk_chunk
from parquet_keytools.encryption.read_ahead import ReadAhead
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.collector import paused_collector
from parquet_keytools.format.file_layout import MAGIC_LENGTH, ChunkPlaces, Region, RegionKind, arranged, regions_of
from parquet_keytools.format.pages import move_pages
from parquet_keytools.format.structs import BloomFilterHeader, ColumnChunk, ColumnMetaData, RowGroup

_MAX_BLOOM_FILTER_HEADER = 1024
"""Longest header of a Bloom filter in bytes that is looked for; writers make them about 20 bytes long."""

_MODULE_TYPES = {
    RegionKind.COLUMN_INDEX: ModuleType.COLUMN_INDEX,
    RegionKind.OFFSET_INDEX: ModuleType.OFFSET_INDEX,
}


class PagesMemory:
    """How much memory the pages of all chunks may take while a file is laid out; beyond that they are found again.

    Attributes:
        left_bytes: How much is left.
    """

    def __init__(self, left_bytes: int = 64 * 1024 * 1024) -> None:
        self.left_bytes = left_bytes

    def take(self, pages: ChunkPages) -> bool:
        """Take what these pages need; returns whether there was as much."""
        needed = len(pages.headers) + 40 * len(pages) + 1024
        if needed > self.left_bytes:
            return False
        self.left_bytes -= needed
        return True


@dataclass(slots=True)
class ChunkRewrite:
    """A column chunk, how it is read and how it is written.

    Attributes:
        chunk: As in the source's footer. Not changed.
        metadata: Its full metadata. Not changed.
        reader: Decrypts its modules; None for a plaintext chunk.
        writer: Encrypts them; None for plaintext output.
        new_chunk: For the output's footer; what says how it is encrypted is still to be set.
        new_metadata: For the output.
        places: What the metadata says of where the chunk lies.
        start: Where its pages begin in the output; None until they are laid out.
    """

    chunk: ColumnChunk
    metadata: ColumnMetaData
    reader: ChunkCipher | None
    writer: ChunkCipher | None
    new_chunk: ColumnChunk = field(init=False)
    new_metadata: ColumnMetaData = field(init=False)
    places: ChunkPlaces = field(init=False)
    start: int | None = None
    _find_pages: Callable[[], ChunkPages] | None = None

    def __post_init__(self) -> None:
        self.new_chunk = self.chunk.shallow_copy()
        self.new_metadata = self.metadata.shallow_copy()

    def lay_out(self, source: ByteSource, region: Region, offset: int, memory: PagesMemory) -> Part:
        """Lay out one of the chunk's regions at `offset` of the output; pages come before their offset index.

        Raises:
            ParquetFormatError: The region does not hold what it should.
            DecryptionError: It does not authenticate.
            FormatLimitError: The output would break a limit of the format.
        """
        if region.kind is RegionKind.PAGES:
            return self._lay_out_pages(source, region, offset, memory)
        if region.kind is RegionKind.BLOOM_FILTER:
            part = self._lay_out_bloom_filter(source, region)
            self.new_metadata.bloom_filter_offset = offset
            if self.writer is not None or self.places.bloom_filter_length is not None:
                self.new_metadata.bloom_filter_length = part.length
            return part
        if region.kind is RegionKind.OFFSET_INDEX:
            part = self._lay_out_offset_index(source, region)
            self.new_chunk.offset_index_offset = offset
            self.new_chunk.offset_index_length = part.length
            return part
        assert region.length is not None
        part = self._copied(source, region.offset, region.length, ModuleType.COLUMN_INDEX)
        self.new_chunk.column_index_offset = offset
        self.new_chunk.column_index_length = part.length
        return part

    # --- Pages ---------------------------------------------------------------------------------------------

    def _lay_out_pages(self, source: ByteSource, region: Region, offset: int, memory: PagesMemory) -> Part:
        pages = self._walk(source, region)
        find_pages = (lambda: pages) if memory.take(pages) else partial(self._walk, source, region)
        lengths = output_lengths(pages, self.reader, self.writer)
        length = sum(lengths)
        if self.writer is not None:
            self.writer.cipher.reserve(2 * len(pages))
        self.start = offset
        self._find_pages = find_pages
        self._move(pages, lengths, region, offset, length)
        return PagesPart(length, source, find_pages, self.reader, self.writer)

    def _walk(self, source: ByteSource, region: Region) -> ChunkPages:
        assert region.length is not None
        return walk_chunk(
            source,
            region.offset,
            region.offset + region.length,
            limit=region.limit,
            reader=self.reader,
            writer=self.writer,
            expects_dictionary_page=bool(self.places.dictionary_page_offset),
        )

    def _move(self, pages: ChunkPages, lengths: list[int], region: Region, offset: int, length: int) -> None:
        """Set all offsets and sizes that depend on where the pages are."""
        old = self.places
        new: dict[Any, int | None] = {ColumnMetaData.total_compressed_size: length}
        data_page, dictionary_page = old.data_page_offset, old.dictionary_page_offset
        has_dictionary_page = pages.has_dictionary_page
        if self.reader is None and self.writer is None:
            if data_page:
                new[ColumnMetaData.data_page_offset] = _moved(data_page, pages, lengths, region, offset) or offset
            if dictionary_page:
                new[ColumnMetaData.dictionary_page_offset] = _moved(
                    dictionary_page, pages, lengths, region, offset
                )
        else:
            # Readers of encrypted files take the type of the first module from here.
            if has_dictionary_page or dictionary_page is not None:
                new[ColumnMetaData.dictionary_page_offset] = offset if has_dictionary_page else None
            if data_page:
                new[ColumnMetaData.data_page_offset] = offset + sum(lengths[: pages.first_data_page])
        index_page = old.index_page_offset
        if index_page:
            new[ColumnMetaData.index_page_offset] = _moved(index_page, pages, lengths, region, offset)
        elif len(pages) and pages.first_data_page != 0 and not has_dictionary_page:
            # An index page comes first: without its offset nobody would know where the chunk begins.
            new[ColumnMetaData.index_page_offset] = offset
        self.new_metadata.set_fields(new)
        file_offset = self.chunk.file_offset
        if file_offset:
            self.new_chunk.file_offset = _moved(file_offset, pages, lengths, region, offset) or 0

    # --- Indexes -------------------------------------------------------------------------------------------

    def _lay_out_offset_index(self, source: ByteSource, region: Region) -> Part:
        assert region.length is not None and self._find_pages is not None and self.start is not None
        plaintext = self._plaintext(source, region.offset, region.length, ModuleType.OFFSET_INDEX)
        pages = self._find_pages()
        lengths = output_lengths(pages, self.reader, self.writer)
        starts = accumulate(lengths, initial=self.start)
        moves = dict(zip(source_offsets(pages), zip(starts, lengths, strict=False), strict=False))
        try:
            moved = move_pages(plaintext, moves)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"offset index at byte {region.offset}: {error}", path=source.path) from None
        return self._encrypted(len(moved), lambda: moved, ModuleType.OFFSET_INDEX)

    def _plaintext(
        self, source: ByteSource, offset: int, length: int, module_type: ModuleType
    ) -> bytes | memoryview:
        stored = source.read_at(offset, length)
        return stored if self.reader is None else self.reader.decrypt(stored, module_type)

    def _copied(self, source: ByteSource, offset: int, length: int, module_type: ModuleType) -> BytesPart:
        """Return the part for something that is one module where it is encrypted."""
        plaintext_length = length if self.reader is None else length - GCM_FRAMING
        if plaintext_length < 0:
            raise self._too_short(module_type, length)
        make = partial(self._plaintext, source, offset, length, module_type)
        return self._encrypted(plaintext_length, make, module_type)

    def _too_short(self, module_type: ModuleType, length: int) -> Exception:
        assert self.reader is not None
        return self.reader.place(module_type).error(f"a module of {length} bytes is too short.")

    def _encrypted(
        self, plaintext_length: int, make: Callable[[], bytes | memoryview], module_type: ModuleType
    ) -> BytesPart:
        writer = self.writer
        if writer is None:
            return BytesPart(plaintext_length, make)
        writer.cipher.reserve(1)
        return BytesPart(plaintext_length + GCM_FRAMING, lambda: writer.encrypt_reserved(make(), module_type))

    # --- Bloom filters -------------------------------------------------------------------------------------

    def _lay_out_bloom_filter(self, source: ByteSource, region: Region) -> Part:
        """Lay out a Bloom filter: header and bitset, which are two modules where they are encrypted."""
        header_length, num_bytes = self._read_bloom_filter_header(source, region)
        bitset_length = num_bytes + (GCM_FRAMING if self.reader is not None else 0)
        length = header_length + bitset_length
        if region.length not in (None, length) or region.offset + length > region.limit:
            raise ParquetFormatError(
                f"the Bloom filter at byte {region.offset} has {length} bytes, and its place "
                f"{region.length or region.limit - region.offset}.",
                path=source.path,
            )
        header = self._copied(source, region.offset, header_length, ModuleType.BLOOM_FILTER_HEADER)
        bitset_offset = region.offset + header_length
        bitset = self._copied(source, bitset_offset, bitset_length, ModuleType.BLOOM_FILTER_BITSET)
        return BytesPart(header.length + bitset.length, lambda: bytes(header.make()) + bytes(bitset.make()))

    def _read_bloom_filter_header(self, source: ByteSource, region: Region) -> tuple[int, int]:
        """Return the length of the header as it is stored, and that of the bitset without framing."""
        room = region.limit - region.offset
        stored = memoryview(source.read_at(region.offset, min(room, _MAX_BLOOM_FILTER_HEADER)))
        if self.reader is None:
            header, length = BloomFilterHeader.read(stored)
        else:
            place = self.reader.place(ModuleType.BLOOM_FILTER_HEADER)
            if len(stored) < LENGTH_LENGTH:
                raise place.error(f"{len(stored)} bytes are too few for a module.")
            (length,) = struct.unpack_from("<I", stored)
            length += LENGTH_LENGTH
            if length > len(stored):
                raise place.error(f"a module of {length} bytes does not fit where it lies.")
            header, _ = BloomFilterHeader.read(self.reader.cipher.decrypt(stored[:length], place))
            if region.limit - region.offset >= length + LENGTH_LENGTH + max(header.num_bytes, 0):
                bitset = memoryview(source.read_at(region.offset + length, LENGTH_LENGTH))
                bitset_place = self.reader.place(ModuleType.BLOOM_FILTER_BITSET)
                check_length_field(bitset, header.num_bytes + GCM_FRAMING, bitset_place)
        if header.num_bytes < 0:
            raise ParquetFormatError(f"a Bloom filter has {header.num_bytes} bytes.", path=source.path)
        return length, header.num_bytes


def _moved(old_offset: int, pages: ChunkPages, lengths: list[int], region: Region, offset: int) -> int | None:
    """Return where the page of a chunk that began at an offset begins now; None where none did.

    Args:
        old_offset: Where it began.
        pages: Those of the chunk.
        lengths: Of them in the output.
        region: Where they lay.
        offset: Where the first one begins now.
    """
    if old_offset == region.offset:
        return offset
    # Only where nothing lies behind it does the end of the chunk stay a place that means something: early
    # writers put another copy of the column metadata there, which must not go into the output.
    if old_offset == pages.source_end:
        return offset + sum(lengths) if region.next_offset == old_offset else None
    new_offset = offset
    for old_start, new_length in zip(source_offsets(pages), lengths, strict=True):
        if old_start == old_offset:
            return new_offset
        new_offset += new_length
    return None


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
    with paused_collector():
        parts: list[Part] = [BytesPart(MAGIC_LENGTH, lambda: magic)]
        offset = MAGIC_LENGTH
        memory = PagesMemory()
        regions = in_order(source, row_groups, footer_offset, created_by)
        read_ahead = ReadAhead(source, (region for region, _ in regions))
        for region, chunk in regions:
            try:
                part = chunk.lay_out(read_ahead, region, offset, memory)
            except ParquetFormatError as error:
                raise _with_path(error, source.path) from None
            parts.append(part)
            offset += part.length
        footer = make_footer([new_row_group(ordinal, *row_group) for ordinal, row_group in enumerate(row_groups)])
    trailer = footer + struct.pack("<I", len(footer)) + magic
    parts.append(BytesPart(len(trailer), lambda: trailer))
    sink.reserve(offset + len(trailer))
    write_parts(parts, sink, threads=threads, on_progress=on_progress)


def in_order(
    source: ByteSource, row_groups: Sequence[RowGroupRewrite], footer_offset: int, created_by: str | None
) -> list[tuple[Region, ChunkRewrite]]:
    """Return all regions in the order of the source, but offset indexes after the pages that they are about."""
    regions: list[Region] = []
    try:
        for row_group_ordinal, (_, row_group_chunks) in enumerate(row_groups):
            for column_ordinal, chunk in enumerate(row_group_chunks):
                chunk.places = ChunkPlaces.of(chunk.metadata)
                regions += regions_of(chunk.chunk, chunk.metadata, row_group_ordinal, column_ordinal, chunk.places)
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
        (early if is_early else result).append((region, row_groups[key[0]][1][key[1]]))
    return result + early


def new_row_group(ordinal: int, row_group: RowGroup, chunks: Sequence[ChunkRewrite]) -> RowGroup:
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
