"""One encrypted file as plain Parquet: the same bytes at the same offsets, decrypted as they are read.

Pages keep their places (`chunk_view`), so that opening a file costs its footer, whatever its length. Indexes and
Bloom filters keep where they begin. What no column that is shown has is zeros.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable

from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH, ChunkCipher, ModuleCipher
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.files.denied_columns import NEEDS_KEY
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import (
    FileIdentities,
    OpenedFile,
    as_verified,
    naming_place,
    read_again_if_changed,
)
from parquet_keytools.format.byte_ranges import ByteSource, check_range
from parquet_keytools.format.file_layout import MAGIC, MAGIC_LENGTH, Region, RegionKind, arranged, regions_of
from parquet_keytools.format.structs import BloomFilterHeader, ColumnMetaData
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source
from parquet_keytools.view.chunk_view import ChunkView, HeldSource, PageCache
from parquet_keytools.view.digest_chunk import StandIn, StandIns
from parquet_keytools.view.digest_kinds import digest_kind, leaf_chains
from parquet_keytools.view.plain_footer import PlainTail, plain_tail

_log = logging.getLogger(__name__)

_numbers = itertools.count()

_LOCAL_PIECE = 4 * 1024 * 1024
"""How much of a local file is read at once: the allocator takes memory of that size again. Other storage is asked
as seldom as can be."""

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
    """Open an encrypted file that is what its table says, to be read as plaintext.

    What cannot be read is as the configuration says under `denied_columns`. A column that cannot be read for any
    other reason than that the KMS refuses its key is an error, unless reading it is one anyway. With
    `identities` it is compared with other files of its folder, else with all that were opened before.

    Raises:
        NotEncryptedError: It is not encrypted.
        ColumnAccessDeniedError: A column cannot be read, and the KMS did not refuse its key.
        KeytoolsError: Another subclass says what is wrong with the file or its keys.
    """
    denied_columns = keys.configuration.reading.denied_columns

    def opening() -> PlainFile:
        (opened,) = keys.open_files([location], table_name, aad_prefix, again=False, identities=identities)
        if denied_columns in ("hide", "null"):
            opened.refuse_denied(None, hides_refused=True)
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(open_source(location))
            with naming_place(location, opened.footer.columns):
                file = PlainFile(opened, as_verified(opened, source), denied_columns, cache)
            # Readers come and go: the file is closed when nobody has it any more.
            weakref.finalize(file, stack.pop_all().close)
            return file

    return read_again_if_changed(opening)


class PlainFile:
    """An encrypted file, as a source of plaintext Parquet; for any number of threads.

    Attributes:
        path: Its name, for error texts.
        size_bytes: Length of the view: that of the file, unless it has digests, or more has to be said of refused
            columns than fits.
    """

    def __init__(
        self,
        opened: OpenedFile,
        source: ByteSource,
        denied_columns: str,
        cache: PageCache,
        *,
        gap: int = 0,
    ) -> None:
        """Make one; of the file itself nothing is read yet.

        The file was opened with all columns. A `gap` of so many zeros lies before the footer: a reader that takes
        the end of a small file, for its footer, then gets no pages, which would be decrypted for nothing.

        Raises:
            ParquetFormatError: The footer does not say where the columns are.
        """
        self.path = str(opened.location)
        self._opened = opened
        self._source = source
        self._first: PlainFile | None = None
        """Keeps pages in the cache as long as a view that `over` returned lives."""
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
        self._stand_ins: StandIns | None = None
        self.size_bytes = source.size_bytes
        weakref.finalize(self, cache.forget, self._number)
        if opened.is_encrypted or opened.digests is not None:
            self._lay_out(denied_columns, gap)

    def over(self, source: ByteSource) -> PlainFile:
        """Return the view of the same file, which was opened again: nothing is laid out again."""
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
                # Of digests: statistics and filters are of values.
                regions += found[:1] if column.path in digests else found
        try:
            arranged_regions = arranged(regions, footer.envelope.footer_offset, footer.metadata.created_by)
        except ParquetFormatError as error:
            raise ParquetFormatError(str(error), path=self.path) from None
        digested = {column.ordinal for column in footer.columns if column.path in digests}
        stand_ins = self._arranged_stand_ins(
            [region for region in arranged_regions if region.column_ordinal in digested], all_metadata
        )
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
        offset = footer.envelope.footer_offset + gap
        if stand_ins:
            assert opened.digests is not None
            offset = stand_ins[-1].end
            self._stand_ins = StandIns(self._number, self._cache, stand_ins, opened.digests.secret)
        places = {(found.region.row_group_ordinal, found.region.column_ordinal): found for found in stand_ins}
        self._tail = plain_tail(opened, all_metadata, denied_columns, offset, places)
        self.size_bytes = self._tail.offset + len(self._tail.data)

    def _arranged_stand_ins(
        self, regions: list[Region], all_metadata: list[list[ColumnMetaData | None]]
    ) -> list[StandIn]:
        """Return the digests of chunks, one behind the other where the footer of the file begins."""
        found: list[StandIn] = []
        if not regions:
            return found
        footer = self._opened.footer
        chains = leaf_chains(footer.metadata.schema)
        offset = footer.envelope.footer_offset
        for region in sorted(regions):
            metadata = all_metadata[region.row_group_ordinal][region.column_ordinal]
            assert metadata is not None
            chain = chains[region.column_ordinal]
            num_rows = footer.row_groups[region.row_group_ordinal].num_rows
            if metadata.num_values < 0 or num_rows < 0:
                raise ParquetFormatError("a chunk has fewer values than none.", path=self.path)
            created_by = footer.metadata.created_by
            kind = digest_kind(chain[-1])
            found.append(StandIn(chain, kind, metadata, region, num_rows, created_by, offset))
            offset = found[-1].end
        return found

    # --- Reading -------------------------------------------------------------------------------------------

    def read_at(self, offset: int, length: int, *, whole_row_groups: bool = False) -> bytes:
        """Return exactly `length` bytes from `offset`.

        Args:
            offset: From the start of the file.
            length: How many bytes.
            whole_row_groups: Whether a read of all that is shown of a row group may have refused columns in it:
                DuckDB reads so where it needs nearly all. What is read in place of them is no valid page.

        Raises:
            ParquetFormatError: They are not in the file, or a page is not what its header says.
            DecryptionError: A page does not authenticate: nothing of it is returned.
            ColumnAccessDeniedError: They are of a column whose key is refused.
            OSError: The file cannot be read.
        """
        # Bytes that are written in their place, once: to copy them would cost as much as to decrypt them.
        buffer = _Buffer(bytes(length))
        with buffer.getbuffer() as out:
            self.read_into(offset, out, whole_row_groups=whole_row_groups)
        return buffer.getvalue()

    def read_into(self, offset: int, out: memoryview, *, whole_row_groups: bool = False) -> None:
        """Fill `out` from `offset` of the file on; see `read_at`."""
        check_range(self, offset, len(out))
        end = offset + len(out)
        tail = self._tail
        if tail is None:
            out[:] = self._source.read_at(offset, len(out))
            return
        refused = tail.refused_in(offset, end)
        if refused and whole_row_groups and self._has_row_group(offset, end):
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
            if self._stand_ins is not None and start < stop:
                self._stand_ins.read_into(self._pages_of, self.path, start, out[start - offset : stop - offset])
            elif start < stop:
                _blank(out[start - offset : stop - offset])
        if offset < MAGIC_LENGTH:
            out[: MAGIC_LENGTH - offset] = MAGIC[offset:end]
        if end > tail.offset:
            start = max(offset, tail.offset)
            out[start - offset :] = tail.data[start - tail.offset : end - tail.offset]

    def _has_row_group(self, offset: int, end: int) -> bool:
        """Tell whether a range has all chunks of a row group."""
        return any(offset <= start and stop <= end for start, stop in self._row_groups.values())

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
            self._chunk_view(position, region).read_into(source, offset, out)
        else:
            data = self._decrypted(region, source)[offset - region.offset :][: len(out)]
            out[: len(data)] = data
            _blank(out[len(data) :])

    def _chunk_view(self, position: int, region: Region) -> ChunkView:
        with self._lock:
            view = self._views.get(position)
            if view is None:
                view = self._views[position] = self._new_chunk_view(region)
            return view

    def _new_chunk_view(self, region: Region) -> ChunkView:
        place = region.row_group_ordinal, region.column_ordinal
        index = self._index_places.get(place)
        return ChunkView(
            self._number,
            region,
            self._reader(region),
            self._cache,
            expects_dictionary_page=place in self._with_dictionary,
            offset_index=None if index is None else self._reader_of(index),
            piece_length=_LOCAL_PIECE if self._opened.location.is_local else region.limit,
        )

    def _pages_of(self, region: Region) -> memoryview:
        """Return the pages of a chunk that is shown as digests only, in plaintext."""
        length = _end_of(region) - region.offset
        if self._ciphers[region.column_ordinal] is None:
            return memoryview(self._source.read_at(region.offset, length))
        pages = memoryview(bytearray(length))
        self._new_chunk_view(region).read_into(self._source, region.offset, pages)
        return pages

    def _reader(self, region: Region) -> ChunkCipher:
        cipher = self._ciphers[region.column_ordinal]
        assert cipher is not None
        footer = self._opened.footer
        return ChunkCipher(cipher, footer.algorithm, region.row_group_ordinal, region.column_ordinal)

    def _reader_of(self, index: Region) -> Callable[[ByteSource], memoryview]:
        # No cycle of references: a view that is no longer used closes its file at once.
        this = weakref.proxy(self)

        def read(source: ByteSource) -> memoryview:
            found: memoryview = this._decrypted(index, source)
            return found

        return read

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
        """Close nothing: if parts of a view outlive a failed read, Python 3.13 says on stderr that it cannot."""


def _blank(out: memoryview) -> None:
    """Write zeros: what no column that is shown has."""
    out[:] = bytes(len(out))


def _end_of(region: Region) -> int:
    return region.limit if region.length is None else region.offset + region.length


def _bloom_filter(reader: ChunkCipher, stored: memoryview) -> bytes:
    """Return a Bloom filter in plaintext: its header, and right behind it the bitset."""
    place = reader.place(ModuleType.BLOOM_FILTER_HEADER)
    if len(stored) < LENGTH_LENGTH:
        raise place.error(f"{len(stored)} bytes are too few for a module.")
    (length,) = struct.unpack_from("<I", stored)
    header = reader.decrypt(stored[: LENGTH_LENGTH + length], ModuleType.BLOOM_FILTER_HEADER)
    num_bytes = BloomFilterHeader.read(header)[0].num_bytes
    bitset = stored[LENGTH_LENGTH + length :][: max(num_bytes, 0) + GCM_FRAMING]
    return header + reader.decrypt(bitset, ModuleType.BLOOM_FILTER_BITSET)
