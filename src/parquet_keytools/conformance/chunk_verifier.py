"""Column chunks verified: pages authenticated, and numbers compared with what was found.

Pages must also begin as their codec lets pages begin. A page of AES_GCM_CTR_V1 has no tag: any bytes decrypt to
something (spec 4.2.2). What another key, or a counter that begins elsewhere, makes of it shows there; a few
altered values do not. In other pages it shows where the codec, or with Snappy the length in the header, is not
that of the content.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from parquet_keytools.conformance.chunk_layout import ChunkNumbers, ChunkRegion, Window, ends_of_runs
from parquet_keytools.conformance.chunk_modules import AUTHENTICITY_RULES, ChunkCiphers, Page, PageWalk
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.nonce_ledger import nonce_entry
from parquet_keytools.conformance.page_headers import START_LENGTH, begins_as_compressed, can_be_told
from parquet_keytools.conformance.report import Loss
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, ModuleCipher
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.runtime.working_threads import in_threads

_UNCOMPRESSED = 0
_read_length = struct.Struct("<I").unpack_from
_pack_crc = struct.Struct("<I").pack
_pack_ordinal = struct.Struct("<h").pack

_END_LENGTH = 8 * 1024
"""How much of each end of a page tells it from others; with all of it, a file would take twice as long."""


@dataclass
class PageList:
    """The data pages of a chunk.

    Attributes:
        lengths: How long they are with their headers.
        first_values: How many values come before each.
    """

    offsets: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    first_values: array[int] = field(default_factory=lambda: array("q"))


_DATA_HEADER = (ModuleType.DATA_PAGE_HEADER, "authentic")
_DICTIONARY_HEADER = (ModuleType.DICTIONARY_PAGE_HEADER, "authentic")
_WITH_TAG = ((ModuleType.DATA_PAGE, "authentic"), (ModuleType.DICTIONARY_PAGE, "authentic"))
_WITHOUT_TAG = ((ModuleType.DATA_PAGE, "unauthenticated"), (ModuleType.DICTIONARY_PAGE, "unauthenticated"))


Task = tuple["ChunkVerifier", Page, memoryview, memoryview]
"""A page, all its bytes, and those of its module: without the levels that may lie before it."""


@dataclass(slots=True, eq=False)
class ChunkVerifier:
    """Verifies the pages of one chunk.

    Attributes:
        chunk: How it is decrypted.
        numbers: What its metadata says.
        num_rows: Of its row group.
        region: Where its pages lie.
        book: Where findings go.
        pages: Takes its data pages, where somebody compares an index with them.
        is_whole: Whether the walk reached the end of the chunk.
    """

    chunk: ChunkCiphers
    numbers: ChunkNumbers
    num_rows: int
    region: ChunkRegion
    book: RuleBook
    pages: PageList | None
    is_whole: bool = False
    _broken_pages: list[Page] = field(default_factory=list)
    _lost_pages: set[int] = field(default_factory=set)
    _lost_from: int | None = None
    _is_lost: bool = False
    _is_uncompressed: bool = field(init=False)
    _content_can_be_told: bool = field(init=False)
    _data_aad: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._is_uncompressed = self.numbers.codec == _UNCOMPRESSED
        self._content_can_be_told = can_be_told(self.numbers.codec)
        self._data_aad = b"" if self.chunk.ciphers.cipher is None else self.chunk.aad(ModuleType.DATA_PAGE)

    @property
    def end(self) -> int:
        """Where its pages end."""
        assert self.region.length is not None
        return self.region.offset + self.region.length

    def walk(self, window: Window) -> Iterator[Task]:
        """Yield all pages, and check the chunk's own numbers at the end."""
        chunk, pages, view = self.chunk, self.pages, window.view
        walk = PageWalk(
            window, chunk, self.numbers.dictionary_page_offset, self.region.offset, self.end, self.book
        )
        is_encrypted, is_ctr = chunk.ciphers.cipher is not None, chunk.ciphers.is_ctr
        first_data_page: int | None = None
        number = data_pages = values = 0
        nonces = bytearray()
        for page in walk:
            ordinal, facts, header_offset, offset, header = page
            stored = module = view(offset, facts.length)
            number += 1
            if is_encrypted:
                if facts.levels_length:
                    module = page.module_of(stored, chunk.ciphers.page_framing)
                nonces += nonce_entry(header[4:16], header_offset, header[-4:])
                nonces += nonce_entry(module[4:16], offset, _crc_of_ends(module) if is_ctr else module[-4:])
            if ordinal is not None:
                if first_data_page is None:
                    first_data_page = header_offset
                if pages is not None:
                    pages.first_values.append(values)
                    pages.offsets.append(header_offset)
                    pages.lengths.append(offset + facts.length - header_offset)
                values += facts.num_values
                data_pages += 1
            yield self, page, stored, module
        if is_encrypted:
            self._count(walk, data_pages, number - data_pages)
        if nonces:
            chunk.ciphers.nonces.add(nonces, number)
        self.is_whole = not walk.stopped
        if walk.stopped:
            self._lost_from = walk.next_ordinal
        else:
            self._check_numbers(values, first_data_page)

    def _count(self, walk: PageWalk, data_pages: int, dictionary_pages: int) -> None:
        counts = self.chunk.ciphers.counts
        data, dictionary = self._kinds
        if walk.data_headers:
            counts[_DATA_HEADER] += walk.data_headers
        if walk.has_dictionary_header:
            counts[_DICTIONARY_HEADER] += 1
        if data_pages:
            counts[data] += data_pages
        if dictionary_pages:
            counts[dictionary] += dictionary_pages

    @property
    def whole_pages(self) -> PageList | None:
        """Its data pages; None where they were not all walked, or are not kept."""
        return self.pages if self.is_whole else None

    @property
    def _kinds(self) -> tuple[tuple[ModuleType, str], ...]:
        """As what data and dictionary pages count whose length field is right, and whose tag if they have one."""
        return _WITHOUT_TAG if self.chunk.ciphers.is_ctr else _WITH_TAG

    def _check_numbers(self, values: int, first_data_page: int | None) -> None:
        book, chunk, held = self.book, self.chunk, self.chunk.ciphers.held
        # Messages, and places, are made where they are needed: chunks are many.
        num_values, is_flat = self.numbers.num_values, chunk.ciphers.column.is_flat
        held.add("value-count")
        if values != num_values:
            message = f"the pages have {values} values, the metadata says {num_values}."
            book.broken("value-count", message, chunk.place(ModuleType.COLUMN_META_DATA))
        if is_flat and num_values != self.num_rows:
            message = f"it has {num_values} values, and the row group {self.num_rows} rows."
            book.broken("value-count", message, chunk.place(ModuleType.COLUMN_META_DATA))
        if values != num_values or (is_flat and num_values != self.num_rows):
            # Which values belong to which rows cannot be told any more.
            self._is_lost = True
        if chunk.ciphers.cipher is not None and first_data_page is not None:
            stated = self.numbers.data_page_offset
            if stated == first_data_page:
                held.add("data-page-offset")
            else:
                message = f"it is {stated}, and the first data page is at {first_data_page}."
                book.broken("data-page-offset", message, chunk.place(ModuleType.COLUMN_META_DATA))

    def check_page(self, page: Page, stored: memoryview, module: memoryview, scratch: memoryview) -> None:
        """Authenticate one page, or as much of it as its algorithm and its CRC allow; for any thread.

        The plaintext goes to `scratch`, which is as long as `stored` at least.
        """
        facts, ciphers = page.facts, self.chunk.ciphers
        is_good = True
        if facts.crc is not None:
            is_good = zlib.crc32(stored) == facts.crc & 0xFFFF_FFFF
            message = "the page does not have the CRC that its header states."
            self._check("page-crc", is_good, message, page)
        if ciphers.cipher is not None:
            is_good = self._authenticate(ciphers.cipher, page, stored, module, scratch) and is_good
        elif self._content_can_be_told:
            start = stored[facts.levels_length :][:START_LENGTH]
            is_good = self._check_content(page, self._begins_well(page, start)) and is_good
        if self._is_uncompressed:
            length, stated = len(stored) - ciphers.page_framing, facts.uncompressed_length
            if length == stated:
                ciphers.held.add("page-size")
            else:
                message = f"{length} bytes without framing, and the header states {stated}."
                is_good = self._check("page-size", False, message, page)
        if not is_good:
            self._lose(page)

    def _check(self, rule_id: str, holds: bool, message: str, page: Page) -> bool:
        if holds:
            self.chunk.ciphers.held.add(rule_id)
        else:
            self.book.broken(rule_id, message, self.chunk.page_place(page.ordinal))
        return holds

    def _aad(self, page: Page) -> bytes:
        if page.ordinal is None:
            return self.chunk.aad(ModuleType.DICTIONARY_PAGE)
        return self._data_aad + _pack_ordinal(page.ordinal)

    def _authenticate(
        self, cipher: ModuleCipher, page: Page, stored: memoryview, module: memoryview, scratch: memoryview
    ) -> bool:
        facts, size = page.facts, len(module)
        levels_before = len(stored) - size
        if levels_before:
            message = f"{levels_before} bytes of levels are in plaintext before the module."
            self.book.broken("page-v2-whole", message, self.chunk.page_place(page.ordinal), page.offset)
        elif facts.page_type == PageHeader.DATA_PAGE_V2:
            self.chunk.ciphers.held.add("page-v2-whole")
        (length,) = _read_length(module)
        if length != size - 4:
            message = f"its length field says {length} bytes, its header {size - 4}."
            self._break(page, "module-length", message)
            return False
        if self.chunk.ciphers.is_ctr:
            # To decrypt it would show nothing: any bytes decrypt to something.
            start = self._decrypted_start(cipher, page, module, levels_before, scratch)
            begins_well = self._begins_well(page, start)
            is_first = not page.ordinal
            if (is_first or begins_well is False) and not self._check_algorithm(cipher, page, module, scratch):
                return True
            return self._check_content(page, begins_well)
        out = scratch[: size - GCM_FRAMING]
        try:
            cipher.gcm.decrypt_into(module[4:16], module[16:], self._aad(page), out)
        except InvalidTag:
            is_dictionary = page.ordinal is None
            rule_id = AUTHENTICITY_RULES[ModuleType.DICTIONARY_PAGE if is_dictionary else ModuleType.DATA_PAGE]
            self._break(page, rule_id, "the module does not authenticate.")
            return False
        if not self._content_can_be_told:
            return True
        skipped = max(0, facts.levels_length - levels_before)
        return self._check_content(page, self._begins_well(page, out[skipped : skipped + START_LENGTH]))

    def _break(self, page: Page, rule_id: str, message: str) -> None:
        self.book.broken(rule_id, message, self.chunk.page_place(page.ordinal), page.offset)
        self._broken_pages.append(page)

    def _check_algorithm(self, cipher: ModuleCipher, page: Page, module: memoryview, scratch: memoryview) -> bool:
        """Check that a page of a file that states AES-CTR is no module of AES-GCM."""
        if len(module) < GCM_FRAMING:
            return True
        out = scratch[: len(module) - GCM_FRAMING]
        try:
            cipher.gcm.decrypt_into(module[4:16], module[16:], self._aad(page), out)
        except InvalidTag:
            self.chunk.ciphers.held.add("algorithm-of-pages")
            return True
        message = "the page authenticates with AES-GCM, and the file states AES_GCM_CTR_V1."
        self.book.broken("algorithm-of-pages", message, self.chunk.page_place(page.ordinal), page.offset)
        return False

    @staticmethod
    def _decrypted_start(
        cipher: ModuleCipher, page: Page, module: memoryview, levels_before: int, scratch: memoryview
    ) -> memoryview:
        """Return how what follows the levels begins, in a page without a tag; levels may stand before it."""
        skipped = max(0, page.facts.levels_length - levels_before)
        looked_at = module[CTR_FRAMING : CTR_FRAMING + skipped + START_LENGTH]
        out = scratch[: len(looked_at)]
        cipher.ctr().apply_into(module[4:16], looked_at, b"", out)
        return out[skipped:]

    def _begins_well(self, page: Page, start: memoryview) -> bool | None:
        """Return whether what follows the levels begins as the codec has it; None where that cannot be told."""
        facts = page.facts
        length = facts.uncompressed_length - facts.levels_length
        if not self._content_can_be_told or not facts.is_compressed or length <= 0:
            return None
        return begins_as_compressed(self.numbers.codec, bytes(start), length)

    def _check_content(self, page: Page, begins_well: bool | None) -> bool:
        if begins_well:
            self.chunk.ciphers.held.add("page-content")
        if begins_well is not False:
            return True
        return self._check("page-content", False, "it does not begin as the output of its codec does.", page)

    def _lose(self, page: Page) -> None:
        if page.ordinal is None:
            self._is_lost = True
        else:
            self._lost_pages.add(page.ordinal)

    def finish(self) -> Loss | None:
        """Count the broken pages, and return what is lost of the chunk, when all its pages were checked."""
        counts = self.chunk.ciphers.counts
        for page in self._broken_pages:
            kind = self._kinds[page.ordinal is None]
            counts[kind] -= 1
            counts[kind[0], "broken"] += 1
        if not self._is_lost and not self._lost_pages and self._lost_from is None:
            return None
        pages = None if self._is_lost else tuple(sorted(self._lost_pages))
        column = self.chunk.ciphers.column
        return Loss(self.chunk.row_group_ordinal, column.ordinal, column.name, pages, self._lost_from)


