"""A whole file verified, rule by rule."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from parquet_keytools.conformance.chunk_modules import ChunkCiphers
from parquet_keytools.conformance.chunk_verifier import ChunkVerifier, authenticate_pages
from parquet_keytools.conformance.configuration_rules import check_table_of_columns, check_table_of_footer
from parquet_keytools.conformance.envelope import check_envelope, plaintext_metadata
from parquet_keytools.conformance.file_keys import FOOTER, FileKeys, MaterialFinder, check_deks, fingerprint
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.footer_rules import Column, OpenFooter, check_footer
from parquet_keytools.conformance.index_rules import IndexVerifier
from parquet_keytools.conformance.layout_rules import (
    ChunkRegion,
    check_gaps,
    check_layout,
    check_row_groups,
    chunk_regions,
)
from parquet_keytools.conformance.metadata_rules import MetadataReader, check_left_metadata
from parquet_keytools.conformance.nonce_ledger import NonceLedger
from parquet_keytools.conformance.opening import Expectation, FooterOpener, OpenedEnvelope
from parquet_keytools.conformance.report import Damage, FileReport, Loss, ModuleTally
from parquet_keytools.conformance.rules import FILE_SCOPES, Scope
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.aad_prefix import without_delimiter
from parquet_keytools.encryption.envelope import Envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.collector import paused_for
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import ColumnMetaData

ChunkKey = tuple[int, int]
"""Row group ordinal and column ordinal."""

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
    with paused_for(source.size_bytes):
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
        self._counts: defaultdict[tuple[ModuleType, str | None], Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()
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
        self._ledger.check(self._book, self._expectation.invocation_limit)
        report = FileReport(
            self._source.path,
            self._keys.finder is not None,
            self._book.results(),
            tuple(
                ModuleTally(
                    *key, *(self._counts[key][name] for name in ("authentic", "broken", "unauthenticated"))
                )
                for key in sorted(self._counts, key=lambda key: (key[0], key[1] or ""))
            ),
            damage if has_all_keys else None,
            self._keys.denied_by_title(),
            frozenset() if self._expectation.aad_prefix is None else frozenset({"prefix-expected"}),
            None if self._expectation.table is None else self._expectation.table.check.table_name,
        )
        facts = replace(
            self._facts,
            dek_fingerprints=frozenset(self._keys.fingerprints),
            nonces=self._ledger,
            unknown=next(iter(report.result("nonce-reuse").reasons), None),
        )
        return report, facts

    def _unencrypted(self, envelope: Envelope) -> Damage | None:
        self._facts = replace(self._facts, mode=envelope.mode)
        metadata = plaintext_metadata(envelope, self._book)
        footer = None if metadata is None else check_footer(envelope, metadata, self._book)
        if not self._expectation.allow_plaintext and not self._book.is_broken("algorithm-stated"):
            self._book.broken("encrypted", "the file is a plaintext Parquet file.")
        if footer is None:
            self._nothing_behind("the footer cannot be read")
            return _FILE_IS_LOST
        self._facts = replace(self._facts, column_paths=tuple(column.path for column in footer.columns))
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
            self._count(ModuleType.FOOTER, None, outcome, 1)
        table = self._expectation.table
        shown_keys = table.settings.plaintext_footer_keys if table is not None else ()
        footer = check_footer(envelope, opened.metadata, self._book, shown_keys)
        if footer is None:
            self._nothing_behind("the footer cannot be read")
            return _FILE_IS_LOST
        self._columns(envelope, footer, opened)
        check_table_of_columns(self._expectation, envelope, footer, self._keys, self._book)
        # What a footer says that is not authentic is of no use to readers.
        return self._damage(len(footer.row_groups)) if opened.is_authentic else _FILE_IS_LOST

    def _nothing_behind(self, reason: str) -> None:
        for scope in (Scope.FOOTER, Scope.COLUMN):
            self._book.scope_not_checked(scope, reason)
        if self._expectation.table is not None or self._expectation.without_table:
            self._book.scope_not_checked(Scope.CONFIGURATION, reason)

    # --- Columns -------------------------------------------------------------------------------------------

    def _columns(self, envelope: Envelope, footer: OpenFooter, opened: OpenedEnvelope | None) -> None:
        self._facts = replace(self._facts, column_paths=tuple(column.path for column in footer.columns))
        ciphers = self._ciphers(footer, opened)
        reader = MetadataReader(envelope, footer, self._book, self._ledger, self._count)
        metadata: dict[ChunkKey, ColumnMetaData] = {}
        walkable: dict[ChunkKey, ChunkCiphers] = {}
        is_ctr = envelope.algorithm is Algorithm.AES_GCM_CTR_V1
        for row_group_ordinal in range(len(footer.row_groups)):
            for column in footer.columns:
                key = (row_group_ordinal, column.ordinal)
                cipher, dek_fingerprint = ciphers.get(column.ordinal, (None, b""))
                chunk = ChunkCiphers(column, row_group_ordinal, cipher, is_ctr, dek_fingerprint)
                is_readable = column.encryption is ColumnEncryption.PLAINTEXT or cipher is not None
                found = reader.read(chunk, is_readable=is_readable)
                if found is not None:
                    metadata[key] = found
                    if is_readable and key not in footer.unusable:
                        walkable[key] = chunk
                elif is_readable:
                    self._lose_chunk(chunk)
        regions = [
            region
            for (row_group_ordinal, column_ordinal), found in metadata.items()
            for region in chunk_regions(
                footer.chunks[row_group_ordinal][column_ordinal],
                found,
                row_group_ordinal,
                column_ordinal,
                self._book,
            )
        ]
        usable = check_layout(regions, envelope.footer_offset, self._book)
        if envelope.mode is not FooterMode.UNENCRYPTED:
            check_row_groups(footer, metadata, regions, self._book)
        self._walk(envelope, footer, metadata, walkable, regions, usable)

    def _ciphers(self, footer: OpenFooter, opened: OpenedEnvelope | None) -> dict[int, tuple[ModuleCipher, bytes]]:
        """Return the ciphers of encrypted columns, by ordinal, as far as their keys are available."""
        ciphers: dict[int, tuple[ModuleCipher, bytes]] = {}
        if opened is None:
            return ciphers
        with_footer_key = [c for c in footer.columns if c.encryption is ColumnEncryption.FOOTER_KEY]
        with_own_key = [c for c in footer.columns if c.encryption is ColumnEncryption.COLUMN_KEY]
        for column in with_footer_key:
            if opened.cipher is not None:
                ciphers[column.ordinal] = (opened.cipher, opened.fingerprint)
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
                ciphers[column.ordinal] = (ModuleCipher(dek, opened.file_aad), own[-1][1])
        check_deks(opened.fingerprint or None, own, self._keys, self._book)
        return ciphers

    def _denied(self, column: Column, reason: str) -> None:
        self._keys.denied.setdefault(column.path, reason)
        self._book.scope_not_checked(Scope.COLUMN, f"column {column.name!r}: {reason}")

    # --- Modules -------------------------------------------------------------------------------------------

    def _walk(
        self,
        envelope: Envelope,
        footer: OpenFooter,
        metadata: dict[ChunkKey, ColumnMetaData],
        walkable: dict[ChunkKey, ChunkCiphers],
        regions: list[ChunkRegion],
        usable: set[ChunkRegion],
    ) -> None:
        verifiers: dict[ChunkKey, ChunkVerifier] = {}
        elsewhere = walkable.keys() - {(region.row_group_ordinal, region.column_ordinal) for region in regions}
        for key in sorted(elsewhere):
            self._lose_chunk(walkable[key])
        for region in regions:
            key = (region.row_group_ordinal, region.column_ordinal)
            if region.kind is not RegionKind.PAGES or key not in walkable:
                continue
            if region in usable:
                num_rows = footer.row_groups[region.row_group_ordinal].num_rows
                verifiers[key] = ChunkVerifier(
                    walkable[key], metadata[key], num_rows, region, self._book, self._ledger, self._count
                )
            else:
                name = walkable[key].column.name
                self._book.scope_not_checked(Scope.COLUMN, f"{name!r}: a chunk is not where it can be read")
                self._lose_chunk(walkable[key])
        authenticate_pages(self._source, verifiers.values(), self._threads)
        self._losses += [loss for verifier in verifiers.values() if (loss := verifier.loss()) is not None]
        if any(not verifier.is_whole for verifier in verifiers.values()):
            self._book.scope_not_checked(Scope.COLUMN, "the pages of a chunk could not all be walked")
        lengths = self._check_indexes(envelope, footer, walkable, verifiers, regions, usable)
        is_complete = len(metadata) == len(footer.row_groups) * len(footer.columns)
        if is_complete and len(usable) == len(regions) and None not in lengths.values():
            ranges = [(region.offset, lengths.get(region, region.length) or 0) for region in regions]
            gaps = check_gaps(ranges, envelope.footer_offset, self._book)
            check_left_metadata(self._source, gaps, footer.columns, self._book)
        else:
            for rule_id in ("layout-gap", "metadata-leaked"):
                self._book.not_checked(rule_id, "not all parts of the file are known")

    def _check_indexes(
        self,
        envelope: Envelope,
        footer: OpenFooter,
        walkable: dict[ChunkKey, ChunkCiphers],
        verifiers: dict[ChunkKey, ChunkVerifier],
        regions: list[ChunkRegion],
        usable: set[ChunkRegion],
    ) -> dict[ChunkRegion, int | None]:
        """Check page indexes and Bloom filters; returns the lengths of those whose length is not stated."""
        lengths: dict[ChunkRegion, int | None] = {}
        starts = sorted({region.offset for region in regions if region.length != 0} | {envelope.footer_offset})
        for region in regions:
            key = (region.row_group_ordinal, region.column_ordinal)
            if region.kind is RegionKind.PAGES:
                continue
            if key not in walkable or region not in usable:
                if region.length is None:
                    lengths[region] = None
                if key in walkable:
                    self._damaged_indexes.append(key)
                continue
            limit = starts[bisect_right(starts, region.offset)]
            indexes = IndexVerifier(self._source, walkable[key], limit, self._book, self._ledger, self._count)
            if region.kind is RegionKind.BLOOM_FILTER:
                length = indexes.check_bloom_filter(region)
                lengths[region] = length if region.length is None else region.length
            elif region.kind is RegionKind.OFFSET_INDEX:
                num_rows = footer.row_groups[region.row_group_ordinal].num_rows
                indexes.check_offset_index(region, verifiers.get(key), num_rows)
            else:
                indexes.check_column_index(region, verifiers.get(key))
            if indexes.is_damaged:
                self._damaged_indexes.append(key)
        return lengths

    def _count(self, module_type: ModuleType, column: str | None, outcome: str, number: int) -> None:
        with self._lock:
            self._counts[module_type, column][outcome] += number

    # --- What it comes to ----------------------------------------------------------------------------------

    def _lose_chunk(self, chunk: ChunkCiphers) -> None:
        column = chunk.column
        self._losses.append(Loss(chunk.row_group_ordinal, column.ordinal, column.name, None))

    def _damage(self, row_groups: int) -> Damage:
        lost = {loss.row_group_ordinal for loss in self._losses}
        return Damage(
            losses=tuple(sorted(self._losses, key=lambda loss: (loss.row_group_ordinal, loss.column_ordinal))),
            row_groups=row_groups,
            readable_row_groups=tuple(ordinal for ordinal in range(row_groups) if ordinal not in lost),
            damaged_indexes=tuple(dict.fromkeys(self._damaged_indexes)),
        )
