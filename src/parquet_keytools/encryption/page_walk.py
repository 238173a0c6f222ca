"""The walk over the pages of a column chunk: from header to header, without looking at what lies between."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from parquet_keytools.encryption.aad import MAX_COUNT, MAX_ORDINAL, WRITE_LARGER_PAGES
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.chunk_pages import NOTHING, ChunkPages, check_crc, decrypt_page
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, NO_PAGE_ORDINAL, ChunkCipher
from parquet_keytools.errors import FormatLimitError, ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.pages import (
    MAX_PAGE_LENGTH,
    PageHeaderFacts,
    crc_position,
    read_page_header,
    with_sizes,
)
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.format.thrift import varint

_WINDOW_LENGTH = 64 * 1024
"""How much is read at once where the next header is likely to be in it too."""

_HEADER_LENGTH = 512
"""How much is read at once where pages are longer than a window; few headers are."""

_read_length = struct.Struct("<I").unpack_from

_DICTIONARY_PAGE, _INDEX_PAGE = PageHeader.DICTIONARY_PAGE, PageHeader.INDEX_PAGE

_BEGINNING_LENGTH = 32
"""Length field, nonce, and one block of a page."""


class HeaderWindow:
    """The bytes around the next header, read in pieces that are large enough and not much larger.

    Args:
        source: The file.
        start: Where the first header begins.
        end: What lies there and after it is not read.
        is_for_one: Whether no more than the first header is likely to be read.
    """

    __slots__ = ("_end", "_is_for_one", "_source", "data", "offset")

    def __init__(self, source: ByteSource, start: int, end: int, *, is_for_one: bool = False) -> None:
        self._source = source
        self._end = end
        self._is_for_one = is_for_one
        self.offset = start
        self.data: memoryview = memoryview(b"")

    def cover(self, offset: int, length: int = 1) -> int:
        """Make `length` bytes at `offset` be in `data`; returns their position there."""
        position = offset - self.offset
        if not 0 <= position <= len(self.data) - length:
            is_far = position > _WINDOW_LENGTH or self._is_for_one
            self._is_for_one = False
            usual = _HEADER_LENGTH if is_far else _WINDOW_LENGTH
            length = min(max(length, usual), self._end - offset)
            self.data = memoryview(self._source.read_at(offset, length))
            self.offset = offset
            position = 0
        return position

    def grow(self, offset: int) -> bool:
        """Read twice as much at `offset`; returns whether there is more."""
        held = len(self.data) - (offset - self.offset)
        if offset + held >= self._end:
            return False
        self.cover(offset, min(held * 2 + 64, self._end - offset))
        return True


def walk_chunk(
    source: ByteSource,
    start: int,
    end: int,
    *,
    limit: int,
    reader: ChunkCipher | None,
    writer: ChunkCipher | None,
    expects_dictionary_page: bool,
) -> ChunkPages:
    """Find the pages of a chunk and make their new headers.

    Args:
        source: The file.
        start: Where the chunk begins.
        end: Where its metadata says that it ends.
        limit: Where it may end at most; more than `end` for writers that forgot bytes.
        reader: Decrypts headers; None for a plaintext chunk.
        writer: Will encrypt them; None for plaintext output.
        expects_dictionary_page: Whether the metadata names a dictionary page. An encrypted header authenticates
            with one of two AADs only; the other one is tried too, since old writers leave the offset out.

    Raises:
        ParquetFormatError: There are no such pages.
        DecryptionError: A header does not authenticate, or a page that must be looked at.
        FormatLimitError: The output would have too many pages, or too long ones.
    """
    pages = ChunkPages(start)
    window = HeaderWindow(source, start, limit)
    added = (writer.page_framing if writer is not None else 0) - (reader.page_framing if reader is not None else 0)
    is_copied = reader is None and writer is None
    header_framing = 0 if writer is None else GCM_FRAMING
    headers, add = bytearray(), pages.numbers.extend
    offset = start
    ordinal = position = output_length = 0
    while offset < end:
        if ordinal >= MAX_COUNT and not is_copied:
            raise FormatLimitError(
                f"{source.path}: a column chunk has more than {MAX_COUNT} pages.", hint=WRITE_LARGER_PAGES
            )
        try:
            if reader is None:
                facts = _plaintext_header(window, offset)
                header_length = facts[3]
            else:
                facts, header_length = read_encrypted_header(
                    window, offset, reader, ordinal, offset == start, expects_dictionary_page
                )
        except ParquetFormatError as error:
            raise ParquetFormatError(f"page header at byte {offset}: {error}", path=source.path) from None
        page_type, page_length, crc, _, before, rest = facts
        page_offset = offset + header_length
        page_end = page_offset + page_length
        if page_end > limit:
            raise ParquetFormatError(f"the page at byte {offset} goes on after its chunk.", path=source.path)
        page_ordinal = ordinal
        if page_type == _DICTIONARY_PAGE:
            if offset != start:
                raise ParquetFormatError(
                    f"the dictionary page at byte {offset} is not the first page.", path=source.path
                )
            page_ordinal = NO_PAGE_ORDINAL
        elif page_type != _INDEX_PAGE:
            if ordinal == 0:
                pages.first_data_page = position
                pages.length_before_data = output_length + len(headers)
            ordinal += 1
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
                page_ordinal if page_ordinal <= MAX_ORDINAL else MAX_ORDINAL,
                NOTHING if crc is None else crc,
                len(headers),
                crc_place,
            )
        )
        offset = page_end
    pages.count = position
    pages.headers = bytes(headers)
    pages.source_end = offset
    pages.output_length = output_length + len(headers)
    if pages.first_data_page is None:
        pages.length_before_data = pages.output_length
    return pages


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
    facts, length = read_encrypted_header(window, start, reader, 0, True, expects_dictionary_page)
    offset = start + length
    if offset + facts.page_length > end:
        raise ParquetFormatError(f"the page at byte {start} goes on after its chunk.", path=source.path)
    record, _ = PageHeader.read(with_sizes(facts, facts.page_length, facts.crc))
    beginning_length = min(_BEGINNING_LENGTH, facts.page_length)
    position = window.cover(offset, beginning_length)
    return FirstPage(record, offset, window.data[position : position + beginning_length])


def _plaintext_header(window: HeaderWindow, offset: int) -> PageHeaderFacts:
    while True:
        position = offset - window.offset
        if not 0 <= position < len(window.data):
            position = window.cover(offset)
        try:
            return read_page_header(window.data, position)
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
) -> tuple[PageHeaderFacts, int]:
    """Read and decrypt the header of one page.

    Args:
        window: The chunk.
        offset: Where the header begins.
        reader: Decrypts it.
        ordinal: The page ordinal, if it is no dictionary page.
        is_first: Whether it is the first page of its chunk, which alone may be a dictionary page.
        expects_dictionary_page: As in `walk_chunk`.

    Returns:
        What the header says, and the length of its module in bytes.

    Raises:
        ParquetFormatError: There is no such header.
        DecryptionError: It does not authenticate.
    """
    data, position = window.data, offset - window.offset
    if position < 0 or position + LENGTH_LENGTH > len(data):
        position = window.cover(offset, LENGTH_LENGTH)
        data = window.data
        if len(data) - position < LENGTH_LENGTH:
            raise ParquetFormatError("it goes on after its chunk.")
    length = _read_length(data, position)[0] + LENGTH_LENGTH
    if position + length > len(data):
        position = window.cover(offset, length)
        data = window.data
    module_end = position + length
    if module_end > len(data) or length < GCM_FRAMING:
        raise ParquetFormatError(f"a module of {length} bytes does not fit into its chunk.")
    nonce, sealed = data[position + 4 : position + 16], data[position + 16 : module_end]
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
        raise ParquetFormatError("its page type is not that of its module.")
    if facts[1] < reader.page_framing:
        raise ParquetFormatError(f"an encrypted page of {facts.page_length} bytes is too short.")
    return facts, length


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
