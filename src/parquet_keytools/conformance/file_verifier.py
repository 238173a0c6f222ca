"""A file verified, rule by rule: its footer, and the modules of each column chunk.

Modules are authenticated, and compared with each other and with the metadata. Pages must also begin as their codec
lets pages begin. A page of AES_GCM_CTR_V1 has no tag: any bytes decrypt to something (spec 4.2.2). A wrong key, or
a counter that begins elsewhere, shows there; a few altered values do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from typing import NamedTuple

from parquet_keytools.conformance.file_keys import (
    ENTRY_LENGTH,
    NOT_READ_AGAIN,
    Expectation,
    FileKeys,
    FileNonces,
    MaterialFinder,
    NoncePart,
    check_deks,
    check_table_of_columns,
    check_table_of_footer,
    fingerprint,
    nonce_entry,
    title_of,
)
from parquet_keytools.conformance.footer_rules import (
    ChunkKey,
    ChunkNumbers,
    Column,
    OpenFooter,
    check_envelope,
    check_footer,
    check_gaps,
    check_layout,
    check_row_groups,
    read_metadata,
)
from parquet_keytools.conformance.report import FILE_SCOPES, Damage, FileReport, Loss, RuleBook, Scope
from parquet_keytools.encryption.aad import FOOTER_PLACE, MAX_COUNT, ModulePlace, ModuleType, without_delimiter
from parquet_keytools.encryption.footer import SIGNATURE_LENGTH, FooterEnvelope
from parquet_keytools.encryption.module_cipher import (
    CTR_FRAMING,
    GCM_FRAMING,
    LENGTH_LENGTH,
    NO_PAGE_ORDINAL,
    NONCE_LENGTH,
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
from parquet_keytools.encryption.protection import ColumnEncryption, FooterMode
from parquet_keytools.errors import AadPrefixError, DecryptionError, ParquetFormatError
from parquet_keytools.format.file_layout import (
    INDEX_PLACES,
    Bytes,
    ByteSource,
    Region,
    RegionKind,
    regions_at,
)
from parquet_keytools.format.pages import PageContents, compressed_beginning, read_page_contents
from parquet_keytools.format.partial_footers import shown_metadata
from parquet_keytools.format.structs import (
    BloomFilterHeader,
    ColumnChunk,
    ColumnMetaData,
    FileMetaData,
    PageHeader,
)
from parquet_keytools.format.thrift import WireType

_read_length = struct.Struct("<I").unpack_from

_UNCOMPRESSED = 0
"""Codec, as column metadata names it."""

_START_LENGTH = 5
"""How much of a page is compared with its codec."""

_END_LENGTH = 8 * 1024
"""How much of each end of a page tells it from others; with all of it, a file would take twice as long."""

_MOST_PAGES = 1 << 20
"""How many pages of a chunk are kept for its page index."""

_STEP = 4 * 1024 * 1024
"""How much is read at once."""

_MAX_BLOOM_FILTER_HEADER = 1024
_BLOOM_FILTER_UNIONS = (2, 3, 4)
"""Algorithm, hash and compression of a Bloom filter."""

_REQUIRED = {
    ColumnMetaData.type.field_id: WireType.I32,
    2: WireType.LIST,  # encodings
    ColumnMetaData.path_in_schema.field_id: WireType.LIST,
    ColumnMetaData.codec.field_id: WireType.I32,
    ColumnMetaData.num_values.field_id: WireType.I64,
    ColumnMetaData.total_uncompressed_size.field_id: WireType.I64,
    ColumnMetaData.total_compressed_size.field_id: WireType.I64,
    ColumnMetaData.data_page_offset.field_id: WireType.I64,
}
"""Ids of the required fields of ColumnMetaData, and their types."""


class Depth(IntEnum):
    """How much of a file is read; each includes the ones before."""

    FOOTER = 0
    HEADERS = 1
    """Headers of pages."""
    NONCES = 2
    """The nonces of all modules; no page is authenticated."""
    ALL = 3


class InspectedModule(NamedTuple):
    """A module, or what would be one if it were encrypted; offset and length are bytes, with framing."""

    module_type: ModuleType
    offset: int
    length: int
    page_ordinal: int | None = None


@dataclass
class FileReading:
    """What the chunks of a file share while they are read.

    Attributes:
        windows: In most files, pages follow one another, and so do page indexes of a kind: one reads each kind.
        scratch: Where pages are decrypted, again and again.
    """

    source: ByteSource
    depth: Depth
    book: RuleBook
    nonces: FileNonces
    windows: dict[RegionKind, HeaderWindow]
    scratch: bytearray = field(default_factory=bytearray)


class ChunkVerifier:
    """Verifies one column chunk: its metadata, then its pages, its Bloom filter and page indexes.

    Attributes:
        is_readable: Whether it is in plaintext, or its key is available.
        numbers: What its metadata says; None where that is unknown.
        has_full_metadata: Whether this is not only what a footer shows of an encrypted column.
        regions: What it consists of, as far as that can be read.
        is_lost: Whether no value of it can be read.
        is_whole: Whether the walk reached the end of its pages.
        modules: What it consists of, as far as that was found; for an inspection.
    """

    def __init__(
        self,
        file: FileReading,
        envelope: FooterEnvelope,
        column: Column,
        row_group_ordinal: int,
        cipher: ModuleCipher | None,
        fingerprint: bytes,
    ) -> None:
        self._file = file
        self._mode = envelope.mode
        self._book = file.book
        self._fingerprint = fingerprint
        self._reader: ChunkCipher | None = None
        if cipher is not None:
            self._reader = ChunkCipher(cipher, envelope.algorithm, row_group_ordinal, column.ordinal)
        self.column = column
        self.row_group_ordinal = row_group_ordinal
        self.key: ChunkKey = (row_group_ordinal, column.ordinal)
        self.is_readable = cipher is not None or column.encryption is ColumnEncryption.PLAINTEXT
        self.numbers: ChunkNumbers | None = None
        self.has_full_metadata = False
        self.regions: dict[RegionKind, Region] = {}
        self.is_lost = self.is_index_damaged = False
        self.is_whole = True
        self._lost_pages: list[int] = []
        self._lost_from: int | None = None
        self.modules: list[InspectedModule] = []
        self.bloom_filter_length: int | None = None

    @property
    def loss(self) -> Loss | None:
        """What of it cannot be read."""
        is_all = self.is_lost or (self.is_readable and self.numbers is None)
        if not is_all and not self._lost_pages and self._lost_from is None:
            return None
        return Loss(*self.key, self.column.name, None if is_all else tuple(self._lost_pages), self._lost_from)

    def place(self, module_type: ModuleType, page_ordinal: int | None = None) -> ModulePlace:
        """Return the place of a module."""
        return ModulePlace(module_type, self.row_group_ordinal, self.column.ordinal, page_ordinal)

    def _page_place(self, page_ordinal: int, *, is_header: bool = False) -> ModulePlace:
        if page_ordinal == NO_PAGE_ORDINAL:
            return self.place(ModuleType.DICTIONARY_PAGE_HEADER if is_header else ModuleType.DICTIONARY_PAGE)
        return self.place(ModuleType.DATA_PAGE_HEADER if is_header else ModuleType.DATA_PAGE, page_ordinal)

    def _plaintext(self, module_type: ModuleType, stored: bytes | memoryview, offset: int | None) -> bytes | None:
        """Return the plaintext of a module that is no page and fills `stored`; None where it is reported."""
        reader, book, place, length = self._reader, self._book, self.place(module_type), len(stored)
        if reader is None:
            return bytes(stored)
        if length >= GCM_FRAMING:
            # Metadata lies somewhere in the footer; a number after its end tells it apart from all others.
            where = self._file.source.size_bytes + (self.row_group_ordinal << 16) + self.column.ordinal
            entry = nonce_entry(stored[4:16], where if offset is None else offset, stored[-4:])
            self._file.nonces.add(self._fingerprint, entry)
        stated = _read_length(stored)[0] if length >= LENGTH_LENGTH else 0
        if length < GCM_FRAMING or stated != length - LENGTH_LENGTH:
            message = f"its length field says {stated} bytes, its place has {length - LENGTH_LENGTH}."
            book.not_authentic(place, offset, "module-length", message)
            return None
        try:
            plaintext = reader.decrypt(stored, module_type)
        except DecryptionError:
            book.not_authentic(place, offset)
            return None
        book.authentic(module_type)
        return plaintext

    def _check_padding(self, left: int, place: ModulePlace) -> None:
        """Check that a Thrift structure fills the plaintext of its module."""
        if self._reader is not None:
            self._book.check("padding", left == 0, f"{left} bytes follow it.", place)

    # --- Metadata ---

    def read_metadata(self, chunk: ColumnChunk) -> ColumnMetaData | None:
        """Return the metadata: its own where it can be decrypted, else what is visible; None where it is wrong."""
        visible, hidden = chunk.meta_data, chunk.encrypted_column_metadata
        mode, found = self._mode, visible
        # Beside metadata in the place where it belongs, a second copy is a breach of its own.
        is_in_place = mode is FooterMode.ENCRYPTED_FOOTER and self.column.encryption is ColumnEncryption.FOOTER_KEY
        try:
            if visible is not None:
                self._check_metadata(visible)
            if hidden is not None and self._reader is not None and not (is_in_place and visible is not None):
                plaintext = self._plaintext(ModuleType.COLUMN_META_DATA, hidden, None)
                if plaintext is None:
                    return None
                found, end = ColumnMetaData.read(plaintext)
                self._check_padding(len(plaintext) - end, self.place(ModuleType.COLUMN_META_DATA))
                self._check_metadata(found)
            self.numbers = None if found is None else ChunkNumbers.of(found)
        except ParquetFormatError as error:
            self._book.broken("metadata-path", str(error), self.place(ModuleType.COLUMN_META_DATA))
            return None
        if found is None:
            return None
        self._book.holds("metadata-path")
        self.has_full_metadata = hidden is None or found is not visible
        if visible is not None and found is not visible and mode is FooterMode.PLAINTEXT_FOOTER:
            self._check_agreement(visible, found)
        return found

    def _check_metadata(self, metadata: ColumnMetaData) -> None:
        if not metadata.struct.has_types(_REQUIRED):
            raise ParquetFormatError("ColumnMetaData: a required field is missing, or has another type.")
        if metadata.type != self.column.type:
            raise ParquetFormatError(f"its type is {metadata.type}, and its column has type {self.column.type}.")
        if not metadata.has_path(self.column.path):
            raise ParquetFormatError(f"the metadata names column {'.'.join(metadata.path_in_schema)!r}.")

    def _check_agreement(self, visible: ColumnMetaData, found: ColumnMetaData) -> None:
        differing: list[int] = []
        # Most writers leave out what must not be shown: the same fields, and then perhaps others.
        if not found.struct.as_bytes().startswith(visible.struct.as_bytes()[:-1]):
            full = found.struct.fields
            shown, _ = shown_metadata(visible)  # What is not to be shown is a breach of its own.
            differing = sorted(i for i, value in shown.struct.fields.items() if full.get(i) != value)
        place = self.place(ModuleType.COLUMN_META_DATA)
        self._book.check("metadata-agrees", not differing, f"the fields {differing} differ.", place)

    # --- Pages ---

    def verify(self, num_rows: int, bloom_filter_limit: int) -> None:
        """Check everything; a Bloom filter whose length is not stated may go up to the limit."""
        has_index = not self.regions.keys().isdisjoint((RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX))
        pages = DataPages() if has_index else None
        if RegionKind.PAGES in self.regions:
            pages = self._verify_pages(self.regions[RegionKind.PAGES], num_rows, pages)
        else:
            self.is_whole, self.is_lost, pages = False, True, None
        for kind, region in self.regions.items():
            if kind is RegionKind.BLOOM_FILTER:
                self._check_bloom_filter(region, bloom_filter_limit)
            elif kind is not RegionKind.PAGES:
                self._check_page_index(region, pages, num_rows)

    def _verify_pages(self, region: Region, num_rows: int, found: DataPages | None) -> DataPages | None:
        """Walk over all pages; returns `found` with them, or None where not all were found."""
        reader, file, window = self._reader, self._file, self._file.windows[RegionKind.PAGES]
        start, end = region.offset, region.offset + (region.length or 0)
        window.end = end
        first_data_page: int | None = None
        values = 0
        nonces = bytearray()
        for page in walk_pages(
            window,
            start,
            end,
            reader,
            expects_dictionary_page=bool(self._known.places.dictionary_page_offset),
            path="",
            on_defect=self._note_defect,
        ):
            ordinal, facts, header_offset, offset, header = page
            header_place, place = self._page_place(ordinal, is_header=True), self._page_place(ordinal)
            if reader is not None:
                self._book.authentic(header_place.module_type)
            if file.depth is Depth.HEADERS:
                length = offset - header_offset
                self.modules += (
                    InspectedModule(header_place.module_type, header_offset, length, place.page_ordinal),
                    InspectedModule(place.module_type, offset, facts.page_length, place.page_ordinal),
                )
                continue
            contents = self._contents(page, header_place, is_first=header_offset == start)
            if contents is None:
                break
            stored = module = window.view(offset, facts.page_length)
            if reader is not None:
                module = _module_of(stored, contents.levels_length, reader.page_framing)
                check = module[-4:] if reader.pages_are_gcm else _crc_of_ends(module)
                nonces += nonce_entry(header[4:16], header_offset, header[-4:])
                nonces += nonce_entry(module[4:16], offset, check)
            if file.depth is Depth.ALL and not self._check_page(page, place, contents, stored, module):
                if ordinal == NO_PAGE_ORDINAL:
                    self.is_lost = True
                else:
                    self._lost_pages.append(ordinal)
            if ordinal != NO_PAGE_ORDINAL and facts.page_type != PageHeader.INDEX_PAGE:
                if first_data_page is None:
                    first_data_page = header_offset
                if found is not None:
                    found.values.append(contents.num_values)
                    found.offsets.append(header_offset)
                    found.lengths.append(offset + facts.page_length - header_offset)
                    if len(found.offsets) > _MOST_PAGES:
                        found = None
                values += contents.num_values
        file.nonces.add(self._fingerprint, nonces, len(nonces) // (2 * ENTRY_LENGTH))
        if not self.is_whole or file.depth is Depth.HEADERS:
            return None
        self._book.holds("chunk-size", "page-header", "page-type")
        self._check_numbers(values, first_data_page, num_rows)
        return found

    @property
    def _known(self) -> ChunkNumbers:
        assert self.numbers is not None
        return self.numbers

    def _end_at(self, page_ordinal: int) -> None:
        self.is_whole, self._lost_from = False, max(page_ordinal, 0)  # The dictionary page comes before page 0.

    def _note_defect(self, defect: PageDefect) -> None:
        """Note why the walk ended early."""
        self._end_at(defect.page_ordinal)
        place = self._page_place(defect.page_ordinal, is_header=True)
        if defect.flaw is PageFlaw.NOT_AUTHENTIC:
            self._book.not_authentic(place, defect.offset)
            return
        message = str(defect.error)
        if defect.flaw is PageFlaw.TOO_MANY:
            place = place._replace(page_ordinal=MAX_COUNT - 1)
            message = f"the chunk has more than {MAX_COUNT} data pages."
        self._book.broken(defect.flaw.value, message, place, defect.offset)

    def _contents(self, page: Page, place: ModulePlace, *, is_first: bool) -> PageContents | None:
        """Return what a header says of the content of its page; None, which is reported, where that is wrong."""
        ordinal, facts, header_offset, _, header = page
        rule_id, problem = "page-header", ""
        if self._reader is not None:
            self._check_padding(len(header) - facts.length - GCM_FRAMING, place)
            if is_first:
                stated = self._known.places.dictionary_page_offset or None
                actual = header_offset if ordinal == NO_PAGE_ORDINAL else None
                message = f"it is {stated}, and the dictionary page is at {actual}."
                self._book.check("dictionary-offset", stated == actual, message, place)
            if facts.page_type == PageHeader.INDEX_PAGE:
                rule_id, problem = "page-type", f"the header says page type {facts.page_type}."
        try:
            contents = read_page_contents(facts)
            if contents.levels_length > facts.page_length:
                problem = f"{contents.levels_length} bytes of levels do not fit into {facts.page_length}."
        except ParquetFormatError as error:
            problem = problem or str(error)
        if problem:
            self._end_at(ordinal)
            self._book.broken(rule_id, problem, place, header_offset)
            return None
        return contents

    def _check_numbers(self, values: int, first_data_page: int | None, num_rows: int) -> None:
        book, numbers, place = self._book, self._known, self.place(ModuleType.COLUMN_META_DATA)
        message = f"the pages have {values} values, the metadata says {numbers.num_values}."
        fits = book.check("value-count", values == numbers.num_values, message, place)
        if self.column.is_flat:
            message = f"it has {numbers.num_values} values, and the row group {num_rows} rows."
            fits = book.check("value-count", numbers.num_values == num_rows, message, place) and fits
        # Else it is unknown which values belong to which rows.
        self.is_lost = self.is_lost or not fits
        if self._reader is not None and first_data_page is not None:
            stated = numbers.places.data_page_offset
            message = f"it is {stated}, and the first data page is at {first_data_page}."
            book.check("data-page-offset", stated == first_data_page, message, place)

    def _check_page(
        self, page: Page, place: ModulePlace, contents: PageContents, stored: memoryview, module: memoryview
    ) -> bool:
        """Authenticate one page as far as its algorithm and its CRC allow; returns whether it is good."""
        reader, book, crc, is_good = self._reader, self._book, page.facts.crc, True
        if crc is not None:
            message = "the page does not have the CRC that its header states."
            is_good = book.check("page-crc", zlib.crc32(stored) == crc, message, place)
        if reader is not None:
            is_good = self._authenticate(reader, page, place, contents, stored, module) and is_good
        else:
            is_good = self._check_content(place, contents, stored[contents.levels_length :]) and is_good
        if self._known.codec == _UNCOMPRESSED:
            length = len(stored) - (0 if reader is None else reader.page_framing)
            stated = contents.uncompressed_length
            message = f"{length} bytes without framing, the header states {stated}."
            is_good = book.check("page-size", length == stated, message, place) and is_good
        return is_good

    def _authenticate(
        self,
        reader: ChunkCipher,
        page: Page,
        place: ModulePlace,
        contents: PageContents,
        stored: memoryview,
        module: memoryview,
    ) -> bool:
        book, levels_before = self._book, len(stored) - len(module)
        if page.facts.page_type == PageHeader.DATA_PAGE_V2:
            message = f"{levels_before} bytes of levels are in plaintext before the module."
            book.check("page-v2-whole", not levels_before, message, place, page.offset)
        (length,) = _read_length(module)
        if length != len(module) - LENGTH_LENGTH:
            message = f"its length field says {length} bytes, its header {len(module) - LENGTH_LENGTH}."
            book.not_authentic(place, page.offset, "module-length", message)
            return False
        skipped = max(0, contents.levels_length - levels_before)
        if reader.pages_are_gcm:
            plaintext = self._decrypted(reader, page, module)
            if plaintext is None:
                book.not_authentic(place, page.offset)
                return False
            book.authentic(place.module_type)
            return self._check_content(place, contents, plaintext[skipped:])
        book.modules["unauthenticated"] += 1
        # To decrypt all of it would show nothing: any bytes decrypt to something.
        looked_at = module[CTR_FRAMING : CTR_FRAMING + skipped + _START_LENGTH]
        out = bytearray(len(looked_at))
        reader.cipher.ctr().apply_into(module[4:16], looked_at, b"", out)
        begins_well = self._begins_well(contents, memoryview(out)[skipped:])
        if page.ordinal in (0, NO_PAGE_ORDINAL) or begins_well is False:
            is_gcm = self._decrypted(reader, page, module) is not None
            message = "the page authenticates with AES-GCM, and the file states AES_GCM_CTR_V1."
            if not book.check("algorithm-of-pages", not is_gcm, message, place, page.offset):
                return True
        return self._check_content(place, contents, memoryview(out)[skipped:])

    def _decrypted(self, reader: ChunkCipher, page: Page, module: memoryview) -> memoryview | None:
        """Return the plaintext of a page that authenticates with AES-GCM; None where it does not."""
        if len(module) < GCM_FRAMING:
            return None
        file = self._file
        if len(file.scratch) < len(module):
            file.scratch = bytearray(len(module))
        out = memoryview(file.scratch)[: len(module) - GCM_FRAMING]
        try:
            reader.cipher.gcm.decrypt_into(module[4:16], module[16:], reader.page_aads(page.ordinal)[1], out)
        except InvalidTag:
            return None
        return out

    def _begins_well(self, contents: PageContents, start: memoryview) -> bool | None:
        """Return whether what follows the levels begins as the codec has it; None where that is unknown."""
        codec, length = self._known.codec, contents.uncompressed_length - contents.levels_length
        if not contents.is_compressed or length <= 0:
            return None
        expected = compressed_beginning(codec, length)
        return bytes(start[:_START_LENGTH]).startswith(expected) if expected else None

    def _check_content(self, place: ModulePlace, contents: PageContents, start: memoryview) -> bool:
        begins_well = self._begins_well(contents, start)
        if begins_well is None:
            return True
        message = "it does not begin as the output of its codec does."
        return self._book.check("page-content", begins_well, message, place)

    # --- Page indexes and Bloom filters ---

    def _index_broken(self, rule_id: str, message: str, module_type: ModuleType, offset: int) -> None:
        self.is_index_damaged = True
        self._book.broken(rule_id, message, self.place(module_type), offset)

    def _index_plaintext(self, module_type: ModuleType, stored: memoryview, offset: int) -> bytes | None:
        plaintext = self._plaintext(module_type, stored, offset)
        self.is_index_damaged |= plaintext is None
        return plaintext

    def _check_page_index(self, region: Region, pages: DataPages | None, num_rows: int) -> None:
        is_offset_index = region.kind is RegionKind.OFFSET_INDEX
        module_type = ModuleType.OFFSET_INDEX if is_offset_index else ModuleType.COLUMN_INDEX
        self.modules.append(InspectedModule(module_type, region.offset, region.length or 0))
        if self._file.depth is Depth.HEADERS:
            return
        stored = self._file.windows[region.kind].view(region.offset, region.length or 0)
        if (data := self._index_plaintext(module_type, stored, region.offset)) is None:
            return
        is_flat = self.column.is_flat
        if is_offset_index:
            flaws, end = checked_offset_index(data, pages, num_rows, is_flat=is_flat)
        else:
            flaws, end = checked_column_index(data, pages)
        for rule, message in flaws:
            self._index_broken(rule.value, message, module_type, region.offset)
        if end is None:
            return
        for rule in (IndexRule.PAGES, IndexRule.ROWS) if is_offset_index else (IndexRule.COLUMN,):
            if pages is not None or (rule is IndexRule.ROWS and not is_flat):
                self._book.holds(rule.value)
            else:
                reason = f"the pages of a chunk could not all be walked, or there are more than {_MOST_PAGES:,}"
                self._book.not_checked(rule.value, reason)
        self._check_padding(len(data) - end, self.place(module_type))

    def _check_bloom_filter(self, region: Region, limit: int) -> None:
        """Check a Bloom filter. Many that overlap, without a stated length, would else be read many times."""
        where = (ModuleType.BLOOM_FILTER_HEADER, region.offset)
        room = region.length if region.length is not None else limit - region.offset
        stored = memoryview(self._file.source.read_at(region.offset, min(room, _MAX_BLOOM_FILTER_HEADER)))
        header_length, framing = len(stored), 0
        if self._reader is not None:
            framing = GCM_FRAMING
            header_length = LENGTH_LENGTH + (_read_length(stored)[0] if header_length >= LENGTH_LENGTH else 0)
            if not GCM_FRAMING <= header_length <= len(stored):
                message = f"a module of {header_length} bytes does not fit where it lies."
                self._index_broken("module-length", message, *where)
                return
        if (data := self._index_plaintext(where[0], stored[:header_length], region.offset)) is None:
            return
        try:
            header, end = BloomFilterHeader.read(data)
            num_bytes, types = header.num_bytes, header.struct.types()
            if any(types.get(field_id) is not WireType.STRUCT for field_id in _BLOOM_FILTER_UNIONS):
                raise ParquetFormatError("its algorithm, hash or compression is missing.")
        except ParquetFormatError as error:
            self._index_broken("bloom-filter", str(error), *where)
            return
        self._check_padding(len(data) - end, self.place(where[0]))
        if self._reader is None:
            header_length = end
        length = header_length + num_bytes + framing
        if num_bytes < 0 or length > room or (region.length is not None and length != region.length):
            message = (
                f"header and bitset have {length} bytes, and {room} belong to it or are left to what comes next."
            )
            self._index_broken("bloom-filter", message, *where)
            return
        self._book.holds("bloom-filter")
        self.bloom_filter_length = length
        bitset_offset, bitset_length = region.offset + header_length, num_bytes + framing
        self.modules.append(InspectedModule(where[0], region.offset, header_length))
        self.modules.append(InspectedModule(ModuleType.BLOOM_FILTER_BITSET, bitset_offset, bitset_length))
        if self._reader is not None and self._file.depth is not Depth.HEADERS:
            bitset = memoryview(self._file.source.read_at(bitset_offset, bitset_length))
            self._index_plaintext(ModuleType.BLOOM_FILTER_BITSET, bitset, bitset_offset)


def _module_of(stored: memoryview, levels_length: int, framing: int) -> memoryview:
    """Return the module of an encrypted page: all of it, or what follows the levels if those are outside."""
    if 0 < levels_length <= len(stored) - framing and _read_length(stored)[0] != len(stored) - LENGTH_LENGTH:
        module = stored[levels_length:]
        if _read_length(module)[0] == len(module) - LENGTH_LENGTH:
            return module
    return stored


def _crc_of_ends(module: memoryview) -> bytes:
    """Return what tells a page that has no tag from others: the CRC of its length field and of both ends."""
    crc = zlib.crc32(module[max(_END_LENGTH, len(module) - _END_LENGTH) :], zlib.crc32(module[:_END_LENGTH]))
    return crc.to_bytes(4, "little")


# --- A file ---


FORGED_FOOTER_LENGTH = 64 * 1024
"""Up to how many bytes a plaintext footer is looked into though its signature is missing or wrong."""

_MOST_LEFT_BYTES = 64 * 1024

_FILE_IS_LOST = Damage(file_is_lost=True)
_NOWHERE = Region(RegionKind.PAGES, 0, 0, 0, 0)


@dataclass(frozen=True)
class FileEnd:
    """What tells one state of a file from another: its length, and a digest from the footer's start to its end."""

    size_bytes: int
    footer_sha256: str

    @classmethod
    def of(cls, footer_offset: int, tail: bytes) -> FileEnd:
        """Return the end of a file from its footer's offset and the bytes from there on."""
        return cls(footer_offset + len(tail), hashlib.sha256(tail).hexdigest())


