"""The pages of a column chunk: the walk from header to header (spec 5.1), and what a page index must say.

Files are encrypted, decrypted, re-keyed, salvaged and verified by one walk. Defects go to a callback: commands
that write files raise the first, and `verify` notes the defects of all chunks.
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
from parquet_keytools.encryption.module_cipher import (
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    ChunkCipher,
    InvalidTag,
    check_length_field,
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
from parquet_keytools.format.structs import OffsetIndex, PageHeader
from parquet_keytools.format.thrift import ThriftList, WireType, read_struct, varint

NOTHING = -1
"""Marks a missing CRC, or a CRC without a position."""


@dataclass(slots=True, eq=False, repr=False)
class ChunkPages:
    """Pages of a chunk, as packed numbers: a chunk may have 32,768 of them, and a file many chunks.

    Attributes:
        source_offset: Where the first header begins.
        source_end: Where the last page ends.
        numbers: Six of 64 bits for each page, in order: the lengths of header and page in the source, with
            framing; the page ordinal, `NO_PAGE_ORDINAL` for the dictionary page; the CRC that the header states,
            or `NOTHING`; where its new header ends in `headers`; and where in that header a padded CRC is filled
            in, or `NOTHING`.
        data_pages: What page indexes are compared with; None if that was not asked for.
        headers: The new headers one after another, without framing; empty where chunks are copied.
        first_data_page: Position of the first data page among the pages; None where there is none.
        length_before_data: How many bytes the pages before the first data page take in the output.
        output_length: How many bytes all of it takes there.
    """

    source_offset: int
    data_pages: DataPages | None = None
    numbers: bytes = b""
    count: int = 0
    source_end: int = 0
    headers: bytes = b""
    first_data_page: int | None = None
    length_before_data: int = 0
    output_length: int = 0

    @property
    def has_dictionary_page(self) -> bool:
        """Whether the first page is a dictionary page."""
        return bool(self.numbers) and self.page(0)[2] == NO_PAGE_ORDINAL

    def page(self, position: int) -> tuple[int, int, int, int, int, int]:
        """Return the numbers of the page at a position."""
        return _NUMBERS.unpack_from(self.numbers, position * _NUMBERS.size)

    def each(self, first: int, last: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the numbers of the pages from position `first` up to `last`."""
        return _NUMBERS.iter_unpack(self.numbers[first * _NUMBERS.size : last * _NUMBERS.size])

    def header_end(self, position: int) -> int:
        """Return where in `headers` the header of the page before a position ends."""
        return self.page(position - 1)[4] if position else 0


_NUMBERS = struct.Struct("<6q")


def output_lengths(pages: ChunkPages, reader: ChunkCipher | None, writer: ChunkCipher | None) -> list[int]:
    """Return how long each page is in the output, in bytes with header and framing."""
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


_read_length = struct.Struct("<I").unpack_from


def check_crc(page: memoryview, stored_crc: int, path: str, offset: int) -> None:
    """Raise `ParquetFormatError` unless a page, as it is stored, has the CRC of its header."""
    if zlib.crc32(page) != stored_crc:
        raise ParquetFormatError(
            f"the page at byte {offset} does not have the CRC that its header states: it is damaged.", path=path
        )


def decrypt_page(reader: ChunkCipher, module: memoryview, ordinal: int, out: bytearray | memoryview) -> None:
    """Decrypt one page into `out`; raise `DecryptionError` if its length field is wrong or it is not authentic."""
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


_NO_DATA = memoryview(b"")


@dataclass(slots=True, eq=False, repr=False)
class HeaderWindow:
    """The bytes around the next header, read in pieces that are large enough and not much larger.

    With a `step`, which is how much is read at once, pages are read through the window too, and chunks that follow
    each other can share it. `end` is where the chunk may end at most; bytes from `readable_end` on are not read.
    """

    source: ByteSource
    offset: int
    end: int
    is_for_one: bool = False
    """Whether no more than the first header is likely to be read."""
    step: int | None = None
    data: memoryview = _NO_DATA
    readable_end: int = field(init=False)

    def __post_init__(self) -> None:
        """Allow reads up to the end of the chunk."""
        self.readable_end = self.end

    def cover(self, offset: int, length: int = 1) -> int:
        """Make `length` bytes at `offset` be in `data`; returns their position there."""
        position = offset - self.offset
        if not 0 <= position <= len(self.data) - length:
            usual = self.step
            if usual is None:
                is_far = position > _WINDOW_LENGTH or self.is_for_one
                usual = _HEADER_LENGTH if is_far else _WINDOW_LENGTH
                self.is_for_one = False
            length = min(max(length, usual), self.readable_end - offset)
            self.data = memoryview(self.source.read_at(offset, length))
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
    """What can be wrong with a page, or its header; except for the first, by the rule that `verify` reports."""

    NOT_AUTHENTIC = "the header does not authenticate"
    MODULE_LENGTH = "module-length"
    HEADER = "page-header"
    TYPE = "page-type"
    CHUNK_SIZE = "chunk-size"
    TOO_MANY = "ordinal-limit"


