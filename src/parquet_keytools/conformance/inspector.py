"""Looks into a file, and reads no more of it than is shown."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from parquet_keytools.conformance.chunk_layout import (
    ChunkNumbers,
    ChunkRegion,
    Column,
    OpenFooter,
    check_layout,
    chunk_place,
    chunk_regions,
)
from parquet_keytools.conformance.envelope import check_envelope, plaintext_metadata
from parquet_keytools.conformance.findings import FILE_SCOPES, Finding, RuleBook, Severity
from parquet_keytools.conformance.footer_rules import check_footer
from parquet_keytools.conformance.inspection import (
    FOOTER,
    InspectedChunk,
    InspectedColumn,
    InspectedModule,
    InspectedRowGroup,
    Inspection,
    KeyDescription,
    describe_key,
)
from parquet_keytools.encryption.aad import ExpectedAadPrefix, ModuleType, prefix_text
from parquet_keytools.encryption.protection import ColumnEncryption, Envelope, FooterMode
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource, FileSource
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import ColumnMetaData, FileMetaData
from parquet_keytools.runtime.presentation import escaped_bytes, expanded

if TYPE_CHECKING:
    from parquet_keytools.conformance.file_keys import MaterialFinder
    from parquet_keytools.conformance.module_finder import ModuleFinder

_REGION_TYPES = {
    RegionKind.PAGES: ModuleType.DATA_PAGE,
    RegionKind.BLOOM_FILTER: ModuleType.BLOOM_FILTER_HEADER,
    RegionKind.COLUMN_INDEX: ModuleType.COLUMN_INDEX,
    RegionKind.OFFSET_INDEX: ModuleType.OFFSET_INDEX,
}

_Found = tuple[int, Column, ChunkNumbers, list[ChunkRegion]]
"""A chunk: row group ordinal, column, what its metadata says, and what it consists of."""

_BLOOM_FILTER = (ModuleType.BLOOM_FILTER_HEADER, ModuleType.BLOOM_FILTER_BITSET)

_FIELD_NAMES = {
    1: "type",
    2: "encodings",
    3: "path",
    4: "codec",
    5: "number of values",
    6: "uncompressed size",
    7: "compressed size",
    8: "key-value metadata",
    9: "data page offset",
    10: "index page offset",
    11: "dictionary page offset",
    12: "statistics",
    13: "page encoding statistics",
    14: "Bloom filter offset",
    15: "Bloom filter length",
    16: "size statistics",
    17: "geospatial statistics",
}


def inspect_source(
    source: ByteSource,
    finder: MaterialFinder | None = None,
    aad_prefix: ExpectedAadPrefix | None = None,
    path: str | None = None,
) -> Inspection:
    """Return what a file shows; only its footer is read, and with keys the headers of its pages.

    Args:
        source: The file.
        finder: Where its keys come from; None shows what needs no key.
        aad_prefix: The AAD prefix that the file must have; needed for files that do not store theirs.
        path: Where the file lies, whose folders must not give values to protected columns; None for the source's.
    """
    return _Inspector(source, finder, aad_prefix, source.path if path is None else path).run()


class _Inspector:
    def __init__(
        self, source: ByteSource, keys: MaterialFinder | None, aad_prefix: ExpectedAadPrefix | None, path: str
    ) -> None:
        self._source = source
        self._path = path
        self._keys = keys
        self._aad_prefix = aad_prefix
        self._book = RuleBook(FILE_SCOPES)
        self._finder: ModuleFinder | None = None
        self._is_authentic: bool | None = None
        self._bytes: dict[str, int] = {}

    def run(self) -> Inspection:
        source = self._source
        envelope = check_envelope(source, self._book)
        if envelope is None:
            return Inspection(source.path, source.size_bytes, flaws=self._flaws())
        is_encrypted = envelope.mode is not FooterMode.UNENCRYPTED
        metadata = self._open(envelope)
        footer = check_footer(envelope, metadata, self._path, self._book) if metadata is not None else None
        self._add(FOOTER, source.size_bytes - envelope.footer_offset)
        prefix, file_unique = envelope.aad_prefix, envelope.aad_file_unique
        shown = Inspection(
            path=source.path,
            size_bytes=source.size_bytes,
            mode=envelope.mode,
            algorithm=envelope.algorithm.value if envelope.algorithm is not None else None,
            aad_prefix=None if prefix is None else prefix_text(prefix),
            aad_prefix_escaped=None if prefix is None else escaped_bytes(prefix),
            aad_file_unique=None if file_unique is None else file_unique.hex(),
            supply_aad_prefix=envelope.supply_aad_prefix,
            footer_offset=envelope.footer_offset,
            footer_length=envelope.footer_length,
            footer_key=describe_key(envelope.key_metadata, (), self._keys) if is_encrypted else None,
            footer_is_authentic=self._is_authentic,
            footer_denied=self._finder.denied.get(()) if is_encrypted and self._finder is not None else None,
        )
        if footer is not None:
            shown = self._with_footer(shown, envelope, footer)
        return replace(shown, bytes_by_key=dict(self._bytes), flaws=self._flaws())

    def _open(self, envelope: Envelope) -> FileMetaData | None:
        """Return the footer, if it is plaintext or can be decrypted."""
        if self._keys is not None:
            from parquet_keytools.conformance.module_finder import ModuleFinder

            self._finder = ModuleFinder(self._source, envelope, self._keys, self._aad_prefix, self._book)
            if envelope.mode is not FooterMode.UNENCRYPTED:
                opened = self._finder.open()
                if opened is not None and opened.cipher is not None:
                    self._is_authentic = opened.is_authentic
                return None if opened is None else opened.metadata
        return plaintext_metadata(envelope, self._book)

    def _flaws(self) -> tuple[Finding, ...]:
        return tuple(
            finding
            for result in self._book.results()
            for finding in result.findings
            if result.rule.severity is Severity.VIOLATION
        )

    def _add(self, key_name: str, length: int) -> None:
        self._bytes[key_name] = self._bytes.get(key_name, 0) + length

    # --- The footer's content ------------------------------------------------------------------------------

    def _with_footer(self, shown: Inspection, envelope: Envelope, footer: OpenFooter) -> Inspection:
        if self._finder is not None:
            self._finder.find_keys(footer)
        columns = tuple(self._column(column, footer, envelope) for column in footer.columns)
        chunks = tuple(self._chunks(envelope, footer, shown.footer_key, columns))
        metadata = footer.metadata
        return replace(
            shown,
            created_by=metadata.created_by,
            num_rows=metadata.num_rows,
            key_values={
                entry.key: len((entry.value or "").encode("utf-8", "surrogateescape"))
                for entry in metadata.key_value_metadata or ()
            },
            columns=columns,
            row_groups=tuple(
                InspectedRowGroup(ordinal, group.num_rows, group.total_compressed_size, group.file_offset)
                for ordinal, group in enumerate(footer.row_groups)
            ),
            chunks=chunks,
        )

    def _column(self, column: Column, footer: OpenFooter, envelope: Envelope) -> InspectedColumn:
        is_encrypted = column.encryption is not ColumnEncryption.PLAINTEXT
        own = column.encryption is ColumnEncryption.COLUMN_KEY
        shows: tuple[str, ...] = ()
        if is_encrypted and envelope.mode is FooterMode.PLAINTEXT_FOOTER:
            ids = {
                field_id
                for chunks in footer.chunks
                if (visible := chunks[column.ordinal].visible) is not None
                for field_id in visible.struct.types()
            }
            shows = tuple(_FIELD_NAMES.get(field_id, f"field {field_id}") for field_id in sorted(ids))
        denied = None
        if is_encrypted and self._finder is not None:
            denied = self._finder.denied.get(column.path if own else ())
        return InspectedColumn(
            column.name,
            column.ordinal,
            column.encryption,
            describe_key(column.key_metadata, column.path, self._keys) if own else None,
            shows,
            denied,
        )

    # --- Chunks --------------------------------------------------------------------------------------------

    def _chunks(
        self,
        envelope: Envelope,
        footer: OpenFooter,
        footer_key: KeyDescription | None,
        columns: tuple[InspectedColumn, ...],
    ) -> Iterator[InspectedChunk]:
        found: list[_Found] = []
        for row_group_ordinal, chunks in enumerate(footer.chunks):
            for column in footer.columns:
                place = (row_group_ordinal, column.ordinal)
                metadata = None if place in footer.unusable else self._metadata(row_group_ordinal, column, footer)
                if metadata is None:
                    continue
                try:
                    numbers = ChunkNumbers.of(metadata)
                    regions = chunk_regions(chunks[column.ordinal], numbers, *place, self._book)
                    found.append((row_group_ordinal, column, numbers, regions))
                except ParquetFormatError as error:
                    self._book.broken("metadata-path", str(error), chunk_place(*place))
        every = [region for *_, regions in found for region in regions]
        unusable = check_layout(every, envelope.footer_offset, self._book)
        starts = sorted({region.offset for region in every if region.length != 0} | {envelope.footer_offset})
        titles = [column.key_title(footer_key) for column in columns]
        for row_group_ordinal, column, numbers, regions in found:
            kept = [region for region in regions if region not in unusable] if unusable else regions
            offset = numbers.dictionary_page_offset
            modules, is_whole = self._modules(row_group_ordinal, column, offset, kept, starts)
            size = sum(region.length or 0 for region in kept)
            if any(region.length is None for region in kept):
                size += sum(module.length for module in modules if module.module_type in _BLOOM_FILTER)
            self._add(titles[column.ordinal], size)
            yield InspectedChunk(row_group_ordinal, column.ordinal, numbers.num_values, modules, is_whole)

    def _metadata(self, row_group_ordinal: int, column: Column, footer: OpenFooter) -> ColumnMetaData | None:
        stored = footer.chunks[row_group_ordinal][column.ordinal]
        if stored.hidden is None or self._finder is None:
            return stored.visible
        return self._finder.chunk_metadata(row_group_ordinal, column, stored.hidden) or stored.visible

    def _modules(
        self,
        row_group_ordinal: int,
        column: Column,
        dictionary_page_offset: int | None,
        regions: list[ChunkRegion],
        starts: list[int],
    ) -> tuple[tuple[InspectedModule, ...], bool]:
        """Return the modules of a chunk, and whether all of its pages were found."""
        modules: list[InspectedModule] = []
        is_whole = True
        for region in regions:
            found: list[InspectedModule] | None = None
            if region.kind is RegionKind.PAGES and self._finder is not None:
                pages = self._finder.pages(row_group_ordinal, column, dictionary_page_offset, region)
                if pages is not None:
                    found, is_whole = pages
            elif region.kind is RegionKind.BLOOM_FILTER and self._finder is not None:
                limit = starts[bisect_right(starts, region.offset)]
                found = self._finder.bloom_filter(row_group_ordinal, column, region, limit)
            if found is None:
                found = [InspectedModule(_REGION_TYPES[region.kind], region.offset, region.length or 0)]
            modules += found
        return tuple(modules), is_whole


@contextlib.contextmanager
def open_local(path: str) -> Iterator[FileSource]:
    """Open a file for reading, without any other library: to show a footer must take no time.

    Raises:
        OSError: It cannot be read, or is a folder.
    """
    with expanded(path).open("rb") as file:
        yield FileSource.of(path, file.fileno())
