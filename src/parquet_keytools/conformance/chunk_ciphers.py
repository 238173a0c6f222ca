"""How column chunks are decrypted, and what becomes of their modules."""

from __future__ import annotations

import struct
from collections import Counter
from typing import NamedTuple

from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import Column
from parquet_keytools.conformance.nonce_ledger import DekNonces
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.encryption.module_cipher import CTR_FRAMING, GCM_FRAMING, LENGTH_LENGTH, ModuleCipher

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
_pack_place = struct.Struct("<B2h").pack


def check_padding(plaintext: bytes | bytearray, end: int, place: ModulePlace, book: RuleBook) -> None:
    """Check that a Thrift structure that ends at `end` fills the plaintext of its module."""
    if end == len(plaintext):
        book.holds("padding")
    else:
        book.broken("padding", f"{len(plaintext) - end} bytes follow it.", place)


class ColumnCiphers:
    """How the chunks of one column are decrypted, and what became of their modules.

    Attributes:
        column: The column.
        name: Its dotted path.
        cipher: Under its DEK; None where it is in plaintext, or its key is unavailable.
        is_ctr: Whether its pages are encrypted with AES-CTR.
        nonces: Those that were used with its DEK.
        page_framing: How many bytes longer a page is than its plaintext.
        counts: Module type, and one of `authentic`, `broken`, `unauthenticated` -> number of modules. Only the
            thread that walks counts, and adds nonces.
        held: Ids of rules that were checked and hold; for any thread, as a book, and faster.
    """

    __slots__ = ("cipher", "column", "counts", "held", "is_ctr", "name", "nonces", "page_framing")

    def __init__(
        self,
        column: Column,
        cipher: ModuleCipher | None = None,
        nonces: DekNonces | None = None,
        *,
        is_ctr: bool = False,
    ) -> None:
        self.column = column
        self.name = column.name
        self.cipher = cipher
        self.is_ctr = is_ctr
        self.nonces = DekNonces() if nonces is None else nonces
        self.page_framing = 0 if cipher is None else CTR_FRAMING if is_ctr else GCM_FRAMING
        self.counts: Counter[tuple[ModuleType, str]] = Counter()
        self.held: set[str] = set()

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
