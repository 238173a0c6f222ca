"""A whole file verified, rule by rule."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from parquet_keytools.conformance.chunk_layout import (
    ChunkKey,
    ChunkNumbers,
    ChunkRegion,
    Column,
    OpenFooter,
    check_gaps,
    check_layout,
    check_row_groups,
    chunk_regions,
)
from parquet_keytools.conformance.chunk_modules import ChunkCiphers, ColumnCiphers
from parquet_keytools.conformance.chunk_verifier import ChunkVerifier, PageList, authenticate_pages
from parquet_keytools.conformance.envelope import check_envelope, plaintext_metadata
from parquet_keytools.conformance.expectations import Expectation, check_table_of_columns, check_table_of_footer
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, MaterialFinder, check_deks, fingerprint
from parquet_keytools.conformance.findings import FILE_SCOPES, RuleBook, Scope
from parquet_keytools.conformance.footer_rules import check_footer
from parquet_keytools.conformance.index_rules import IndexVerifier, IndexWindows
from parquet_keytools.conformance.metadata_rules import (
    FooterOpener,
    MetadataReader,
    OpenedEnvelope,
    check_left_metadata,
)
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.conformance.report import Damage, FileReport, Loss, ModuleTally
from parquet_keytools.encryption.aad import ModuleType, without_delimiter
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, Envelope, FooterMode
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import FileMetaData

_FILE_IS_LOST = Damage(file_is_lost=True)


@dataclass(frozen=True)
class FileFacts:
    """What a data set is checked by.

    Attributes:
        aad_prefix: The text of the prefix, stored or supplied, without NUL at its end.
        column_paths: Leaf paths; None where they are not known.
        mode: How the footer is protected; None where that cannot be told.
        nonces: Those of all modules that were found.
        unknown: Why not all of its DEKs and nonces are known; None where they are.
    """

    aad_prefix: bytes | None = None
    file_unique: bytes | None = None
    dek_fingerprints: frozenset[bytes] = frozenset()
    column_paths: tuple[tuple[str, ...], ...] | None = None
    mode: FooterMode | None = None
    nonces: NonceLedger | None = None
    unknown: str | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is."""
        return self.mode not in (None, FooterMode.UNENCRYPTED)


def verify_source(
    source: ByteSource, finder: MaterialFinder | None, expectation: Expectation | None = None, *, threads: int = 2
) -> tuple[FileReport, FileFacts]:
    """Verify a file against all rules of a file.

    Raises:
        OSError: The file cannot be read. Whatever is wrong with its bytes is in the report.
    """
    return _FileVerifier(source, finder, expectation or Expectation(), threads).run()


