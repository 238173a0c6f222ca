"""Opens what is encrypted in a file that is inspected, and finds its modules by their headers."""

from __future__ import annotations

from parquet_keytools.conformance.chunk_layout import ChunkRegion, Column, OpenFooter, Window, chunk_place
from parquet_keytools.conformance.chunk_modules import ChunkCiphers, ColumnCiphers, PageWalk, check_module
from parquet_keytools.conformance.expectations import Expectation
from parquet_keytools.conformance.file_keys import FileKeys, MaterialFinder
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.index_rules import IndexVerifier
from parquet_keytools.conformance.inspection import InspectedModule
from parquet_keytools.conformance.metadata_rules import FooterOpener, OpenedEnvelope
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.encryption.aad import ExpectedAadPrefix, ModuleType
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, Envelope
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.structs import ColumnMetaData

_HEADER_STEP = 64 * 1024

_DATA = (ModuleType.DATA_PAGE_HEADER, ModuleType.DATA_PAGE)
_DICTIONARY = (ModuleType.DICTIONARY_PAGE_HEADER, ModuleType.DICTIONARY_PAGE)


class ModuleFinder:
    """The part of an inspection that needs keys.

    Attributes:
        denied: Path of a column, empty for the footer -> why its key is unavailable.
    """

    def __init__(
        self,
        source: ByteSource,
        envelope: Envelope,
        finder: MaterialFinder,
        aad_prefix: ExpectedAadPrefix | None,
        book: RuleBook,
    ) -> None:
        self._source = source
        self._envelope = envelope
        self._book = book
        self._keys = FileKeys(finder, book)
        self._expectation = Expectation(aad_prefix)
        self._opened: OpenedEnvelope | None = None
        self._ciphers: dict[int, ColumnCiphers] = {}
        self._window = Window(source, _HEADER_STEP)
        self._window.end = envelope.footer_offset
        self.denied = self._keys.denied

    def open(self) -> OpenedEnvelope | None:
        """Open the footer of an encrypted file; None where it cannot be read."""
        opener = FooterOpener(self._envelope, self._expectation, self._keys, NonceLedger())
        self._opened = opener.open()
        return self._opened

    def find_keys(self, footer: OpenFooter) -> None:
        """Ask for the keys of all columns."""
        opened = self._opened
        plaintext = [column for column in footer.columns if column.encryption is ColumnEncryption.PLAINTEXT]
        self._ciphers = {column.ordinal: ColumnCiphers(column) for column in plaintext}
        if opened is None or opened.file_aad is None:
            return
        own = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
        for column in footer.columns:
            if column.encryption is ColumnEncryption.FOOTER_KEY and opened.cipher is not None:
                self._add(column, opened.cipher)
        wanted = [(column.path, column.key_metadata) for column in own]
        for column, dek in zip(own, self._keys.column_deks(wanted), strict=True):
            if dek is not None:
                self._add(column, ModuleCipher(dek, opened.file_aad))

    def _add(self, column: Column, cipher: ModuleCipher) -> None:
        is_ctr = self._envelope.algorithm is Algorithm.AES_GCM_CTR_V1
        self._ciphers[column.ordinal] = ColumnCiphers(column, cipher, is_ctr=is_ctr)

    def chunk_metadata(self, row_group_ordinal: int, column: Column, hidden: bytes) -> ColumnMetaData | None:
        """Return the metadata of a chunk from its module; None without its key, or where it is not authentic."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None or chunk.ciphers.cipher is None:
            return None
        plaintext = check_module(chunk, ModuleType.COLUMN_META_DATA, hidden, None, self._book)
        try:
            return None if plaintext is None else ColumnMetaData.read(plaintext)[0]
        except ParquetFormatError as error:
            self._book.broken("metadata-path", str(error), chunk_place(row_group_ordinal, column.ordinal))
            return None

    def pages(
        self, row_group_ordinal: int, column: Column, dictionary_page_offset: int | None, region: ChunkRegion
    ) -> tuple[list[InspectedModule], bool] | None:
        """Return the pages of a chunk and their headers, and whether all were found; None without its key."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        end = region.offset + (region.length or 0)
        walk = PageWalk(self._window, chunk, dictionary_page_offset, region.offset, end, self._book)
        modules: list[InspectedModule] = []
        for ordinal, facts, header_offset, offset, _ in walk:
            header_type, page_type = _DATA if ordinal is not None else _DICTIONARY
            modules.append(InspectedModule(header_type, header_offset, offset - header_offset, ordinal))
            modules.append(InspectedModule(page_type, offset, facts.length, ordinal))
        return modules, not walk.stopped

    def bloom_filter(
        self, row_group_ordinal: int, column: Column, region: ChunkRegion, limit: int
    ) -> list[InspectedModule] | None:
        """Return header and bitset of a Bloom filter; None without its key, or where the header is damaged."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        index = IndexVerifier(self._source, chunk, limit, self._book)
        lengths = index.bloom_filter_lengths(region)
        if lengths is None:
            return None
        return [
            InspectedModule(ModuleType.BLOOM_FILTER_HEADER, region.offset, lengths[0]),
            InspectedModule(ModuleType.BLOOM_FILTER_BITSET, region.offset + lengths[0], lengths[1]),
        ]

    def _chunk(self, row_group_ordinal: int, column: Column) -> ChunkCiphers | None:
        """Return how a chunk is decrypted; None without its key."""
        ciphers = self._ciphers.get(column.ordinal)
        return None if ciphers is None else ChunkCiphers(ciphers, row_group_ordinal)
