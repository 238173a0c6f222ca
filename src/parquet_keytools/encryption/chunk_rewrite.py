"""One column chunk rewritten: each of its modules read, laid out again, and written as plaintext or encrypted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.chunk_pages import ChunkPages, PageJobs, output_lengths, source_offsets
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ChunkCipher
from parquet_keytools.encryption.page_index import DataPages, checked_column_index, checked_offset_index
from parquet_keytools.encryption.page_walk import NOT_DATA, walk_chunk
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.format.file_layout import ChunkPlaces, Region, RegionKind
from parquet_keytools.format.pages import move_pages
from parquet_keytools.format.structs import BloomFilterHeader, ColumnChunk, ColumnMetaData
from parquet_keytools.format.thrift import Changes, Entry, WireType
from parquet_keytools.runtime.working_threads import share_out

# --- What an output file is made of, and how it is written ---
# By several threads, if the sink takes any order.

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


class PagesPart(NamedTuple):
    """The pages of a column chunk.

    Attributes:
        length: How many bytes they have in the output.
        source: Where they come from.
        chunk: Their chunk.
    """

    length: int
    source: ByteSource
    chunk: ChunkRewrite

    def pieces(self) -> Iterator[OutputPiece]:
        """Yield pieces of about `SEGMENT_LENGTH`, each of whole pages."""
        pages = self.chunk.find_pages(self.source)
        if self.length <= SEGMENT_LENGTH:
            if self.length:
                source_length = pages.source_end - pages.source_offset
                yield PagesPiece(self.length, self, pages, 0, pages.count, pages.source_offset, source_length)
            return
        lengths = output_lengths(pages, self.chunk.reader, self.chunk.writer)
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


class PagesPiece(NamedTuple):
    """Some of the pages of a chunk.

    Attributes:
        length: How many bytes they have in the output.
        part: The chunk.
        pages: Its pages.
        first: Position of the first one.
        last: Position after the last one.
        source_offset: Where they begin in the source.
        source_length: How many bytes they have there.
    """

    length: int
    part: PagesPart
    pages: ChunkPages
    first: int
    last: int
    source_offset: int
    source_length: int

    def fill(self, out: memoryview, jobs: PageJobs) -> None:
        """Write them into memory of their length, as soon as the jobs are run."""
        _, part, pages, first, last, source_offset, source_length = self
        source, reader, writer = part.source, part.chunk.reader, part.chunk.writer
        stored = memoryview(source.read_at(source_offset, source_length))
        if writer is not None:
            jobs.encrypt(pages, first, last, stored, out, source.path, source_offset, reader, writer)
        elif reader is not None:
            jobs.decrypt(pages, first, last, stored, out, reader)
        else:
            out[:] = stored


OutputPiece = BytesPart | PagesPiece
"""Bytes that are made in one go."""

Part = BytesPart | PagesPart


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


# --- A chunk ---

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
        "start",
        "writer",
    )

    places: ChunkPlaces
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
        self._region = region
        if memory.take(pages):
            self._pages = pages
        if self.writer is not None:
            self.writer.cipher.reserve(2 * pages.count)
        self.start = offset
        self.length = pages.output_length
        assert region.length is not None
        self.forgotten_length = max(pages.source_end - region.offset - region.length, 0)
        self._move(pages, region, offset)
        return PagesPart(pages.output_length, source, self)

    def find_pages(self, source: ByteSource) -> ChunkPages:
        """Return the pages, once they are laid out."""
        return self._pages or self._walk(source, self._region)

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
        new: dict[int, int | None] = {_TOTAL_COMPRESSED_SIZE: pages.output_length}
        has_dictionary_page = pages.has_dictionary_page
        if self.reader is None and self.writer is None:
            if data_page:
                new[_DATA_PAGE_OFFSET] = self._moved(data_page, pages, region, offset) or offset
            if dictionary_page:
                new[_DICTIONARY_PAGE_OFFSET] = self._moved(dictionary_page, pages, region, offset)
        else:
            # Readers of encrypted files take the type of the first module from here.
            if has_dictionary_page:
                new[_DICTIONARY_PAGE_OFFSET] = offset
            elif dictionary_page is not None:
                new[_DICTIONARY_PAGE_OFFSET] = None
            if data_page:
                new[_DATA_PAGE_OFFSET] = offset + pages.length_before_data
        if index_page:
            new[_INDEX_PAGE_OFFSET] = self._moved(index_page, pages, region, offset)
        elif pages.count and pages.first_data_page != 0 and not has_dictionary_page:
            # An index page comes first: without its offset, readers would not know where the chunk begins.
            new[_INDEX_PAGE_OFFSET] = offset
        if self.forgotten_length:
            new[_TOTAL_UNCOMPRESSED_SIZE] = self.metadata.total_uncompressed_size + self.forgotten_length
        self.metadata_changes.update(new)
        if self.chunk.file_path is not None:
            # Empty, or the chunk would have been refused.
            self.chunk_changes[_FILE_PATH] = None
        file_offset = self.chunk.file_offset
        if file_offset:
            self.chunk_changes[_FILE_OFFSET] = self._moved(file_offset, pages, region, offset) or 0

    def _moved(self, old_offset: int, pages: ChunkPages, region: Region, offset: int) -> int | None:
        """Return where the page of the chunk that began at an offset begins now; None where none did.

        Args:
            old_offset: Where it began.
            pages: Those of the chunk.
            region: Where they lay.
            offset: Where the first one begins now.
        """
        if old_offset == region.offset:
            return offset
        # Only where nothing lies behind it does the end of the chunk stay a place that means something: early
        # writers put another copy of the column metadata there, which must not go into the output.
        if old_offset == pages.source_end:
            return offset + pages.output_length if region.next_offset == old_offset else None
        new_offset = offset
        lengths = output_lengths(pages, self.reader, self.writer)
        for old_start, new_length in zip(source_offsets(pages), lengths, strict=True):
            if old_start == old_offset:
                return new_offset
            new_offset += new_length
        return None

    # --- Indexes -------------------------------------------------------------------------------------------

    def _lay_out_index(self, source: ByteSource, region: Region, offset: int) -> Part:
        assert region.length is not None
        is_offset_index = region.kind is RegionKind.OFFSET_INDEX
        module_type = ModuleType.OFFSET_INDEX if is_offset_index else ModuleType.COLUMN_INDEX
        plaintext = self._plaintext(source, region.offset, region.length, module_type)
        pages = self.find_pages(source)
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