class _FileVerifier:
    def __init__(
        self, source: ByteSource, finder: MaterialFinder | None, expectation: Expectation, threads: int
    ) -> None:
        self._source = source
        self._expectation = expectation
        self._threads = threads
        self._book = RuleBook(FILE_SCOPES)
        self._keys = FileKeys(finder, self._book)
        self._ledger = NonceLedger()
        self._footer_counts: Counter[str] = Counter()
        self._ciphers: dict[int, ColumnCiphers] = {}
        self._metadata: dict[ChunkKey, ChunkNumbers] = {}
        self._walkable: dict[ChunkKey, ChunkCiphers] = {}
        self._regions: list[ChunkRegion] = []
        self._unusable: frozenset[ChunkRegion] = frozenset()
        self._verifiers: dict[ChunkKey, ChunkVerifier] = {}
        self._losses: list[Loss] = []
        self._damaged_indexes: list[ChunkKey] = []
        self._facts = FileFacts()

    # --- From the end of the file to its beginning ---------------------------------------------------------

    def run(self) -> tuple[FileReport, FileFacts]:
        envelope = check_envelope(self._source, self._book)
        damage: Damage | None = _FILE_IS_LOST
        if envelope is None:
            self._nothing_behind("what is visible of the footer cannot be read")
        elif envelope.mode is FooterMode.UNENCRYPTED:
            damage = self._unencrypted(envelope)
        else:
            expected = self._expectation.aad_prefix
            prefix = envelope.aad_prefix or (None if expected is None else expected.candidates[0])
            self._facts = FileFacts(
                None if prefix is None else without_delimiter(prefix), envelope.aad_file_unique, mode=envelope.mode
            )
            damage = self._encrypted(envelope)
        has_all_keys = self._keys.finder is not None and not self._keys.denied
        for ciphers in self._ciphers.values():
            ciphers.note_held(self._book)
        self._ledger.check(self._book)
        report = FileReport(
            self._source.path,
            self._keys.finder is not None,
            self._book.results(),
            self._tallies(),
            damage if has_all_keys else None,
            self._keys.denied_by_title(),
            frozenset() if self._expectation.aad_prefix is None else frozenset({"prefix-expected"}),
            None if self._expectation.table is None else self._expectation.table.table_name,
        )
        facts = replace(
            self._facts,
            dek_fingerprints=frozenset(self._keys.fingerprints),
            nonces=self._ledger,
            unknown=next(iter(report.result("nonce-reuse").reasons), None),
        )
        return report, facts

    def _tallies(self) -> tuple[ModuleTally, ...]:
        counts: defaultdict[tuple[ModuleType, str | None], Counter[str]] = defaultdict(Counter)
        if self._footer_counts:
            counts[ModuleType.FOOTER, None] = self._footer_counts
        for ciphers in self._ciphers.values():
            for (module_type, outcome), number in ciphers.counts.items():
                counts[module_type, ciphers.column.name][outcome] += number
        return tuple(
            ModuleTally(*key, *(counts[key][name] for name in ("authentic", "broken", "unauthenticated")))
            for key in sorted(counts, key=lambda key: (key[0], key[1] or ""))
        )

    def _unencrypted(self, envelope: Envelope) -> Damage | None:
        self._facts = replace(self._facts, mode=envelope.mode)
        footer = self._footer(envelope, plaintext_metadata(envelope, self._book))
        if not self._expectation.allow_plaintext and not self._book.is_broken("algorithm-stated"):
            self._book.broken("encrypted", "the file is a plaintext Parquet file.")
        if footer is None:
            return _FILE_IS_LOST
        if not self._expectation.allow_plaintext:
            return None
        # Readers may take plaintext files, and what is expected of this one is still not there.
        if self._expectation.aad_prefix is not None:
            self._book.broken("prefix-expected", "the file is in plaintext, and has none.")
        self._columns(envelope, footer, None)
        check_table_of_footer(self._expectation, envelope, self._keys, self._book)
        check_table_of_columns(self._expectation, envelope, footer, self._keys, self._book)
        return self._damage(len(footer.row_groups))

    def _encrypted(self, envelope: Envelope) -> Damage | None:
        check_table_of_footer(self._expectation, envelope, self._keys, self._book)
        opened = FooterOpener(envelope, self._expectation, self._keys, self._ledger).open()
        if opened is None:
            self._nothing_behind("the footer cannot be read")
            is_prefix_missing = envelope.supply_aad_prefix and self._expectation.aad_prefix is None
            return None if is_prefix_missing and envelope.aad_prefix is None else _FILE_IS_LOST
        if opened.cipher is not None:
            outcome = "authentic" if opened.is_authentic else "broken"
            self._footer_counts[outcome] += 1
        footer = self._footer(envelope, opened.metadata)
        if footer is None:
            return _FILE_IS_LOST
        self._columns(envelope, footer, opened)
        check_table_of_columns(self._expectation, envelope, footer, self._keys, self._book)
        # What a footer says that is not authentic is of no use to readers.
        return self._damage(len(footer.row_groups)) if opened.is_authentic else _FILE_IS_LOST

    def _footer(self, envelope: Envelope, metadata: FileMetaData | None) -> OpenFooter | None:
        expected = self._expectation
        footer = None
        if metadata is not None:
            footer = check_footer(envelope, metadata, expected.path, self._book, expected.table)
        if footer is None:
            self._nothing_behind("the footer cannot be read")
        else:
            self._facts = replace(self._facts, column_paths=tuple(column.path for column in footer.columns))
        return footer

    def _nothing_behind(self, reason: str) -> None:
        for scope in (Scope.FOOTER, Scope.COLUMN):
            self._book.scope_not_checked(scope, reason)
        if self._expectation.table is not None or self._expectation.without_table:
            self._book.scope_not_checked(Scope.CONFIGURATION, reason)

    # --- Columns -------------------------------------------------------------------------------------------

    def _columns(self, envelope: Envelope, footer: OpenFooter, opened: OpenedEnvelope | None) -> None:
        is_ctr = envelope.algorithm is Algorithm.AES_GCM_CTR_V1
        self._ciphers = self._column_ciphers(footer, opened, is_ctr=is_ctr)
        reader = MetadataReader(envelope, footer, self._book)
        for row_group_ordinal, chunks in enumerate(footer.chunks):
            for ordinal, ciphers in self._ciphers.items():
                chunk = ChunkCiphers(ciphers, row_group_ordinal)
                is_plaintext = ciphers.column.encryption is ColumnEncryption.PLAINTEXT
                is_readable = is_plaintext or ciphers.cipher is not None
                numbers = reader.read(chunk)
                key = (row_group_ordinal, ordinal)
                if numbers is None:
                    if is_readable:
                        self._lose_chunk(chunk)
                    continue
                self._metadata[key] = numbers
                if is_readable:
                    self._walkable[key] = chunk
                self._regions += chunk_regions(chunks[ordinal], numbers, *key, self._book)
        self._unusable = check_layout(self._regions, envelope.footer_offset, self._book)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            check_row_groups(footer, self._metadata, self._regions, self._book)
        self._walk(footer)
        lengths = self._check_indexes(envelope.footer_offset, footer)
        is_complete = len(self._metadata) == len(footer.row_groups) * len(footer.columns)
        if is_complete and not self._unusable and None not in lengths.values():
            ranges = [(region.offset, lengths.get(region, region.length) or 0) for region in self._regions]
            gaps = check_gaps(ranges, envelope.footer_offset, self._book)
            check_left_metadata(self._source, gaps, footer.columns, self._book)
        else:
            for rule_id in ("layout-gap", "metadata-leaked"):
                self._book.not_checked(rule_id, "not all parts of the file are known")

    def _column_ciphers(
        self, footer: OpenFooter, opened: OpenedEnvelope | None, *, is_ctr: bool
    ) -> dict[int, ColumnCiphers]:
        """Return how columns are decrypted, by ordinal, as far as their keys are available."""
        ciphers = {column.ordinal: ColumnCiphers(column) for column in footer.columns}
        if opened is None:
            return ciphers
        with_footer_key = [c for c in footer.columns if c.encryption is ColumnEncryption.FOOTER_KEY]
        with_own_key = [c for c in footer.columns if c.encryption is ColumnEncryption.COLUMN_KEY]
        for column in with_footer_key:
            if opened.cipher is not None:
                nonces = self._ledger.of(opened.fingerprint)
                found = ColumnCiphers(column, opened.cipher, nonces, is_ctr=is_ctr)
                ciphers[column.ordinal] = found
            else:
                self._denied(column, self._keys.denied.get(FOOTER, "no keys are given"))
        deks = self._keys.column_deks([(column.path, column.key_metadata) for column in with_own_key])
        own: list[tuple[Column, bytes]] = []
        for column, dek in zip(with_own_key, deks, strict=True):
            if dek is None:
                self._denied(column, self._keys.denied[column.path])
                continue
            own.append((column, fingerprint(dek)))
            if opened.file_aad is None:
                self._denied(column, "no AAD can be built")
            else:
                cipher = ModuleCipher(dek, opened.file_aad)
                nonces = self._ledger.of(own[-1][1])
                ciphers[column.ordinal] = ColumnCiphers(column, cipher, nonces, is_ctr=is_ctr)
        check_deks(opened.fingerprint or None, own, self._keys, self._book)
        return ciphers

    def _denied(self, column: Column, reason: str) -> None:
        self._keys.denied.setdefault(column.path, reason)
        self._book.scope_not_checked(Scope.COLUMN, f"column {column.name!r}: {reason}")

    # --- Modules -------------------------------------------------------------------------------------------

    def _walk(self, footer: OpenFooter) -> None:
        """Verify the pages of the chunks whose keys are available."""
        walkable, verifiers = self._walkable, self._verifiers
        for key in sorted(walkable.keys() - {region.chunk_key for region in self._regions}):
            self._lose_chunk(walkable[key])
        index_kinds = (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX)
        indexed = {region.chunk_key for region in self._regions if region.kind in index_kinds}
        for region in self._regions:
            key = region.chunk_key
            if region.kind is not RegionKind.PAGES or key not in walkable:
                continue
            if not self._unusable or region not in self._unusable:
                pages = PageList() if key in indexed else None
                num_rows = footer.row_groups[region.row_group_ordinal].num_rows
                verifier = ChunkVerifier(walkable[key], self._metadata[key], num_rows, region, self._book, pages)
                verifiers[key] = verifier
            else:
                name = walkable[key].ciphers.column.name
                self._book.scope_not_checked(Scope.COLUMN, f"{name!r}: a chunk is not where it can be read")
                self._lose_chunk(walkable[key])
        authenticate_pages(self._source, tuple(verifiers.values()), self._threads)
        self._losses += [loss for verifier in verifiers.values() if (loss := verifier.finish()) is not None]
        if any(not verifier.is_whole for verifier in verifiers.values()):
            self._book.scope_not_checked(Scope.COLUMN, "the pages of a chunk could not all be walked")

    def _check_indexes(self, footer_offset: int, footer: OpenFooter) -> dict[ChunkRegion, int | None]:
        """Check page indexes and Bloom filters; returns the lengths of those whose length is not stated."""
        lengths: dict[ChunkRegion, int | None] = {}
        starts = sorted({region.offset for region in self._regions if region.length != 0} | {footer_offset})
        # What may not be looked into may lie outside of the file.
        windows = IndexWindows(self._source, [region for region in self._regions if region not in self._unusable])
        for region in self._regions:
            key = region.chunk_key
            if region.kind is RegionKind.PAGES:
                continue
            if key not in self._walkable or region in self._unusable:
                if region.length is None:
                    lengths[region] = None
                if key in self._walkable:
                    self._damaged_indexes.append(key)
                continue
            limit = starts[bisect_right(starts, region.offset)]
            pages = self._verifiers[key].whole_pages if key in self._verifiers else None
            indexes = IndexVerifier(self._source, self._walkable[key], limit, self._book)
            if region.kind is RegionKind.BLOOM_FILTER:
                length = indexes.check_bloom_filter(region)
                lengths[region] = length if region.length is None else region.length
            elif region.kind is RegionKind.OFFSET_INDEX:
                num_rows = footer.row_groups[region.row_group_ordinal].num_rows
                indexes.check_offset_index(region, windows.read(region), pages, num_rows)
            else:
                indexes.check_column_index(region, windows.read(region), pages)
            if indexes.is_damaged:
                self._damaged_indexes.append(key)
        return lengths

    # --- What it comes to ----------------------------------------------------------------------------------

    def _lose_chunk(self, chunk: ChunkCiphers) -> None:
        column = chunk.ciphers.column
        self._losses.append(Loss(chunk.row_group_ordinal, column.ordinal, column.name, None))

    def _damage(self, row_groups: int) -> Damage:
        lost = {loss.row_group_ordinal for loss in self._losses}
        return Damage(
            losses=tuple(sorted(self._losses, key=lambda loss: (loss.row_group_ordinal, loss.column_ordinal))),
            row_groups=row_groups,
            readable_row_groups=tuple(ordinal for ordinal in range(row_groups) if ordinal not in lost),
            damaged_indexes=tuple(dict.fromkeys(self._damaged_indexes)),
        )
