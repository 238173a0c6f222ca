"""The pages of a column chunk, and how they are enciphered, many in one go (spec 5.1).

The loops here run once for each page, and files with pages of 2 KB have hundreds of thousands: they look up
nothing twice, build no object that is not needed, and take random bytes for many nonces at once.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap

from parquet_keytools.encryption.aes import NONCE_LENGTH, InvalidTag
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, NO_PAGE_ORDINAL, ChunkCipher, check_length_field
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import Bytes
from parquet_keytools.format.pages import padded_crc

NOTHING = -1
"""Stands for no CRC, and for no position of one."""


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

    __slots__ = (
        "crc_positions",
        "first_data_page",
        "header_ends",
        "header_lengths",
        "headers",
        "ordinals",
        "page_lengths",
        "source_end",
        "source_offset",
        "stored_crcs",
    )

    def __init__(self, source_offset: int) -> None:
        self.source_offset = source_offset
        self.source_end = 0
        self.header_lengths: array[int] = array("Q")
        self.page_lengths: array[int] = array("I")
        self.ordinals: array[int] = array("h")
        self.stored_crcs: array[int] = array("q")
        self.headers = bytearray()
        self.header_ends: array[int] = array("Q")
        self.crc_positions: array[int] = array("i")
        self.first_data_page: int | None = None

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


_Job = tuple[Bytes, Bytes, bytes, Bytes]
"""Nonce, input, AAD and output of one invocation of a cipher."""

_write_framing = struct.Struct("<I12s").pack_into
_read_length = struct.Struct("<I").unpack_from


def check_crc(page: memoryview, stored_crc: int, path: str, offset: int) -> None:
    """Check the CRC of a page as it is stored.

    Raises:
        ParquetFormatError: The page is damaged.
    """
    if zlib.crc32(page) != stored_crc:
        raise ParquetFormatError(
            f"the page at byte {offset} does not have the CRC that its header states: it is damaged.", path=path
        )


def decrypt_page(reader: ChunkCipher, module: memoryview, ordinal: int, out: bytearray | memoryview) -> None:
    """Decrypt one page into `out`.

    Raises:
        DecryptionError: Its length field is wrong, or it does not authenticate.
    """
    check_length_field(module, len(module), reader.page_place(ordinal))
    job = (module[4:16], module[16:], reader.page_aads(ordinal)[1], out)
    _decrypt_all(reader, [job], [ordinal])


def encrypt_pages(
    pages: ChunkPages,
    first: int,
    last: int,
    stored: memoryview,
    out: memoryview,
    path: str,
    reader: ChunkCipher | None,
    writer: ChunkCipher,
) -> None:
    """Encrypt pages and their headers.

    Args:
        pages: Those of the chunk.
        first: Position of the first page to encrypt.
        last: Position after the last one.
        stored: These pages with their headers as they lie in the source.
        out: Where the modules go; as long as they are.
        path: The source's name, for error texts.
        reader: Decrypts them first, where the source is encrypted too.
        writer: Encrypts them; its invocations are reserved.

    Raises:
        ParquetFormatError: A page is damaged.
        DecryptionError: A page does not authenticate.
    """
    plaintexts = _stored_pages(pages, first, last, stored, path)
    ordinals = pages.ordinals[first:last]
    if reader is not None:
        plaintexts = _decrypted(reader, plaintexts, ordinals)
    header_base = header_start = pages.header_ends[first - 1] if first else 0
    header_ends = pages.header_ends[first:last]
    headers = bytes(pages.headers[header_base : header_ends[-1]])
    nonces = writer.cipher.nonces(2 * len(plaintexts))
    aads_of, write_framing, framing = writer.page_aads, _write_framing, writer.page_framing
    page_jobs: list[_Job] = []
    header_jobs: list[_Job] = []
    offset = taken = 0
    for page, ordinal, header_end in zip(plaintexts, ordinals, header_ends, strict=True):
        header_aad, page_aad = aads_of(ordinal)
        page_offset = offset + header_end - header_start + GCM_FRAMING
        end = page_offset + len(page) + framing
        nonce = nonces[taken : taken + 12]
        write_framing(out, offset, page_offset - offset - 4, nonce)
        header = headers[header_start - header_base : header_end - header_base]
        header_jobs.append((nonce, header, header_aad, out[offset + 16 : page_offset]))
        nonce = nonces[taken + 12 : taken + 24]
        write_framing(out, page_offset, end - page_offset - 4, nonce)
        page_jobs.append((nonce, page, page_aad, out[page_offset + 16 : end]))
        header_start = header_end
        taken += 24
        offset = end
    _run(writer.pages_into(encrypt=True), page_jobs)
    if max(pages.stored_crcs[first:last]) >= 0:
        _fill_in_crcs(pages, first, header_jobs, page_jobs)
    _run(writer.cipher.gcm.encrypt_into, header_jobs)


def decrypt_pages(
    pages: ChunkPages, first: int, last: int, stored: memoryview, out: memoryview, reader: ChunkCipher
) -> None:
    """Decrypt pages; their headers were decrypted, and what CRCs they state was checked, when they were found.

    Args:
        pages: Those of the chunk.
        first: Position of the first page to decrypt.
        last: Position after the last one.
        stored: These pages with their headers as they lie in the source.
        out: Where the plaintext goes; as long as it is.
        reader: Decrypts them.

    Raises:
        DecryptionError: A page does not authenticate.
    """
    header_ends = pages.header_ends
    header_base = header_start = header_ends[first - 1] if first else 0
    headers = bytes(memoryview(pages.headers)[header_base : header_ends[last - 1]])
    ordinals = pages.ordinals[first:last]
    aads_of, framing = reader.page_aads, reader.page_framing
    jobs: list[_Job] = []
    at = offset = 0
    for header_length, length, ordinal, header_end in zip(
        pages.header_lengths[first:last],
        pages.page_lengths[first:last],
        ordinals,
        header_ends[first:last],
        strict=True,
    ):
        page_start = at + header_length
        at = page_start + length
        if _read_length(stored, page_start)[0] != length - 4:
            check_length_field(stored[page_start:at], length, reader.page_place(ordinal))
        page_offset = offset + header_end - header_start
        out[offset:page_offset] = headers[header_start - header_base : header_end - header_base]
        offset = page_offset + length - framing
        nonce = stored[page_start + 4 : page_start + 16]
        jobs.append((nonce, stored[page_start + 16 : at], aads_of(ordinal)[1], out[page_offset:offset]))
        header_start = header_end
    _decrypt_all(reader, jobs, ordinals)


def _stored_pages(pages: ChunkPages, first: int, last: int, stored: memoryview, path: str) -> list[memoryview]:
    """Return pages as they lie in the source, after a look at their CRCs."""
    result = []
    at = 0
    for header_length, length, crc in zip(
        pages.header_lengths[first:last],
        pages.page_lengths[first:last],
        pages.stored_crcs[first:last],
        strict=True,
    ):
        page_start = at + header_length
        at = page_start + length
        page = stored[page_start:at]
        if crc >= 0:
            check_crc(page, crc, path, pages.source_offset + page_start)
        result.append(page)
    return result


def _decrypted(reader: ChunkCipher, modules: Sequence[memoryview], ordinals: Sequence[int]) -> list[memoryview]:
    """Return the plaintexts of pages."""
    framing = reader.page_framing
    room = memoryview(bytearray(sum(map(len, modules)) - framing * len(modules)))
    jobs: list[_Job] = []
    plaintexts: list[memoryview] = []
    offset = 0
    for module, ordinal in zip(modules, ordinals, strict=True):
        length = len(module)
        if _read_length(module)[0] != length - 4:
            check_length_field(module, length, reader.page_place(ordinal))
        end = offset + length - framing
        plaintexts.append(room[offset:end])
        jobs.append((module[4:16], module[16:], reader.page_aads(ordinal)[1], plaintexts[-1]))
        offset = end
    _decrypt_all(reader, jobs, ordinals)
    return plaintexts


def _fill_in_crcs(pages: ChunkPages, first: int, header_jobs: list[_Job], page_jobs: Sequence[_Job]) -> None:
    """Put into headers the CRCs of their pages as they are now stored."""
    for number, (_, _, _, ciphertext) in enumerate(page_jobs):
        position = pages.crc_positions[first + number]
        if position >= 0:
            nonce, header, aad, header_out = header_jobs[number]
            framing = struct.pack("<I12s", len(ciphertext) + NONCE_LENGTH, page_jobs[number][0])
            crc = padded_crc(zlib.crc32(ciphertext, zlib.crc32(framing)))
            header = b"".join((header[:position], crc, header[position + len(crc) :]))
            header_jobs[number] = (nonce, header, aad, header_out)


def _run(cipher: Callable[..., object], jobs: list[_Job]) -> None:
    # The interpreter lock is let go within the cipher. A loop around it that does next to nothing else keeps two
    # threads from waiting for each other after every page.
    deque(starmap(cipher, jobs), maxlen=0)


def _decrypt_all(reader: ChunkCipher, jobs: list[_Job], ordinals: Sequence[int]) -> None:
    rest = iter(jobs)
    try:
        deque(starmap(reader.pages_into(encrypt=False), rest), maxlen=0)
    except InvalidTag:
        failed = len(jobs) - sum(1 for _ in rest) - 1
        raise reader.page_place(ordinals[failed]).not_authentic() from None
