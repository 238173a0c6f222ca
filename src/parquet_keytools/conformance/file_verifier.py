"""A whole file verified, rule by rule."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
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
    chunk_place,
    chunk_regions,
)
from parquet_keytools.conformance.chunk_verifier import (
    Chunk,
    ChunkVerifier,
    ColumnCiphers,
    IndexVerifier,
    ends_of_runs,
    index_windows,
    note_defect,
    verify_chunks,
)
from parquet_keytools.conformance.file_keys import (
    FOOTER,
    Expectation,
    FileKeys,
    MaterialFinder,
    check_deks,
    check_table_of_columns,
    check_table_of_footer,
    fingerprint,
)
from parquet_keytools.conformance.footer_rules import check_envelope, check_footer, plaintext_metadata
from parquet_keytools.conformance.metadata_rules import (
    FooterOpener,
    MetadataReader,
    OpenedEnvelope,
    check_left_metadata,
)
from parquet_keytools.conformance.nonces import NOT_READ_AGAIN, FileNonces, NoncePart
from parquet_keytools.conformance.report import FILE_SCOPES, Damage, FileReport, Loss, ModuleTally, RuleBook, Scope
from parquet_keytools.encryption.aad import ExpectedAadPrefix, ModuleType, without_delimiter
from parquet_keytools.encryption.module_cipher import NO_PAGE_ORDINAL, ModuleCipher
from parquet_keytools.encryption.page_walk import HeaderWindow, PageDefect, walk_pages
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import ColumnMetaData, FileMetaData

_FILE_IS_LOST = Damage(file_is_lost=True)


@dataclass(frozen=True)
class FileEnd:
    """What tells one state of a file from another.

    Attributes:
        size_bytes: Length of the file.
        footer_sha256: SHA-256, in hexadecimal, of the bytes from the footer's start to the end of the file.
    """

    size_bytes: int
    footer_sha256: str

    @classmethod
    def of(cls, footer_offset: int, tail: bytes) -> FileEnd:
        """Return the end of a file from its footer's offset and the bytes from there on."""
        return cls(footer_offset + len(tail), hashlib.sha256(tail).hexdigest())