def _crc_of_ends(module: memoryview) -> bytes:
    """Return what tells a page that has no tag from others: the CRC of its length field and of both ends."""
    return _pack_crc(
        zlib.crc32(module[max(_END_LENGTH, len(module) - _END_LENGTH) :], zlib.crc32(module[:_END_LENGTH]))
    )


# --- Pages of many chunks, by several threads ---


_STEP = 4 * 1024 * 1024
"""How much is read at once."""

_SMALL_PAGE = 32 * 1024
"""Up to how many bytes the thread that walks authenticates a page itself: to hand it over would take longer."""

_BATCH_BYTES = 32 * 1024 * 1024
"""How much is walked before it is authenticated: large enough that threads seldom wait for each other."""


def authenticate_pages(source: ByteSource, verifiers: Sequence[ChunkVerifier], threads: int) -> None:
    """Walk chunks one after another, and authenticate their pages.

    To walk is Python's work and to authenticate is the cipher's, which lets go of the interpreter. Threads that do
    both at once wait for each other more than they work: so one thread walks, and then all authenticate, each into
    memory that it uses again and again. Small pages, for which the cipher takes no longer than Python, are
    authenticated on the way.
    """
    scratches = [bytearray(_SMALL_PAGE) for _ in range(threads)]
    for batch in _batches(source, verifiers):
        longest = max(len(stored) for _, _, stored, _ in batch)
        for position, scratch in enumerate(scratches):
            if len(scratch) < longest:
                scratches[position] = bytearray(longest)
        shares = [(batch[position::threads], scratch) for position, scratch in enumerate(scratches)]
        in_threads(_authenticate, shares, threads)


def _authenticate(share: tuple[list[Task], bytearray]) -> None:
    tasks, scratch = share
    view = memoryview(scratch)
    for verifier, page, stored, module in tasks:
        verifier.check_page(page, stored, module, view)


def _batches(source: ByteSource, verifiers: Sequence[ChunkVerifier]) -> Iterator[list[Task]]:
    """Authenticate small pages, and yield others, those of about `_BATCH_BYTES` of the file together."""
    scratch = memoryview(bytearray(_SMALL_PAGE))
    window = Window(source, _STEP)
    ends = ends_of_runs([(verifier.region.offset, verifier.end) for verifier in verifiers])
    batch: list[Task] = []
    size = 0
    for verifier, window.end in zip(verifiers, ends, strict=True):
        for task in verifier.walk(window):
            _, page, stored, module = task
            # One page keeps all that was read with it: small ones count, too.
            size += page.offset - page.header_offset + len(stored)
            if len(stored) <= _SMALL_PAGE:
                verifier.check_page(page, stored, module, scratch)
            else:
                batch.append(task)
            if size >= _BATCH_BYTES:
                if batch:
                    yield batch
                batch, size = [], 0
    if batch:
        yield batch
