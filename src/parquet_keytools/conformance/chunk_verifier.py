"""Column chunks verified: pages authenticated by several threads, and numbers compared with what was found.

Pages must also begin as their codec lets pages begin. A page of AES_GCM_CTR_V1 has no tag: any bytes decrypt to
something (spec 4.2.2). What another key, or a counter that begins elsewhere, makes of it shows there; a few
altered values do not. In other pages it shows where the codec, or with Snappy the length in the header, is not
that of the content.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from parquet_keytools.conformance.chunk_modules import AUTHENTICITY_RULES, ChunkCiphers, Page, PageWalk, Window
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.layout_rules import ChunkRegion
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.conformance.report import Loss
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, ModuleCipher
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import ColumnMetaData, PageHeader

_SNAPPY = 1
_MAGICS = {2: b"\x1f\x8b\x08", 6: b"\x28\xb5\x2f\xfd"}
"""Codec of parquet.thrift (gzip, Zstandard) -> what its output begins with. Brotli and LZ4 have no such thing."""

START_LENGTH = 5
"""How many bytes are looked at, at most."""


def can_be_told(codec: int) -> bool:
    """Return whether pages of a codec begin in a way of their own."""
    return codec == _SNAPPY or codec in _MAGICS


def begins_as_compressed(codec: int, start: bytes, length: int) -> bool:
    """Return whether a page that decompresses to `length` bytes may begin with these, at most `START_LENGTH`."""
    if codec != _SNAPPY:
        return start.startswith(_MAGICS[codec])
    # Snappy begins with the length, seven bits in each byte.
    value = 0
    for position, byte in enumerate(start):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value == length
    return False


_UNCOMPRESSED = 0
_STEP = 4 * 1024 * 1024
_read_length = struct.Struct("<I").unpack_from
_pack_crc = struct.Struct("<I").pack

_END_LENGTH = 8 * 1024
"""How much of each end of a page tells it from others; with all of it, a file would take twice as long."""

Count = Callable[[ModuleType, str, str, int], None]
"""Takes module type, column name, one of `authentic`, `broken`, `unauthenticated`, and how many."""


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


class ChunkVerifier:
    """Verifies the pages of one chunk.

    Attributes:
        pages: Its data pages, as far as they were walked.
        is_whole: Whether the walk reached the end of the chunk.
    """

    def __init__(
        self,
        chunk: ChunkCiphers,
        metadata: ColumnMetaData,
        num_rows: int,
        region: ChunkRegion,
        book: RuleBook,
        ledger: NonceLedger,
        count: Count,
    ) -> None:
        self.chunk = chunk
        self.metadata = metadata
        self.num_rows = num_rows
        self.pages = PageList()
        self.is_whole = False
        self._region = region
        self._book = book
        self._ledger = ledger
        self._count = count
        self._lost_pages: set[int] = set()
        self._lost_from: int | None = None
        self._is_lost = False
        self._values = 0
        self._is_uncompressed = metadata.codec == _UNCOMPRESSED
        self._content_can_be_told = can_be_told(metadata.codec)

    def walk(self, source: ByteSource) -> Iterator[tuple[Page, memoryview]]:
        """Yield all pages with their bytes, and check the chunk's own numbers at the end."""
        region, chunk, metadata = self._region, self.chunk, self.metadata
        assert region.length is not None
        end = region.offset + region.length
        window = Window(source, end, _STEP)
        walk = PageWalk(window, chunk, metadata, region.offset, end, self._book)
        first_data_page: int | None = None
        cipher, add_nonce, pages = chunk.cipher, self._ledger.add, self.pages
        for page in walk:
            stored = window.view(page.offset, page.length)
            if cipher is not None:
                add_nonce(chunk.fingerprint, page.header_nonce, page.header_offset, page.header_check)
            if not page.is_dictionary:
                first_data_page = page.header_offset if first_data_page is None else first_data_page
                pages.first_values.append(self._values)
                self._values += page.facts.num_values
                pages.offsets.append(page.header_offset)
                pages.lengths.append(page.offset + page.length - page.header_offset)
            yield page, stored
        for module_type, number in walk.authentic_headers.items():
            self._count(module_type, chunk.column.name, "authentic", number)
        self.is_whole = not walk.stopped
        if walk.stopped:
            self._lost_from = walk.next_ordinal
            return
        # Messages are made where they are needed: chunks are many.
        place = chunk.place(ModuleType.COLUMN_META_DATA)
        num_values = metadata.num_values
        self._book.holds("value-count")
        if self._values != num_values:
            message = f"the pages have {self._values} values, the metadata says {num_values}."
            self._book.broken("value-count", message, place)
        if chunk.column.is_flat and num_values != self.num_rows:
            message = f"it has {num_values} values, and the row group {self.num_rows} rows."
            self._book.broken("value-count", message, place)
        if self._values != num_values or (chunk.column.is_flat and num_values != self.num_rows):
            # Which values belong to which rows cannot be told any more.
            self._is_lost = True
        if chunk.cipher is not None and first_data_page is not None:
            stated = metadata.data_page_offset
            if stated == first_data_page:
                self._book.holds("data-page-offset")
            else:
                message = f"it is {stated}, and the first data page is at {first_data_page}."
                self._book.broken("data-page-offset", message, place)

    def check_page(self, page: Page, stored: memoryview, scratch: memoryview) -> None:
        """Authenticate one page, or as much of it as its algorithm and its CRC allow; for any thread.

        The plaintext goes to `scratch`, which is as long as `stored` at least.
        """
        book, chunk = self._book, self.chunk
        is_good = True
        crc = page.facts.crc
        if crc is not None:
            is_good = zlib.crc32(stored) == crc & 0xFFFF_FFFF
            book.check("page-crc", is_good, "the page does not have the CRC that its header states.", page.place)
        plaintext_length = len(stored) - chunk.page_framing
        if chunk.cipher is not None:
            is_good = self._authenticate(chunk.cipher, page, stored, scratch) and is_good
        elif self._content_can_be_told:
            start = stored[page.facts.levels_length :][:START_LENGTH]
            is_good = self._check_content(page, self._begins_well(page, start)) and is_good
        if self._is_uncompressed:
            stated = page.facts.uncompressed_length
            message = f"{plaintext_length} bytes without framing, and the header states {stated}."
            is_good = book.check("page-size", plaintext_length == stated, message, page.place) and is_good
        if not is_good:
            self._lose(page)

    def _authenticate(self, cipher: ModuleCipher, page: Page, stored: memoryview, scratch: memoryview) -> bool:
        place, name = page.place, self.chunk.column.name
        whole, stored = stored, page.module_of(stored, self.chunk.page_framing)
        check = _crc_of_ends(stored) if self.chunk.is_ctr else bytes(stored[-4:])
        self._ledger.add(self.chunk.fingerprint, stored[4:16], page.offset, check, is_page=True)
        if len(stored) < len(whole):
            message = f"{len(whole) - len(stored)} bytes of levels are in plaintext before the module."
            self._book.broken("page-v2-whole", message, place, page.offset)
        elif page.facts.page_type == PageHeader.DATA_PAGE_V2:
            self._book.holds("page-v2-whole")
        (length,) = _read_length(stored)
        if length != len(stored) - 4:
            message = f"its length field says {length} bytes, its header {len(stored) - 4}."
            self._book.broken("module-length", message, place, page.offset)
            self._count(place.module_type, name, "broken", 1)
            return False
        if self.chunk.is_ctr:
            # To decrypt it would show nothing: any bytes decrypt to something.
            self._count(place.module_type, name, "unauthenticated", 1)
            start = self._decrypted_start(cipher, page, stored, len(whole) - len(stored), scratch)
            begins_well = self._begins_well(page, start)
            is_first = page.is_dictionary or place.page_ordinal == 0
            if (is_first or begins_well is False) and not self._check_algorithm(cipher, page, stored, scratch):
                return True
            return self._check_content(page, begins_well)
        out = scratch[: len(stored) - GCM_FRAMING]
        rule_id = AUTHENTICITY_RULES[place.module_type]
        try:
            cipher.gcm.decrypt_into(stored[4:16], stored[16:], place.aad(cipher.file_aad), out)
        except InvalidTag:
            self._book.broken(rule_id, "the module does not authenticate.", place, page.offset)
            self._count(place.module_type, name, "broken", 1)
            return False
        self._book.holds(rule_id, "module-length")
        self._count(place.module_type, name, "authentic", 1)
        if not self._content_can_be_told:
            return True
        skipped = max(0, page.facts.levels_length - (len(whole) - len(stored)))
        return self._check_content(page, self._begins_well(page, out[skipped : skipped + START_LENGTH]))

    def _check_algorithm(self, cipher: ModuleCipher, page: Page, stored: memoryview, scratch: memoryview) -> bool:
        """Check that a page of a file that states AES-CTR is no module of AES-GCM."""
        if len(stored) < GCM_FRAMING:
            return True
        out = scratch[: len(stored) - GCM_FRAMING]
        try:
            cipher.gcm.decrypt_into(stored[4:16], stored[16:], page.place.aad(cipher.file_aad), out)
        except InvalidTag:
            self._book.holds("algorithm-of-pages")
            return True
        message = "the page authenticates with AES-GCM, and the file states AES_GCM_CTR_V1."
        self._book.broken("algorithm-of-pages", message, page.place, page.offset)
        return False

    @staticmethod
    def _decrypted_start(
        cipher: ModuleCipher, page: Page, stored: memoryview, levels_before: int, scratch: memoryview
    ) -> memoryview:
        """Return how what follows the levels begins, in a page without a tag; levels may stand before it."""
        skipped = max(0, page.facts.levels_length - levels_before)
        looked_at = stored[CTR_FRAMING : CTR_FRAMING + skipped + START_LENGTH]
        out = scratch[: len(looked_at)]
        cipher.ctr().apply_into(stored[4:16], looked_at, b"", out)
        return out[skipped:]

    def _begins_well(self, page: Page, start: memoryview) -> bool | None:
        """Return whether what follows the levels begins as the codec has it; None where that cannot be told."""
        facts = page.facts
        length = facts.uncompressed_length - facts.levels_length
        if not self._content_can_be_told or not facts.is_compressed or length <= 0:
            return None
        return begins_as_compressed(self.metadata.codec, bytes(start), length)

    def _check_content(self, page: Page, begins_well: bool | None) -> bool:
        message = "it does not begin as the output of its codec does."
        return begins_well is None or self._book.check("page-content", begins_well, message, page.place)

    def _lose(self, page: Page) -> None:
        if page.is_dictionary:
            self._is_lost = True
        elif page.place.page_ordinal is not None:
            self._lost_pages.add(page.place.page_ordinal)

    def loss(self) -> Loss | None:
        """Return what is lost of the chunk, when all its pages were checked."""
        if not self._is_lost and not self._lost_pages and self._lost_from is None:
            return None
        pages = None if self._is_lost else tuple(sorted(self._lost_pages))
        column = self.chunk.column
        return Loss(self.chunk.row_group_ordinal, column.ordinal, column.name, pages, self._lost_from)


