"""The pages of a column chunk: the walk from header to header, and encryption of many pages at once (spec 5.1).

There is one walk: files are encrypted, decrypted, re-keyed, salvaged and verified by it. Defects go to a
callback: commands that write files raise the first, and `verify` notes the defects of all chunks.

The loops of `PageJobs` run once for each page, and files with pages of 2 KB have hundreds of thousands: they look
up nothing twice, build no object that is not needed, and take random bytes for many nonces at once.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise, starmap
from operator import call
from typing import NamedTuple

from parquet_keytools.encryption.aad import MAX_COUNT, WRITE_LARGER_PAGES
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    NONCE_LENGTH,
    ChunkCipher,
    InvalidTag,
    check_length_field,
)
from parquet_keytools.errors import DecryptionError, FormatLimitError, KeytoolsError, ParquetFormatError
from parquet_keytools.format.file_layout import Bytes, ByteSource
from parquet_keytools.format.pages import (
    MAX_PAGE_LENGTH,
    PageHeaderFacts,
    crc_position,
    padded_crc,
    read_page_contents,
    read_page_header,
    with_sizes,
)
from parquet_keytools.format.structs import OffsetIndex, PageHeader, PageLocation
from parquet_keytools.format.thrift import IntegerFields, ThriftList, WireType, read_struct, varint

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
        for position, crc_at in self._crcs:
            _, nonce, _, _, ciphertext = self._pages[position]
            framing = struct.pack("<I12s", len(ciphertext) + NONCE_LENGTH, nonce)
            crc = padded_crc(zlib.crc32(ciphertext, zlib.crc32(framing)))
            cipher, nonce, header, aad, out = self._headers[position]
            header = b"".join((header[:crc_at], crc, header[crc_at + len(crc) :]))
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
        for header_length, length, ordinal, crc, header_end, crc_at in pages.each(first, last):
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
            if crc_at >= 0:
                self._crcs.append((len(self._pages), crc_at))
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


_WINDOW_LENGTH = 64 * 1024
"""How much is read at once where the next header is likely to be within it."""

_HEADER_LENGTH = 512
"""How much is read at once where pages are longer than a window; few headers are."""

_DICTIONARY_PAGE, _INDEX_PAGE = PageHeader.DICTIONARY_PAGE, PageHeader.INDEX_PAGE

NOT_DATA = -2
"""Stands for the number of values of a page without values of the column."""

_BEGINNING_LENGTH = 32
"""Length field, nonce, and one block of a page."""


class HeaderWindow:
    """The bytes around the next header, read in pieces that are large enough and not much larger.

    Args:
        source: The file.
        start: Where the first header begins.
        end: Where the chunk may end at most.
        is_for_one: Whether no more than the first header is likely to be read.
        step: How much is read at once. With a step, pages are read through the window too, and chunks that follow
            each other can share it.

    Attributes:
        end: Where the chunk may end at most.
        readable_end: Bytes from here on are not read.
    """

    __slots__ = ("_is_for_one", "_source", "_step", "data", "end", "offset", "readable_end")

    def __init__(
        self, source: ByteSource, start: int, end: int, *, is_for_one: bool = False, step: int | None = None
    ) -> None:
        self._source = source
        self._is_for_one = is_for_one
        self._step = step
        self.end = self.readable_end = end
        self.offset = start
        self.data: memoryview = memoryview(b"")

    def cover(self, offset: int, length: int = 1) -> int:
        """Make `length` bytes at `offset` be in `data`; returns their position there."""
        position = offset - self.offset
        if not 0 <= position <= len(self.data) - length:
            usual = self._step
            if usual is None:
                is_far = position > _WINDOW_LENGTH or self._is_for_one
                usual = _HEADER_LENGTH if is_far else _WINDOW_LENGTH
                self._is_for_one = False
            length = min(max(length, usual), self.readable_end - offset)
            self.data = memoryview(self._source.read_at(offset, length))
            self.offset = offset
            position = 0
        return position

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes at `offset`."""
        position = self.cover(offset, length)
        return self.data[position : position + length]

    def grow(self, offset: int) -> bool:
        """Read twice as much at `offset`; returns whether there is more."""
        held = len(self.data) - (offset - self.offset)
        if offset + held >= self.end:
            return False
        self.cover(offset, min(held * 2 + 64, self.end - offset))
        return True


# --- Pages, one after another ---


class PageFlaw(Enum):
    """What can be wrong with a page, or its header."""

    NOT_AUTHENTIC = "the header does not authenticate"
    MODULE_LENGTH = "the length field of the header does not fit"
    HEADER = "the header is not the Thrift structure of a page header"
    TYPE = "the type of the page does not fit its module"
    CHUNK_SIZE = "the page goes on after its chunk"
    TOO_MANY = "there are more pages than ordinals"


