"""Whole files rewritten: every module of a chunk read, laid out again, and written as plaintext or encrypted.

The loops of `PageJobs` run once for each page, and files with pages of 2 KB have hundreds of thousands: they look
up nothing twice, build no object that is not needed, and take random bytes for many nonces at once.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, starmap
from operator import call
from typing import NamedTuple

from parquet_keytools.encryption.aad import MAX_ORDINAL, ModuleType
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NONCE_LENGTH,
    ChunkCipher,
    InvalidTag,
    check_length_field,
)
from parquet_keytools.encryption.page_walk import (
    ChunkPages,
    check_crc,
    checked_column_index,
    checked_offset_index,
    output_lengths,
    source_offsets,
    walk_chunk,
)
from parquet_keytools.encryption.protection import naming_file
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    MAGIC_LENGTH,
    Bytes,
    ByteSink,
    ByteSource,
    Places,
    Region,
    RegionKind,
    arranged,
    places_of,
    regions_of,
    with_trailer,
)
from parquet_keytools.format.pages import move_pages, padded_crc
from parquet_keytools.format.structs import BloomFilterHeader, ColumnChunk, ColumnMetaData, RowGroup
from parquet_keytools.format.thrift import Changes, Entry, Struct, ThriftList, WireType
from parquet_keytools.runtime.presentation import warn_caller
from parquet_keytools.runtime.threads_and_forks import share_out

# --- What an output file is made of ---

SEGMENT_LENGTH = 1024 * 1024
"""About how many bytes of output are made and written at a time: large writes are faster than small ones, as
long as what is written is still in the processor's cache."""


class BytesPart(NamedTuple):
    """Bytes that are there already, or are made in one go."""

    length: int
    make: Callable[[], bytes | memoryview]

    def pieces(self) -> Iterable[OutputPiece]:
        """Return them as one piece."""
        return (self,)

    def fill(self, out: memoryview, jobs: PageJobs) -> None:
        """Write them into memory of that length."""
        out[:] = self.make()


def bytes_part(data: bytes) -> BytesPart:
    """Return bytes as a part of the output."""
    return BytesPart(len(data), lambda: data)


class PagesPiece(NamedTuple):
    """Some of the pages of a chunk, from position `first` up to `last`."""

    length: int
    chunk: ChunkRewrite
    pages: ChunkPages
    first: int
    last: int
    source_offset: int
    source_length: int

    def fill(self, out: memoryview, jobs: PageJobs) -> None:
        """Write them into memory of their length, as soon as the jobs are run."""
        chunk = self.chunk
        stored = memoryview(chunk.source.read_at(self.source_offset, self.source_length))
        if chunk.writer is not None:
            jobs.encrypt(self, stored, out)
        elif chunk.reader is not None:
            jobs.decrypt(self, stored, out)
        else:
            out[:] = stored


_Job = tuple[Callable[[Bytes, Bytes, bytes, Bytes], object], Bytes, Bytes, bytes, Bytes]
"""What one invocation of a cipher takes: the cipher, nonce, input, AAD and output."""

_write_framing = struct.Struct("<I12s").pack_into
_read_length = struct.Struct("<I").unpack_from


_MOST_JOBS = 64
"""After how many jobs they are done: more objects that live at once would wake Python's garbage collector."""

_MORE_NONCES = 256 * NONCE_LENGTH


