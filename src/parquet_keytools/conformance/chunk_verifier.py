"""The modules of column chunks verified: authenticated, and compared with each other and with the metadata.

Pages must also begin as their codec lets pages begin. A page of AES_GCM_CTR_V1 has no tag: any bytes decrypt to
something (spec 4.2.2). A wrong key, or a counter that begins elsewhere, shows there; a few altered values do not.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parquet_keytools.conformance.chunk_layout import ChunkNumbers, Column
from parquet_keytools.conformance.nonces import FileNonces, nonce_entry
from parquet_keytools.conformance.report import Loss, RuleBook
from parquet_keytools.encryption.aad import MAX_COUNT, ModulePlace, ModuleType
from parquet_keytools.encryption.module_cipher import (
    CTR_FRAMING,
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    ChunkCipher,
    InvalidTag,
    ModuleCipher,
)
from parquet_keytools.encryption.page_walk import (
    DataPages,
    HeaderWindow,
    IndexRule,
    Page,
    PageDefect,
    PageFlaw,
    checked_column_index,
    checked_offset_index,
    walk_pages,
)
from parquet_keytools.encryption.protection import Algorithm
from parquet_keytools.errors import DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import ByteSource, Region, RegionKind
from parquet_keytools.format.pages import PageContents, read_page_contents
from parquet_keytools.format.structs import BloomFilterHeader, PageHeader
from parquet_keytools.format.thrift import WireType
from parquet_keytools.runtime.threads_and_forks import in_threads

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


@dataclass(slots=True, eq=False, repr=False)
class ColumnCiphers:
    """How the chunks of one column are decrypted, and what became of their modules.

    Attributes:
        column: The column.
        cipher: Under its DEK; None where it is in plaintext, or its key is unavailable.
        fingerprint: Of its DEK.
        algorithm: Of the file.
        nonces: The nonces of the file.
        counts: Module type, and one of `authentic`, `broken`, `unauthenticated` -> number of modules. Only the
            thread that walks counts, and adds nonces.
        held: Ids of rules that were checked and hold; for any thread, as a book, and faster.
    """

    column: Column
    cipher: ModuleCipher | None = None
    fingerprint: bytes = b""
    algorithm: Algorithm | None = None
    nonces: FileNonces = field(default_factory=FileNonces)
    counts: Counter[tuple[ModuleType, str]] = field(default_factory=Counter, init=False)
    held: set[str] = field(default_factory=set, init=False)

    def note_held(self, book: RuleBook) -> None:
        """Note the rules that hold, and those that each authentic module keeps."""
        book.holds(*self.held)
        for (module_type, outcome), number in self.counts.items():
            if outcome == "authentic" and number:
                book.holds(AUTHENTICITY_RULES[module_type], "module-length")


class Chunk:
    """A column chunk.

    Attributes:
        ciphers: How its column is decrypted.
        row_group_ordinal: Of its row group.
        reader: Decrypts its modules; None where its column has no cipher.
    """

    __slots__ = ("ciphers", "reader", "row_group_ordinal")

    def __init__(self, ciphers: ColumnCiphers, row_group_ordinal: int) -> None:
        self.ciphers = ciphers
        self.row_group_ordinal = row_group_ordinal
        self.reader: ChunkCipher | None = None
        if ciphers.cipher is not None:
            self.reader = ChunkCipher(ciphers.cipher, ciphers.algorithm, row_group_ordinal, ciphers.column.ordinal)

    def place(self, module_type: ModuleType, page_ordinal: int | None = None) -> ModulePlace:
        """Return the place of a module."""
        return ModulePlace(module_type, self.row_group_ordinal, self.ciphers.column.ordinal, page_ordinal)

    def page_place(self, page_ordinal: int, *, is_header: bool = False) -> ModulePlace:
        """Return the place of a page, or of its header."""
        if page_ordinal == NO_PAGE_ORDINAL:
            return self.place(ModuleType.DICTIONARY_PAGE_HEADER if is_header else ModuleType.DICTIONARY_PAGE)
        return self.place(ModuleType.DATA_PAGE_HEADER if is_header else ModuleType.DATA_PAGE, page_ordinal)

    def plaintext(
        self, module_type: ModuleType, stored: bytes | memoryview, offset: int | None, book: RuleBook
    ) -> bytes | None:
        """Return the plaintext of a module that is no page and fills `stored`; None where it is reported."""
        assert self.reader is not None
        place, length = self.place(module_type), len(stored)
        stated = _read_length(stored)[0] if length >= LENGTH_LENGTH else 0
        if length < GCM_FRAMING or stated != length - LENGTH_LENGTH:
            message = f"its length field says {stated} bytes, its place has {length - LENGTH_LENGTH}."
            book.broken("module-length", message, place, offset)
            return None
        try:
            return self.reader.decrypt(stored, module_type)
        except DecryptionError:
            book.broken(AUTHENTICITY_RULES[module_type], "the module does not authenticate.", place, offset)
            return None


def check_padding(plaintext: bytes | bytearray, end: int, place: ModulePlace, book: RuleBook) -> None:
    """Check that a Thrift structure that ends at `end` fills the plaintext of its module."""
    left = len(plaintext) - end
    book.check("padding", left == 0, f"{left} bytes follow it.", place)


# --- Pages ---

_UNCOMPRESSED, _SNAPPY = 0, 1
_MAGICS = {2: b"\x1f\x8b\x08", 6: b"\x28\xb5\x2f\xfd"}
"""Codec of parquet.thrift (gzip, Zstandard) -> what its output begins with. Brotli and LZ4 have no such thing."""

_START_LENGTH = 5
"""How much of a page is compared with its codec."""

_END_LENGTH = 8 * 1024
"""How much of each end of a page tells it from others; with all of it, a file would take twice as long."""

_MOST_PAGES = 1 << 20
"""How many pages of a chunk are kept for its page index."""

_WALKED = ("chunk-size", "page-header", "page-type")
"""What holds where the walk reaches the end of a chunk."""

_DEFECTS = {
    PageFlaw.NOT_AUTHENTIC: ("", "the module does not authenticate."),
    PageFlaw.MODULE_LENGTH: ("module-length", ""),
    PageFlaw.HEADER: ("page-header", ""),
    PageFlaw.TYPE: ("page-type", ""),
    PageFlaw.CHUNK_SIZE: ("chunk-size", ""),
    PageFlaw.TOO_MANY: ("ordinal-limit", f"the chunk has more than {MAX_COUNT} data pages."),
}
"""The rule that a defect of the walk breaks, and the message where the error has none for a report."""


def begins_as_compressed(codec: int, start: bytes, length: int) -> bool:
    """Return whether a page that decompresses to `length` bytes may begin with these, at most `_START_LENGTH`."""
    if codec != _SNAPPY:
        return start.startswith(_MAGICS[codec])
    # Snappy begins with the length, seven bits in each byte.
    value = 0
    for position, byte in enumerate(start):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value == length
    return False


class Task(NamedTuple):
    """A page to be authenticated.

    Attributes:
        verifier: Verifies its chunk.
        page: As the walk found it.
        contents: What its header says of its content.
        stored: All its bytes.
        module: Its module: without the levels that may lie before it.
    """

    verifier: ChunkVerifier
    page: Page
    contents: PageContents
    stored: memoryview
    module: memoryview


_task = Task._make  # Twice as fast as calling the class.


@dataclass(slots=True, eq=False)
class ChunkVerifier:
    """Verifies the pages of one chunk, and then its page indexes and Bloom filter.

    Attributes:
        chunk: The chunk.
        numbers: What its metadata says.
        num_rows: Of its row group.
        region: Where its pages lie; None where they cannot be read.
        indexes: What belongs to it beside its pages; None where there is nothing.
        book: Where findings go.
        is_whole: Whether the walk reached the end of the chunk.
    """

    chunk: Chunk
    numbers: ChunkNumbers
    num_rows: int
    region: Region | None
    indexes: IndexVerifier | None
    book: RuleBook
    is_whole: bool = False
    _broken_pages: list[int] = field(default_factory=list)
    _lost_pages: set[int] = field(default_factory=set)
    _lost_from: int | None = None
    _is_lost: bool = False
    _begins_in_a_way: bool = field(init=False)

    def __post_init__(self) -> None:
        self._begins_in_a_way = self.numbers.codec == _SNAPPY or self.numbers.codec in _MAGICS

    @property
    def start(self) -> int:
        """Where its pages begin."""
        return 0 if self.region is None else self.region.offset

    @property
    def end(self) -> int:
        """Where its pages end."""
        return 0 if self.region is None else self.region.offset + (self.region.length or 0)

    def walk(self, window: HeaderWindow) -> Iterator[Task]:
        """Yield all pages, and check the chunk's own numbers, and its indexes, at the end."""
        indexes = self.indexes
        if self.region is None:
            if indexes is not None:
                indexes.check(None, self.num_rows)
            return
        chunk, reader, view = self.chunk, self.chunk.reader, window.view
        is_ctr = reader is not None and not reader.pages_are_gcm
        window.end = self.end
        found: DataPages | None = DataPages() if indexes is not None and indexes.has_page_index else None
        first_data_page: int | None = None
        data_pages = dictionary_pages = values = 0
        nonces = bytearray()
        self.is_whole = True
        for page in walk_pages(
            window,
            self.start,
            self.end,
            reader,
            expects_dictionary_page=bool(self.numbers.dictionary_page_offset),
            path="",
            on_defect=self._note_defect,
        ):
            ordinal, facts, header_offset, offset, header = page
            contents = self._contents(page)
            if contents is None:
                self.is_whole = False
                break
            stored = module = view(offset, facts.page_length)
            if reader is not None:
                if contents.levels_length:
                    module = _module_of(stored, contents.levels_length, reader.page_framing)
                nonces += nonce_entry(header[4:16], header_offset, header[-4:])
                nonces += nonce_entry(module[4:16], offset, _crc_of_ends(module) if is_ctr else module[-4:])
            if ordinal == NO_PAGE_ORDINAL:
                dictionary_pages += 1
            elif facts.page_type != PageHeader.INDEX_PAGE:
                if first_data_page is None:
                    first_data_page = header_offset
                if found is not None:
                    found.values.append(contents.num_values)
                    found.offsets.append(header_offset)
                    found.lengths.append(offset + facts.page_length - header_offset)
                    if len(found.offsets) > _MOST_PAGES:
                        found = None
                values += contents.num_values
                data_pages += 1
            yield _task((self, page, contents, stored, module))
        if reader is not None:
            counts, (data, dictionary) = chunk.ciphers.counts, self._kinds
            counts[ModuleType.DATA_PAGE_HEADER, "authentic"] += data_pages
            counts[ModuleType.DICTIONARY_PAGE_HEADER, "authentic"] += dictionary_pages
            counts[data] += data_pages
            counts[dictionary] += dictionary_pages
            chunk.ciphers.nonces.add(chunk.ciphers.fingerprint, nonces, data_pages + dictionary_pages)
        if self.is_whole:
            chunk.ciphers.held.update(_WALKED)
            self._check_numbers(values, first_data_page)
        else:
            self._lost_from = data_pages
        if indexes is not None:
            indexes.check(found if self.is_whole else None, self.num_rows)

    def _note_defect(self, defect: PageDefect) -> None:
        self.is_whole = False
        note_defect(self.chunk, defect, self.book)

    def _contents(self, page: Page) -> PageContents | None:
        """Return what a header says of its page's content; None, which is reported, where that cannot be."""
        ordinal, facts, header_offset, _, header = page
        problem, rule_id = "", "page-header"
        if self.chunk.reader is not None:
            held = self.chunk.ciphers.held
            if len(header) == facts.length + GCM_FRAMING:
                held.add("padding")
            else:
                left = len(header) - facts.length - GCM_FRAMING
                place = self.chunk.page_place(ordinal, is_header=True)
                self.book.broken("padding", f"{left} bytes follow it.", place)
            if header_offset == self.start:
                self._check_dictionary_offset(ordinal, header_offset)
            if facts.page_type == PageHeader.INDEX_PAGE:
                problem, rule_id = f"the header says page type {facts.page_type}.", "page-type"
        if not problem:
            try:
                contents = read_page_contents(facts)
                if contents.levels_length <= facts.page_length:
                    return contents
                problem = f"{contents.levels_length} bytes of levels do not fit into {facts.page_length}."
            except ParquetFormatError as error:
                problem = str(error)
        place = self.chunk.page_place(ordinal, is_header=True)
        self.book.broken(rule_id, problem, place, header_offset)
        return None

    def _check_dictionary_offset(self, ordinal: int, offset: int) -> None:
        stated = self.numbers.dictionary_page_offset or None
        actual = offset if ordinal == NO_PAGE_ORDINAL else None
        if stated == actual:
            self.chunk.ciphers.held.add("dictionary-offset")
        else:
            message = f"it is {stated}, and the dictionary page is at {actual}."
            place = self.chunk.page_place(ordinal, is_header=True)
            self.book.broken("dictionary-offset", message, place)

    @property
    def _kinds(self) -> tuple[tuple[ModuleType, str], tuple[ModuleType, str]]:
        """As what data and dictionary pages count whose length field is right, and whose tag if they have one."""
        assert self.chunk.reader is not None
        outcome = "authentic" if self.chunk.reader.pages_are_gcm else "unauthenticated"
        return (ModuleType.DATA_PAGE, outcome), (ModuleType.DICTIONARY_PAGE, outcome)

    def _check_numbers(self, values: int, first_data_page: int | None) -> None:
        book, chunk, held = self.book, self.chunk, self.chunk.ciphers.held
        # Messages and places are made where they are needed: chunks are many.
        num_values, is_flat = self.numbers.num_values, chunk.ciphers.column.is_flat
        held.add("value-count")
        if values != num_values:
            message = f"the pages have {values} values, the metadata says {num_values}."
            book.broken("value-count", message, chunk.place(ModuleType.COLUMN_META_DATA))
        if is_flat and num_values != self.num_rows:
            message = f"it has {num_values} values, and the row group {self.num_rows} rows."
            book.broken("value-count", message, chunk.place(ModuleType.COLUMN_META_DATA))
        if values != num_values or (is_flat and num_values != self.num_rows):
            # It is unknown which values belong to which rows.
            self._is_lost = True
        if chunk.reader is not None and first_data_page is not None:
            stated = self.numbers.data_page_offset
            if stated == first_data_page:
                held.add("data-page-offset")
            else:
                message = f"it is {stated}, and the first data page is at {first_data_page}."
                book.broken("data-page-offset", message, chunk.place(ModuleType.COLUMN_META_DATA))

    def check_page(self, task: Task, scratch: memoryview) -> None:
        """Authenticate one page, or as much of it as its algorithm and its CRC allow; for any thread.

        The plaintext goes to `scratch`, which is at least as long as the page.
        """
        page, contents, stored = task.page, task.contents, task.stored
        reader, crc = self.chunk.reader, page.facts.crc
        is_good = True
        if crc is not None:
            is_good = zlib.crc32(stored) == crc
            self._check("page-crc", is_good, "the page does not have the CRC that its header states.", page)
        if reader is not None:
            is_good = self._authenticate(reader, task, scratch) and is_good
        elif self._begins_in_a_way:
            start = stored[contents.levels_length :][:_START_LENGTH]
            is_good = self._check_content(page, self._begins_well(contents, start)) and is_good
        if self.numbers.codec == _UNCOMPRESSED:
            length = len(stored) - (0 if reader is None else reader.page_framing)
            stated = contents.uncompressed_length
            message = "" if length == stated else f"{length} bytes without framing, the header states {stated}."
            is_good = self._check("page-size", length == stated, message, page) and is_good
        if not is_good and page.ordinal == NO_PAGE_ORDINAL:
            self._is_lost = True
        elif not is_good:
            self._lost_pages.add(page.ordinal)

    def _check(self, rule_id: str, holds: bool, message: str, page: Page) -> bool:
        if holds:
            self.chunk.ciphers.held.add(rule_id)
        else:
            self.book.broken(rule_id, message, self.chunk.page_place(page.ordinal))
        return holds

    def _authenticate(self, reader: ChunkCipher, task: Task, scratch: memoryview) -> bool:
        page, contents, module = task.page, task.contents, task.module
        size = len(module)
        levels_before = len(task.stored) - size
        if levels_before:
            message = f"{levels_before} bytes of levels are in plaintext before the module."
            self.book.broken("page-v2-whole", message, self.chunk.page_place(page.ordinal), page.offset)
        elif page.facts.page_type == PageHeader.DATA_PAGE_V2:
            self.chunk.ciphers.held.add("page-v2-whole")
        (length,) = _read_length(module)
        if length != size - LENGTH_LENGTH:
            message = f"its length field says {length} bytes, its header {size - LENGTH_LENGTH}."
            self._break(page, "module-length", message)
            return False
        skipped = max(0, contents.levels_length - levels_before)
        if not reader.pages_are_gcm:
            # To decrypt all of it would show nothing: any bytes decrypt to something.
            looked_at = module[CTR_FRAMING : CTR_FRAMING + skipped + _START_LENGTH]
            out = scratch[: len(looked_at)]
            reader.cipher.ctr().apply_into(module[4:16], looked_at, b"", out)
            begins_well = self._begins_well(contents, out[skipped:])
            is_first = page.ordinal in (0, NO_PAGE_ORDINAL)
            if (is_first or begins_well is False) and not self._check_algorithm(reader, page, module, scratch):
                return True
            return self._check_content(page, begins_well)
        out = scratch[: size - GCM_FRAMING]
        try:
            reader.cipher.gcm.decrypt_into(module[4:16], module[16:], reader.page_aads(page.ordinal)[1], out)
        except InvalidTag:
            rule_id = AUTHENTICITY_RULES[self.chunk.page_place(page.ordinal).module_type]
            self._break(page, rule_id, "the module does not authenticate.")
            return False
        if not self._begins_in_a_way:
            return True
        return self._check_content(page, self._begins_well(contents, out[skipped : skipped + _START_LENGTH]))

    def _break(self, page: Page, rule_id: str, message: str) -> None:
        self.book.broken(rule_id, message, self.chunk.page_place(page.ordinal), page.offset)
        self._broken_pages.append(page.ordinal)

    def _check_algorithm(self, reader: ChunkCipher, page: Page, module: memoryview, scratch: memoryview) -> bool:
        """Check that a page of a file that states AES-CTR is no module of AES-GCM."""
        if len(module) < GCM_FRAMING:
            return True
        out = scratch[: len(module) - GCM_FRAMING]
        try:
            reader.cipher.gcm.decrypt_into(module[4:16], module[16:], reader.page_aads(page.ordinal)[1], out)
        except InvalidTag:
            self.chunk.ciphers.held.add("algorithm-of-pages")
            return True
        message = "the page authenticates with AES-GCM, and the file states AES_GCM_CTR_V1."
        self.book.broken("algorithm-of-pages", message, self.chunk.page_place(page.ordinal), page.offset)
        return False

    def _begins_well(self, contents: PageContents, start: memoryview) -> bool | None:
        """Return whether what follows the levels begins as the codec has it; None where that is unknown."""
        length = contents.uncompressed_length - contents.levels_length
        if not self._begins_in_a_way or not contents.is_compressed or length <= 0:
            return None
        return begins_as_compressed(self.numbers.codec, bytes(start), length)

    def _check_content(self, page: Page, begins_well: bool | None) -> bool:
        if begins_well is None:
            return True
        message = "it does not begin as the output of its codec does."
        return self._check("page-content", begins_well, message, page)

    def finish(self) -> Loss | None:
        """Count the broken pages, and return what is lost of the chunk, when all its pages were checked."""
        for ordinal in self._broken_pages:
            kind = self._kinds[ordinal == NO_PAGE_ORDINAL]
            self.chunk.ciphers.counts[kind] -= 1
            self.chunk.ciphers.counts[kind[0], "broken"] += 1
        if self.region is not None and not self._is_lost and not self._lost_pages and self._lost_from is None:
            return None
        pages = None if self._is_lost or self.region is None else tuple(sorted(self._lost_pages))
        column = self.chunk.ciphers.column
        return Loss(self.chunk.row_group_ordinal, column.ordinal, column.name, pages, self._lost_from)