class PageDefect(NamedTuple):
    """Why the walk cannot go on: the rest of the chunk is lost.

    Attributes:
        flaw: What is wrong.
        offset: Where the header begins.
        page_ordinal: Of the page, as it should be; `NO_PAGE_ORDINAL` for a dictionary page.
        error: The error for callers that end here.
    """

    flaw: PageFlaw
    offset: int
    page_ordinal: int
    error: KeytoolsError


def raise_defect(defect: PageDefect) -> None:
    """End at the first defect."""
    raise defect.error


class _HeaderError(ParquetFormatError):
    def __init__(self, message: str, flaw: PageFlaw = PageFlaw.HEADER) -> None:
        super().__init__(message)
        self.flaw = flaw


class Page(NamedTuple):
    """A page of a chunk.

    Attributes:
        ordinal: Its page ordinal; `NO_PAGE_ORDINAL` for a dictionary page.
        facts: What its header says.
        header_offset: Where the header begins.
        offset: Where the page itself begins.
        header: The module of the header; empty in a plaintext chunk.
    """

    ordinal: int
    facts: PageHeaderFacts
    header_offset: int
    offset: int
    header: memoryview | bytes


_page = Page._make  # Twice as fast as calling the class.


def walk_pages(
    window: HeaderWindow,
    start: int,
    end: int,
    reader: ChunkCipher | None,
    *,
    expects_dictionary_page: bool,
    path: str,
    on_defect: Callable[[PageDefect], None] = raise_defect,
) -> Iterator[Page]:
    """Yield the pages of a chunk, and end behind the last one or at the first defect.

    Args:
        window: Reads the chunk; its `end` is where the chunk may end at most.
        start: Where the chunk begins.
        end: Where its metadata says that it ends.
        reader: Decrypts headers; None for a plaintext chunk.
        expects_dictionary_page: Whether the metadata names a dictionary page. An encrypted header authenticates
            with one of two AADs only; the other one is tried too, since old writers leave the offset out.
        path: The file, for errors.
        on_defect: Called with what is wrong; raises its error or returns.
    """
    offset, ordinal = start, 0
    header: memoryview | bytes = b""
    while offset < end:
        candidate = NO_PAGE_ORDINAL if expects_dictionary_page and offset == start else ordinal
        if reader is not None and ordinal >= MAX_COUNT:
            on_defect(PageDefect(PageFlaw.TOO_MANY, offset, candidate, too_many_pages(path)))
            return
        try:
            if reader is None:
                facts = _plaintext_header(window, offset)
                header_length = facts[3]
            else:
                facts, header = read_encrypted_header(
                    window, offset, reader, ordinal, offset == start, expects_dictionary_page
                )
                header_length = len(header)
        except (ParquetFormatError, DecryptionError) as error:
            on_defect(_defect_of(error, offset, candidate, path))
            return
        page_offset = offset + header_length
        page_end = page_offset + facts[1]
        if page_end > window.end:
            problem = f"the page at byte {offset} goes on after its chunk."
            on_defect(PageDefect(PageFlaw.CHUNK_SIZE, offset, candidate, ParquetFormatError(problem, path=path)))
            return
        page_ordinal = ordinal
        if facts[0] == _DICTIONARY_PAGE:
            if offset != start:
                problem = f"the dictionary page at byte {offset} is not the first page."
                on_defect(PageDefect(PageFlaw.TYPE, offset, candidate, ParquetFormatError(problem, path=path)))
                return
            page_ordinal = NO_PAGE_ORDINAL
        elif facts[0] != _INDEX_PAGE:
            ordinal += 1
        yield _page((page_ordinal, facts, offset, page_offset, header))
        offset = page_end


def _defect_of(error: KeytoolsError, offset: int, page_ordinal: int, path: str) -> PageDefect:
    if isinstance(error, DecryptionError):
        return PageDefect(PageFlaw.NOT_AUTHENTIC, offset, page_ordinal, error)
    flaw = error.flaw if isinstance(error, _HeaderError) else PageFlaw.HEADER
    named = ParquetFormatError(f"page header at byte {offset}: {error}", path=path)
    return PageDefect(flaw, offset, page_ordinal, named)


def too_many_pages(path: str) -> FormatLimitError:
    """Return the error for a chunk with more pages than page ordinals."""
    return FormatLimitError(f"{path}: a column chunk has more than {MAX_COUNT} pages.", hint=WRITE_LARGER_PAGES)


