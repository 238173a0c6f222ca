"""What an output file is made of, and how that is written: by several threads where the sink takes any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from parquet_keytools.encryption.chunk_pages import ChunkPages, PageJobs, output_lengths
from parquet_keytools.encryption.module_cipher import ChunkCipher
from parquet_keytools.format.byte_ranges import ByteSink, ByteSource
from parquet_keytools.runtime.working_threads import share_out

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


class RewrittenChunk(Protocol):
    """A column chunk that is rewritten.

    Attributes:
        reader: Decrypts its pages, or None.
        writer: Encrypts them, or None.
    """

    reader: ChunkCipher | None
    writer: ChunkCipher | None

    def find_pages(self, source: ByteSource) -> ChunkPages:
        """Return the pages, once they are laid out."""
        ...


class PagesPart(NamedTuple):
    """The pages of a column chunk.

    Attributes:
        length: How many bytes they have in the output.
        source: Where they come from.
        chunk: Their chunk.
    """

    length: int
    source: ByteSource
    chunk: RewrittenChunk

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