@dataclass(frozen=True)
class FileFacts:
    """What a data set is checked by, as far as it is known.

    Attributes:
        name: Path within the folder.
        aad_prefix: The text of the prefix, stored or supplied, without NUL at its end.
        nonces: The nonces of all modules that were found, or of the part that was asked for.
        unknown: Why not all of its DEKs and nonces are known; None where they are.
    """

    name: str = ""
    aad_prefix: bytes | None = None
    file_unique: bytes | None = None
    dek_fingerprints: frozenset[bytes] = frozenset()
    column_paths: tuple[tuple[str, ...], ...] | None = None
    mode: FooterMode | None = None
    nonces: FileNonces | None = None
    unknown: str | None = None
    end: FileEnd | None = None
    refers_to_material_file: bool = False

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is."""
        return self.mode not in (None, FooterMode.UNENCRYPTED)


def verify_source(
    source: ByteSource,
    finder: MaterialFinder | None,
    expectation: Expectation | None = None,
    *,
    nonce_part: NoncePart | None = None,
) -> tuple[FileReport, FileFacts]:
    """Verify a file against all rules of a file; without a `finder`, against rules that need no key.

    With `nonce_part`, only these nonces are collected, and no page is authenticated.
    """
    depth = Depth.ALL if nonce_part is None else Depth.NONCES
    return FileVerifier(source, finder, expectation or Expectation(), depth, nonce_part).verified()


@dataclass(eq=False, repr=False)
class FileVerifier:
    """Checks the rules of a file, as far as it is read.

    Attributes:
        cipher: What opened the footer; None without its key, and of a plaintext file.
        fingerprint: Of the DEK of the footer; empty without it.
        is_authentic: Whether the footer is.
        footer: The parts of the footer; None where they do not fit together.
        chunks: Its column chunks, in the order of the footer.
    """

    source: ByteSource
    finder: InitVar[MaterialFinder | None]
    expectation: Expectation
    depth: Depth = Depth.ALL
    nonce_part: InitVar[NoncePart | None] = None
    book: RuleBook = field(default_factory=lambda: RuleBook(FILE_SCOPES))
    envelope: FooterEnvelope | None = None
    cipher: ModuleCipher | None = None
    file_aad: bytes | None = None
    fingerprint: bytes = b""
    is_authentic: bool = False
    footer: OpenFooter | None = None
    chunks: list[ChunkVerifier] = field(default_factory=list)
    _regions: list[Region] = field(default_factory=list)
    _kept: defaultdict[str, list[ColumnMetaData]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self, finder: MaterialFinder | None, nonce_part: NoncePart | None) -> None:
        self.nonces = FileNonces(nonce_part)
        self.keys = FileKeys(finder, self.book)

    def verified(self) -> tuple[FileReport, FileFacts]:
        """Verify the file."""
        damage = self.run()
        if self.depth is Depth.ALL:
            self._check_nonces()
        envelope, footer, expected = self.envelope, self.footer, self.expectation
        table, finder = expected.table, self.keys.finder
        report = FileReport(
            self.source.path,
            finder is not None,
            self.book.results(),
            dict(self.book.modules),
            damage if finder is not None and not self.keys.denied else None,
            {title_of(user): reason for user, reason in self.keys.denied.items()},
            frozenset() if expected.aad_prefix is None else frozenset({"prefix-expected"}),
            None if table is None else table.table_name,
            accepted=frozenset({"no-prefix"} if table is not None and table.settings.aad_prefix is None else ()),
        )
        if envelope is None:
            return report, FileFacts(nonces=self.nonces)
        prefix = envelope.aad_prefix
        if prefix is None and envelope.algorithm is not None and expected.aad_prefix is not None:
            prefix = expected.aad_prefix.candidates[0]
        return report, FileFacts(
            aad_prefix=None if prefix is None else without_delimiter(prefix),
            file_unique=envelope.aad_file_unique,
            dek_fingerprints=frozenset(self.keys.fingerprints),
            column_paths=None if footer is None else tuple(column.path for column in footer.columns),
            mode=envelope.mode,
            nonces=self.nonces,
            unknown=next(iter(report.result("nonce-reuse").reasons), None),
            end=FileEnd.of(envelope.footer_offset, envelope.tail),
            refers_to_material_file=self.keys.refers_to_material_file,
        )

    def run(self) -> Damage | None:
        """Check the rules; returns what is lost, None where that is unknown or does not matter."""
        envelope = self.envelope = check_envelope(self.source, self.book)
        if envelope is None:
            self._nothing_behind("what is visible of the footer cannot be read")
            return _FILE_IS_LOST
        book, expected, is_plaintext = self.book, self.expectation, envelope.mode is FooterMode.UNENCRYPTED
        if is_plaintext:
            metadata = read_metadata(envelope, envelope.body, book)
        else:
            check_table_of_footer(expected, envelope, self.keys)
            metadata = self._open(envelope)
        footer = self._footer(envelope, metadata)
        if is_plaintext and not book.is_broken("algorithm-stated"):
            if expected.accept_plaintext:
                return None
            if not expected.allow_plaintext:
                book.broken("encrypted", "the file is a plaintext Parquet file.")
        if footer is None:
            is_prefix_missing = envelope.supply_aad_prefix and expected.aad_prefix is None
            is_unknown = metadata is None and is_prefix_missing and envelope.aad_prefix is None
            return None if is_unknown else _FILE_IS_LOST
        if is_plaintext:
            if not expected.allow_plaintext:
                return None
            # Readers may take plaintext files, and what is expected of this one is still not there.
            if expected.aad_prefix is not None:
                book.broken("prefix-expected", "the file is in plaintext, and has none.")
            check_table_of_footer(expected, envelope, self.keys)
        self._check_chunks(envelope, footer)
        check_table_of_columns(expected, envelope, footer, self.keys, self._kept)
        # What a footer says that is not authentic is of no use to readers.
        return self._damage(footer) if is_plaintext or self.is_authentic else _FILE_IS_LOST

    def _check_nonces(self) -> None:
        """Check the rules about nonces; where they do not fit into memory, the file is read once for each part.

        What the first reading found stays found, whatever becomes of the file meanwhile.
        """
        self.nonces.check(self.book)
        parts = self.nonces.part.parts
        for part in range(1, parts):
            wanted = NoncePart(part, parts)
            again = FileVerifier(self.source, self.keys.finder, self.expectation, Depth.NONCES, wanted)
            try:
                again.run()
            except (OSError, ParquetFormatError):
                self.book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
                continue
            if again.nonces.invocations != self.nonces.invocations:
                self.book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
            again.nonces.check_repeated(self.book)

    def _footer(self, envelope: FooterEnvelope, metadata: FileMetaData | None) -> OpenFooter | None:
        if metadata is not None:
            path, table = self.expectation.path, self.expectation.table
            self.footer = check_footer(envelope, metadata, path, self.book, table)
        if self.footer is None:
            self._nothing_behind("the footer cannot be read")
        return self.footer

    def _nothing_behind(self, reason: str) -> None:
        for scope in (Scope.FOOTER, Scope.COLUMN):
            self.book.scope_not_checked(scope, reason)
        if self.expectation.table is not None or self.expectation.without_table:
            self.book.scope_not_checked(Scope.CONFIGURATION, reason)

    # --- The footer ---

    def _open(self, envelope: FooterEnvelope) -> FileMetaData | None:
        """Open the footer; None where it is not plaintext and cannot be decrypted."""
        book, is_plaintext = self.book, envelope.mode is FooterMode.PLAINTEXT_FOOTER
        dek = self.keys.deks([(None, envelope.key_metadata)])[0]
        file_aads = self._file_aads(envelope)
        if is_plaintext:
            length = len(envelope.signature)
            message = f"{length} bytes follow the footer, and the signature has {SIGNATURE_LENGTH}."
            book.check("signature-present", length == SIGNATURE_LENGTH, message, FOOTER_PLACE)
        if dek is None or not file_aads:
            reason = self.keys.denied.get(None) or "the AAD prefix is missing or wrong, or the file unique is"
            if not is_plaintext:
                book.scope_not_checked(Scope.FOOTER, f"footer: {reason}")
                return None
            # What it shows can be checked; only that it is authentic cannot.
            book.not_checked("signature-valid", f"footer: {reason}")
            self.file_aad = next(iter(file_aads), None)
            return read_metadata(envelope, envelope.body, book)
        ciphers = [ModuleCipher(dek, file_aad) for file_aad in file_aads]
        key, metadata = fingerprint(dek), None
        cipher, data = (self._signed if is_plaintext else self._decrypted)(envelope, ciphers, key)
        if data is not None:
            metadata = read_metadata(envelope, data, book, is_authentic=True)
        elif is_plaintext and len(envelope.body) <= FORGED_FOOTER_LENGTH:
            metadata = read_metadata(envelope, envelope.body, book)
        if envelope.aad_prefix is None and envelope.supply_aad_prefix and (data is not None or not is_plaintext):
            book.holds("prefix-expected")
        if metadata is not None:
            self.cipher, self.file_aad, self.fingerprint = cipher, cipher.file_aad, key
            self.is_authentic = data is not None
        return metadata

    def _file_aads(self, envelope: FooterEnvelope) -> tuple[bytes, ...]:
        """Return what may begin all AADs; nothing where it is not known (spec 4.4.1)."""
        expected, book = self.expectation.aad_prefix, self.book
        is_supplied = envelope.supply_aad_prefix and envelope.aad_prefix is None
        if is_supplied and expected is None:
            book.not_checked("prefix-expected", "readers must supply the prefix, and none is given")
            return ()
        if is_supplied and self.keys.finder is None:
            book.not_checked("prefix-expected", "the prefix is not stored: without keys nothing shows it")
        file_unique = envelope.aad_file_unique
        try:
            file_aads = envelope.file_aads(expected)
            if expected is not None and not is_supplied:
                book.holds("prefix-expected")
            return file_aads
        except AadPrefixError as error:
            book.broken("prefix-expected", str(error), FOOTER_PLACE)
        except DecryptionError as error:
            is_plaintext = envelope.mode is FooterMode.PLAINTEXT_FOOTER
            book.broken("signature-valid" if is_plaintext else "footer-authentic", str(error), FOOTER_PLACE)
            return ()
        except ParquetFormatError:
            return ()  # It has no file unique, which has a rule of its own.
        # What the file itself stores is still what its modules are checked with.
        prefixes = expected.candidates if is_supplied and expected is not None else (envelope.aad_prefix or b"",)
        return tuple(prefix + (file_unique or b"") for prefix in prefixes)

    def _signed(
        self, envelope: FooterEnvelope, ciphers: Sequence[ModuleCipher], key: bytes
    ) -> tuple[ModuleCipher, Bytes | None]:
        """Return the cipher that signed a plaintext footer, and the footer; None where none did."""
        signature = envelope.signature
        if len(signature) != SIGNATURE_LENGTH:
            return ciphers[0], None
        end = envelope.footer_offset + len(envelope.body)
        self.nonces.add(key, nonce_entry(signature[:NONCE_LENGTH], end, signature[-4:]))
        found = next(filter(envelope.is_sealed_by, ciphers), None)
        self.book.modules["broken" if found is None else "authentic"] += 1
        self.book.check("signature-valid", found is not None, "the signature is wrong.", FOOTER_PLACE)
        return (ciphers[0], None) if found is None else (found, envelope.body)

    def _decrypted(
        self, envelope: FooterEnvelope, ciphers: Sequence[ModuleCipher], key: bytes
    ) -> tuple[ModuleCipher, Bytes | None]:
        """Return the cipher that decrypts a footer, and its plaintext; None where none does."""
        body, book = envelope.body, self.book
        offset = envelope.footer_offset + envelope.footer_length - len(body)
        stored = struct.unpack_from("<I", body)[0] if len(body) >= LENGTH_LENGTH else 0
        message = f"its length field says {stored} bytes, and {len(body) - LENGTH_LENGTH} follow."
        if not book.check("footer-framing", stored == len(body) - LENGTH_LENGTH, message, FOOTER_PLACE):
            # The module itself may still be whole.
            body = body[: stored + LENGTH_LENGTH]
        if len(body) < GCM_FRAMING or stored != len(body) - LENGTH_LENGTH:
            return ciphers[0], None
        self.nonces.add(key, nonce_entry(body[4:16], offset, body[-4:]))
        for cipher in ciphers:
            with contextlib.suppress(DecryptionError):
                plaintext = cipher.decrypt(body, FOOTER_PLACE)
                book.authentic(ModuleType.FOOTER)
                return cipher, plaintext
        book.not_authentic(FOOTER_PLACE, offset, message="the footer does not authenticate.")
        return ciphers[0], None

    # --- Column chunks ---

    def _check_chunks(self, envelope: FooterEnvelope, footer: OpenFooter) -> None:
        book, footer_offset = self.book, envelope.footer_offset
        windows = {
            kind: HeaderWindow(self.source, 0, footer_offset, step=step)
            for kind, step in (
                (RegionKind.PAGES, None if self.depth is Depth.HEADERS else _STEP),
                (RegionKind.COLUMN_INDEX, None),
                (RegionKind.OFFSET_INDEX, None),
            )
        }
        # Chunks do not refer to this object: they would hold each other, and the file, until a garbage collection.
        reading = FileReading(self.source, self.depth, book, self.nonces, windows)
        ciphers = self._ciphers(footer)
        for row_group_ordinal in range(len(footer.row_groups)):
            for column in footer.columns:
                cipher, key = ciphers.get(column.ordinal, (None, b""))
                chunk = ChunkVerifier(reading, envelope, column, row_group_ordinal, cipher, key)
                self.chunks.append(chunk)
                self._read_metadata(chunk, footer)
        unusable = check_layout(self._regions, footer_offset, book)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            numbers = {chunk.key: chunk.numbers for chunk in self.chunks if chunk.numbers is not None}
            check_row_groups(footer, numbers, self._regions, book)
        by_key = {chunk.key: chunk for chunk in self.chunks}
        for region in self._regions:
            chunk = by_key[region.chunk_key]
            if region not in unusable:
                chunk.regions[region.kind] = region
            elif region.kind is not RegionKind.PAGES:
                chunk.is_index_damaged = True
        if self.depth is not Depth.FOOTER:
            self._walk(footer, footer_offset)
        if self.depth is Depth.ALL:
            self._check_gaps(footer, footer_offset, is_complete=not unusable)

    def _read_metadata(self, chunk: ChunkVerifier, footer: OpenFooter) -> None:
        book, name = self.book, chunk.column.name
        stored = footer.chunks[chunk.row_group_ordinal][chunk.column.ordinal]
        if chunk.key in footer.unusable:
            book.scope_not_checked(Scope.COLUMN, f"{name!r}: a chunk cannot be checked")
            return
        metadata = chunk.read_metadata(stored)
        if metadata is None:
            book.scope_not_checked(Scope.COLUMN, f"{name!r}: the metadata of a chunk cannot be read")
            return
        table = self.expectation.table
        if table is not None and name in table.settings.value_columns and chunk.has_full_metadata:
            self._kept[name].append(metadata)
        if stored.file_path:
            book.broken("layout-range", "its data lies in another file.", chunk.place(ModuleType.COLUMN_META_DATA))
            return
        assert chunk.numbers is not None
        # An index without a length costs the index alone: no reader can find where it ends.
        for region in regions_at(chunk.numbers.places, stored.struct.numbers(INDEX_PLACES), *chunk.key):
            has_length = region.length is not None or region.kind is RegionKind.BLOOM_FILTER
            self._regions.append(region if has_length else region._replace(length=-1))

    def _walk(self, footer: OpenFooter, footer_offset: int) -> None:
        starts = sorted({region.offset for region in self._regions if region.length != 0} | {footer_offset})
        readable = [chunk for chunk in self.chunks if chunk.is_readable and chunk.numbers is not None]
        num_rows = [row_group.num_rows for row_group in footer.row_groups]
        # In the order of the file: what is read at once is read once.
        for chunk in sorted(readable, key=lambda chunk: chunk.regions.get(RegionKind.PAGES, _NOWHERE).offset):
            bloom_filter = chunk.regions.get(RegionKind.BLOOM_FILTER)
            limit = footer_offset if bloom_filter is None else starts[bisect_right(starts, bloom_filter.offset)]
            chunk.verify(num_rows[chunk.row_group_ordinal], limit)
        if not all(chunk.is_whole for chunk in readable):
            self.book.scope_not_checked(Scope.COLUMN, "the pages of a chunk could not all be walked")

    def _check_gaps(self, footer: OpenFooter, footer_offset: int, *, is_complete: bool) -> None:
        lengths = {chunk.key: chunk.bloom_filter_length for chunk in self.chunks}
        found = [(r.offset, lengths[r.chunk_key] if r.length is None else r.length) for r in self._regions]
        ranges = [(offset, length) for offset, length in found if length is not None]
        is_complete = is_complete and len(ranges) == len(found)
        if is_complete and all(chunk.numbers is not None for chunk in self.chunks):
            gaps = check_gaps(ranges, footer_offset, self.book)
            check_left_metadata(self.source, gaps, footer.columns, self.book)
        else:
            for rule_id in ("layout-gap", "metadata-leaked"):
                self.book.not_checked(rule_id, "not all parts of the file are known")

    def _ciphers(self, footer: OpenFooter) -> dict[int, tuple[ModuleCipher, bytes]]:
        """Return cipher and fingerprint of the DEK of columns, by ordinal, as far as their keys are available."""
        found: dict[int, tuple[ModuleCipher, bytes]] = {}
        own = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
        known: list[tuple[Column, bytes]] = []
        for column in footer.columns:
            if column.encryption is ColumnEncryption.FOOTER_KEY:
                if self.cipher is not None:
                    found[column.ordinal] = (self.cipher, self.fingerprint)
                else:
                    self._denied(column, self.keys.denied.get(None, "no AAD can be built"))
        deks = self.keys.deks([(column.path, column.key_metadata) for column in own])
        for column, dek in zip(own, deks, strict=True):
            if dek is None:
                self._denied(column, self.keys.denied[column.path])
                continue
            known.append((column, fingerprint(dek)))
            if self.file_aad is None:
                self._denied(column, "no AAD can be built")
            else:
                found[column.ordinal] = (ModuleCipher(dek, self.file_aad), known[-1][1])
        check_deks(self.fingerprint or None, known, self.keys)
        return found

    def _denied(self, column: Column, reason: str) -> None:
        self.keys.denied.setdefault(column.path, reason)
        self.book.scope_not_checked(Scope.COLUMN, f"column {column.name!r}: {reason}")

    def _damage(self, footer: OpenFooter) -> Damage:
        losses = tuple(loss for chunk in self.chunks if (loss := chunk.loss) is not None)
        row_groups = {loss.row_group_ordinal for loss in losses}
        return Damage(
            losses=losses,
            row_groups=len(footer.row_groups),
            readable_row_groups=tuple(o for o in range(len(footer.row_groups)) if o not in row_groups),
            damaged_indexes=tuple(chunk.key for chunk in self.chunks if chunk.is_index_damaged),
        )


def check_left_metadata(
    source: ByteSource, gaps: Iterable[tuple[int, int]], columns: Iterable[Column], book: RuleBook
) -> None:
    """Check that no metadata of encrypted columns was left in plaintext behind their chunks (spec 5.3).

    Some writers repeat the metadata of a chunk behind it, as the first versions of the format wanted it.
    """
    encrypted = {column.path for column in columns if column.encryption is not ColumnEncryption.PLAINTEXT}
    for offset, length in gaps:
        data, at = bytes(source.read_at(offset, min(length, _MOST_LEFT_BYTES))), 0
        # Until something else comes.
        with contextlib.suppress(ParquetFormatError):
            while at < len(data):
                metadata, end = ColumnMetaData.read(data, at)
                path = tuple(metadata.path_in_schema)
                if path in encrypted:
                    message = f"the metadata of column {'.'.join(path)!r} can be read there."
                    book.broken("metadata-leaked", message, offset=offset + at)
                at = end
    book.holds("metadata-leaked")