def walk_chunk(
    source: ByteSource,
    start: int,
    end: int,
    *,
    limit: int,
    reader: ChunkCipher | None,
    writer: ChunkCipher | None,
    expects_dictionary_page: bool,
    keeps_values: bool = False,
) -> ChunkPages:
    """Find the pages of a chunk and make their new headers.

    Args:
        source: The file.
        start: Where the chunk begins.
        end: Where its metadata says that it ends.
        limit: Where it may end at most; more than `end` for writers that forgot bytes.
        reader: Decrypts headers; None for a plaintext chunk.
        writer: Will encrypt them; None for plaintext output.
        expects_dictionary_page: As in `walk_pages`.
        keeps_values: Whether to note how many values each page has, which page indexes are compared with.

    Raises:
        ParquetFormatError: There are no such pages.
        DecryptionError: A header does not authenticate, or a page that must be looked at.
        FormatLimitError: The output would have too many pages, or too long ones.
    """
    pages = ChunkPages(start, keeps_values=keeps_values)
    window = HeaderWindow(source, start, limit)
    added = (writer.page_framing if writer is not None else 0) - (reader.page_framing if reader is not None else 0)
    is_copied = reader is None and writer is None
    header_framing = 0 if writer is None else GCM_FRAMING
    headers, add = bytearray(), pages.numbers.extend
    position = output_length = 0
    page_end = start
    for page_ordinal, facts, offset, page_offset, _ in walk_pages(
        window, start, end, reader, expects_dictionary_page=expects_dictionary_page, path=source.path
    ):
        page_type, page_length, crc, _, before, rest = facts
        header_length = page_offset - offset
        page_end = page_offset + page_length
        if page_ordinal >= MAX_COUNT and not is_copied:
            raise too_many_pages(source.path)
        is_data = page_type != _DICTIONARY_PAGE and page_type != _INDEX_PAGE
        if is_data and pages.first_data_page is None:
            pages.first_data_page = position
            pages.length_before_data = output_length + len(headers)
        if pages.values is not None:
            pages.values.append(_values_of(facts) if is_data else NOT_DATA)
        position += 1
        new_length = page_length + added
        crc_place = NOTHING
        if is_copied:
            output_length += header_length
        else:
            if new_length > MAX_PAGE_LENGTH:
                raise FormatLimitError(
                    f"{source.path}: a page would have {new_length} bytes, more than {MAX_PAGE_LENGTH}.",
                    hint="Write smaller pages.",
                )
            if crc is None:
                headers += before + varint(new_length << 1) + rest
            elif writer is not None:
                headers += with_sizes(facts, new_length)
                crc_place = crc_position(facts, new_length)
            else:
                assert reader is not None
                new_crc = _plaintext_crc(source, page_offset, facts, page_ordinal, reader)
                headers += with_sizes(facts, new_length, new_crc)
            output_length += header_framing
        output_length += new_length
        add(
            (
                header_length,
                page_length,
                page_ordinal,
                NOTHING if crc is None else crc,
                len(headers),
                crc_place,
            )
        )
    pages.count = position
    pages.headers = bytes(headers)
    pages.source_end = page_end
    pages.output_length = output_length + len(headers)
    if pages.first_data_page is None:
        pages.length_before_data = pages.output_length
    return pages


def _values_of(facts: PageHeaderFacts) -> int:
    """Return how many values a page has; -1 where its header does not say it."""
    try:
        return read_page_contents(facts).num_values
    except ParquetFormatError:
        return NOTHING


@dataclass(frozen=True, slots=True)
class FirstPage:
    """The first page of an encrypted chunk.

    Attributes:
        header: Its header, which is authentic.
        offset: Where the page itself begins.
        beginning: Its first bytes as they are stored: length field, nonce, and one block.
    """

    header: PageHeader
    offset: int
    beginning: memoryview


def read_first_page(
    source: ByteSource, start: int, end: int, reader: ChunkCipher, *, expects_dictionary_page: bool
) -> FirstPage:
    """Read the header of the first page of a chunk, and the beginning of the page.

    Args:
        source: The file.
        start: Where the chunk begins.
        end: Where it ends.
        reader: Decrypts the header.
        expects_dictionary_page: As in `walk_chunk`.

    Raises:
        ParquetFormatError: There is no such page.
        DecryptionError: The header does not authenticate.
    """
    window = HeaderWindow(source, start, end)
    facts, module = read_encrypted_header(window, start, reader, 0, True, expects_dictionary_page)
    offset = start + len(module)
    if offset + facts.page_length > end:
        raise ParquetFormatError(f"the page at byte {start} goes on after its chunk.", path=source.path)
    record, _ = PageHeader.read(with_sizes(facts, facts.page_length, facts.crc))
    beginning_length = min(_BEGINNING_LENGTH, facts.page_length)
    return FirstPage(record, offset, window.view(offset, beginning_length))


