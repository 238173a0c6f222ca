"""The pages of a column chunk, and how they are enciphered, many in one go (spec 5.1).

The loops here run once for each page, and files with pages of 2 KB have hundreds of thousands: they look up
nothing twice, build no object that is not needed, and take random bytes for many nonces at once.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import starmap
from operator import call

from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    NONCE_LENGTH,
    ChunkCipher,
    InvalidTag,
    check_length_field,
)
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import Bytes
from parquet_keytools.format.pages import padded_crc

NOTHING = -1
"""Stands for no CRC, and for no position of one."""


class ChunkPages:
    """Pages of a chunk, as one array of numbers: a chunk may have 32,768 of them, and a file many chunks.

    Attributes:
        source_offset: Where the first header begins.
        source_end: Where the last page ends.
        count: How many pages there are.
        numbers: Six for each page, in order: the lengths of header and page in the source, with framing; the page
            ordinal, `NO_PAGE_ORDINAL` for the dictionary page; the CRC that the header states, or `NOTHING`; where
            its new header ends in `headers`; and where in that header a padded CRC is filled in, or `NOTHING`.
        values: How many values each page has; None if that was not asked for.
        headers: The new headers one after another, without framing; empty where chunks are copied.
        first_data_page: Position of the first data page among the pages; None where there is none.
        length_before_data: How many bytes the pages before the first data page take in the output.
        output_length: How many bytes all of it takes there.
    """

    __slots__ = (
        "count",
        "first_data_page",
        "headers",
        "length_before_data",
        "numbers",
        "output_length",
        "source_end",
        "source_offset",
        "values",
    )

    def __init__(self, source_offset: int, *, keeps_values: bool = False) -> None:
        self.source_offset = source_offset
        self.source_end = self.count = 0
        self.numbers: array[int] = array("q")
        self.values: array[int] | None = array("q") if keeps_values else None
        self.headers = b""
        self.first_data_page: int | None = None
        self.length_before_data = self.output_length = 0

    @property
    def header_lengths(self) -> array[int]:
        """Lengths of the headers in the source, with framing."""
        return self.numbers[::_EACH]

    @property
    def page_lengths(self) -> array[int]:
        """Lengths of the pages in the source, with framing."""
        return self.numbers[1::_EACH]

    @property
    def ordinals(self) -> array[int]:
        """Page ordinals, `NO_PAGE_ORDINAL` for the dictionary page."""
        return self.numbers[2::_EACH]

    @property
    def has_dictionary_page(self) -> bool:
        """Whether the first page is a dictionary page."""
        return bool(self.numbers) and self.numbers[2] == NO_PAGE_ORDINAL

    def each(self, first: int, last: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the numbers of the pages from position `first` up to `last`."""
        numbers = iter(self.numbers[first * _EACH : last * _EACH])
        return zip(numbers, numbers, numbers, numbers, numbers, numbers, strict=True)

    def header_end(self, position: int) -> int:
        """Return where in `headers` the header of the page before a position ends."""
        return self.numbers[position * _EACH - 2] if position else 0


_EACH = 6


def output_lengths(pages: ChunkPages, reader: ChunkCipher | None, writer: ChunkCipher | None) -> list[int]:
    """Return how long each page is in the output, in bytes with header and framing.

    Args:
        pages: The pages of the chunk.
        reader: Decrypts them, or None.
        writer: Encrypts them, or None.
    """
    each = pages.each(0, pages.count)
    if reader is None and writer is None:
        return [header_length + page_length for header_length, page_length, *_ in each]
    added = (GCM_FRAMING + writer.page_framing) if writer is not None else 0
    added -= reader.page_framing if reader is not None else 0
    lengths = []
    start = 0
    for _, page_length, _, _, end, _ in each:
        lengths.append(end - start + page_length + added)
        start = end
    return lengths


def source_offsets(pages: ChunkPages) -> Iterator[int]:
    """Yield where each page begins in the source, from the start of the file."""
    offset = pages.source_offset
    for header_length, page_length, _, _, _, _ in pages.each(0, pages.count):
        yield offset
        offset += header_length + page_length


_Job = tuple[Callable[[Bytes, Bytes, bytes, Bytes], object], Bytes, Bytes, bytes, Bytes]
"""What one invocation of a cipher takes: the cipher, nonce, input, AAD and output."""

_write_framing = struct.Struct("<I12s").pack_into
_read_length = struct.Struct("<I").unpack_from