class PageJobs:
    """The cipher work for a part of the output, in one go: for many chunks where these are small.

    The interpreter lock is released inside the cipher. Loops around it that do next to nothing else keep two
    threads from waiting for each other after every page.
    """

    __slots__ = ("_crcs", "_decrypting", "_headers", "_nonces", "_owners", "_pages")

    def __init__(self) -> None:
        self._decrypting: list[_Job] = []
        self._owners: list[tuple[int, ChunkCipher, ChunkPages, int]] = []
        """Where the jobs of a chunk begin in `_decrypting`, its cipher, its pages, and the first of them."""
        self._pages: list[_Job] = []
        self._headers: list[_Job] = []
        """One entry for each entry of `_pages`."""
        self._crcs: list[tuple[int, int]] = []
        """Position in these lists, and where in the header the CRC of the page is filled in."""
        self._nonces = b""

    def __len__(self) -> int:
        return len(self._pages) + len(self._decrypting)

    def run(self) -> None:
        """Do all of it and forget it; a page that does not authenticate raises `DecryptionError`."""
        if self._decrypting:
            jobs = iter(self._decrypting)
            try:
                deque(starmap(call, jobs), maxlen=0)
            except InvalidTag:
                raise self._not_authentic(len(self._decrypting) - sum(1 for _ in jobs) - 1) from None
        deque(starmap(call, self._pages), maxlen=0)
        for position, crc_at in self._crcs:
            _, nonce, _, _, ciphertext = self._pages[position]
            framing = struct.pack("<I12s", len(ciphertext) + NONCE_LENGTH, nonce)
            crc = padded_crc(zlib.crc32(ciphertext, zlib.crc32(framing)))
            cipher, nonce, header, aad, out = self._headers[position]
            header = b"".join((header[:crc_at], crc, header[crc_at + len(crc) :]))
            self._headers[position] = (cipher, nonce, header, aad, out)
        deque(starmap(call, self._headers), maxlen=0)
        for done in (self._decrypting, self._owners, self._pages, self._crcs, self._headers):
            done.clear()

    def _take_nonces(self, count: int) -> bytes:
        length = NONCE_LENGTH * count
        if len(self._nonces) < length:
            # Once for many small chunks, because `os.urandom` releases the interpreter lock, too.
            self._nonces = os.urandom(length + _MORE_NONCES)
        taken, self._nonces = self._nonces[:length], self._nonces[length:]
        return taken

    def _not_authentic(self, failed: int) -> DecryptionError:
        start, reader, pages, first = max(owner for owner in self._owners if owner[0] <= failed)
        return reader.page_place(pages.page(first + failed - start)[2]).not_authentic()

    def encrypt(self, piece: PagesPiece, stored: memoryview, out: memoryview) -> None:
        """Have pages and their headers encrypted, after decryption where there is a reader.

        `stored` has them with their headers as they lie in the source; `out` is as long as their modules. The
        writer's invocations are reserved. Wrong CRCs and length fields are errors.
        """
        _, chunk, pages, first, last, source_offset, _ = piece
        reader, writer = chunk.reader, chunk.writer
        assert writer is not None
        header_base = header_start = pages.header_end(first)
        headers = pages.headers[header_base : pages.header_end(last)]
        nonces = self._take_nonces(2 * (last - first))
        aads_of, framing = writer.page_aads, writer.page_framing
        encrypt_page, encrypt_header = writer.pages_into(encrypt=True), writer.cipher.gcm.encrypt_into
        add_page, add_header = self._pages.append, self._headers.append
        room = memoryview(b"")
        if reader is not None:
            decrypt = reader.pages_into(encrypt=False)
            room = memoryview(bytearray(len(stored)))
            self._owners.append((len(self._decrypting), reader, pages, first))
        at = offset = taken = used = 0
        for header_length, length, ordinal, crc, header_end, crc_at in pages.each(first, last):
            page_start = at + header_length
            at = page_start + length
            page = stored[page_start:at]
            if crc >= 0:
                check_crc(page, crc, chunk.source.path, source_offset + page_start)
            if reader is not None:
                if _read_length(page)[0] != length - LENGTH_LENGTH:
                    check_length_field(page, length, reader.page_place(ordinal))
                plaintext = room[used : used + length - reader.page_framing]
                used += length
                self._decrypting.append((decrypt, page[4:16], page[16:], reader.page_aads(ordinal)[1], plaintext))
                page = plaintext
            header_aad, page_aad = aads_of(ordinal)
            page_offset = offset + header_end - header_start + GCM_FRAMING
            end = page_offset + len(page) + framing
            nonce = nonces[taken : taken + 12]
            _write_framing(out, offset, page_offset - offset - 4, nonce)
            header = headers[header_start - header_base : header_end - header_base]
            add_header((encrypt_header, nonce, header, header_aad, out[offset + 16 : page_offset]))
            nonce = nonces[taken + 12 : taken + 24]
            _write_framing(out, page_offset, end - page_offset - 4, nonce)
            if crc_at >= 0:
                self._crcs.append((len(self._pages), crc_at))
            add_page((encrypt_page, nonce, page, page_aad, out[page_offset + 16 : end]))
            header_start = header_end
            taken += 24
            offset = end

    def decrypt(self, piece: PagesPiece, stored: memoryview, out: memoryview) -> None:
        """Have pages decrypted; headers were decrypted, and CRCs checked, when the pages were found."""
        _, chunk, pages, first, last, _, _ = piece
        reader = chunk.reader
        assert reader is not None
        header_base = header_start = pages.header_end(first)
        headers = pages.headers[header_base : pages.header_end(last)]
        aads_of, framing, decrypt = reader.page_aads, reader.page_framing, reader.pages_into(encrypt=False)
        add = self._decrypting.append
        self._owners.append((len(self._decrypting), reader, pages, first))
        at = offset = 0
        for header_length, length, ordinal, _, header_end, _ in pages.each(first, last):
            page_start = at + header_length
            at = page_start + length
            if _read_length(stored, page_start)[0] != length - LENGTH_LENGTH:
                check_length_field(stored[page_start:at], length, reader.page_place(ordinal))
            page_offset = offset + header_end - header_start
            out[offset:page_offset] = headers[header_start - header_base : header_end - header_base]
            offset = page_offset + length - framing
            nonce = stored[page_start + 4 : page_start + 16]
            add((decrypt, nonce, stored[page_start + 16 : at], aads_of(ordinal)[1], out[page_offset:offset]))
            header_start = header_end


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
    """How much memory the pages of all chunks may take during layout; beyond that, they are found again."""

    def __init__(self, left_bytes: int = 64 * 1024 * 1024) -> None:
        self.left_bytes = left_bytes

    def take(self, pages: ChunkPages) -> bool:
        """Take what these pages need; returns whether there was as much."""
        needed = len(pages.headers) + 72 * pages.count + 1024
        if needed > self.left_bytes:
            return False
        self.left_bytes -= needed
        return True