def _crc_of_ends(module: memoryview) -> bytes:
    """Return what tells a page that has no tag from others: the CRC of its length field and of both ends."""
    return _pack_crc(
        zlib.crc32(module[max(_END_LENGTH, len(module) - _END_LENGTH) :], zlib.crc32(module[:_END_LENGTH]))
    )


_BATCH_BYTES = 32 * 1024 * 1024
"""How much is walked before it is authenticated: large enough that threads seldom wait for each other."""

Task = tuple[ChunkVerifier, Page, memoryview]


def authenticate_pages(source: ByteSource, verifiers: Iterable[ChunkVerifier], threads: int) -> None:
    """Walk chunks one after another, and authenticate their pages.

    To walk is Python's work and to authenticate is the cipher's, which lets go of the interpreter. Threads that do
    both at once wait for each other more than they work: so one thread walks, and then all authenticate, each into
    memory that it uses again and again.
    """
    scratches = [bytearray() for _ in range(threads)]
    with ThreadPoolExecutor(max(1, threads - 1)) as pool:
        for batch in _batches(source, verifiers):
            longest = max(len(stored) for _, _, stored in batch)
            for position, scratch in enumerate(scratches):
                if len(scratch) < longest:
                    scratches[position] = bytearray(longest)
            shares = [batch[position::threads] for position in range(threads)]
            others = [
                pool.submit(_authenticate, share, memoryview(scratch))
                for share, scratch in zip(shares[1:], scratches[1:], strict=True)
            ]
            _authenticate(shares[0], memoryview(scratches[0]))
            for other in others:
                other.result()


def _authenticate(share: list[Task], scratch: memoryview) -> None:
    for verifier, page, stored in share:
        verifier.check_page(page, stored, scratch)


def _batches(source: ByteSource, verifiers: Iterable[ChunkVerifier]) -> Iterator[list[Task]]:
    """Yield pages that are about `_BATCH_BYTES` together."""
    batch: list[Task] = []
    size = 0
    for verifier in verifiers:
        for page, stored in verifier.walk(source):
            batch.append((verifier, page, stored))
            size += len(stored)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
