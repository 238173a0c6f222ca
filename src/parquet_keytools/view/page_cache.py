"""Pages that were decrypted last, for readers that come back for the rest of one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque

from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.view.read_buffers import ReadBuffers

CACHE_BYTES = 64 * 1024 * 1024
"""How much the pages in a cache may take, in bytes."""

PageKey = tuple[int, int]
"""A number of the file's own, and where the page begins."""


class PageCache:
    """Plaintext pages of any number of files, bounded by their bytes; for any number of threads.

    Attributes:
        held_bytes: How much it holds.
        buffers: Memory for what is read of these files.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.held_bytes = 0
        self.buffers = ReadBuffers()
        self._max_bytes = max_bytes
        self._pages: OrderedDict[PageKey, memoryview] = OrderedDict()
        self._lock = ForkSafeLock()
        self._forgotten: deque[int] = deque()

    def get(self, key: PageKey) -> memoryview | None:
        """Return a page with its header, if it is held."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: PageKey, page: memoryview) -> None:
        """Keep a page, in place of those that nobody used for the longest time."""
        with self._lock:
            self._drop_forgotten()
            if len(page) > self._max_bytes or key in self._pages:
                return
            self._pages[key] = page
            self.held_bytes += len(page)
            while self.held_bytes > self._max_bytes:
                _, oldest = self._pages.popitem(last=False)
                self.held_bytes -= len(oldest)

    def forget(self, number: int) -> None:
        """Drop the pages of a file; at once, unless another one is looked for or kept meanwhile.

        The garbage collector may call this at any time, also in a thread that has the lock.
        """
        self._forgotten.append(number)
        with contextlib.suppress(TimeoutError), self._lock.held_within(0):
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            number = self._forgotten.popleft()
            for key in [key for key in self._pages if key[0] == number]:
                self.held_bytes -= len(self._pages.pop(key))