@dataclass(slots=True, eq=False, repr=False)
class ChunkRewrite:
    """A column chunk as in the source's footer, which is not changed; how it is read, and how it is written.

    `chunk_changes` are field id -> new value, or None to remove it, apart from how the chunk is encrypted;
    likewise `metadata_changes`. Layout sets `places`, from its metadata; `start` and `length` in the output; and
    `forgotten_length`, how many bytes old writers left out of the sizes that the source states. `dropped_indexes`
    are page indexes that are wrong and so are not in the output, and why.
    """

    # No records around the structs, and tuples and dictionaries of integers alone: a wide file has tens of
    # thousands of chunks, and Python's garbage collector looks at each object that may refer to others.
    chunk: Struct
    metadata: Struct
    reader: ChunkCipher | None
    writer: ChunkCipher | None
    num_rows: int = 0
    is_flat: bool = False
    chunk_changes: dict[int, int | None] = field(default_factory=dict)
    metadata_changes: dict[int, int | None] = field(default_factory=dict)
    start: int = 0
    length: int = 0
    forgotten_length: int = 0
    dropped_indexes: tuple[str, ...] = ()
    places: Places = field(init=False)
    source: ByteSource = field(init=False)
    _region: Region = field(init=False)
    _pages: ChunkPages | None = field(default=None, init=False)

    def forget_indexes(self) -> None:
        """Leave page indexes and the Bloom filter out: they are damaged, and readers find values without them."""
        self.chunk, self.metadata = self.chunk.copy(), self.metadata.copy()
        for field_id in (*_INDEX_OFFSETS, *_INDEX_LENGTHS):
            self.chunk.set_entry(field_id, None)
        for field_id in (_BLOOM_FILTER_OFFSET, _BLOOM_FILTER_LENGTH):
            self.metadata.set_entry(field_id, None)

    def new_metadata(self) -> bytes:
        """Return the bytes of its metadata in the output."""
        return self.metadata.changed_bytes(_entries(self.metadata_changes, (_BLOOM_FILTER_LENGTH,)))

    def new_chunk(self, encryption: Changes) -> bytes:
        """Return the bytes of the chunk in the output's footer, with what says how it is encrypted."""
        return self.chunk.changed_bytes({**_entries(self.chunk_changes, _INDEX_LENGTHS), **encryption})

    def lay_out(self, source: ByteSource, region: Region, offset: int, memory: PagesMemory) -> Part:
        """Lay out one of the chunk's regions at `offset` of the output; wrong page indexes get no place there."""
        if region[0] is _PAGES:
            return self._lay_out_pages(source, region, offset, memory)
        if region.kind is RegionKind.BLOOM_FILTER:
            part = self._lay_out_bloom_filter(source, region)
            self.metadata_changes[_BLOOM_FILTER_OFFSET] = offset
            *_, stated_length = self.places
            if self.writer is not None or stated_length is not None:
                self.metadata_changes[_BLOOM_FILTER_LENGTH] = part.length
            return part
        return self._lay_out_index(source, region, offset)

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
        for position, (page_length, (source_header_length, source_page_length, *_)) in enumerate(
            zip(lengths, pages.each(0, pages.count), strict=True)
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
        _, dictionary_page, *_ = self.places
        return walk_chunk(
            source,
            region.offset,
            region.offset + region.length,
            limit=region.limit,
            reader=self.reader,
            writer=self.writer,
            expects_dictionary_page=bool(dictionary_page),
            keeps_data_pages=any(map(self.chunk.has, _INDEX_OFFSETS)),
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
            stated = ColumnMetaData(self.metadata).total_uncompressed_size
            new[_TOTAL_UNCOMPRESSED_SIZE] = stated + self.forgotten_length
        if self.chunk.has(_FILE_PATH) and ColumnChunk(self.chunk).file_path is not None:
            # Empty, or the chunk would have been refused.
            self.chunk_changes[_FILE_PATH] = None
        (file_offset,) = self.chunk.numbers(_FILE_OFFSET_FIELD)
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
        if is_offset_index:
            flaws, _ = checked_offset_index(plaintext, pages.data_pages, self.num_rows, is_flat=self.is_flat)
        else:
            flaws, _ = checked_column_index(plaintext, pages.data_pages)
        if flaws:
            self.dropped_indexes += (f"the {module_type.title} at byte {region.offset}: {flaws[0][1]}",)
            for field_id in INDEX_FIELD_IDS[region.kind]:
                self.chunk_changes[field_id] = None
            return bytes_part(b"")
        if is_offset_index:
            lengths = output_lengths(pages, self.reader, self.writer)
            starts = accumulate(lengths, initial=self.start)
            moves = dict(zip(source_offsets(pages), zip(starts, lengths, strict=False), strict=False))
            moved = move_pages(plaintext, moves)
            part = self._encrypted(len(moved), lambda: moved, module_type)
        else:
            part = self._copied(source, region.offset, region.length, module_type)
        offset_id, length_id = INDEX_FIELD_IDS[region.kind]
        self.chunk_changes[offset_id], self.chunk_changes[length_id] = offset, part.length
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
            assert self.reader is not None
            raise self.reader.place(module_type).error(f"a module of {length} bytes is too short.")
        make = partial(self._plaintext, source, offset, length, module_type)
        return self._encrypted(plaintext_length, make, module_type)

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
    """Make all parts and write them one after another, by several threads where the sink takes any order."""

    def write(batches: Iterator[Batch]) -> None:
        buffer = bytearray()
        jobs = PageJobs()
        for start, length, pieces in batches:
            if len(buffer) < length:
                buffer = bytearray(length)
            view = memoryview(buffer)
            filled = 0
            for piece in pieces:
                end = filled + piece[0]
                piece.fill(view[filled:end], jobs)
                filled = end
                if len(jobs) >= _MOST_JOBS:
                    jobs.run()
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

_MOST_NAMED = 3

RowGroupRewrite = tuple[RowGroup, Sequence[ChunkRewrite]]
"""A row group of the source, and its chunks that go into the output."""


def rewrite_file(
    source: ByteSource,
    sink: ByteSink,
    footer: Footer,
    row_groups: Sequence[RowGroupRewrite],
    *,
    magic: bytes,
    make_footer: Callable[[], bytes],
    threads: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Write a file with the chunks given, and the footer that is made when all of them are laid out.

    The layout of the whole output is made first: all limits are checked and all that the footer says is known
    before the first byte is written.
    """
    parts: list[Part] = [bytes_part(magic)]
    parts += [part for _, _, part in laid_out(source, footer, row_groups, MAGIC_LENGTH)]
    parts.append(bytes_part(with_trailer(make_footer(), magic)))
    sink.reserve(sum([part.length for part in parts]))
    write_parts(parts, sink, threads=threads, on_progress=on_progress)


def laid_out(
    source: ByteSource,
    footer: Footer,
    row_groups: Sequence[RowGroupRewrite],
    offset: int,
    kept: Collection[RegionKind] = (),
) -> Iterator[tuple[Region, ChunkRewrite, Part]]:
    """Lay out all chunks from `offset` on, apart from kinds of regions that are kept for another place."""
    memory = PagesMemory()
    with naming_file(source.path):
        regions = in_order(row_groups, footer.envelope.footer_offset, footer.metadata.created_by)
        read_ahead = ReadAhead(source, regions)
        for region in regions:
            chunk = _chunk_of(region, row_groups)
            part = chunk.lay_out(read_ahead, region, offset, memory)
            if not kept or region[0] not in kept:
                offset += part.length
            yield region, chunk, part
    _warn_of_dropped_indexes(source.path, row_groups)


def in_order(row_groups: Sequence[RowGroupRewrite], footer_offset: int, created_by: str | None) -> list[Region]:
    """Return all regions in the order of the source, but page indexes after the pages that they are about."""
    regions: list[Region] = []
    for row_group_ordinal, (_, row_group_chunks) in enumerate(row_groups):
        for column_ordinal, chunk in enumerate(row_group_chunks):
            metadata = ColumnMetaData(chunk.metadata)
            chunk.places = places_of(metadata)
            regions += regions_of(
                ColumnChunk(chunk.chunk), metadata, row_group_ordinal, column_ordinal, chunk.places
            )
    early: list[Region] = []
    pages_found: set[ChunkRewrite] = set()
    result: list[Region] = []
    for region in arranged(regions, footer_offset, created_by):
        kind, chunk = region[0], _chunk_of(region, row_groups)
        if kind is _PAGES:
            pages_found.add(chunk)
        elif kind in INDEX_FIELD_IDS and chunk not in pages_found:
            early.append(region)
            continue
        result.append(region)
    return result + early


def _chunk_of(region: Region, row_groups: Sequence[RowGroupRewrite]) -> ChunkRewrite:
    return row_groups[region[1]][1][region[2]]


def _warn_of_dropped_indexes(path: str, row_groups: Sequence[RowGroupRewrite]) -> None:
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
    """Return a row group for the output; readers split files by the offsets and sizes that it states."""
    new = row_group.shallow_copy()
    new.struct.set_entry(RowGroup.columns.field_id, (WireType.LIST, ThriftList(WireType.STRUCT, columns)))
    if chunks:
        new.file_offset = min([chunk.start for chunk in chunks])
    new.total_compressed_size = sum([chunk.length for chunk in chunks])
    if forgotten := sum([chunk.forgotten_length for chunk in chunks]):
        new.total_byte_size += forgotten
    if ordinal <= MAX_ORDINAL:
        new.ordinal = ordinal
    return new


_SMALL = 64 * 1024
"""Longer regions are read as they are asked for."""

_READ_LENGTH = 256 * 1024
"""How much is read at once, at most."""


class ReadAhead:
    """A source that reads small regions ahead, and no byte outside of the regions; for any number of threads."""

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
        """Return exactly `length` bytes from `offset`."""
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