class PageDefect(NamedTuple):
    """Why the walk cannot go on, and the error for callers that end here: the rest of the chunk is lost."""

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
    """A page of a chunk; `header` is the module of its header, and empty in a plaintext chunk."""

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
    """Yield the pages of a chunk, and stop after the last one or at the first defect.

    `end` is where the metadata says that the chunk ends; `window.end` is where it may end at most. An encrypted
    header authenticates with one of two AADs only: the one of `expects_dictionary_page` is tried first, and then
    the other, since old writers omit the offset of the dictionary page.
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
    keeps_data_pages: bool = False,
) -> ChunkPages:
    """Find the pages of a chunk and make their new headers.

    `limit` is more than `end` for writers that forgot bytes. `keeps_data_pages` notes what page indexes
    are compared with. Raises `FormatLimitError` for too many, or too long, pages of the output.
    """
    pages = ChunkPages(start, DataPages() if keeps_data_pages else None)
    window = HeaderWindow(source, start, limit)
    added = (writer.page_framing if writer is not None else 0) - (reader.page_framing if reader is not None else 0)
    is_copied = reader is None and writer is None
    header_framing = 0 if writer is None else GCM_FRAMING
    headers, numbers = bytearray(), bytearray()
    pack = _NUMBERS.pack
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
        if is_data and pages.data_pages is not None:
            pages.data_pages.offsets.append(offset)
            pages.data_pages.lengths.append(header_length + page_length)
            pages.data_pages.values.append(_values_of(facts))
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
        stated_crc = NOTHING if crc is None else crc
        numbers += pack(header_length, page_length, page_ordinal, stated_crc, len(headers), crc_place)
    pages.count = position
    pages.numbers = bytes(numbers)
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


def _plaintext_header(window: HeaderWindow, offset: int) -> PageHeaderFacts:
    while True:
        position = offset - window.offset
        if not 0 <= position < len(window.data):
            position = window.cover(offset)
        data = window.data
        if window.offset + len(data) > window.end:
            # Small chunks share a window: a header that ends behind its chunk would be read to the window's end.
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
    """Read and decrypt the header of a page, with that ordinal if it is a data page; return facts and module."""
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
# Writers of files and `verify` share these rules.

_COLUMN_INDEX_LISTS = (1, 2, 3, 5)
_REQUIRED_LISTS = (1, 2, 3)
_BOUNDARY_ORDER_ID = 4


@dataclass
class DataPages:
    """The data pages of a chunk: offsets, lengths with headers, and numbers of values, negative if unknown."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    values: array[int] = field(default_factory=lambda: array("q"))


class IndexRule(Enum):
    """A rule about page indexes, as `verify` reports it."""

    PAGES = "offset-index"
    ROWS = "offset-index-rows"
    COLUMN = "column-index"


class CheckedIndex(NamedTuple):
    """The rules that a page index breaks, and where its Thrift structure ends; None where it is none."""

    flaws: list[tuple[IndexRule, str]]
    end: int | None


def checked_offset_index(
    data: bytes | memoryview, pages: DataPages | None, num_rows: int, *, is_flat: bool
) -> CheckedIndex:
    """Compare an offset index with the data pages of its chunk; None where they could not all be found."""
    try:
        index, end = OffsetIndex.read(data)
        locations = [
            (location.offset, location.compressed_page_size, location.first_row_index)
            for location in index.page_locations
        ]
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


def _first_rows(pages: DataPages | None, stated: list[int]) -> list[int]:
    """Return the first row of each page where that is known, else what is stated."""
    if pages is None or len(pages.values) != len(stated) or min(pages.values, default=0) < 0:
        return stated
    return list(accumulate(pages.values[:-1], initial=0)) if stated else stated


def checked_column_index(data: bytes | memoryview, pages: DataPages | None) -> CheckedIndex:
    """Compare a column index with the pages of its chunk; None where they could not all be found."""
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
