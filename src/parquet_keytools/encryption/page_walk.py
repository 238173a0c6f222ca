"""The walk over the pages of a column chunk, from header to header.

It is the only one: files are encrypted, decrypted, re-keyed, salvaged and verified by it. Defects go to a
callback: commands that write files raise the first, and `verify` notes the defects of all chunks.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

from parquet_keytools.encryption.aad import MAX_COUNT, WRITE_LARGER_PAGES
from parquet_keytools.encryption.chunk_pages import NOTHING, ChunkPages, check_crc, decrypt_page
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    ChunkCipher,
    InvalidTag,
)
from parquet_keytools.errors import DecryptionError, FormatLimitError, KeytoolsError, ParquetFormatError
from parquet_keytools.format.file_layout import ByteSource
from parquet_keytools.format.pages import (
    MAX_PAGE_LENGTH,
    PageHeaderFacts,
    crc_position,
    read_page_contents,
    read_page_header,
    with_sizes,
)
from parquet_keytools.format.structs import OffsetIndex, PageHeader, PageLocation
from parquet_keytools.format.thrift import IntegerFields, ThriftList, WireType, read_struct, varint

_WINDOW_LENGTH = 64 * 1024
"""How much is read at once where the next header is likely to be within it."""

_HEADER_LENGTH = 512
"""How much is read at once where pages are longer than a window; few headers are."""

_read_length = struct.Struct("<I").unpack_from

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
