"""The modules of one column chunk, found one after another, decrypted, and each checked against its place.

This walk shares the formats and ciphers with the module encryptor, and none of its ways to go through a file: a
mistake in one of them shows in the other.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from parquet_keytools.conformance.chunk_layout import Column, Window
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.nonce_ledger import DekNonces
from parquet_keytools.conformance.page_headers import HeaderFacts, facts_of, read_header, usual_header
from parquet_keytools.encryption.aad import MAX_COUNT, MAX_ORDINAL, ModulePlace, ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, LENGTH_LENGTH, ModuleCipher
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import PageHeader

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

_read_length = struct.Struct("<I").unpack_from
_pack_ordinal = struct.Struct("<h").pack
_pack_place = struct.Struct("<B2h").pack


def check_padding(plaintext: bytes | bytearray, end: int, place: ModulePlace, book: RuleBook) -> None:
    """Check that a Thrift structure that ends at `end` fills the plaintext of its module."""
    if end == len(plaintext):
        book.holds("padding")
    else:
        book.broken("padding", f"{len(plaintext) - end} bytes follow it.", place)


@dataclass(slots=True, eq=False, repr=False)
class ColumnCiphers:
    """How the chunks of one column are decrypted, and what became of their modules.

    Attributes:
        column: The column.
        cipher: Under its DEK; None where it is in plaintext, or its key is unavailable.
        is_ctr: Whether its pages are encrypted with AES-CTR.
        nonces: Those that were used with its DEK.
        page_framing: How many bytes longer a page is than its plaintext.
        counts: Module type, and one of `authentic`, `broken`, `unauthenticated` -> number of modules. Only the
            thread that walks counts, and adds nonces.
        held: Ids of rules that were checked and hold; for any thread, as a book, and faster.
    """

    column: Column
    cipher: ModuleCipher | None = None
    nonces: DekNonces = field(default_factory=DekNonces)
    is_ctr: bool = field(default=False, kw_only=True)
    page_framing: int = field(init=False)
    counts: Counter[tuple[ModuleType, str]] = field(default_factory=Counter, init=False)
    held: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.page_framing = 0 if self.cipher is None else CTR_FRAMING if self.is_ctr else GCM_FRAMING

    def note_held(self, book: RuleBook) -> None:
        """Note the rules that were found to hold, and those that each module keeps that is authentic."""
        book.holds(*self.held)
        for (module_type, outcome), number in self.counts.items():
            if outcome == "authentic" and number:
                book.holds(AUTHENTICITY_RULES[module_type], "module-length")


class ChunkCiphers(NamedTuple):
    """How one chunk is decrypted: as its column is, and at its place."""

    ciphers: ColumnCiphers
    row_group_ordinal: int

    def place(self, module_type: ModuleType, page_ordinal: int | None = None) -> ModulePlace:
        """Return the place of a module of this chunk."""
        return ModulePlace(module_type, self.row_group_ordinal, self.ciphers.column.ordinal, page_ordinal)

    def page_place(self, page_ordinal: int | None) -> ModulePlace:
        """Return the place of a page; the dictionary page has no ordinal."""
        if page_ordinal is None:
            return self.place(ModuleType.DICTIONARY_PAGE)
        return self.place(ModuleType.DATA_PAGE, page_ordinal)

    def aad(self, module_type: ModuleType) -> bytes:
        """Return the AAD of a module of this chunk, without the page ordinal that the AADs of data pages end with.

        Pages are many: their AADs are not made from their places one by one (spec 4.4.2).
        """
        assert self.ciphers.cipher is not None
        place = _pack_place(module_type, self.row_group_ordinal, self.ciphers.column.ordinal)
        return self.ciphers.cipher.file_aad + place


def check_module(
    chunk: ChunkCiphers, module_type: ModuleType, stored: bytes | memoryview, offset: int | None, book: RuleBook
) -> bytes | None:
    """Return the plaintext of a module that fills `stored`; None where it is not authentic, which is reported.

    Whoever counts it as authentic notes with that which rules hold: `ColumnCiphers.note_held`.
    """
    cipher = chunk.ciphers.cipher
    assert cipher is not None
    length = len(stored)
    field = _read_length(stored)[0] if length >= LENGTH_LENGTH else 0
    if length < GCM_FRAMING or field != length - LENGTH_LENGTH:
        message = f"its length field says {field} bytes, its place has {length - LENGTH_LENGTH}."
        book.broken("module-length", message, chunk.place(module_type), offset)
        return None
    try:
        return cipher.gcm.decrypt(stored[4:16], stored[16:], chunk.aad(module_type))
    except InvalidTag:
        rule_id = AUTHENTICITY_RULES[module_type]
        book.broken(rule_id, "the module does not authenticate.", chunk.place(module_type), offset)
        return None


# --- The walk over pages ---


_LIKELY_HEADER = 256
"""How much is looked at for the header of an encrypted page; few are longer."""

_MIN_PLAINTEXT_HEADER_WINDOW = 4096


class Page(NamedTuple):
    """A page that the walk came by.

    Attributes:
        ordinal: Its ordinal; None for a dictionary page.
        facts: What its header says.
        header_offset: Where its header begins, with framing.
        offset: Where the page itself begins.
        header: The module of its header; empty in a plaintext chunk.
    """

    ordinal: int | None
    facts: HeaderFacts
    header_offset: int
    offset: int
    header: memoryview | bytes

    def module_of(self, stored: memoryview, framing: int) -> memoryview:
        """Return the module of an encrypted page: all of it, or what follows the levels if those are outside."""
        levels = self.facts.levels_length
        if 0 < levels <= len(stored) - framing and _read_length(stored)[0] != len(stored) - LENGTH_LENGTH:
            module = stored[levels:]
            if _read_length(module)[0] == len(module) - LENGTH_LENGTH:
                return module
        return stored


_page = Page._make

_FoundHeader = tuple[HeaderFacts, int, ModuleType, memoryview | bytes]
"""What a header says, its length with framing, its type, and its module."""


@dataclass(eq=False, repr=False)
class PageWalk:
    """Goes from header to header through a chunk.

    Attributes:
        next_ordinal: Of the data page that would come next.
        stopped: Whether the rest of the chunk could not be walked: it is lost.
        has_dictionary_header: Whether the header of a dictionary page was decrypted.
        data_headers: How many headers of data pages were decrypted.
    """

    _window: Window
    _chunk: ChunkCiphers
    _dictionary_page_offset: int | None
    _start: int
    _end: int
    _book: RuleBook
    _data_aad: bytes = b""
    next_ordinal: int = 0
    stopped: bool = False
    has_dictionary_header: bool = False
    data_headers: int = 0

    def __post_init__(self) -> None:
        self._framing = self._chunk.ciphers.page_framing
        # Writers leave 0 where there is none.
        self._dictionary_page_offset = self._dictionary_page_offset or None

    def __iter__(self) -> Iterator[Page]:
        cipher, end = self._chunk.ciphers.cipher, self._end
        if cipher is not None:
            self._data_aad = self._chunk.aad(ModuleType.DATA_PAGE_HEADER)
        offset = self._start
        while offset < end:
            found = self._plaintext_header(offset) if cipher is None else self._encrypted_header(offset, cipher)
            if found is None:
                self.stopped = True
                return
            facts, header_length, header_type, header = found
            page_offset = offset + header_length
            next_offset = page_offset + facts.length
            if next_offset > end:
                message = f"a page of {facts.length} bytes goes on after its chunk, which ends at {end}."
                self._broken("chunk-size", message, header_type, offset)
                self.stopped = True
                return
            ordinal: int | None = None
            if facts.page_type != PageHeader.DICTIONARY_PAGE:
                ordinal = self.next_ordinal
                self.next_ordinal += facts.page_type != PageHeader.INDEX_PAGE
            yield _page((ordinal, facts, offset, page_offset, header))
            offset = next_offset
        self._chunk.ciphers.held.update(_WALKED)

    def _checked_facts(
        self, header: HeaderFacts | PageHeader, header_type: ModuleType, offset: int
    ) -> HeaderFacts | None:
        """Return what a header says, if all that it must have is there and can be."""
        try:
            if isinstance(header, HeaderFacts):
                page_type = header.page_type
            else:
                page_type, _ = header.type, header.compressed_page_size
            if not self._has_its_place(page_type, header_type, offset):
                self._broken("page-type", f"the header says page type {page_type}.", header_type, offset)
                return None
            facts = header if isinstance(header, HeaderFacts) else facts_of(header)
        except ParquetFormatError as error:
            self._broken("page-header", str(error), header_type, offset)
            return None
        if facts.length < self._framing or facts.uncompressed_length < 0 or facts.levels_length > facts.length:
            message = f"type {page_type}, {facts.length} bytes, and what belongs to them, cannot be."
            self._broken("page-header", message, header_type, offset)
            return None
        return facts

    def _has_its_place(self, page_type: int, header_type: ModuleType, offset: int) -> bool:
        is_dictionary = page_type == PageHeader.DICTIONARY_PAGE
        if self._chunk.ciphers.cipher is None:
            return not is_dictionary or offset == self._start
        is_dictionary_header = header_type is ModuleType.DICTIONARY_PAGE_HEADER
        return is_dictionary == is_dictionary_header and page_type != PageHeader.INDEX_PAGE

    def _plaintext_header(self, offset: int) -> _FoundHeader | None:
        header_type, left = ModuleType.DATA_PAGE_HEADER, self._end - offset
        length = _MIN_PLAINTEXT_HEADER_WINDOW
        while True:
            try:
                header, end = read_header(self._window.view(offset, min(length, left)))
            except ParquetFormatError as error:
                if length <= left:
                    # Statistics in a header may be long; it is looked for in twice as many bytes.
                    length *= 2
                    continue
                self._broken("page-header", str(error), header_type, offset)
                return None
            facts = self._checked_facts(header, header_type, offset)
            return None if facts is None else (facts, end, header_type, b"")

    def _encrypted_header(self, offset: int, cipher: ModuleCipher) -> _FoundHeader | None:
        header_types = self._header_types(offset)
        left = self._end - offset
        if self.next_ordinal > MAX_ORDINAL:
            message = f"the chunk has more than {MAX_COUNT} data pages."
            place = self._chunk.place(ModuleType.DATA_PAGE_HEADER, MAX_ORDINAL)
            self._book.broken("ordinal-limit", message, place, offset)
            return None
        if left < GCM_FRAMING:
            message = f"{left} bytes are left, too few for a module."
            self._broken("chunk-size", message, header_types[0], offset)
            return None
        module = self._window.view(offset, min(_LIKELY_HEADER, left))
        (stored,) = _read_length(module)
        length = stored + LENGTH_LENGTH
        if not GCM_FRAMING <= length <= left:
            message = f"its length field says {stored} bytes, and its chunk has {left}."
            self._broken("module-length", message, header_types[0], offset)
            return None
        module = module[:length] if length <= len(module) else self._window.view(offset, length)
        nonce, sealed = module[4:16], module[16:]
        for header_type in header_types:
            try:
                plaintext = cipher.gcm.decrypt(nonce, sealed, self._aad(header_type))
            except InvalidTag:
                continue
            break
        else:
            rule_id = AUTHENTICITY_RULES[header_types[0]]
            self._broken(rule_id, "the module does not authenticate.", header_types[0], offset)
            return None
        if header_type is ModuleType.DATA_PAGE_HEADER:
            self.data_headers += 1
        else:
            self.has_dictionary_header = True
        if offset == self._start:
            self._check_dictionary_offset(header_type, offset)
        found = usual_header(plaintext)
        if found is not None and found[1] == len(plaintext):
            self._chunk.ciphers.held.add("padding")
            facts = found[0]
            is_dictionary = header_type is ModuleType.DICTIONARY_PAGE_HEADER
            if (
                (facts.page_type == PageHeader.DICTIONARY_PAGE) is is_dictionary
                and facts.length >= self._framing
                and facts.levels_length <= facts.length
            ):
                return facts, length, header_type, module
        return self._unusual_header(plaintext, header_type, offset, length, module)

    def _unusual_header(
        self, plaintext: bytes, header_type: ModuleType, offset: int, length: int, module: memoryview
    ) -> _FoundHeader | None:
        """Read the header of a page that is not as writers write it, or not what belongs here."""
        try:
            header, end = read_header(plaintext)
        except ParquetFormatError as error:
            self._broken("page-header", str(error), header_type, offset)
            return None
        check_padding(plaintext, end, self._place(header_type), self._book)
        facts = self._checked_facts(header, header_type, offset)
        return None if facts is None else (facts, length, header_type, module)

    def _aad(self, header_type: ModuleType) -> bytes:
        if header_type is ModuleType.DATA_PAGE_HEADER:
            return self._data_aad + _pack_ordinal(self.next_ordinal)
        return self._chunk.aad(header_type)

    def _header_types(self, offset: int) -> tuple[ModuleType, ...]:
        """Return what the module at `offset` may be; the first page's AAD is one of two."""
        if offset != self._start:
            return _DATA_ONLY
        return _DICTIONARY_FIRST if self._dictionary_page_offset else _DATA_FIRST

    def _check_dictionary_offset(self, header_type: ModuleType, offset: int) -> None:
        stated = self._dictionary_page_offset
        actual = offset if header_type is ModuleType.DICTIONARY_PAGE_HEADER else None
        if stated == actual:
            self._chunk.ciphers.held.add("dictionary-offset")
        else:
            message = f"it is {stated}, and the dictionary page is at {actual}."
            self._book.broken("dictionary-offset", message, self._place(header_type))

    def _place(self, header_type: ModuleType) -> ModulePlace:
        is_dictionary = header_type is ModuleType.DICTIONARY_PAGE_HEADER
        return self._chunk.place(header_type, None if is_dictionary else self.next_ordinal)

    def _broken(self, rule_id: str, message: str, header_type: ModuleType, offset: int) -> None:
        self._book.broken(rule_id, message, self._place(header_type), offset)


_WALKED = ("chunk-size", "page-header", "page-type")
"""What holds where the walk reaches the end of a chunk."""

_DATA_ONLY = (ModuleType.DATA_PAGE_HEADER,)
_DATA_FIRST = (ModuleType.DATA_PAGE_HEADER, ModuleType.DICTIONARY_PAGE_HEADER)
_DICTIONARY_FIRST = (ModuleType.DICTIONARY_PAGE_HEADER, ModuleType.DATA_PAGE_HEADER)