def _plaintext_header(window: HeaderWindow, offset: int) -> PageHeaderFacts:
    while True:
        position = offset - window.offset
        if not 0 <= position < len(window.data):
            position = window.cover(offset)
        data = window.data
        if window.offset + len(data) > window.end:
            # Small chunks share a window: a header that goes on after its chunk would be read to the window's end.
            data = data[: window.end - window.offset]
        try:
            return read_page_header(data, position)
        except ParquetFormatError:
            if not window.grow(offset):
                raise


def read_encrypted_header(
    window: HeaderWindow,
    offset: int,
    reader: ChunkCipher,
    ordinal: int,
    is_first: bool,
    expects_dictionary_page: bool,
) -> tuple[PageHeaderFacts, memoryview]:
    """Read and decrypt the header of one page.

    Args:
        window: The chunk.
        offset: Where the header begins.
        reader: Decrypts it.
        ordinal: The page ordinal, if it is no dictionary page.
        is_first: Whether it is the first page of its chunk, which alone may be a dictionary page.
        expects_dictionary_page: As in `walk_pages`.

    Returns:
        What the header says, and its module.

    Raises:
        ParquetFormatError: There is no such header.
        DecryptionError: It does not authenticate.
    """
    data, position = window.data, offset - window.offset
    if position < 0 or position + LENGTH_LENGTH > len(data):
        if window.end - offset < LENGTH_LENGTH:
            raise _HeaderError("it goes on after its chunk.", PageFlaw.CHUNK_SIZE)
        position = window.cover(offset, LENGTH_LENGTH)
        data = window.data
    length = _read_length(data, position)[0] + LENGTH_LENGTH
    if length < GCM_FRAMING or offset + length > window.end:
        flaw = PageFlaw.CHUNK_SIZE if window.end - offset < GCM_FRAMING else PageFlaw.MODULE_LENGTH
        raise _HeaderError(f"a module of {length} bytes does not fit into its chunk.", flaw)
    if position + length > len(data):
        position = window.cover(offset, length)
        data = window.data
    module = data[position : position + length]
    nonce, sealed = module[4:16], module[16:]
    candidate = likelier = NO_PAGE_ORDINAL if is_first and expects_dictionary_page else ordinal
    try:
        plaintext = reader.cipher.gcm.decrypt(nonce, sealed, reader.page_aads(candidate)[0])
    except InvalidTag:
        if not is_first:
            raise reader.header_place(likelier).not_authentic() from None
        candidate = ordinal if expects_dictionary_page else NO_PAGE_ORDINAL
        try:
            plaintext = reader.cipher.gcm.decrypt(nonce, sealed, reader.page_aads(candidate)[0])
        except InvalidTag:
            raise reader.header_place(likelier).not_authentic() from None
    facts = read_page_header(plaintext, 0)
    if (facts[0] == _DICTIONARY_PAGE) != (candidate == NO_PAGE_ORDINAL):
        raise _HeaderError("its page type does not fit its module.", PageFlaw.TYPE)
    if facts[1] < reader.page_framing:
        raise _HeaderError(f"an encrypted page of {facts.page_length} bytes is too short.")
    return facts, module


def _plaintext_crc(
    source: ByteSource, page_offset: int, facts: PageHeaderFacts, page_ordinal: int, reader: ChunkCipher
) -> int:
    """Return the CRC of a page's plaintext: the length of a header in the output depends on it."""
    assert facts.crc is not None
    module = memoryview(source.read_at(page_offset, facts.page_length))
    check_crc(module, facts.crc, source.path, page_offset)
    plaintext = bytearray(facts.page_length - reader.page_framing)
    decrypt_page(reader, module, page_ordinal, plaintext)
    return zlib.crc32(plaintext)


# --- What a page index must say of the pages of its chunk ---
# The same rules for what writes files and for `verify`.

_COLUMN_INDEX_LISTS = (1, 2, 3, 5)
_REQUIRED_LISTS = (1, 2, 3)
_BOUNDARY_ORDER_ID = 4


def _numbers() -> array[int]:
    return array("q")


@dataclass
class DataPages:
    """The data pages of a chunk.

    Attributes:
        offsets: Where each begins.
        lengths: How long each is, with its header, in bytes.
        values: How many values each has; negative where that is not known.
    """

    offsets: array[int] = field(default_factory=_numbers)
    lengths: array[int] = field(default_factory=_numbers)
    values: array[int] = field(default_factory=_numbers)


