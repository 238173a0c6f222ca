"""Whole files rewritten: every module of a chunk read, laid out again, and written as plaintext or encrypted."""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from parquet_keytools.encryption.aad import MAX_ORDINAL, ModuleType
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ChunkCipher
from parquet_keytools.encryption.page_walk import (
    NOT_DATA,
    ChunkPages,
    DataPages,
    PageJobs,
    checked_column_index,
    checked_offset_index,
    output_lengths,
    source_offsets,
    walk_chunk,
)
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import (
    MAGIC_LENGTH,
    ByteSink,
    ByteSource,
    ChunkPlaces,
    Region,
    RegionKind,
    arranged,
    regions_of,
    with_trailer,
)
from parquet_keytools.format.pages import move_pages
from parquet_keytools.format.structs import BloomFilterHeader, ColumnChunk, ColumnMetaData, RowGroup
from parquet_keytools.format.thrift import Changes, Entry, Struct, ThriftList, WireType
from parquet_keytools.runtime.presentation import warn_caller
from parquet_keytools.runtime.threads_and_forks import share_out

# --- What an output file is made of ---

SEGMENT_LENGTH = 1024 * 1024
"""About how many bytes of output are made and written at a time: large writes are faster than small ones, as
long as what is written is still in the processor's cache."""


class BytesPart(NamedTuple):
    """Bytes that are there already, or are made in one go.

    Attributes:
        length: How many.
        make: Returns them.
    """

    length: int
    make: Callable[[], bytes | memoryview]

    def pieces(self) -> Iterable[OutputPiece]:
        """Return them as one piece."""
        return (self,)

    def fill(self, out: memoryview, jobs: PageJobs) -> None:
        """Write them into memory of that length."""
        out[:] = self.make()


class PagesPiece(NamedTuple):
    """Some of the pages of a chunk.

    Attributes:
        length: How many bytes they have in the output.
        chunk: The chunk.
        pages: Its pages.
        first: Position of the first one.
        last: Position after the last one.
        source_offset: Where they begin in the source.
        source_length: How many bytes they have there.
    """

    length: int
    chunk: ChunkRewrite
    pages: ChunkPages
    first: int
    last: int
    source_offset: int
    source_length: int

    def fill(self, out: memoryview, jobs: PageJobs) -> None:
        """Write them into memory of their length, as soon as the jobs are run."""
        _, chunk, pages, first, last, source_offset, source_length = self
        source, reader, writer = chunk.source, chunk.reader, chunk.writer
        stored = memoryview(source.read_at(source_offset, source_length))
        if writer is not None:
            jobs.encrypt(pages, first, last, stored, out, source.path, source_offset, reader, writer)
        elif reader is not None:
            jobs.decrypt(pages, first, last, stored, out, reader)
        else:
            out[:] = stored


OutputPiece = BytesPart | PagesPiece
"""Bytes that are made in one go."""

# --- A column chunk: each of its modules read, laid out again, and written as plaintext or encrypted ---

_MAX_BLOOM_FILTER_HEADER = 1024
"""Longest header of a Bloom filter in bytes that is looked for; writers make them about 20 bytes long."""

_PAGES = RegionKind.PAGES
_I32, _I64 = WireType.I32, WireType.I64
_TOTAL_UNCOMPRESSED_SIZE = ColumnMetaData.total_uncompressed_size.field_id
_TOTAL_COMPRESSED_SIZE = ColumnMetaData.total_compressed_size.field_id
_DATA_PAGE_OFFSET = ColumnMetaData.data_page_offset.field_id
_INDEX_PAGE_OFFSET = ColumnMetaData.index_page_offset.field_id
_DICTIONARY_PAGE_OFFSET = ColumnMetaData.dictionary_page_offset.field_id
_BLOOM_FILTER_OFFSET = ColumnMetaData.bloom_filter_offset.field_id
_BLOOM_FILTER_LENGTH = ColumnMetaData.bloom_filter_length.field_id
_FILE_OFFSET = ColumnChunk.file_offset.field_id
_FILE_OFFSET_FIELD = ((_FILE_OFFSET, _I64),)
_FILE_PATH = ColumnChunk.file_path.field_id
INDEX_FIELD_IDS = {
    RegionKind.COLUMN_INDEX: (ColumnChunk.column_index_offset.field_id, ColumnChunk.column_index_length.field_id),
    RegionKind.OFFSET_INDEX: (ColumnChunk.offset_index_offset.field_id, ColumnChunk.offset_index_length.field_id),
}

