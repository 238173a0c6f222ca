"""The rules about page indexes and Bloom filters, which are compared with the pages that were found."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parquet_keytools.conformance.chunk_layout import ChunkRegion, Window, ends_of_runs
from parquet_keytools.conformance.chunk_modules import ChunkCiphers, check_module, check_padding
from parquet_keytools.conformance.chunk_verifier import PageList
from parquet_keytools.conformance.findings import RuleBook
from parquet_keytools.conformance.nonce_ledger import nonce_entry
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.module_cipher import GCM_FRAMING, LENGTH_LENGTH
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.format.file_layout import RegionKind
from parquet_keytools.format.structs import BloomFilterHeader, OffsetIndex
from parquet_keytools.format.thrift import ThriftList, WireType, read_struct

_COLUMN_INDEX_LISTS = (1, 2, 3, 5)
_REQUIRED_LISTS = (1, 2, 3)
_BOUNDARY_ORDER = (4, WireType.I32)
_BLOOM_FILTER_UNIONS = (2, 3, 4)
"""Algorithm, hash and compression of a Bloom filter."""

_MAX_BLOOM_FILTER_HEADER = 1024


_STEP = 1024 * 1024


class IndexWindows:
    """Reads page indexes: in most files all of a kind lie one after another."""

    def __init__(self, source: ByteSource, regions: Sequence[ChunkRegion]) -> None:
        self._windows: dict[RegionKind, Window] = {}
        self._ends: dict[ChunkRegion, int] = {}
        for kind in (RegionKind.COLUMN_INDEX, RegionKind.OFFSET_INDEX):
            self._windows[kind] = Window(source, _STEP)
            found = [region for region in regions if region.kind is kind]
            ends = ends_of_runs([(region.offset, region.offset + (region.length or 0)) for region in found])
            self._ends.update(zip(found, ends, strict=True))

    def read(self, region: ChunkRegion) -> memoryview:
        """Return the bytes of one of the regions, which has a length."""
        assert region.length is not None
        window = self._windows[region.kind]
        window.end = self._ends[region]
        return window.view(region.offset, region.length)


@dataclass(eq=False, repr=False)
class IndexVerifier:
    """Verifies what belongs to a chunk beside its pages.

    Attributes:
        is_damaged: Whether something was found that keeps readers from using it.
    """

    _source: ByteSource
    _chunk: ChunkCiphers
    _limit: int
    _book: RuleBook
    is_damaged: bool = False

    def _broken(self, rule_id: str, message: str, module_type: ModuleType, offset: int) -> None:
        self.is_damaged = True
        self._book.broken(rule_id, message, self._chunk.place(module_type), offset)

    def _plaintext(self, stored: memoryview, module_type: ModuleType, offset: int) -> bytes | None:
        """Return the plaintext of a module that fills `stored`; None where it is reported."""
        ciphers = self._chunk.ciphers
        if ciphers.cipher is None:
            return bytes(stored)
        if len(stored) >= GCM_FRAMING:
            ciphers.nonces.add(nonce_entry(stored[4:16], offset, stored[-4:]))
        plaintext = check_module(self._chunk, module_type, stored, offset, self._book)
        self.is_damaged = self.is_damaged or plaintext is None
        ciphers.counts[module_type, "broken" if plaintext is None else "authentic"] += 1
        return plaintext

    def _check_padding(self, plaintext: bytes, end: int, module_type: ModuleType) -> None:
        if self._chunk.ciphers.cipher is not None:
            check_padding(plaintext, end, self._chunk.place(module_type), self._book)

    # --- Page indexes --------------------------------------------------------------------------------------

    def check_offset_index(
        self, region: ChunkRegion, stored: memoryview, pages: PageList | None, num_rows: int
    ) -> None:
        """Compare the offset index with the pages; None where they could not all be walked."""
        data = self._plaintext(stored, ModuleType.OFFSET_INDEX, region.offset)
        if data is None:
            return
        where = (ModuleType.OFFSET_INDEX, region.offset)
        try:
            index, end = OffsetIndex.read(data)
            locations = [
                (location.offset, location.compressed_page_size, location.first_row_index)
                for location in index.page_locations
            ]
        except ParquetFormatError as error:
            self._broken("offset-index", str(error), *where)
            return
        self._check_padding(data, end, ModuleType.OFFSET_INDEX)
        rows = [row for _, _, row in locations]
        increases = all(earlier <= later for earlier, later in pairwise(rows))
        if rows and (rows[0] != 0 or not increases or rows[-1] >= max(num_rows, 1)):
            self._broken("offset-index-rows", f"pages begin at rows {_some(rows)} of {num_rows}.", *where)
        elif rows != (first_rows := self._first_rows(pages, rows)):
            message = f"it says that pages begin at rows {_some(rows)}, and they begin at {_some(first_rows)}."
            self._broken("offset-index-rows", message, *where)
        else:
            self._book.holds("offset-index-rows")
        if pages is None:
            self._book.not_checked("offset-index", "the pages of a chunk could not all be walked")
            return
        found = list(zip(pages.offsets, pages.lengths, strict=True))
        stated = [(offset, length) for offset, length, _ in locations]
        if stated == found:
            self._book.holds("offset-index")
            return
        wrong = next((pair for pair in zip(stated, found, strict=False) if pair[0] != pair[1]), None)
        if wrong is None:
            message = f"it has {len(stated)} pages, the chunk {len(found)}."
        else:
            message = (
                f"it has a page of {wrong[0][1]} bytes at {wrong[0][0]} for one of {wrong[1][1]} at {wrong[1][0]}."
            )
        self._broken("offset-index", message, *where)

    def _first_rows(self, pages: PageList | None, stated: list[int]) -> list[int]:
        """Return the first row of each page where that is known, else what is stated."""
        if pages is None or not self._chunk.ciphers.column.is_flat or len(pages.first_values) != len(stated):
            return stated
        return list(pages.first_values)

    def check_column_index(self, region: ChunkRegion, stored: memoryview, pages: PageList | None) -> None:
        """Compare the lists of the column index with the number of data pages; None as in `check_offset_index`."""
        data = self._plaintext(stored, ModuleType.COLUMN_INDEX, region.offset)
        if data is None:
            return
        where = (ModuleType.COLUMN_INDEX, region.offset)
        try:
            column_index, end = read_struct(data)
        except ParquetFormatError as error:
            self._broken("column-index", str(error), *where)
            return
        self._check_padding(data, end, ModuleType.COLUMN_INDEX)
        lengths = {}
        for field_id in _COLUMN_INDEX_LISTS:
            value = (column_index.entry(field_id) or (None, None))[1]
            if isinstance(value, ThriftList):
                lengths[field_id] = len(value.elements)
        if any(field_id not in lengths for field_id in _REQUIRED_LISTS) or len(set(lengths.values())) != 1:
            self._broken("column-index", f"its lists have lengths {lengths}.", *where)
        elif column_index.types().get(_BOUNDARY_ORDER[0]) is not _BOUNDARY_ORDER[1]:
            self._broken("column-index", "its boundary_order is missing.", *where)
        elif pages is None:
            self._book.not_checked("column-index", "the pages of a chunk could not all be walked")
        elif lengths[1] != len(pages.offsets):
            message = f"its lists have {lengths[1]} entries for {len(pages.offsets)} data pages."
            self._broken("column-index", message, *where)
        else:
            self._book.holds("column-index")

    # --- Bloom filters -------------------------------------------------------------------------------------

    def check_bloom_filter(self, region: ChunkRegion) -> int | None:
        """Check a Bloom filter; returns its length in bytes, or None where that is not known."""
        lengths = self.bloom_filter_lengths(region)
        if lengths is None:
            return None
        header_length, bitset_length = lengths
        if self._chunk.ciphers.cipher is not None:
            offset = region.offset + header_length
            bitset = memoryview(self._source.read_at(offset, bitset_length))
            self._plaintext(bitset, ModuleType.BLOOM_FILTER_BITSET, offset)
        return header_length + bitset_length

    def bloom_filter_lengths(self, region: ChunkRegion) -> tuple[int, int] | None:
        """Check the header of a Bloom filter; returns its length and that of the bitset, None where it is damaged.

        One whose length is not stated may reach to the limit: many that overlap would else be read many times.
        """
        room = region.length if region.length is not None else self._limit - region.offset
        stored = memoryview(self._source.read_at(region.offset, min(room, _MAX_BLOOM_FILTER_HEADER)))
        where = (ModuleType.BLOOM_FILTER_HEADER, region.offset)
        is_encrypted = self._chunk.ciphers.cipher is not None
        header_length = len(stored)
        if is_encrypted:
            header_length = LENGTH_LENGTH + (struct.unpack_from("<I", stored)[0] if header_length >= 4 else 0)
            if not GCM_FRAMING <= header_length <= len(stored):
                message = f"a module of {header_length} bytes does not fit where it lies."
                self._broken("module-length", message, *where)
                return None
        data = self._plaintext(stored[:header_length], *where)
        if data is None:
            return None
        try:
            header, end = BloomFilterHeader.read(data)
            num_bytes = header.num_bytes
            kinds = [header.struct.types().get(field_id) for field_id in _BLOOM_FILTER_UNIONS]
            if kinds != [WireType.STRUCT] * len(kinds):
                raise ParquetFormatError("its algorithm, hash or compression is missing.")
        except ParquetFormatError as error:
            self._broken("bloom-filter", str(error), *where)
            return None
        if is_encrypted:
            self._check_padding(data, end, ModuleType.BLOOM_FILTER_HEADER)
        else:
            header_length = end
        bitset_length = num_bytes + (GCM_FRAMING if is_encrypted else 0)
        length = header_length + bitset_length
        if num_bytes < 0 or length > room or (region.length is not None and length != region.length):
            stated = f"the length stated is {region.length}"
            stated = f"{room} are left to what comes next" if region.length is None else stated
            message = f"header and bitset have {length} bytes, and {stated}."
            self._broken("bloom-filter", message, *where)
            return None
        self._book.holds("bloom-filter")
        return header_length, bitset_length


def _some(values: list[int]) -> str:
    return f"{values[:5]}{' and so on' if len(values) > 5 else ''}"