def note_defect(chunk: Chunk, defect: PageDefect, book: RuleBook) -> None:
    """Note why a walk over the pages of a chunk ended early."""
    place = chunk.page_place(defect.page_ordinal, is_header=True)
    rule_id, message = _DEFECTS[defect.flaw]
    if defect.flaw is PageFlaw.TOO_MANY:
        place = place._replace(page_ordinal=MAX_COUNT - 1)
    rule_id = rule_id or AUTHENTICITY_RULES[place.module_type]
    book.broken(rule_id, message or str(defect.error), place, defect.offset)


def _module_of(stored: memoryview, levels_length: int, framing: int) -> memoryview:
    """Return the module of an encrypted page: all of it, or what follows the levels if those are outside."""
    if levels_length <= len(stored) - framing and _read_length(stored)[0] != len(stored) - LENGTH_LENGTH:
        module = stored[levels_length:]
        if _read_length(module)[0] == len(module) - LENGTH_LENGTH:
            return module
    return stored


def _crc_of_ends(module: memoryview) -> bytes:
    """Return what tells a page that has no tag from others: the CRC of its length field and of both ends."""
    crc = zlib.crc32(module[max(_END_LENGTH, len(module) - _END_LENGTH) :], zlib.crc32(module[:_END_LENGTH]))
    return crc.to_bytes(4, "little")