_INDEX_OFFSETS = [offset_id for offset_id, _ in INDEX_FIELD_IDS.values()]
_INDEX_LENGTHS = [length_id for _, length_id in INDEX_FIELD_IDS.values()]


class PagesMemory:
    """How much memory the pages of all chunks may take while a file is laid out; beyond that they are found again.

    Attributes:
        left_bytes: How much is left.
    """

    def __init__(self, left_bytes: int = 64 * 1024 * 1024) -> None:
        self.left_bytes = left_bytes

    def take(self, pages: ChunkPages) -> bool:
        """Take what these pages need; returns whether there was as much."""
        needed = len(pages.headers) + 56 * pages.count + 1024
        if needed > self.left_bytes:
            return False
        self.left_bytes -= needed
        return True


class ChunkRewrite:
    """A column chunk, how it is read and how it is written.

    Attributes:
        chunk: As in the source's footer. Not changed.
        metadata: Its full metadata. Not changed.
        reader: Decrypts its modules; None for a plaintext chunk.
        writer: Encrypts them; None for plaintext output.
        chunk_changes: What changes in the chunk for the output, apart from how it is encrypted: field id -> new
            value, or None if the field is removed.
        metadata_changes: Likewise in its metadata.
        places: What the metadata says of where the chunk lies; set by `in_order`.
        source: Where its pages come from, when they are laid out.
        start: Where its pages begin in the output, when they are laid out.
        length: How many bytes they take there.
        forgotten_length: How many bytes old writers left out of the sizes that the source states.
        num_rows: Of its row group.
        is_flat: Whether each of its values is a row.
        dropped_indexes: Page indexes that are wrong and so are not in the output, and why.
    """

    __slots__ = (
        "_pages",
        "_region",
        "chunk",
        "chunk_changes",
        "dropped_indexes",
        "forgotten_length",
        "is_flat",
        "length",
        "metadata",
        "metadata_changes",
        "num_rows",
        "places",
        "reader",
        "source",
        "start",
        "writer",
    )

    places: ChunkPlaces
    source: ByteSource
    _region: Region

    def __init__(
        self,
        chunk: ColumnChunk,
        metadata: ColumnMetaData,
        reader: ChunkCipher | None,
        writer: ChunkCipher | None,
        *,
        num_rows: int = 0,
        is_flat: bool = False,
    ) -> None:
        self.chunk = chunk
        self.metadata = metadata
        self.reader = reader
        self.writer = writer
        # Integers alone: Python's garbage collector does not look at such dictionaries, of which there are many.
        self.chunk_changes: dict[int, int | None] = {}
        self.metadata_changes: dict[int, int | None] = {}
        self.start = 0
        self.length = 0
        self.forgotten_length = 0
        self.num_rows = num_rows
        self.is_flat = is_flat
        self.dropped_indexes: tuple[str, ...] = ()
        self._pages: ChunkPages | None = None

    def new_metadata(self) -> bytes:
        """Return the bytes of its metadata in the output."""
        return self.metadata.struct.changed_bytes(_entries(self.metadata_changes, (_BLOOM_FILTER_LENGTH,)))

    def new_chunk(self, encryption: Changes) -> bytes:
        """Return the bytes of the chunk in the output's footer, with what says how it is encrypted."""
        return self.chunk.struct.changed_bytes({**_entries(self.chunk_changes, _INDEX_LENGTHS), **encryption})

    def lay_out(self, source: ByteSource, region: Region, offset: int, memory: PagesMemory) -> Part:
        """Lay out one of the chunk's regions at `offset` of the output; pages come before their indexes.

        A page index that is wrong gets no place in the output.

        Raises:
            ParquetFormatError: The region does not hold what it should.
            DecryptionError: It does not authenticate.
            FormatLimitError: The output would break a limit of the format.
        """
        if region[0] is _PAGES:
            return self._lay_out_pages(source, region, offset, memory)
        if region.kind is RegionKind.BLOOM_FILTER:
            part = self._lay_out_bloom_filter(source, region)
            self.metadata_changes[_BLOOM_FILTER_OFFSET] = offset
            if self.writer is not None or self.places.bloom_filter_length is not None:
                self.metadata_changes[_BLOOM_FILTER_LENGTH] = part.length
            return part
        return self._lay_out_index(source, region, offset)

    def place_index(self, kind: RegionKind, offset: int, length: int) -> None:
        """Note where one of its indexes lies in the output."""
        offset_id, length_id = INDEX_FIELD_IDS[kind]
        self.chunk_changes[offset_id] = offset
        self.chunk_changes[length_id] = length

    # --- Pages ---------------------------------------------------------------------------------------------

    def _lay_out_pages(self, source: ByteSource, region: Region, offset: int, memory: PagesMemory) -> Part:
        pages = self._walk(source, region)
        self.source, self._region = source, region
        if memory.take(pages):
            self._pages = pages
        if self.writer is not None:
            self.writer.cipher.reserve(2 * pages.count)
        self.start = offset
        self.length = pages.output_length
        assert region.length is not None
        self.forgotten_length = max(pages.source_end - region.offset - region.length, 0)
        self._move(pages, region, offset)
        return self

    def _found_pages(self) -> ChunkPages:
        return self._pages or self._walk(self.source, self._region)

    def pieces(self) -> Iterator[OutputPiece]:
        """Yield its pages in pieces of about `SEGMENT_LENGTH`, each of whole pages."""
        pages = self._found_pages()
        if self.length <= SEGMENT_LENGTH:
            if self.length:
                source_length = pages.source_end - pages.source_offset
                yield PagesPiece(self.length, self, pages, 0, pages.count, pages.source_offset, source_length)
            return
        lengths = output_lengths(pages, self.reader, self.writer)
        first = length = source_length = 0
        source_offset = pages.source_offset
        for position, (page_length, source_header_length, source_page_length) in enumerate(
            zip(lengths, pages.header_lengths, pages.page_lengths, strict=True)
        ):
            if length and length + page_length > SEGMENT_LENGTH:
                yield PagesPiece(length, self, pages, first, position, source_offset, source_length)
                source_offset += source_length
                first, length, source_length = position, 0, 0
            length += page_length
            source_length += source_header_length + source_page_length
        if length:
            yield PagesPiece(length, self, pages, first, len(lengths), source_offset, source_length)

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
            keeps_values=any(map(self.chunk.struct.has, _INDEX_OFFSETS)),
        )

    def _move(self, pages: ChunkPages, region: Region, offset: int) -> None:
        """Set all offsets and sizes that depend on where the pages are."""
        data_page, dictionary_page, index_page, *_ = self.places
        new = self.metadata_changes
        new[_TOTAL_COMPRESSED_SIZE] = pages.output_length
        if data_page:
            new[_DATA_PAGE_OFFSET] = offset + pages.length_before_data
        # Readers of encrypted files take the type of the first module from here.
        if pages.has_dictionary_page:
            new[_DICTIONARY_PAGE_OFFSET] = offset
        elif dictionary_page is not None:
            new[_DICTIONARY_PAGE_OFFSET] = None
        if pages.count and pages.first_data_page != 0 and not pages.has_dictionary_page:
            # An index page comes first: without its offset, readers would not know where the chunk begins.
            new[_INDEX_PAGE_OFFSET] = offset
        elif index_page is not None:
            new[_INDEX_PAGE_OFFSET] = None
        if self.forgotten_length:
            new[_TOTAL_UNCOMPRESSED_SIZE] = self.metadata.total_uncompressed_size + self.forgotten_length
        if self.chunk.struct.has(_FILE_PATH) and self.chunk.file_path is not None:
            # Empty, or the chunk would have been refused.
            self.chunk_changes[_FILE_PATH] = None
        (file_offset,) = self.chunk.struct.numbers(_FILE_OFFSET_FIELD)
        if file_offset:
            # The chunk, or its first data page, with parquet-java. Early writers named the end of the pages, where
            # they put another copy of the metadata, which must not go into the output.
            begins = {data_page: offset + pages.length_before_data, region.offset: offset}
            self.chunk_changes[_FILE_OFFSET] = begins.get(file_offset, 0)

    # --- Indexes -------------------------------------------------------------------------------------------

    def _lay_out_index(self, source: ByteSource, region: Region, offset: int) -> Part:
        assert region.length is not None
        is_offset_index = region.kind is RegionKind.OFFSET_INDEX
        module_type = ModuleType.OFFSET_INDEX if is_offset_index else ModuleType.COLUMN_INDEX
        plaintext = self._plaintext(source, region.offset, region.length, module_type)
        pages = self._found_pages()
        data_pages = _data_pages(pages)
        if is_offset_index:
            flaws, _ = checked_offset_index(plaintext, data_pages, self.num_rows, is_flat=self.is_flat)
        else:
            flaws, _ = checked_column_index(plaintext, data_pages)
        if flaws:
            self.dropped_indexes += (f"the {module_type.title} at byte {region.offset}: {flaws[0][1]}",)
            for field_id in INDEX_FIELD_IDS[region.kind]:
                self.chunk_changes[field_id] = None
            return BytesPart(0, lambda: b"")
        if is_offset_index:
            lengths = output_lengths(pages, self.reader, self.writer)
            starts = accumulate(lengths, initial=self.start)
            moves = dict(zip(source_offsets(pages), zip(starts, lengths, strict=False), strict=False))
            moved = move_pages(plaintext, moves)
            part = self._encrypted(len(moved), lambda: moved, module_type)
        else:
            part = self._copied(source, region.offset, region.length, module_type)
        self.place_index(region.kind, offset, part.length)
        return part

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
        """Return the length of the header as it is stored, and the length of the bitset without framing."""
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
            header, _ = BloomFilterHeader.read(self.reader.cipher.decrypt(stored[:length], place))
        if header.num_bytes < 0:
            raise ParquetFormatError(f"a Bloom filter has {header.num_bytes} bytes.", path=source.path)
        return length, header.num_bytes


