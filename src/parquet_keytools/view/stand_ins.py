"""The digests of a view: chunks that follow the pages of the file, and are made when they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import Region
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.view.digest_chunk import StandIn
from parquet_keytools.view.page_cache import PageCache


class StandIns:
    """Chunks of digests, one behind the other; for any number of threads, one of which makes a chunk at a time."""

    def __init__(
        self, number: int, cache: PageCache, chunks: Sequence[StandIn], secret: SecretBytes | None
    ) -> None:
        """Make one; no digest is made yet.

        Args:
            number: Of the file, in the cache.
            cache: Keeps chunks that were made.
            chunks: In the order of their offsets.
            secret: The key of the digests.
        """
        self._number = number
        self._cache = cache
        self._chunks = chunks
        self._starts = [chunk.offset for chunk in chunks]
        self._secret = secret
        self._lock = ForkSafeLock()
        self._last: tuple[int, memoryview] | None = None

    def read_into(self, pages_of: Callable[[Region], memoryview], path: str, offset: int, out: memoryview) -> None:
        """Put digests into `out`, from `offset` of the view on.

        Args:
            pages_of: Returns the pages of a chunk of the file in plaintext.
            path: Of the file, for errors.
            offset: In the view, not before the first chunk.
            out: As long as what is wanted, which ends with the last chunk at most.

        Raises:
            DecryptionError: A page does not authenticate.
            ParquetFormatError: A chunk is not what its metadata says.
        """
        stop = offset + len(out)
        at = offset
        while at < stop:
            position = bisect_right(self._starts, at) - 1
            chunk = self._chunks[position]
            end = min(stop, chunk.end)
            data = self._made(position, pages_of, path)
            out[at - offset : end - offset] = data[at - chunk.offset : end - chunk.offset]
            at = end

    def _made(self, position: int, pages_of: Callable[[Region], memoryview], path: str) -> memoryview:
        chunk = self._chunks[position]
        key = (self._number, chunk.offset)
        data = self._cache.get(key)
        if data is not None:
            return data
        with self._lock:
            data = self._cache.get(key)
            last = self._last
            if data is None and last is not None and last[0] == position:
                data = last[1]
            if data is None:
                assert self._secret is not None
                pages = pages_of(chunk.region)
                try:
                    data = memoryview(chunk.make(pages, self._secret))
                except ParquetFormatError as error:
                    raise ParquetFormatError(str(error), path=path) from None
                self._cache.put(key, data)
                # One that is too long for the cache is wanted again at once, by who reads it in parts.
                self._last = None if self._cache.get(key) is not None else (position, data)
            return data