# --- Page indexes and Bloom filters ---


_BLOOM_FILTER_UNIONS = (2, 3, 4)
"""Algorithm, hash and compression of a Bloom filter."""

_MAX_BLOOM_FILTER_HEADER = 1024

_INDEX_STEP = 1024 * 1024

_INDEX_RULES = {
    IndexRule.PAGES: "offset-index",
    IndexRule.ROWS: "offset-index-rows",
    IndexRule.COLUMN: "column-index",
}

IndexWindows = dict[RegionKind, HeaderWindow]
"""In most files all page indexes of a kind lie one after another: each kind is read through a window."""


def index_windows(source: ByteSource) -> IndexWindows:
    """Return windows for page indexes."""
    kinds = (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX)
    return {kind: HeaderWindow(source, 0, 0, step=_INDEX_STEP) for kind in kinds}


@dataclass(slots=True, eq=False, repr=False)
class IndexVerifier:
    """Verifies what belongs to a chunk beside its pages.

    Attributes:
        regions: What it has, and can be read, with the place up to which a Bloom filter may go, or up to which
            page indexes of a kind follow each other.
        is_damaged: Whether something was found that keeps readers from using it.
        lengths: How long Bloom filters are whose length is not stated; None where that is unknown.
    """

    _source: ByteSource
    _windows: IndexWindows
    _chunk: Chunk
    _book: RuleBook
    regions: Sequence[tuple[Region, int]] = ()
    is_damaged: bool = False
    lengths: dict[Region, int | None] = field(default_factory=dict)

    @property
    def has_page_index(self) -> bool:
        """Whether there is something to compare pages with."""
        return any(region.kind is not RegionKind.BLOOM_FILTER for region, _ in self.regions)

    def check(self, pages: DataPages | None, num_rows: int) -> None:
        """Check everything; `pages` are None where they could not all be walked."""
        for region, limit in self.regions:
            if region.kind is RegionKind.BLOOM_FILTER:
                length = self._check_bloom_filter(region, limit)
                if region.length is None:
                    self.lengths[region] = length
            else:
                self._check_page_index(region, limit, pages, num_rows)

    def _broken(self, rule_id: str, message: str, module_type: ModuleType, offset: int) -> None:
        self.is_damaged = True
        self._book.broken(rule_id, message, self._chunk.place(module_type), offset)

    def _plaintext(self, stored: memoryview, module_type: ModuleType, offset: int) -> bytes | None:
        """Return the plaintext of a module that fills `stored`; None where it is reported."""
        ciphers = self._chunk.ciphers
        if ciphers.cipher is None:
            return bytes(stored)
        if len(stored) >= GCM_FRAMING:
            ciphers.nonces.add(ciphers.fingerprint, nonce_entry(stored[4:16], offset, stored[-4:]))
        plaintext = self._chunk.plaintext(module_type, stored, offset, self._book)
        self.is_damaged = self.is_damaged or plaintext is None
        ciphers.counts[module_type, "broken" if plaintext is None else "authentic"] += 1
        return plaintext

    def _check_padding(self, plaintext: bytes, end: int, module_type: ModuleType) -> None:
        if self._chunk.ciphers.cipher is not None:
            check_padding(plaintext, end, self._chunk.place(module_type), self._book)

    def _check_page_index(self, region: Region, limit: int, pages: DataPages | None, num_rows: int) -> None:
        assert region.length is not None
        window = self._windows[region.kind]
        window.readable_end = limit
        stored = window.view(region.offset, region.length)
        is_offset_index = region.kind is RegionKind.OFFSET_INDEX
        module_type = ModuleType.OFFSET_INDEX if is_offset_index else ModuleType.COLUMN_INDEX
        data = self._plaintext(stored, module_type, region.offset)
        if data is None:
            return
        if is_offset_index:
            is_flat = self._chunk.ciphers.column.is_flat
            flaws, end = checked_offset_index(data, pages, num_rows, is_flat=is_flat)
            rules = [IndexRule.PAGES, IndexRule.ROWS]
        else:
            flaws, end = checked_column_index(data, pages)
            rules = [IndexRule.COLUMN]
        for rule, message in flaws:
            self._broken(_INDEX_RULES[rule], message, module_type, region.offset)
        if end is None:
            return
        for rule in rules:
            needs_pages = rule is not IndexRule.ROWS or self._chunk.ciphers.column.is_flat
            if pages is not None or not needs_pages:
                self._book.holds(_INDEX_RULES[rule])
            else:
                reason = f"the pages of a chunk could not all be walked, or there are more than {_MOST_PAGES:,}"
                self._book.not_checked(_INDEX_RULES[rule], reason)
        self._check_padding(data, end, module_type)

    def _check_bloom_filter(self, region: Region, limit: int) -> int | None:
        """Check a Bloom filter; returns its length in bytes, or None where that is not known."""
        lengths = self.bloom_filter_lengths(region, limit)
        if lengths is None:
            return None
        header_length, bitset_length = lengths
        if self._chunk.ciphers.cipher is not None:
            offset = region.offset + header_length
            bitset = memoryview(self._source.read_at(offset, bitset_length))
            self._plaintext(bitset, ModuleType.BLOOM_FILTER_BITSET, offset)
        return header_length + bitset_length

    def bloom_filter_lengths(self, region: Region, limit: int) -> tuple[int, int] | None:
        """Check the header of a Bloom filter; returns the lengths of header and bitset, None if it is damaged.

        One whose length is not stated may reach to the limit: many that overlap would else be read many times.
        """
        room = region.length if region.length is not None else limit - region.offset
        stored = memoryview(self._source.read_at(region.offset, min(room, _MAX_BLOOM_FILTER_HEADER)))
        where = (ModuleType.BLOOM_FILTER_HEADER, region.offset)
        is_encrypted = self._chunk.ciphers.cipher is not None
        header_length = len(stored)
        if is_encrypted:
            header_length = LENGTH_LENGTH + (_read_length(stored)[0] if header_length >= LENGTH_LENGTH else 0)
            if not GCM_FRAMING <= header_length <= len(stored):
                message = f"a module of {header_length} bytes does not fit where it lies."
                self._broken("module-length", message, *where)
                return None
        data = self._plaintext(stored[:header_length], *where)
        if data is None:
            return None
        try:
            header, end = BloomFilterHeader.read(data)
            num_bytes = header.num_bytes
            types = header.struct.types()
            if any(types.get(field_id) is not WireType.STRUCT for field_id in _BLOOM_FILTER_UNIONS):
                raise ParquetFormatError("its algorithm, hash or compression is missing.")
        except ParquetFormatError as error:
            self._broken("bloom-filter", str(error), *where)
            return None
        if is_encrypted:
            self._check_padding(data, end, ModuleType.BLOOM_FILTER_HEADER)
        else:
            header_length = end
        bitset_length = num_bytes + (GCM_FRAMING if is_encrypted else 0)
        length = header_length + bitset_length
        if num_bytes < 0 or length > room or (region.length is not None and length != region.length):
            stated = f"the length stated is {region.length}"
            stated = f"{room} are left to what comes next" if region.length is None else stated
            message = f"header and bitset have {length} bytes, and {stated}."
            self._broken("bloom-filter", message, *where)
            return None
        self._book.holds("bloom-filter")
        return header_length, bitset_length