@dataclass(frozen=True)
class FileFacts:
    """What a data set is checked by.

    Attributes:
        aad_prefix: The text of the prefix, stored or supplied, without NUL at its end.
        column_paths: Leaf paths; None where they are not known.
        mode: How the footer is protected; None where that cannot be told.
        nonces: The nonces of all modules that were found, or of the part that was asked for.
        unknown: Why not all of its DEKs and nonces are known; None where they are.
        uses_material_file: Whether it refers to the key material file beside it, which is key material.
        end: Size and footer; None where no footer was found.
    """

    aad_prefix: bytes | None = None
    file_unique: bytes | None = None
    dek_fingerprints: frozenset[bytes] = frozenset()
    column_paths: tuple[tuple[str, ...], ...] | None = None
    mode: FooterMode | None = None
    nonces: FileNonces | None = None
    unknown: str | None = None
    uses_material_file: bool = False
    end: FileEnd | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the file is."""
        return self.mode not in (None, FooterMode.UNENCRYPTED)


def verify_source(
    source: ByteSource,
    finder: MaterialFinder | None,
    expectation: Expectation | None = None,
    *,
    threads: int = 2,
    nonce_part: NoncePart | None = None,
) -> tuple[FileReport, FileFacts]:
    """Verify a file against all rules of a file.

    Args:
        source: The file.
        finder: Where its keys come from; None verifies what needs no key.
        expectation: What is expected of it beyond the specification.
        threads: How many threads work.
        nonce_part: Only collects these nonces, and authenticates no page; None verifies the file.

    Raises:
        OSError: The file cannot be read. Whatever is wrong with its bytes is in the report.
    """
    expectation = expectation or Expectation()
    report, facts = _FileVerifier(source, finder, expectation, threads, nonce_part).run()
    return report, facts


class _FileVerifier:
    def __init__(
        self,
        source: ByteSource,
        finder: MaterialFinder | None,
        expectation: Expectation,
        threads: int,
        nonce_part: NoncePart | None,
    ) -> None:
        self._source = source
        self._expectation = expectation
        self._threads = threads
        self._only_nonces = nonce_part is not None
        self._book = RuleBook(FILE_SCOPES)
        self._keys = FileKeys(finder, self._book)
        self._nonces = FileNonces(nonce_part)
        self._footer_counts: Counter[str] = Counter()
        self._ciphers: dict[int, ColumnCiphers] = {}
        self._metadata: dict[ChunkKey, ChunkNumbers] = {}
        self._walkable: dict[ChunkKey, Chunk] = {}
        self._regions: list[ChunkRegion] = []
        self._unusable: frozenset[ChunkRegion] = frozenset()
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
        if not self._only_nonces:
            self._check_nonces()
        table = self._expectation.table
        report = FileReport(
            self._source.path,
            self._keys.finder is not None,
            self._book.results(),
            self._tallies(),
            damage if has_all_keys else None,
            self._keys.denied_by_title(),
            frozenset() if self._expectation.aad_prefix is None else frozenset({"prefix-expected"}),
            None if table is None else table.table_name,
            accepted=frozenset({"no-prefix"} if table is not None and table.settings.aad_prefix is None else ()),
        )
        facts = replace(
            self._facts,
            dek_fingerprints=frozenset(self._keys.fingerprints),
            nonces=self._nonces,
            unknown=next(iter(report.result("nonce-reuse").reasons), None),
            uses_material_file=self._keys.uses_material_file,
            end=None if envelope is None else FileEnd.of(envelope.footer_offset, envelope.tail),
        )
        return report, facts

    def _check_nonces(self) -> None:
        """Check the rules about nonces; where they do not fit into memory, the file is read once for each part.

        What the first reading found stays found, whatever becomes of the file meanwhile.
        """
        self._nonces.check(self._book)
        parts = self._nonces.part.parts
        for part in range(1, parts):
            wanted = NoncePart(part, parts)
            again = _FileVerifier(self._source, self._keys.finder, self._expectation, self._threads, wanted)
            try:
                again.run()
            except (OSError, ParquetFormatError):
                self._book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
                continue
            if again._nonces.invocations != self._nonces.invocations:
                self._book.not_checked("nonce-reuse", f"the file {NOT_READ_AGAIN}")
            again._nonces.check_repeated(self._book)

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
        if self._expectation.accept_plaintext and not self._book.is_broken("algorithm-stated"):
            return None
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
        opened = FooterOpener(envelope, self._expectation, self._keys, self._nonces).open()
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
        self._ciphers = self._column_ciphers(envelope, footer, opened)
        reader = MetadataReader(envelope, footer, self._book)
        for row_group_ordinal, chunks in enumerate(footer.chunks):
            for ordinal, ciphers in self._ciphers.items():
                chunk = Chunk(ciphers, row_group_ordinal)
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
        lengths = self._verify_chunks(footer, envelope.footer_offset)
        is_complete = len(self._metadata) == len(footer.row_groups) * len(footer.columns)
        if is_complete and not self._unusable and None not in lengths.values():
            ranges = [(region.offset, lengths.get(region, region.length) or 0) for region in self._regions]
            gaps = check_gaps(ranges, envelope.footer_offset, self._book)
            check_left_metadata(self._source, gaps, footer.columns, self._book)
        else:
            for rule_id in ("layout-gap", "metadata-leaked"):
                self._book.not_checked(rule_id, "not all parts of the file are known")

    def _column_ciphers(
        self, envelope: Envelope, footer: OpenFooter, opened: OpenedEnvelope | None
    ) -> dict[int, ColumnCiphers]:
        """Return how columns are decrypted, by ordinal, as far as their keys are available."""
        ciphers = {column.ordinal: ColumnCiphers(column) for column in footer.columns}
        if opened is None:
            return ciphers
        own: list[tuple[Column, bytes]] = []
        for column, cipher, key in column_ciphers(footer, opened, self._keys):
            if column.encryption is ColumnEncryption.COLUMN_KEY and key:
                own.append((column, key))
            if cipher is not None:
                ciphers[column.ordinal] = ColumnCiphers(column, cipher, key, envelope.algorithm, self._nonces)
            elif key:
                self._denied(column, "no AAD can be built")
            elif column.encryption is ColumnEncryption.COLUMN_KEY:
                self._denied(column, self._keys.denied[column.path])
            else:
                self._denied(column, self._keys.denied.get(FOOTER, "no keys are given"))
        check_deks(opened.fingerprint or None, own, self._keys, self._book)
        return ciphers

    def _denied(self, column: Column, reason: str) -> None:
        self._keys.denied.setdefault(column.path, reason)
        self._book.scope_not_checked(Scope.COLUMN, f"column {column.name!r}: {reason}")

    # --- Modules -------------------------------------------------------------------------------------------

    def _verify_chunks(self, footer: OpenFooter, footer_offset: int) -> dict[ChunkRegion, int | None]:
        """Verify the chunks whose keys are available.

        Returns the lengths of Bloom filters whose length is not stated; None where a length is not known.
        """
        lengths: dict[ChunkRegion, int | None] = {}
        pages: dict[ChunkKey, ChunkRegion] = {}
        others: defaultdict[ChunkKey, list[tuple[ChunkRegion, int]]] = defaultdict(list)
        for region, limit in self._with_limits(footer_offset):
            key = region.chunk_key
            if key in self._walkable and (not self._unusable or region not in self._unusable):
                if region.kind is RegionKind.PAGES:
                    pages[key] = region
                else:
                    others[key].append((region, limit))
                continue
            if region.length is None:
                lengths[region] = None
            if key not in self._walkable:
                continue
            if region.kind is RegionKind.PAGES:
                name = self._walkable[key].ciphers.column.name
                self._book.scope_not_checked(Scope.COLUMN, f"{name!r}: a chunk is not where it can be read")
            else:
                self._damaged_indexes.append(key)
        verifiers: list[ChunkVerifier] = []
        windows = index_windows(self._source)
        for key, chunk in self._walkable.items():
            indexes = None
            if key in others:
                indexes = IndexVerifier(self._source, windows, chunk, self._book, others[key])
            num_rows = footer.row_groups[key[0]].num_rows
            verifiers.append(
                ChunkVerifier(chunk, self._metadata[key], num_rows, pages.get(key), indexes, self._book)
            )
        verify_chunks(self._source, verifiers, self._threads, only_walk=self._only_nonces)
        for key, verifier in zip(self._walkable, verifiers, strict=True):
            loss = verifier.finish()
            if loss is not None:
                self._losses.append(loss)
            if verifier.indexes is not None:
                lengths.update(verifier.indexes.lengths)
                if verifier.indexes.is_damaged:
                    self._damaged_indexes.append(key)
        if any(verifier.region is not None and not verifier.is_whole for verifier in verifiers):
            self._book.scope_not_checked(Scope.COLUMN, "the pages of a chunk could not all be walked")
        return lengths

    def _with_limits(self, footer_offset: int) -> Iterator[tuple[ChunkRegion, int]]:
        """Yield all regions, each with the place up to which it may be read: see `IndexVerifier.regions`."""
        starts = sorted({region.offset for region in self._regions if region.length != 0} | {footer_offset})
        limits: dict[ChunkRegion, int] = {}
        for kind in (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX):
            # What must not be looked into may lie outside of the file.
            found = [region for region in self._regions if region.kind is kind and region not in self._unusable]
            ends = ends_of_runs([(region.offset, region.offset + (region.length or 0)) for region in found])
            limits.update(zip(found, ends, strict=True))
        for region in self._regions:
            limit = footer_offset
            if region.kind is not RegionKind.PAGES and region not in self._unusable:
                limit = limits.get(region) or starts[bisect_right(starts, region.offset)]
            yield region, limit

    # --- What it comes to ----------------------------------------------------------------------------------

    def _lose_chunk(self, chunk: Chunk) -> None:
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


def column_ciphers(
    footer: OpenFooter, opened: OpenedEnvelope, keys: FileKeys
) -> Iterator[tuple[Column, ModuleCipher | None, bytes]]:
    """Yield each encrypted column, its cipher, and the fingerprint of its DEK, which is empty without the DEK."""
    own = [column for column in footer.columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    for column in footer.columns:
        if column.encryption is ColumnEncryption.FOOTER_KEY:
            yield column, opened.cipher, opened.fingerprint if opened.cipher is not None else b""
    deks = keys.column_deks([(column.path, column.key_metadata) for column in own])
    for column, dek in zip(own, deks, strict=True):
        if dek is None:
            yield column, None, b""
        else:
            yield column, None if opened.file_aad is None else ModuleCipher(dek, opened.file_aad), fingerprint(dek)


# --- For an inspection ---


FoundModule = tuple[ModuleType, int, int, int | None]
"""Type, offset, length with framing, and page ordinal of a module."""


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
        self._window = HeaderWindow(source, 0, envelope.footer_offset)
        self.denied = self._keys.denied

    def open(self) -> OpenedEnvelope | None:
        """Open the footer of an encrypted file; None where it cannot be read."""
        opener = FooterOpener(self._envelope, self._expectation, self._keys, FileNonces())
        self._opened = opener.open()
        return self._opened

    def find_keys(self, footer: OpenFooter) -> None:
        """Ask for the keys of all columns."""
        opened = self._opened
        plaintext = [column for column in footer.columns if column.encryption is ColumnEncryption.PLAINTEXT]
        self._ciphers = {column.ordinal: ColumnCiphers(column) for column in plaintext}
        if opened is None or opened.file_aad is None:
            return
        for column, cipher, _ in column_ciphers(footer, opened, self._keys):
            if cipher is not None:
                self._ciphers[column.ordinal] = ColumnCiphers(column, cipher, b"", self._envelope.algorithm)

    def chunk_metadata(self, row_group_ordinal: int, column: Column, hidden: bytes) -> ColumnMetaData | None:
        """Return the metadata of a chunk from its module; None without its key, or where it is not authentic."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None or chunk.ciphers.cipher is None:
            return None
        plaintext = chunk.plaintext(ModuleType.COLUMN_META_DATA, hidden, None, self._book)
        try:
            return None if plaintext is None else ColumnMetaData.read(plaintext)[0]
        except ParquetFormatError as error:
            self._book.broken("metadata-path", str(error), chunk_place(row_group_ordinal, column.ordinal))
            return None

    def pages(
        self, row_group_ordinal: int, column: Column, dictionary_page_offset: int | None, region: ChunkRegion
    ) -> tuple[list[FoundModule], bool] | None:
        """Return the pages of a chunk and their headers, and whether all were found; None without its key."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        end = self._window.end = region.offset + (region.length or 0)
        modules: list[FoundModule] = []
        defects: list[PageDefect] = []
        for ordinal, facts, header_offset, offset, _ in walk_pages(
            self._window,
            region.offset,
            end,
            chunk.reader,
            expects_dictionary_page=bool(dictionary_page_offset),
            path="",
            on_defect=defects.append,
        ):
            page_ordinal = None if ordinal == NO_PAGE_ORDINAL else ordinal
            for place, start, length in (
                (chunk.page_place(ordinal, is_header=True), header_offset, offset - header_offset),
                (chunk.page_place(ordinal), offset, facts.page_length),
            ):
                modules.append((place.module_type, start, length, page_ordinal))
        for defect in defects:
            note_defect(chunk, defect, self._book)
        return modules, not defects

    def bloom_filter(
        self, row_group_ordinal: int, column: Column, region: ChunkRegion, limit: int
    ) -> list[FoundModule] | None:
        """Return header and bitset of a Bloom filter; None without its key, or where the header is damaged."""
        chunk = self._chunk(row_group_ordinal, column)
        if chunk is None:
            return None
        lengths = IndexVerifier(self._source, {}, chunk, self._book).bloom_filter_lengths(region, limit)
        if lengths is None:
            return None
        return [
            (ModuleType.BLOOM_FILTER_HEADER, region.offset, lengths[0], None),
            (ModuleType.BLOOM_FILTER_BITSET, region.offset + lengths[0], lengths[1], None),
        ]

    def _chunk(self, row_group_ordinal: int, column: Column) -> Chunk | None:
        """Return how a chunk is decrypted; None without its key."""
        ciphers = self._ciphers.get(column.ordinal)
        return None if ciphers is None else Chunk(ciphers, row_group_ordinal)
