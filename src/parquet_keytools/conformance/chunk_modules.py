"""The modules of one column chunk, found one after another, each checked against its place.

This walk shares the formats and ciphers with the module encryptor, and none of its ways to go through a file: a
mistake in one of them shows in the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import Column
from parquet_keytools.encryption.aad import MAX_ORDINAL, ModulePlace, ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, LENGTH_LENGTH, ModuleCipher
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.records import Record
from parquet_keytools.format.structs import ColumnMetaData, PageHeader
from parquet_keytools.format.thrift_compact import WireType

AUTHENTICITY_RULES = {
    ModuleType.COLUMN_META_DATA: "column-metadata-authentic",
    ModuleType.DATA_PAGE: "data-page-authentic",
    ModuleType.DICTIONARY_PAGE: "dictionary-page-authentic",
    ModuleType.DATA_PAGE_HEADER: "data-page-header-authentic",
    ModuleType.DICTIONARY_PAGE_HEADER: "dictionary-page-header-authentic",
    ModuleType.COLUMN_INDEX: "column-index-authentic",
    ModuleType.OFFSET_INDEX: "offset-index-authentic",
    ModuleType.BLOOM_FILTER_HEADER: "bloom-filter-header-authentic",
    ModuleType.BLOOM_FILTER_BITSET: "bloom-filter-bitset-authentic",
}


def check_module(
    cipher: ModuleCipher, stored: bytes | memoryview, place: ModulePlace, offset: int | None, book: RuleBook
) -> bytes | None:
    """Return the plaintext of a module that fills `stored`; None where it is not authentic, which is reported."""
    view = memoryview(stored)
    length = len(view)
    field = struct.unpack_from("<I", view)[0] if length >= LENGTH_LENGTH else 0
    if length < GCM_FRAMING or field != length - LENGTH_LENGTH:
        message = f"its length field says {field} bytes, its place has {length - LENGTH_LENGTH}."
        book.broken("module-length", message, place, offset)
        return None
    out = bytearray(length - GCM_FRAMING)
    try:
        cipher.gcm.decrypt_into(view[4:16], view[16:], place.aad(cipher.file_aad), out)
    except InvalidTag:
        rule_id = AUTHENTICITY_RULES[place.module_type]
        book.broken(rule_id, "the module does not authenticate.", place, offset)
        return None
    book.holds(AUTHENTICITY_RULES[place.module_type], "module-length")
    return bytes(out)


def check_padding(plaintext: bytes | bytearray, end: int, place: ModulePlace, book: RuleBook) -> None:
    """Check that a Thrift structure that ends at `end` fills the plaintext of its module."""
    if end == len(plaintext):
        book.holds("padding")
    else:
        book.broken("padding", f"{len(plaintext) - end} bytes follow it.", place)


# --- pages, from header to header ---


_MIN_PLAINTEXT_HEADER_WINDOW = 4096

_FoundHeader = tuple[PageHeader, int, ModulePlace, bytes, bytes]
"""A header, its length with framing, its place, and nonce and end of the tag of its module."""

_REQUIRED_FIELD_IDS = {
    PageHeader.DATA_PAGE: (1, 2, 3, 4),
    PageHeader.DICTIONARY_PAGE: (1, 2),
    PageHeader.DATA_PAGE_V2: (1, 2, 3, 4, 5, 6),
}
"""Page type -> the required fields of its own header, all of them I32."""

_LEVELS_LENGTH_FIELD_IDS = (5, 6)
"""Of `definition_levels_byte_length` and `repetition_levels_byte_length` in DataPageHeaderV2."""

_IS_COMPRESSED_FIELD_ID = 7
"""Of `is_compressed` there; it is true where it is not set."""


def _inner_facts(header: PageHeader, page_type: int) -> tuple[int, int, bool]:
    """Return number of values, length of levels, and whether what follows these may be compressed.

    Raises:
        ParquetFormatError: The header of this type of page is missing, or a required field of it is.
    """
    if page_type == PageHeader.INDEX_PAGE:
        return 0, 0, True
    inner: Record | None = None
    if page_type == PageHeader.DATA_PAGE:
        inner = header.data_page_header
    elif page_type == PageHeader.DICTIONARY_PAGE:
        inner = header.dictionary_page_header
    elif page_type == PageHeader.DATA_PAGE_V2:
        inner = header.data_page_header_v2
    if inner is None:
        raise ParquetFormatError(f"there is no header of a page of type {page_type}.")
    fields = inner.struct.fields
    for field_id in _REQUIRED_FIELD_IDS[page_type]:
        if field_id not in fields or fields[field_id][0] is not WireType.I32:
            raise ParquetFormatError(f"the header of a page of type {page_type} lacks its field {field_id}.")
    num_values: int = fields[1][1]
    if page_type != PageHeader.DATA_PAGE_V2:
        return num_values, 0, True
    levels = [fields[field_id][1] for field_id in _LEVELS_LENGTH_FIELD_IDS]
    is_compressed = fields.get(_IS_COMPRESSED_FIELD_ID, (WireType.TRUE, None))[0] is WireType.TRUE
    return num_values, -1 if min(levels) < 0 else sum(levels), is_compressed


def _length_field(module: memoryview) -> int:
    length: int = struct.unpack_from("<I", module)[0]
    return length


class Window:
    """A part of a file that was read at once; a mapped file is not copied."""

    def __init__(self, source: ByteSource, end: int, step: int) -> None:
        self._source = source
        self._end = end
        self._step = step
        self._offset = 0
        self._data = memoryview(b"")

    def view(self, offset: int, length: int) -> memoryview:
        """Return a range, or as much of it as there is before the end."""
        length = min(length, self._end - offset)
        position = offset - self._offset
        if not 0 <= position <= len(self._data) - length:
            self._data = memoryview(self._source.read_at(offset, min(max(length, self._step), self._end - offset)))
            self._offset, position = offset, 0
        return self._data[position : position + length]


@dataclass(frozen=True)
class ChunkCiphers:
    """How one chunk is decrypted.

    Attributes:
        cipher: Under its DEK; None for a plaintext chunk.
        is_ctr: Whether its pages are encrypted with AES-CTR.
        fingerprint: Of the DEK, for the nonces that were used with it.
    """

    column: Column
    row_group_ordinal: int
    cipher: ModuleCipher | None
    is_ctr: bool
    fingerprint: bytes

    def place(self, module_type: ModuleType, page_ordinal: int | None = None) -> ModulePlace:
        """Return the place of a module of this chunk."""
        return ModulePlace(module_type, self.row_group_ordinal, self.column.ordinal, page_ordinal)

    @property
    def page_framing(self) -> int:
        """How many bytes longer a page is than its plaintext."""
        if self.cipher is None:
            return 0
        return CTR_FRAMING if self.is_ctr else GCM_FRAMING


class HeaderFacts(NamedTuple):
    """What a page header says.

    Attributes:
        page_type: `PageHeader.DATA_PAGE` and so on.
        length: Of the page with framing.
        levels_length: Of the levels of a V2 page; 0 for others.
        is_compressed: Whether what follows the levels is, if the chunk has a codec.
    """

    page_type: int
    length: int
    uncompressed_length: int
    crc: int | None
    num_values: int
    levels_length: int
    is_compressed: bool


class Page(NamedTuple):
    """A page that the walk came by.

    Attributes:
        place: Of the page itself, which begins at `offset`.
        facts: What its header says.
        header_nonce: The nonce of the header; empty in a plaintext chunk.
        header_check: The end of its tag, likewise.
    """

    place: ModulePlace
    facts: HeaderFacts
    header_offset: int
    offset: int
    header_nonce: bytes
    header_check: bytes

    @property
    def length(self) -> int:
        """Length of the page with framing."""
        return self.facts.length

    @property
    def is_dictionary(self) -> bool:
        """Whether it is the dictionary page."""
        return self.place.module_type is ModuleType.DICTIONARY_PAGE

    def module_of(self, stored: memoryview, framing: int) -> memoryview:
        """Return the module of an encrypted page: all of it, or what follows the levels if those are outside."""
        levels = self.facts.levels_length
        if 0 < levels <= len(stored) - framing and _length_field(stored) != len(stored) - LENGTH_LENGTH:
            module = stored[levels:]
            if _length_field(module) == len(module) - LENGTH_LENGTH:
                return module
        return stored


class PageWalk:
    """Goes from header to header through a chunk.

    Attributes:
        next_ordinal: Of the data page that would come next.
        stopped: Whether the rest of the chunk could not be walked: it is lost.
        authentic_headers: How many headers were decrypted, by module type.
    """

    def __init__(
        self, window: Window, chunk: ChunkCiphers, metadata: ColumnMetaData, start: int, end: int, book: RuleBook
    ) -> None:
        self._window = window
        self._chunk = chunk
        self._metadata = metadata
        self._start = start
        self._end = end
        self._book = book
        self.next_ordinal = 0
        self.stopped = False
        self.authentic_headers: dict[ModuleType, int] = {}

    def __iter__(self) -> Iterator[Page]:
        offset = self._start
        while offset < self._end:
            page = self._page(offset)
            if page is None:
                self.stopped = True
                return
            yield page
            offset = page.offset + page.length
        self._book.holds("chunk-size", "page-header", "page-type")

    def _page(self, offset: int) -> Page | None:
        chunk = self._chunk
        if chunk.cipher is None:
            found = self._plaintext_header(offset)
        else:
            found = self._encrypted_header(offset, chunk.cipher)
        if found is None:
            return None
        header, header_length, header_place, nonce, check = found
        facts = self._checked_facts(header, header_place, offset)
        if facts is None:
            return None
        page_type, length = facts.page_type, facts.length
        page_offset = offset + header_length
        if page_offset + length > self._end:
            message = f"a page of {length} bytes goes on after its chunk, which ends at {self._end}."
            self._broken("chunk-size", message, header_place, offset)
            return None
        if page_type == PageHeader.DICTIONARY_PAGE:
            place = chunk.place(ModuleType.DICTIONARY_PAGE)
        else:
            place = chunk.place(ModuleType.DATA_PAGE, self.next_ordinal)
            self.next_ordinal += page_type != PageHeader.INDEX_PAGE
        return Page(place, facts, offset, page_offset, nonce, check)

    def _checked_facts(self, header: PageHeader, place: ModulePlace, offset: int) -> HeaderFacts | None:
        """Return what a header says, if all that it must have is there and can be."""
        try:
            page_type, length = header.type, header.compressed_page_size
            if not self._has_its_place(page_type, place, offset):
                self._broken("page-type", f"the header says page type {page_type}.", place, offset)
                return None
            uncompressed_length, crc = header.uncompressed_page_size, header.crc
            num_values, levels_length, is_compressed = _inner_facts(header, page_type)
        except ParquetFormatError as error:
            self._broken("page-header", str(error), place, offset)
            return None
        least = min(uncompressed_length, num_values, levels_length, length - self._chunk.page_framing)
        if least < 0 or levels_length > length:
            message = f"type {page_type}, {length} bytes, and what belongs to them, cannot be."
            self._broken("page-header", message, place, offset)
            return None
        return HeaderFacts(page_type, length, uncompressed_length, crc, num_values, levels_length, is_compressed)

    def _has_its_place(self, page_type: int, header_place: ModulePlace, offset: int) -> bool:
        is_dictionary = page_type == PageHeader.DICTIONARY_PAGE
        if self._chunk.cipher is None:
            return not is_dictionary or offset == self._start
        is_dictionary_header = header_place.module_type is ModuleType.DICTIONARY_PAGE_HEADER
        return is_dictionary == is_dictionary_header and page_type != PageHeader.INDEX_PAGE

    def _plaintext_header(self, offset: int) -> _FoundHeader | None:
        place = self._chunk.place(ModuleType.DATA_PAGE_HEADER, self.next_ordinal)
        length = _MIN_PLAINTEXT_HEADER_WINDOW
        while True:
            data = self._window.view(offset, length)
            try:
                header, end = PageHeader.read(data)
            except ParquetFormatError as error:
                if len(data) == length:
                    # Statistics in a header may be long; it is looked for in twice as many bytes.
                    length *= 2
                    continue
                self._broken("page-header", str(error), place, offset)
                return None
            return header, end, place, b"", b""

    def _encrypted_header(self, offset: int, cipher: ModuleCipher) -> _FoundHeader | None:
        places = self._header_places(offset)
        if places is None:
            return None
        left = self._end - offset
        if left < GCM_FRAMING:
            self._broken("chunk-size", f"{left} bytes are left, too few for a module.", places[0], offset)
            return None
        (stored,) = struct.unpack("<I", self._window.view(offset, LENGTH_LENGTH))
        length = stored + LENGTH_LENGTH
        if not GCM_FRAMING <= length <= left:
            message = f"its length field says {stored} bytes, and its chunk has {left}."
            self._broken("module-length", message, places[0], offset)
            return None
        module = self._window.view(offset, length)
        nonce = bytes(module[4:16])
        plaintext = bytearray(length - GCM_FRAMING)
        for place in places:
            try:
                cipher.gcm.decrypt_into(nonce, module[16:], place.aad(cipher.file_aad), plaintext)
            except InvalidTag:
                continue
            break
        else:
            rule_id = AUTHENTICITY_RULES[places[0].module_type]
            self._broken(rule_id, "the module does not authenticate.", places[0], offset)
            return None
        self._book.holds(AUTHENTICITY_RULES[place.module_type], "module-length")
        self.authentic_headers[place.module_type] = self.authentic_headers.get(place.module_type, 0) + 1
        if offset == self._start:
            self._check_dictionary_offset(place, offset)
        try:
            header, end = PageHeader.read(bytes(plaintext))
        except ParquetFormatError as error:
            self._broken("page-header", str(error), place, offset)
            return None
        check_padding(plaintext, end, place, self._book)
        return header, length, place, nonce, bytes(module[-4:])

    def _header_places(self, offset: int) -> list[ModulePlace] | None:
        """Return what the module at `offset` may be; the first page's AAD is one of two."""
        chunk = self._chunk
        if self.next_ordinal > MAX_ORDINAL:
            message = f"the chunk has more than {MAX_ORDINAL + 1} data pages."
            self._broken("ordinal-limit", message, chunk.place(ModuleType.DATA_PAGE_HEADER, MAX_ORDINAL), offset)
            return None
        data = chunk.place(ModuleType.DATA_PAGE_HEADER, self.next_ordinal)
        if offset != self._start:
            return [data]
        dictionary = chunk.place(ModuleType.DICTIONARY_PAGE_HEADER)
        return [dictionary, data] if self._metadata.dictionary_page_offset else [data, dictionary]

    def _check_dictionary_offset(self, place: ModulePlace, offset: int) -> None:
        stated = self._metadata.dictionary_page_offset or None
        actual = offset if place.module_type is ModuleType.DICTIONARY_PAGE_HEADER else None
        message = f"it is {stated}, and the dictionary page is at {actual}."
        self._book.check("dictionary-offset", stated == actual, message, place)

    def _broken(self, rule_id: str, message: str, place: ModulePlace, offset: int) -> None:
        self._book.broken(rule_id, message, place, offset)