# --- Chunks, by several threads ---


_STEP = 4 * 1024 * 1024
"""How much is read at once."""

_SMALL_PAGE = 32 * 1024
"""Up to how many bytes the thread that walks authenticates a page itself: to hand it over would take longer."""

_BATCH_BYTES = 32 * 1024 * 1024
"""How much is walked before it is authenticated: large enough that threads seldom wait for each other."""


def verify_chunks(
    source: ByteSource, verifiers: Sequence[ChunkVerifier], threads: int, *, only_walk: bool = False
) -> None:
    """Walk chunks one after another, and authenticate their pages unless they are only to be walked.

    To walk is Python's work and to authenticate is the cipher's, which lets go of the interpreter. Threads that do
    both at once wait for each other more than they work: so one thread walks, and then all authenticate, each into
    memory that it uses again and again. Small pages, for which the cipher takes no longer than Python, are
    authenticated on the way.
    """
    scratches = [bytearray(_SMALL_PAGE) for _ in range(threads)]
    for batch in _batches(source, verifiers, only_walk=only_walk):
        longest = max(len(task.stored) for task in batch)
        for position, scratch in enumerate(scratches):
            if len(scratch) < longest:
                scratches[position] = bytearray(longest)
        shares = [(batch[position::threads], scratch) for position, scratch in enumerate(scratches)]
        in_threads(_authenticate, shares, threads)


