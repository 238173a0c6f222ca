"""The pages of one encrypted chunk, decrypted in place, and their cache.

Each page keeps its offset and length (spec 5.1). An encrypted page is a module for its header and a module for its
data. In the view, the header takes the bytes of the first module and of the second module's framing: it is padded
by a field that readers skip.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import zlib
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable

from parquet_keytools.encryption.aad import MAX_COUNT
from parquet_keytools.encryption.module_cipher import LENGTH_LENGTH, NO_PAGE_ORDINAL, ChunkCipher
from parquet_keytools.encryption.page_walk import HeaderWindow, check_crc, decrypt_page, read_encrypted_header
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import ByteSource, HeldSource, Region
from parquet_keytools.format.pages import PageHeaderFacts, padded_header, with_sizes
from parquet_keytools.format.structs import OffsetIndex, PageHeader
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock

CACHE_BYTES = 64 * 1024 * 1024
"""Most bytes of all pages in a cache."""

PageKey = tuple[int, int]
"""The number of a view, and where the page begins."""


class PageCache:
    """Pages of which a reader took a part, of any number of files; for any number of threads."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._pages: OrderedDict[PageKey, memoryview] = OrderedDict()
        self._lock = ForkSafeLock()
        self._forgotten: deque[int] = deque()

    def get(self, key: PageKey) -> memoryview | None:
        """Return a page with its header, if the cache has it."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: PageKey, page: memoryview, *, is_kept: bool = False) -> None:
        """Keep a page, in place of the least recently used pages; if `is_kept`, even if it exceeds the limit."""
        with self._lock:
            self._drop_forgotten()
            if (len(page) > self._max_bytes and not is_kept) or key in self._pages:
                return
            self._pages[key] = page
            self.held_bytes += len(page)
            while self.held_bytes > self._max_bytes and len(self._pages) > 1:
                _, oldest = self._pages.popitem(last=False)
                self.held_bytes -= len(oldest)

    def forget(self, number: int) -> None:
        """Drop the pages of a view, now or with the next `put`: a garbage collector may call it under the lock."""
        self._forgotten.append(number)
        with contextlib.suppress(TimeoutError), self._lock.held_within(0):
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            number = self._forgotten.popleft()
            for key in [key for key in self._pages if key[0] == number]:
                self.held_bytes -= len(self._pages.pop(key))


_NEAR_BYTES = 64 * 1024
"""Pages this close to the last known page are found by walking the headers in between."""


class ChunkView:
    """The pages of an encrypted chunk as plaintext; for any number of threads.

    Pages are found from header to header, or by the chunk's offset index, which is authentic. A header at a wrong
    place does not authenticate.
    """

    def __init__(
        self,
        number: int,
        region: Region,
        reader: ChunkCipher,
        cache: PageCache,
        *,
        expects_dictionary_page: bool,
        offset_index: Callable[[ByteSource], bytes | memoryview] | None,
        piece_length: int,
    ) -> None:
        """Take a chunk; nothing is read yet, and later at most about `piece_length` bytes at once."""
        assert region.length is not None
        self._number = number
        self._start = region.offset
        self._end = region.offset + region.length
        self._limit = region.limit
        self._reader = reader
        self._cache = cache
        self._expects_dictionary_page = expects_dictionary_page
        self._offset_index = offset_index
        self._piece_length = piece_length
        self._starts: array[int] = array("Q", [region.offset])
        """Where the known pages begin; the last entry is the end of the last known page."""
        self._ordinals: array[int] = array("i", [0])
        self._lock = ForkSafeLock()

    def read_into(self, source: ByteSource, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` of the file, within the chunk."""
        end = offset + len(out)
        start, last_start, stop = self._span(source, offset, end)
        position = offset
        page = self._cache.get((self._number, start))
        if page is not None:
            position = _copy(page, start, offset, out)
            start += len(page)
        if position >= end:
            return
        last = self._cache.get((self._number, last_start))
        if last is not None:
            _copy(last, last_start, offset, out)
            end = stop = last_start
        while start < end:
            piece_end = min(max(stop, end), start + self._piece_length)
            held = HeldSource(source, start, source.read_at(start, piece_end - start))
            start = self._decrypt(held, start, min(end, piece_end), offset, out)

    def _decrypt(self, source: ByteSource, start: int, end: int, offset: int, out: memoryview) -> int:
        """Decrypt the pages from `start` to the page that holds `end`; return where that page ends."""
        wanted_end = offset + len(out)
        while start < end:
            (header_bytes,) = struct.unpack("<I", source.read_at(start, min(LENGTH_LENGTH, self._limit - start)))
            # This window reads beyond its data only if the header is longer.
            window = HeaderWindow(source, start, min(start + LENGTH_LENGTH + header_bytes, self._limit))
            facts, header_length, ordinal = self._header(window, source.path, start)
            stop = start + header_length + facts.page_length
            is_whole = start >= offset and stop <= wanted_end
            page = out[start - offset : stop - offset] if is_whole else memoryview(bytearray(stop - start))
            module = memoryview(source.read_at(start + header_length, facts.page_length))
            length = facts.page_length - self._reader.page_framing
            room = len(page) - length
            plaintext = page[room:]
            if facts.crc is not None:
                # The CRC of the stored page: with AES-CTR, nothing else detects damage.
                check_crc(module, facts.crc, source.path, start + header_length)
            decrypt_page(self._reader, module, ordinal, plaintext)
            crc = None if facts.crc is None else zlib.crc32(plaintext)
            page[:room] = padded_header(with_sizes(facts, length, crc), room)
            if not is_whole:
                _copy(page, start, offset, out)
                self._cache.put((self._number, start), page.toreadonly())
            start = stop
        return start

    # --- Where pages begin ---------------------------------------------------------------------------------

    def _header(self, window: HeaderWindow, path: str, start: int) -> tuple[PageHeaderFacts, int, int]:
        """Return facts, stored header length and page ordinal of a page whose start is known."""
        with self._lock:
            index = bisect_right(self._starts, start) - 1
            ordinal = self._ordinals[index]
            is_start = self._starts[index] == start
        is_first = start == self._start
        try:
            if not is_start:
                raise ParquetFormatError("the offset index has no page there.")
            if ordinal >= MAX_COUNT:
                raise ParquetFormatError(f"its chunk has more than {MAX_COUNT} pages.")
            expects_dictionary_page = self._expects_dictionary_page or ordinal == NO_PAGE_ORDINAL
            facts, module = read_encrypted_header(
                window, start, self._reader, max(ordinal, 0), is_first, expects_dictionary_page
            )
            length = len(module)
            if start + length + facts.page_length > self._limit:
                raise ParquetFormatError("the page goes on after its chunk.")
            if facts.page_type == PageHeader.DICTIONARY_PAGE:
                if not is_first:
                    raise ParquetFormatError("a dictionary page is not the first page.")
                ordinal = NO_PAGE_ORDINAL
            else:
                ordinal = max(ordinal, 0)
        except ParquetFormatError as error:
            raise ParquetFormatError(f"page header at byte {start}: {error}", path=path) from None
        end = start + length + facts.page_length
        with self._lock:
            if self._starts[-1] == start < self._end:
                following = self._ordinals[-1]
                if facts.page_type == PageHeader.DICTIONARY_PAGE:
                    self._ordinals[-1] = NO_PAGE_ORDINAL
                elif facts.page_type != PageHeader.INDEX_PAGE:
                    following += 1
                self._starts.append(end)
                self._ordinals.append(following)
            elif end not in self._starts[index + 1 : index + 2]:
                raise ParquetFormatError(f"the offset index does not have the page at byte {end}.", path=path)
        return facts, length, ordinal

    def _span(self, source: ByteSource, offset: int, end: int) -> tuple[int, int, int]:
        """Return where the first page of a range begins, and where its last page, if known, begins and ends."""
        if self._starts[-1] + _NEAR_BYTES < offset:
            self._take_offset_index(source)
        window = HeaderWindow(source, self._start, self._limit, is_for_one=True)
        while (start := self._starts[-1]) < min(offset, self._end):
            self._header(window, source.path, start)
        with self._lock:
            starts = self._starts
            last = bisect_right(starts, end - 1)
            stop = starts[last] if last < len(starts) else end
            return starts[bisect_right(starts, offset) - 1], starts[last - 1], stop

    def _take_offset_index(self, source: ByteSource) -> None:
        """Take all pages from the offset index, if it covers the whole chunk."""
        read, self._offset_index = self._offset_index, None
        if read is None:
            return
        locations = OffsetIndex.read(read(source))[0].page_locations
        starts = [location.offset for location in locations]
        ends = [location.offset + location.compressed_page_size for location in locations]
        if not starts or starts[1:] != ends[:-1] or ends[-1] != self._end or starts[0] < self._start:
            return
        has_dictionary_page = starts[0] > self._start
        if has_dictionary_page:
            starts.insert(0, self._start)
        if all(one < other for one, other in itertools.pairwise(starts)):
            with self._lock:
                first = NO_PAGE_ORDINAL if has_dictionary_page else 0
                self._starts = array("Q", [*starts, self._end])
                self._ordinals = array("i", range(first, first + len(starts) + 1))


def _copy(page: memoryview, start: int, offset: int, out: memoryview) -> int:
    """Copy the part of a page that is in a range; return where the page ends."""
    stop = start + len(page)
    first, last = max(start, offset), min(stop, offset + len(out))
    if first < last:
        out[first - offset : last - offset] = page[first - start : last - start]
    return stop