class PageJobs:
    """The cipher work for a part of the output, in one go: for many chunks where these are small.

    The interpreter lock is let go within the cipher. Loops around it that do next to nothing else keep two threads
    from waiting for each other after every page.
    """

    __slots__ = ("_crcs", "_decrypting", "_headers", "_owners", "_pages")

    def __init__(self) -> None:
        self._decrypting: list[_Job] = []
        self._owners: list[tuple[int, ChunkCipher, ChunkPages, int]] = []
        """Where the jobs of a chunk begin in `_decrypting`, its cipher, its pages, and the first of them."""
        self._pages: list[_Job] = []
        self._headers: list[_Job] = []
        """For each of `_pages` one."""
        self._crcs: list[tuple[int, int]] = []
        """Position in these lists, and where in the header the CRC of the page is filled in."""

    def run(self) -> None:
        """Do all of it.

        Raises:
            DecryptionError: A page does not authenticate.
        """
        if self._decrypting:
            jobs = iter(self._decrypting)
            try:
                deque(starmap(call, jobs), maxlen=0)
            except InvalidTag:
                raise self._not_authentic(len(self._decrypting) - sum(1 for _ in jobs) - 1) from None
        deque(starmap(call, self._pages), maxlen=0)
        for position, crc_position in self._crcs:
            _, nonce, _, _, ciphertext = self._pages[position]
            framing = struct.pack("<I12s", len(ciphertext) + NONCE_LENGTH, nonce)
            crc = padded_crc(zlib.crc32(ciphertext, zlib.crc32(framing)))
            cipher, nonce, header, aad, out = self._headers[position]
            header = b"".join((header[:crc_position], crc, header[crc_position + len(crc) :]))
            self._headers[position] = (cipher, nonce, header, aad, out)
        deque(starmap(call, self._headers), maxlen=0)

    def _not_authentic(self, failed: int) -> DecryptionError:
        start, reader, pages, first = max(owner for owner in self._owners if owner[0] <= failed)
        return reader.page_place(pages.ordinals[first + failed - start]).not_authentic()

    def encrypt(
        self,
        pages: ChunkPages,
        first: int,
        last: int,
        stored: memoryview,
        out: memoryview,
        path: str,
        source_offset: int,
        reader: ChunkCipher | None,
        writer: ChunkCipher,
    ) -> None:
        """Have pages and their headers encrypted.

        Args:
            pages: The pages of the chunk.
            first: Position of the first page to encrypt.
            last: Position after the last one.
            stored: These pages with their headers as they lie in the source.
            out: Where the modules go; as long as they are.
            path: The source's name, for error texts.
            source_offset: Where the first of these pages begins there, likewise.
            reader: Decrypts them first, where the source is encrypted too.
            writer: Encrypts them; its invocations are reserved.

        Raises:
            ParquetFormatError: A page is damaged.
            DecryptionError: The length field of a page is wrong.
        """
        header_base = header_start = pages.header_end(first)
        headers = pages.headers[header_base : pages.header_end(last)]
        nonces = writer.cipher.nonces(2 * (last - first))
        aads_of, framing = writer.page_aads, writer.page_framing
        encrypt_page, encrypt_header = writer.pages_into(encrypt=True), writer.cipher.gcm.encrypt_into
        add_page, add_header = self._pages.append, self._headers.append
        room = memoryview(b"")
        if reader is not None:
            decrypt = reader.pages_into(encrypt=False)
            room = memoryview(bytearray(len(stored)))
            self._owners.append((len(self._decrypting), reader, pages, first))
        at = offset = taken = used = 0
        for header_length, length, ordinal, crc, header_end, crc_position in pages.each(first, last):
            page_start = at + header_length
            at = page_start + length
            page = stored[page_start:at]
            if crc >= 0:
                check_crc(page, crc, path, source_offset + page_start)
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
            if crc_position >= 0:
                self._crcs.append((len(self._pages), crc_position))
            add_page((encrypt_page, nonce, page, page_aad, out[page_offset + 16 : end]))
            header_start = header_end
            taken += 24
            offset = end

    def decrypt(
        self, pages: ChunkPages, first: int, last: int, stored: memoryview, out: memoryview, reader: ChunkCipher
    ) -> None:
        """Have pages decrypted; their headers were, and what CRCs they state was checked, when they were found.

        Args:
            pages: The pages of the chunk.
            first: Position of the first page to decrypt.
            last: Position after the last one.
            stored: These pages with their headers as they lie in the source.
            out: Where the plaintext goes; as long as it is.
            reader: Decrypts them.

        Raises:
            DecryptionError: The length field of a page is wrong.
        """
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
    try:
        reader.pages_into(encrypt=False)(module[4:16], module[16:], reader.page_aads(ordinal)[1], out)
    except InvalidTag:
        raise reader.page_place(ordinal).not_authentic() from None
