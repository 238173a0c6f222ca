"""Encrypted files as plain Parquet: pages at the same offsets, decrypted as they are read.

Pages keep their places (`chunk_view`), so that opening a file costs only its footer, whatever the file's length.
Indexes and Bloom filters keep their offsets. Between them, and in place of columns that are not shown, are zeros.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import struct
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyarrow import fs as pafs

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ChunkCipher, ModuleCipher
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import KEY_REFUSALS, FolderNameError, KeytoolsError, KmsError, ParquetFormatError
from parquet_keytools.files.denied_columns import NEEDS_KEY, shown_key_values
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    as_verified,
    naming_place,
    read_again_if_changed,
)
from parquet_keytools.files.table_check import names_in_folders
from parquet_keytools.format.file_layout import (
    MAGIC,
    MAGIC_LENGTH,
    TAIL_LENGTH,
    ByteSource,
    HeldSource,
    RangedFile,
    Region,
    RegionKind,
    arranged,
    check_range,
    regions_of,
    with_trailer,
)
from parquet_keytools.format.pages import generated_chunk, null_page
from parquet_keytools.format.partial_footers import (
    ARROW_SCHEMA_KEY,
    selected_footer,
    selected_sorting_columns,
    shown_row_group,
)
from parquet_keytools.format.structs import BloomFilterHeader, ColumnChunk, ColumnMetaData, RowGroup, SchemaElement
from parquet_keytools.format.thrift import WireType
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, in_use, share_with_arrow
from parquet_keytools.storage.local_files import state_of_local
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.view.chunk_view import ChunkView, PageCache
from parquet_keytools.view.digests import (
    REPETITION_FIELD_ID,
    StandIn,
    digest_arrow_schema,
    digest_kind,
    digest_schema,
    highest_levels,
    leaf_chains,
    repetition,
)

# --- The end of a view: its footer, and the pages of columns with refused keys ---

_REQUIRED, _OPTIONAL = 0, 1

_REFUSED_PAGE = b"\xff" * 8
"""Lies at the place of a refused column: no page header begins with these bytes."""


@dataclass(frozen=True)
class PlainTail:
    """The end of a view, behind pages and indexes: it begins with a place for each of `refused_paths`."""

    offset: int
    data: bytes
    refused_paths: tuple[tuple[str, ...], ...]
    footer_offset: int

    def refused_in(self, offset: int, end: int) -> tuple[tuple[str, ...], ...]:
        """Return the paths of refused columns that a reader asks for: the range begins or ends at their places."""
        # Other reads, such as blocks of round lengths and the last bytes of a file, only pass over these places.
        stop = self.offset + len(self.refused_paths) * len(_REFUSED_PAGE)
        if offset >= stop or end <= self.offset or end > self.footer_offset:
            return ()
        is_begin = offset >= self.offset and (offset - self.offset) % len(_REFUSED_PAGE) == 0
        is_end = end <= stop and (end - self.offset) % len(_REFUSED_PAGE) == 0
        if not is_begin and not is_end:
            return ()
        first = max(offset - self.offset, 0) // len(_REFUSED_PAGE)
        last = (min(end, stop) - 1 - self.offset) // len(_REFUSED_PAGE)
        return self.refused_paths[first : last + 1]


class _TailBuilder:
    """Makes the new footer, and pages that are not in the file; `stand_ins` are by row group and column ordinal.

    Of columns that cannot be read, `hide` leaves out the whole top-level columns, and `null` makes them null: the
    levels are in `nulls`. With other values they are shown, and reading them fails at their place, in
    `refused`.
    """

    def __init__(
        self,
        opened: OpenedFile,
        denied_columns: str,
        offset: int,
        stand_ins: Mapping[tuple[int, int], StandIn],
    ) -> None:
        footer = opened.footer
        self._opened = opened
        self._offset = offset
        self._stand_ins = stand_ins
        digested = frozenset(() if opened.digests is None else opened.digests.columns)
        self._denied = opened.denied_top_level
        self._null_names: frozenset[str] = frozenset()
        self.generated = bytearray()
        self.refused: dict[tuple[str, ...], int] = {}
        self.nulls: dict[int, tuple[int, int]] = {}
        names = {column.path[0] for column in footer.columns}
        # Where digests are shown, columns keep their ordinals.
        hidden = {path[0] for path in opened.not_wanted} if opened.digests is None else set()
        if denied_columns == "hide":
            hidden |= self._denied
        if denied_columns == "null":
            failing = {path[0] for path in opened.denied.keys() - opened.refused}
            self._null_names = frozenset(path[0] for path in opened.refused) - failing - hidden
            for ordinal, chain in enumerate(leaf_chains(footer.metadata.schema)):
                if footer.columns[ordinal].path[0] in self._null_names:
                    definition, repeated = highest_levels(chain)
                    # A required column is optional for this reader.
                    self.nulls[ordinal] = definition + (repetition(chain[0]) == _REQUIRED), repeated
        shown = names - hidden
        columns = [column.path for column in footer.columns if column.path[0] in shown] if hidden else None
        key_values = shown_key_values(opened, shown, self._null_names) if self._denied else None
        for column in footer.columns:
            is_stand_in = column.path[0] in self._null_names or (column.path in opened.refused and bool(digested))
            if column.path in opened.denied and column.path[0] in shown and not is_stand_in:
                self.refused[column.path] = offset + len(self.generated)
                self.generated += _REFUSED_PAGE
        chains = leaf_chains(footer.metadata.schema) if digested else []
        kinds = {c.ordinal: digest_kind(chains[c.ordinal][-1]) for c in footer.columns if c.path in digested}
        if kinds and key_values is not None and (arrow_schema := key_values.get(ARROW_SCHEMA_KEY)) is not None:
            key_values[ARROW_SCHEMA_KEY] = digest_arrow_schema(arrow_schema, footer.leaves, kinds)
        self._metadata, self._column_ordinals = selected_footer(
            footer.metadata, footer.leaves, columns, key_values, shows_all=not self._denied
        )
        if kinds:
            self._metadata.schema = digest_schema(self._metadata.schema, kinds)
        self._is_digested = bool(kinds)
        self._refused_positions = {
            position
            for position, ordinal in enumerate(self._column_ordinals)
            if footer.columns[ordinal].path in self.refused
        }

    @functools.cached_property
    def _types(self) -> list[int]:
        # Only needed for refused columns: otherwise the schema is not parsed.
        metadata = self._metadata if self._is_digested else self._opened.footer.metadata
        return [element.type or 0 for element in metadata.schema[1:] if element.type is not None]

    def tail(self, chunks: Sequence[Sequence[ColumnMetaData | None]]) -> PlainTail:
        """Return the end of the view, which without digests is as long as the file: zeros fill the difference."""
        opened, metadata = self._opened, self._metadata
        metadata.row_groups = [
            self._row_group(ordinal, row_group, all_metadata)
            for ordinal, (row_group, all_metadata) in enumerate(zip(opened.footer.row_groups, chunks, strict=True))
        ]
        if self.nulls:
            metadata.schema = self._schema()
        metadata.encryption_algorithm = None
        metadata.footer_signing_key_metadata = None
        trailer = with_trailer(metadata.serialise(), MAGIC)
        generated = bytes(self.generated)
        # Readers take the last bytes of a file, for its footer: no digests should be made for that.
        least = TAIL_LENGTH if self._stand_ins else 0
        filling = bytes(max(opened.tail.size_bytes - self._offset - len(generated) - len(trailer), least))
        footer_offset = self._offset + len(generated) + len(filling)
        return PlainTail(self._offset, generated + filling + trailer, tuple(self.refused), footer_offset)

    def _row_group(
        self, row_group_ordinal: int, row_group: RowGroup, all_metadata: Sequence[ColumnMetaData | None]
    ) -> RowGroup:
        new: RowGroup = row_group.shallow_copy()
        new.columns = columns = [
            self._chunk(row_group_ordinal, ordinal, row_group.num_rows, all_metadata[ordinal])
            for ordinal in self._column_ordinals
        ]
        if not self._denied:
            return new
        if self.nulls or self._opened.digests is not None:
            selected_sorting_columns(new.struct, [])
        elif len(columns) < len(all_metadata):
            selected_sorting_columns(new.struct, self._column_ordinals)
        described = [chunk.meta_data for chunk in columns if chunk.meta_data is not None]
        new.total_byte_size = sum(metadata.total_uncompressed_size for metadata in described)
        if new.total_compressed_size is not None:
            new.total_compressed_size = sum(metadata.total_compressed_size for metadata in described)
        # The first column may not be shown.
        new.file_offset = None
        shown, _ = shown_row_group(new, self._refused_positions)
        return shown

    def _chunk(
        self, row_group_ordinal: int, ordinal: int, num_rows: int, metadata: ColumnMetaData | None
    ) -> ColumnChunk:
        column = self._opened.footer.columns[ordinal]
        stand_in = self._stand_ins.get((row_group_ordinal, ordinal))
        if stand_in is not None:
            return generated_chunk(
                self._types[ordinal],
                column.path,
                stand_in.metadata.num_values,
                stand_in.offset,
                stand_in.length,
                has_levels=highest_levels(stand_in.chain) != (0, 0),
            )
        if ordinal in self.nulls:
            page = null_page(num_rows, *self.nulls[ordinal])
            offset = self._offset + len(self.generated)
            self.generated += page
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(page), is_null=True)
        if metadata is None:
            offset = self.refused[column.path]
            return generated_chunk(self._types[ordinal], column.path, num_rows, offset, len(_REFUSED_PAGE))
        chunk = self._opened.footer.chunks[row_group_ordinal][ordinal]
        if column.encryption is ColumnEncryption.PLAINTEXT:
            return chunk
        new: ColumnChunk = chunk.shallow_copy()
        if metadata.bloom_filter_length is not None:
            metadata = metadata.shallow_copy()
            metadata.bloom_filter_length = _shorter(metadata.bloom_filter_length, 2)
        new.column_index_length = _shorter(new.column_index_length, 1)
        new.offset_index_length = _shorter(new.offset_index_length, 1)
        new.meta_data = metadata
        new.crypto_metadata = None
        new.encrypted_column_metadata = None
        return new

    def _schema(self) -> list[SchemaElement]:
        """Return the schema in which columns that are made null may be null."""
        schema = list(self._metadata.schema)
        top_level = {id(chain[0]) for chain in leaf_chains(schema)}
        for position, element in enumerate(schema):
            if id(element) in top_level and element.name in self._null_names and repetition(element) == _REQUIRED:
                schema[position] = element.shallow_copy()
                schema[position].struct.set_entry(REPETITION_FIELD_ID, (WireType.I32, _OPTIONAL))
        return schema


def _shorter(length: int | None, modules: int) -> int | None:
    if length is None:
        return None
    if length < modules * GCM_FRAMING:
        raise ParquetFormatError(f"{length} bytes are too short for an encrypted module.")
    return length - modules * GCM_FRAMING


# --- A view ---

_log = logging.getLogger(__name__)

_numbers = itertools.count()

_LOCAL_PIECE = 4 * 1024 * 1024
"""How much of a local file is read at once: the allocator reuses memory of that size. Other storage gets as few
requests as possible."""

_INDEXES = {RegionKind.COLUMN_INDEX: ModuleType.COLUMN_INDEX, RegionKind.OFFSET_INDEX: ModuleType.OFFSET_INDEX}


def open_plain_file(
    keys: KeyService,
    location: FileLocation,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    *,
    cache: PageCache,
    identities: FileIdentities | None = None,
) -> PlainFile:
    """Open an encrypted file that matches its table, to be read as plaintext."""
    # Columns whose keys the KMS refuses appear as `denied_columns` in the configuration says. With `hide` and
    # `null`, a column that cannot be read for another reason is an error. With `identities`, the file is compared
    # with other files of its folder, else with all files that were opened before.
    denied_columns = keys.configuration.denied_columns

    def opening() -> PlainFile:
        (opened,) = keys.open_files([location], table_name, aad_prefix, again=False, identities=identities)
        if denied_columns in ("hide", "null"):
            opened.refuse_denied(None, hides_refused=True)
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(open_source(location))
            with naming_place(location, opened.footer.columns):
                file = PlainFile(opened, as_verified(opened, source), denied_columns, cache)
            # Several readers may share the view: the file is closed with the last of them.
            weakref.finalize(file, stack.pop_all().close)
            return file

    return read_again_if_changed(opening)


class PlainFile:
    """An encrypted file as plaintext Parquet, of the same length without digests; for any number of threads."""

    def __init__(
        self,
        opened: OpenedFile,
        source: ByteSource,
        denied_columns: str,
        cache: PageCache,
        *,
        gap: int = 0,
    ) -> None:
        """Lay out the view from the footer; the file itself is not read yet."""
        # A `gap` of zeros lies before the footer: a reader that takes the end of a small file, for its footer,
        # then gets no pages, which would be decrypted for nothing.
        self.path = str(opened.location)
        self._opened = opened
        self._source = source
        self._first: PlainFile | None = None
        """Keeps pages in the cache as long as a view that `over` returned."""
        self._cache = cache
        self._number = next(_numbers)
        self._lock = ForkSafeLock()
        self._ciphers: dict[int, ModuleCipher | None] = {}
        self._views: dict[int, ChunkView] = {}
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._with_dictionary: set[tuple[int, int]] = set()
        self._index_places: dict[tuple[int, int], Region] = {}
        self._has_warned = False
        self._row_groups: dict[int, tuple[int, int]] = {}
        self._tail: PlainTail | None = None
        self._stand_ins: list[StandIn] = []
        self._digest_lock = ForkSafeLock()
        self.size_bytes = source.size_bytes
        weakref.finalize(self, cache.forget, self._number)
        if opened.is_encrypted or opened.digests is not None:
            self._lay_out(denied_columns, gap)

    def over(self, source: ByteSource) -> PlainFile:
        """Return the same view over the same file, opened again."""
        again = copy.copy(self)
        again._source, again._first = source, self
        return again

    @property
    def is_encrypted(self) -> bool:
        """Whether the file itself is encrypted."""
        return self._opened.is_encrypted

    def _lay_out(self, denied_columns: str, gap: int) -> None:
        opened = self._opened
        footer = opened.footer
        all_metadata: list[list[ColumnMetaData | None]] = [[None] * len(footer.columns) for _ in footer.row_groups]
        regions: list[Region] = []
        digests = {} if opened.digests is None else opened.digests.deks
        for column in footer.columns:
            if column.path in opened.denied and column.path not in digests:
                continue
            cipher = footer.cipher_of(column, opened.deks.get(column.path) or digests.get(column.path))
            self._ciphers[column.ordinal] = cipher
            is_hidden = denied_columns in ("hide", "null") and column.path[0] in opened.denied_top_level
            for row_group_ordinal in range(len(footer.row_groups)):
                metadata = footer.chunk_metadata(row_group_ordinal, column, cipher)
                all_metadata[row_group_ordinal][column.ordinal] = metadata
                if metadata.dictionary_page_offset:
                    self._with_dictionary.add((row_group_ordinal, column.ordinal))
                if is_hidden:
                    continue
                found = regions_of(
                    footer.chunks[row_group_ordinal][column.ordinal], metadata, row_group_ordinal, column.ordinal
                )
                # Statistics and Bloom filters would show values.
                regions += found[:1] if column.path in digests else found
        try:
            arranged_regions = arranged(regions, footer.envelope.footer_offset, footer.metadata.created_by)
        except ParquetFormatError as error:
            raise ParquetFormatError(str(error), path=self.path) from None
        digested = {column.ordinal for column in footer.columns if column.path in digests}
        offset = footer.envelope.footer_offset
        # Digests lie one behind the other from where the footer of the file begins.
        chains = leaf_chains(footer.metadata.schema) if digested else []
        for region in sorted(region for region in arranged_regions if region.column_ordinal in digested):
            of_chunk = all_metadata[region.row_group_ordinal][region.column_ordinal]
            assert of_chunk is not None
            chain = chains[region.column_ordinal]
            num_rows = footer.row_groups[region.row_group_ordinal].num_rows
            if of_chunk.num_values < 0 or num_rows < 0:
                raise ParquetFormatError("a chunk has a negative number of values.", path=self.path)
            created_by = footer.metadata.created_by
            stand_in = StandIn(chain, digest_kind(chain[-1]), of_chunk, region, num_rows, created_by, offset)
            self._stand_ins.append(stand_in)
            offset = stand_in.end
        self._regions = [
            region for region in arranged_regions if region.length != 0 and region.column_ordinal not in digested
        ]
        self._starts = [region.offset for region in self._regions]
        for region in self._regions:
            row_group = region.row_group_ordinal
            if region.kind is RegionKind.OFFSET_INDEX:
                self._index_places[row_group, region.column_ordinal] = region
            elif region.kind is RegionKind.PAGES:
                start, _ = self._row_groups.get(row_group, (region.offset, 0))
                self._row_groups[row_group] = (start, _end_of(region))
        if not self._stand_ins:
            offset += gap
        places = {(one.region.row_group_ordinal, one.region.column_ordinal): one for one in self._stand_ins}
        self._tail = _TailBuilder(opened, denied_columns, offset, places).tail(all_metadata)
        self.size_bytes = self._tail.offset + len(self._tail.data)

    # --- Reading -------------------------------------------------------------------------------------------

    def read_at(self, offset: int, length: int, *, whole_row_groups: bool = False) -> bytes:
        """Return exactly `length` bytes from `offset`."""
        # With `whole_row_groups`, a read of a whole row group may include refused columns, as DuckDB reads if it
        # needs most columns. Their bytes are not valid pages.
        # Pages are decrypted into this buffer: a copy would cost as much as decryption.
        buffer = _Buffer(bytes(length))
        with buffer.getbuffer() as out:
            self.read_into(offset, out, whole_row_groups=whole_row_groups)
        return buffer.getvalue()

    def read_into(self, offset: int, out: memoryview, *, whole_row_groups: bool = False) -> None:
        """Fill `out` from `offset` of the file; see `read_at`."""
        check_range(self, offset, len(out))
        end = offset + len(out)
        tail = self._tail
        if tail is None:
            out[:] = self._source.read_at(offset, len(out))
            return
        refused = tail.refused_in(offset, end)
        row_groups = self._row_groups.values()
        if refused and whole_row_groups and any(offset <= one and other <= end for one, other in row_groups):
            if not self._has_warned:
                self._has_warned = True
                asked = ", ".join(".".join(path) for path in refused)
                _log.warning("%s: a query that asks for %s will fail: the key is refused", self.path, asked)
        elif refused:
            hint = "Read other columns, or set `denied_columns: hide` under `reading`."
            if self._opened.digests is not None:
                hint = f"Read other columns. {NEEDS_KEY}"
            raise self._opened.denial(refused, hint=hint)
        pages_end = self._opened.footer.envelope.footer_offset
        body_end = min(end, pages_end)
        with naming_place(self._opened.location, self._opened.footer.columns):
            if offset < body_end:
                self._read_body(offset, out[: body_end - offset])
            start, stop = max(offset, pages_end), min(end, tail.offset)
            if start < stop and not self._stand_ins:
                _blank(out[start - offset : stop - offset])
            for chunk in self._stand_ins:
                first, last = max(start, chunk.offset), min(stop, chunk.end)
                if first < last:
                    data = self._digests(chunk)[first - chunk.offset : last - chunk.offset]
                    out[first - offset : last - offset] = data
        if offset < MAGIC_LENGTH:
            out[: MAGIC_LENGTH - offset] = MAGIC[offset:end]
        if end > tail.offset:
            start = max(offset, tail.offset)
            out[start - offset :] = tail.data[start - tail.offset : end - tail.offset]

    def _read_body(self, offset: int, out: memoryview) -> None:
        end = offset + len(out)
        first = max(bisect_right(self._starts, offset) - 1, 0)
        touched = []
        for position in range(first, len(self._regions)):
            region = self._regions[position]
            if region.offset >= end:
                break
            if _end_of(region) > offset:
                touched.append(position)
        source = self._source
        if len(touched) > 1 and not self._opened.location.is_local:
            # Readers ask for neighbouring chunks at once, and storage is asked as often as they ask.
            start = max(offset, self._regions[touched[0]].offset)
            stop = min(end, _end_of(self._regions[touched[-1]]))
            source = HeldSource(source, start, source.read_at(start, stop - start))
        done = offset
        for position in touched:
            region = self._regions[position]
            start, stop = max(offset, region.offset), min(end, _end_of(region))
            _blank(out[done - offset : start - offset])
            self._read_region(position, region, source, start, out[start - offset : stop - offset])
            done = stop
        _blank(out[done - offset :])

    def _read_region(
        self, position: int, region: Region, source: ByteSource, offset: int, out: memoryview
    ) -> None:
        if self._ciphers[region.column_ordinal] is None:
            out[:] = source.read_at(offset, len(out))
        elif region.kind is RegionKind.PAGES:
            with self._lock:
                view = self._views.get(position)
                if view is None:
                    view = self._views[position] = self._new_chunk_view(region)
            view.read_into(source, offset, out)
        else:
            data = self._decrypted(region, source)[offset - region.offset :][: len(out)]
            out[: len(data)] = data
            _blank(out[len(data) :])

    def _new_chunk_view(self, region: Region) -> ChunkView:
        place = region.row_group_ordinal, region.column_ordinal
        index = self._index_places.get(place)
        # No cycle of references: a view that is no longer used closes its file at once.
        decrypted = functools.partial(PlainFile._decrypted, weakref.proxy(self))
        return ChunkView(
            self._number,
            region,
            self._reader(region),
            self._cache,
            expects_dictionary_page=place in self._with_dictionary,
            offset_index=None if index is None else functools.partial(decrypted, index),
            piece_length=_LOCAL_PIECE if self._opened.location.is_local else region.limit,
        )

    def _digests(self, chunk: StandIn) -> memoryview:
        """Return the digests of a chunk; one thread makes them at a time."""
        key = (self._number, chunk.offset)
        with self._digest_lock:
            data = self._cache.get(key)
            if data is None:
                region = chunk.region
                length = _end_of(region) - region.offset
                if self._ciphers[region.column_ordinal] is None:
                    pages = memoryview(self._source.read_at(region.offset, length))
                else:
                    pages = memoryview(bytearray(length))
                    self._new_chunk_view(region).read_into(self._source, region.offset, pages)
                assert self._opened.digests is not None and self._opened.digests.secret is not None
                try:
                    data = memoryview(chunk.make(pages, self._opened.digests.secret))
                except ParquetFormatError as error:
                    raise ParquetFormatError(str(error), path=self.path) from None
                self._cache.put(key, data, is_kept=True)
            return data

    def _reader(self, region: Region) -> ChunkCipher:
        cipher = self._ciphers[region.column_ordinal]
        assert cipher is not None
        footer = self._opened.footer
        return ChunkCipher(cipher, footer.algorithm, region.row_group_ordinal, region.column_ordinal)

    def _decrypted(self, region: Region, source: ByteSource) -> memoryview:
        """Return an index or a Bloom filter in plaintext."""
        key = (self._number, region.offset)
        found = self._cache.get(key)
        if found is None:
            stored = memoryview(source.read_at(region.offset, _end_of(region) - region.offset))
            reader = self._reader(region)
            if region.kind is RegionKind.BLOOM_FILTER:
                found = memoryview(_bloom_filter(reader, stored))
            else:
                found = memoryview(reader.decrypt(stored, _INDEXES[region.kind]))
            self._cache.put(key, found)
        return found


class _Buffer(io.BytesIO):
    def __del__(self) -> None:
        """Close nothing: Python 3.13 would complain on stderr if parts of a view outlive a failed read."""


def _blank(out: memoryview) -> None:
    out[:] = bytes(len(out))


def _end_of(region: Region) -> int:
    return region.limit if region.length is None else region.offset + region.length


def _bloom_filter(reader: ChunkCipher, stored: memoryview) -> bytes:
    """Return a Bloom filter in plaintext: the header, and the bitset directly behind it."""
    place = reader.place(ModuleType.BLOOM_FILTER_HEADER)
    if len(stored) < LENGTH_LENGTH:
        raise place.error(f"{len(stored)} bytes are too short for a module.")
    (length,) = struct.unpack_from("<I", stored)
    header = reader.decrypt(stored[: LENGTH_LENGTH + length], ModuleType.BLOOM_FILTER_HEADER)
    num_bytes = BloomFilterHeader.read(header)[0].num_bytes
    bitset = stored[LENGTH_LENGTH + length :][: max(num_bytes, 0) + GCM_FRAMING]
    return header + reader.decrypt(bitset, ModuleType.BLOOM_FILTER_BITSET)


# --- Files as Python files, and views that are kept --------------------------------------------------------------

MOST_KEPT = 128
"""How many views are kept; each has a file open, and a footer in memory."""

_MOST_FOLDERS = 1_000
"""How many folders are remembered, where each folder is a data set of its own."""

_MOST_LISTED = 100_000
"""How many files of listings are remembered."""

_LISTED_TOGETHER = 100
"""How many files of a listing are opened together."""

_CLOCK_STEP_SECONDS = 2
"""Object stores have times in seconds: a younger object may be replaced by an object with the same time."""

_Version = tuple[object, ...]
_Misplacement = tuple[str, str]
"""A folder, and the protected column to which it gives values."""
K = TypeVar("K")
V = TypeVar("V")


class PlainInput(RangedFile):
    """The view of one file as a Python file."""

    mode = "rb"
    blocksize = 4 * 1024 * 1024
    """With `cache`, what fsspec's `blockcache` asks for. Its cache is not used and stays empty."""
    cache: Any = None

    def __init__(
        self, file: PlainFile, reopen: Callable[[], Any] | None = None, *, whole_row_groups: bool = False
    ) -> None:
        """Read a view; `reopen` opens it in another process. For `whole_row_groups` see `PlainFile.read_at`."""
        super().__init__()
        self.name = self.path = file.path
        self.size = self.size_bytes = file.size_bytes
        self._file = file
        self._reopen = reopen
        self._whole_row_groups = whole_row_groups
        share_with_arrow(self)

    @property
    def closed(self) -> bool:
        """Whether it is closed; `blockcache` sets that, too, after it has closed it."""
        return super().closed

    @closed.setter
    def closed(self, value: bool) -> None:
        if value:
            self.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return a range, as fsspec's caches ask for it."""
        return self.read_at(start, end - start)

    @in_use()
    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range of the view."""
        return self._file.read_at(offset, length, whole_row_groups=self._whole_row_groups) if length else b""

    def __reduce__(self) -> Any:
        if self._reopen is None:
            raise TypeError("this file cannot be pickled")
        return self._reopen, ()


class PlainFiles:
    """Opens views of the files of a table; for any number of threads.

    An engine opens a file several times for one query. It gets the same view, unless the file was replaced, or its
    keys expired. Of two files of a data set that share data keys, the second is refused.
    """

    def __init__(
        self,
        keys: KeyService,
        table_name: str | None,
        aad_prefix: str | bytes | None = None,
        *,
        is_one_folder: bool = True,
    ) -> None:
        """Take keys; unless `is_one_folder`, each folder is a data set of its own."""
        self._keys = keys
        self._table_name = table_name
        self._aad_prefix = aad_prefix
        self._is_one_folder = is_one_folder
        self._identities: OrderedDict[str, FileIdentities] = OrderedDict()
        self._cache = PageCache()
        self._kept: OrderedDict[str, tuple[PlainFile, _Version, float]] = OrderedDict()
        """Path -> view, version of its file, and when it was opened."""
        self._misplaced: OrderedDict[tuple[str, int | None, int | None], _Misplacement | None] = OrderedDict()
        """Path, length and time of a file -> whether its folders give values to a protected column."""
        self._sizes: OrderedDict[str, tuple[int, _Version, float]] = OrderedDict()
        """Path -> length of the view, version of its file, and when it was opened."""
        self._lock = ForkSafeLock()

    @in_use()
    def open(self, location: FileLocation) -> PlainFile:
        """Return the view of a file; raise `ReusedKeysError` if it shares its keys with another file."""
        version = _version(location)
        with self._lock:
            file, known, opened_at = self._kept.get(location.path, (None, None, 0.0))
            if file is not None and version is not None and known == version and self._is_fresh(opened_at):
                self._kept.move_to_end(location.path)
                return file
        opened_at = time.monotonic()
        file = open_plain_file(
            self._keys,
            location,
            self._table_name,
            self._aad_prefix,
            cache=self._cache,
            identities=self._identities_beside(location),
        )
        # Keep nothing if the file was replaced meanwhile.
        if version is not None and version == _version(location):
            self._keep(self._kept, location.path, (file, version, opened_at), MOST_KEPT)
        return file

    def size_bytes(self, location: FileLocation, info: pafs.FileInfo) -> int:
        """Return the length of the view of a listed file."""
        version = _version(location, info)
        with self._lock:
            size, known, opened_at = self._sizes.get(location.path, (0, None, 0.0))
            if version is not None and known == version and self._is_fresh(opened_at):
                return size
        opened_at = time.monotonic()
        size = self.open(location).size_bytes
        if version is not None:
            self._keep(self._sizes, location.path, (size, version, opened_at), _MOST_LISTED)
        return size

    def _is_fresh(self, opened_at: float) -> bool:
        return time.monotonic() - opened_at < self._keys.configuration.reading.cache_lifetime_seconds

    def _keep(self, kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
        with self._lock:
            kept[key] = value
            kept.move_to_end(key)
            if len(kept) > most:
                kept.popitem(last=False)

    def misplaced(self, filesystem: pafs.FileSystem, infos: Sequence[pafs.FileInfo]) -> dict[str, FolderNameError]:
        """Return path -> error of files of a folder whose folders give values to their protected columns."""
        # Files in folders without `name=value` are not opened. Of the others, the footers are read, many together;
        # the answer is remembered for each length and time of a file.
        keys = [(info.path, info.size, info.mtime_ns) for info in infos]
        if not infos or not names_in_folders(infos[0].path):
            return {}
        with self._lock:
            found = {key: self._misplaced[key] for key in keys if key in self._misplaced}
        new = [key for key in keys if key not in found]
        for start in range(0, len(new), _LISTED_TOGETHER):
            some = new[start : start + _LISTED_TOGETHER]
            for key, answer in zip(some, self._look(filesystem, [path for path, _, _ in some]), strict=True):
                found[key] = answer
                self._keep(self._misplaced, key, answer, _MOST_LISTED)
        return {
            path: FolderNameError(str(FileLocation(filesystem, path)), *answer)
            for (path, _, _), answer in found.items()
            if answer is not None
        }

    def _look(self, filesystem: pafs.FileSystem, paths: Sequence[str]) -> list[_Misplacement | None]:
        locations = [FileLocation(filesystem, path) for path in paths]
        try:
            if len(locations) == 1:
                self.open(locations[0])
            else:
                self._keys.open_files(
                    locations,
                    self._table_name,
                    self._aad_prefix,
                    wanted=lambda _: (),
                    identities=self._identities_beside(locations[0]),
                )
        except (KeytoolsError, OSError) as error:
            if len(locations) > 1:
                return [self._look(filesystem, [path])[0] for path in paths]
            if isinstance(error, FolderNameError):
                return [(error.folder, error.column or "")]
            # Other errors are for the reader who opens the file.
            if isinstance(error, KmsError) and not isinstance(error, KEY_REFUSALS):
                raise
        return [None] * len(locations)

    def _identities_beside(self, location: FileLocation) -> FileIdentities:
        """Return the identities of the files that must not share keys with a file."""
        folder = "" if self._is_one_folder else location.path.rpartition("/")[0]
        with self._lock:
            found = self._identities.setdefault(folder, FileIdentities(refuses=True))
            self._identities.move_to_end(folder)
            if len(self._identities) > _MOST_FOLDERS:
                self._identities.popitem(last=False)
            return found


def _version(location: FileLocation, info: pafs.FileInfo | None = None) -> _Version | None:
    """Return what changes when a file is replaced; None if that is unknown."""
    if location.is_local:
        return state_of_local(location.path)  # A file that is open keeps its inode.
    info = info or location.info()
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(str(location))
    if info.mtime_ns is None or time.time() - info.mtime_ns / 1e9 < _CLOCK_STEP_SECONDS:
        return None
    return info.size, info.mtime_ns