def _entries(changes: Mapping[int, int | None], lengths: Sequence[int]) -> dict[int, Entry | None]:
    """Return fields that change as they are written; lengths have 32 bits, offsets and sizes 64."""
    return {
        field_id: None if value is None else (_I32 if field_id in lengths else _I64, value)
        for field_id, value in changes.items()
    }


def _data_pages(pages: ChunkPages) -> DataPages:
    """Return the pages of a walk that kept numbers of values, without dictionary and index pages."""
    found = DataPages()
    assert pages.values is not None
    for offset, values, (header_length, page_length, *_) in zip(
        source_offsets(pages), pages.values, pages.each(0, pages.count), strict=True
    ):
        if values != NOT_DATA:
            found.offsets.append(offset)
            found.lengths.append(header_length + page_length)
            found.values.append(values)
    return found


# --- Writing, by several threads if the sink takes any order ---

Part = BytesPart | ChunkRewrite


Batch = tuple[int, int, list[OutputPiece]]
"""Offset and length in bytes of neighbouring pieces that are written together, and the pieces."""


def write_parts(
    parts: Iterable[Part],
    sink: ByteSink,
    *,
    offset: int = 0,
    threads: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Make all parts and write them one after another.

    Args:
        parts: In the order in which they lie in the file.
        sink: Where they go; its space is reserved.
        offset: Where the first one lies.
        threads: How many threads work; the calling one is among them.
        on_progress: Called with the number of bytes after each write, by any of the threads.

    Raises:
        KeytoolsError: A part cannot be made. What was written so far is worth nothing then.
        OSError: The sink cannot be written.
    """

    def write(batches: Iterator[Batch]) -> None:
        buffer = bytearray()
        for start, length, pieces in batches:
            if len(buffer) < length:
                buffer = bytearray(length)
            view = memoryview(buffer)
            filled = 0
            jobs = PageJobs()
            for piece in pieces:
                end = filled + piece[0]
                piece.fill(view[filled:end], jobs)
                filled = end
            jobs.run()
            sink.write_at(start, view[:length])
            if on_progress is not None:
                on_progress(length)

    share_out(write, _batches(parts, offset), threads if sink.takes_any_order else 1)


def _batches(parts: Iterable[Part], offset: int) -> Iterator[Batch]:
    length = 0
    batch: list[OutputPiece] = []
    for part in parts:
        for piece in part.pieces():
            if batch and length + piece.length > SEGMENT_LENGTH:
                yield offset, length, batch
                offset, length, batch = offset + length, 0, []
            batch.append(piece)
            length += piece.length
    if batch:
        yield offset, length, batch


# --- A file ---

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
