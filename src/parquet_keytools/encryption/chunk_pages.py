"""The pages of one column chunk, as they lie in the source and will lie in the output."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from parquet_keytools.encryption.chunk_cipher import NO_PAGE_ORDINAL, ChunkCipher
from parquet_keytools.encryption.module_cipher import GCM_FRAMING

NOTHING = -1
"""Stands for no CRC, and for no position of one."""


@dataclass(slots=True)
class ChunkPages:
    """Pages of a chunk, as columns of numbers: a chunk may have 32,768 of them, and a file many chunks.

    Attributes:
        source_offset: Where the first header begins.
        source_end: Where the last page ends.
        header_lengths: Lengths of the headers in the source, with framing.
        page_lengths: Lengths of the pages in the source, with framing.
        ordinals: Page ordinals, `NO_PAGE_ORDINAL` for the dictionary page.
        stored_crcs: What the headers say, or `NOTHING`.
        headers: The new headers one after another, without framing; empty where chunks are copied.
        header_ends: Where each of them ends.
        crc_positions: Where in each a padded CRC is to be filled in, or `NOTHING`.
        first_data_page: Position of the first data page among the pages; None where there is none.
    """

    source_offset: int
    source_end: int = 0
    header_lengths: array[int] = field(default_factory=lambda: array("Q"))
    page_lengths: array[int] = field(default_factory=lambda: array("I"))
    ordinals: array[int] = field(default_factory=lambda: array("h"))
    stored_crcs: array[int] = field(default_factory=lambda: array("q"))
    headers: bytearray = field(default_factory=bytearray)
    header_ends: array[int] = field(default_factory=lambda: array("Q"))
    crc_positions: array[int] = field(default_factory=lambda: array("i"))
    first_data_page: int | None = None

    @property
    def has_dictionary_page(self) -> bool:
        """Whether the first page is a dictionary page."""
        return bool(self.ordinals) and self.ordinals[0] == NO_PAGE_ORDINAL

    def __len__(self) -> int:
        return len(self.page_lengths)


def output_lengths(pages: ChunkPages, reader: ChunkCipher | None, writer: ChunkCipher | None) -> list[int]:
    """Return how long each page is in the output, in bytes with header and framing.

    Args:
        pages: Those of the chunk.
        reader: Decrypts them, or None.
        writer: Encrypts them, or None.
    """
    if reader is None and writer is None:
        return [a + b for a, b in zip(pages.header_lengths, pages.page_lengths, strict=True)]
    added = (GCM_FRAMING + writer.page_framing) if writer is not None else 0
    added -= reader.page_framing if reader is not None else 0
    lengths = []
    start = 0
    for end, page_length in zip(pages.header_ends, pages.page_lengths, strict=True):
        lengths.append(end - start + page_length + added)
        start = end
    return lengths


def source_offsets(pages: ChunkPages) -> Iterator[int]:
    """Yield where each page begins in the source, from the start of the file."""
    offset = pages.source_offset
    for header_length, page_length in zip(pages.header_lengths, pages.page_lengths, strict=True):
        yield offset
        offset += header_length + page_length
