"""The parts that an output file is put together from: what lies where, and how its bytes are made.

A part knows its length before any of its bytes exist, so that the layout of the whole file is known before the
first byte is written, and so that several threads can make different parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parquet_keytools.encryption.chunk_cipher import ChunkCipher
from parquet_keytools.encryption.chunk_pages import ChunkPages, output_lengths
from parquet_keytools.encryption.page_cipher import decrypt_pages, encrypt_pages
from parquet_keytools.format.byte_ranges import ByteSource

SEGMENT_LENGTH = 1024 * 1024
"""About how many bytes of output are made and written at a time: large writes are faster than small ones, as
long as what is written is still in the processor's cache."""


class Piece(NamedTuple):
    """Bytes that are made in one go.

    Attributes:
        length: How many.
        make: Writes them into memory of that length.
    """

    length: int
    make: Callable[[memoryview], None]


@dataclass(frozen=True)
class BytesPart:
    """Bytes that are there already, or are made in one go.

    Attributes:
        length: How many.
        make: Returns them.
    """

    length: int
    make: Callable[[], bytes | memoryview]

    def pieces(self) -> Iterator[Piece]:
        """Yield them as one piece."""

        def make(out: memoryview) -> None:
            out[:] = self.make()

        yield Piece(self.length, make)


@dataclass(frozen=True)
class PagesPart:
    """The pages of a column chunk.

    Attributes:
        length: How many bytes they have in the output.
        source: Where they come from.
        find_pages: Returns them.
        reader: Decrypts them, or None.
        writer: Encrypts them, or None.
    """

    length: int
    source: ByteSource
    find_pages: Callable[[], ChunkPages]
    reader: ChunkCipher | None
    writer: ChunkCipher | None

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces of about `SEGMENT_LENGTH`, each of whole pages."""
        pages = self.find_pages()
        lengths = output_lengths(pages, self.reader, self.writer)
        first = length = source_length = 0
        source_offset = pages.source_offset
        for position, page_length in enumerate(lengths):
            if length and length + page_length > SEGMENT_LENGTH:
                yield Piece(length, self._make(pages, first, position, source_offset, source_length))
                source_offset += source_length
                first, length, source_length = position, 0, 0
            length += page_length
            source_length += pages.header_lengths[position] + pages.page_lengths[position]
        if length:
            yield Piece(length, self._make(pages, first, len(lengths), source_offset, source_length))

    def _make(
        self, pages: ChunkPages, first: int, last: int, source_offset: int, source_length: int
    ) -> Callable[[memoryview], None]:
        source, reader, writer = self.source, self.reader, self.writer

        def make(out: memoryview) -> None:
            stored = memoryview(source.read_at(source_offset, source_length))
            if writer is not None:
                encrypt_pages(pages, first, last, stored, out, source.path, reader, writer)
            elif reader is not None:
                decrypt_pages(pages, first, last, stored, out, reader)
            else:
                out[:] = stored

        return make


Part = BytesPart | PagesPart