class IndexRule(Enum):
    """A rule about page indexes."""

    PAGES = "the offset index has offset and size of each data page"
    ROWS = "the offset index has the first row of each data page"
    COLUMN = "the column index has an entry for each data page"


class CheckedIndex(NamedTuple):
    """What was found of a page index.

    Attributes:
        flaws: The rules that it breaks, and how.
        end: Where its Thrift structure ends in the plaintext; None where it is none.
    """

    flaws: list[tuple[IndexRule, str]]
    end: int | None


def checked_offset_index(
    data: bytes | memoryview, pages: DataPages | None, num_rows: int, *, is_flat: bool
) -> CheckedIndex:
    """Compare an offset index with the pages of its chunk.

    Args:
        data: Its plaintext.
        pages: The data pages of the chunk; None where they could not all be found.
        num_rows: Of the row group.
        is_flat: Whether each value of the column is a row.
    """
    try:
        index, end = OffsetIndex.read(data)
        locations = [_location(location) for location in index.page_locations]
    except ParquetFormatError as error:
        return CheckedIndex([(IndexRule.PAGES, str(error))], None)
    flaws: list[tuple[IndexRule, str]] = []
    rows = [row for _, _, row in locations]
    first_rows = _first_rows(pages, rows) if is_flat else rows
    increases = all(earlier <= later for earlier, later in pairwise(rows))
    if rows and (rows[0] != 0 or not increases or rows[-1] >= max(num_rows, 1)):
        flaws.append((IndexRule.ROWS, f"pages begin at rows {_some(rows)} of {num_rows}."))
    elif rows != first_rows:
        message = f"it says that pages begin at rows {_some(rows)}, and they begin at {_some(first_rows)}."
        flaws.append((IndexRule.ROWS, message))
    if pages is None:
        return CheckedIndex(flaws, end)
    found = list(zip(pages.offsets, pages.lengths, strict=True))
    stated = [(offset, length) for offset, length, _ in locations]
    wrong = next((pair for pair in zip(stated, found, strict=False) if pair[0] != pair[1]), None)
    if wrong is not None:
        (offset, length), (right_offset, right_length) = wrong
        message = f"it has a page of {length} bytes at {offset} for one of {right_length} at {right_offset}."
        flaws.append((IndexRule.PAGES, message))
    elif len(stated) != len(found):
        flaws.append((IndexRule.PAGES, f"it has {len(stated)} pages, the chunk {len(found)}."))
    return CheckedIndex(flaws, end)


_LOCATION: IntegerFields = (
    (PageLocation.offset.field_id, WireType.I64),
    (PageLocation.compressed_page_size.field_id, WireType.I32),
    (PageLocation.first_row_index.field_id, WireType.I64),
)


def _location(location: PageLocation) -> tuple[int, int, int]:
    offset, length, row = location.struct.numbers(_LOCATION)
    if offset is None or length is None or row is None:
        # One of them says what is missing.
        return location.offset, location.compressed_page_size, location.first_row_index
    return offset, length, row


def _first_rows(pages: DataPages | None, stated: list[int]) -> list[int]:
    """Return the first row of each page where that is known, else what is stated."""
    if pages is None or len(pages.values) != len(stated) or min(pages.values, default=0) < 0:
        return stated
    return list(accumulate(pages.values[:-1], initial=0)) if stated else stated


def checked_column_index(data: bytes | memoryview, pages: DataPages | None) -> CheckedIndex:
    """Compare a column index with the pages of its chunk; see `checked_offset_index`."""
    try:
        column_index, end = read_struct(data)
        lengths = {}
        for field_id in _COLUMN_INDEX_LISTS:
            value = (column_index.entry(field_id) or (None, None))[1]
            if isinstance(value, ThriftList):
                lengths[field_id] = len(value.elements)
    except ParquetFormatError as error:
        return CheckedIndex([(IndexRule.COLUMN, str(error))], None)
    problem = ""
    if any(field_id not in lengths for field_id in _REQUIRED_LISTS) or len(set(lengths.values())) != 1:
        problem = f"its lists have lengths {lengths}."
    elif column_index.types().get(_BOUNDARY_ORDER_ID) is not WireType.I32:
        problem = "its boundary_order is missing."
    elif pages is not None and lengths[1] != len(pages.offsets):
        problem = f"its lists have {lengths[1]} entries for {len(pages.offsets)} data pages."
    return CheckedIndex([(IndexRule.COLUMN, problem)] if problem else [], end)


def _some(values: Sequence[int]) -> str:
    return f"{list(values[:5])}{' and so on' if len(values) > 5 else ''}"