def _authenticate(share: tuple[list[Task], bytearray]) -> None:
    tasks, scratch = share
    view = memoryview(scratch)
    for task in tasks:
        task.verifier.check_page(task, view)


def _batches(source: ByteSource, verifiers: Sequence[ChunkVerifier], *, only_walk: bool) -> Iterator[list[Task]]:
    """Authenticate small pages, and yield large ones in batches: each is about `_BATCH_BYTES` of the file."""
    scratch = memoryview(bytearray(_SMALL_PAGE))
    window = HeaderWindow(source, 0, 0, step=_STEP)
    batch: list[Task] = []
    size = 0
    ends = ends_of_runs([(verifier.start, verifier.end) for verifier in verifiers])
    for verifier, window.readable_end in zip(verifiers, ends, strict=True):
        for task in verifier.walk(window):
            if only_walk:
                continue
            # One page keeps all that was read with it: small ones count, too.
            size += task.page.offset - task.page.header_offset + len(task.stored)
            if len(task.stored) <= _SMALL_PAGE:
                verifier.check_page(task, scratch)
            else:
                batch.append(task)
            if size >= _BATCH_BYTES:
                if batch:
                    yield batch
                batch, size = [], 0
    if batch:
        yield batch


def ends_of_runs(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return where the last one ends of those ranges that follow each other without a gap, for each range.

    Args:
        ranges: Start and end of each, in the order in which they are going to be read.
    """
    ends: list[int] = []
    following: int | None = None
    for start, end in reversed(ranges):
        ends.append(ends[-1] if end == following else end)
        following = start
    return ends[::-1]
