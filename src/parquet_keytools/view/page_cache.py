"""Pages that were decrypted last, for readers that come back for the rest of one, and the memory for them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import itemgetter

from parquet_keytools.runtime.fork_safety import ForkSafeLock

KEPT_BYTES = 128 * 1024 * 1024
"""How much memory is kept for the next readers, in bytes."""

_SMALLEST = 128 * 1024
"""Below that, the allocator of C keeps memory itself."""


class _Buffer(io.BytesIO):
    def __del__(self) -> None:
        """Close nothing: if parts of a view outlive a failed read, Python 3.13 says on stderr that it cannot."""


def _references_to_content(buffer: _Buffer) -> int:
    content = buffer.getvalue()
    return sys.getrefcount(content)


_NOT_SHARED = _references_to_content(_Buffer(bytes(2)))
"""References to bytes that only their buffer has; in Python 3.14 local variables have none."""

CACHE_BYTES = 64 * 1024 * 1024
"""How much the pages in a cache may take, in bytes."""

PageKey = tuple[int, int]
"""A number of the file's own, and where the page begins."""


class ReadBuffers:
    """Makes bytes objects in place, for any number of threads, in memory that readers are done with.

    The operating system hands out memory zeroed, page by page as it is touched first. That costs more than reading
    and decrypting what goes there.

    A buffer shares its memory with the bytes that came from it. If these are still in use when it is written to,
    it takes other memory: what was given out never changes.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[_Buffer] = []
        self._lock = ForkSafeLock()

    def filled(self, length: int, fill: Callable[[memoryview], None]) -> bytes:
        """Return bytes of a length.

        Args:
            length: How many.
            fill: Writes each of them: what is there before is of another read.
        """
        buffer = self._taken(length) if length >= _SMALLEST else _Buffer(bytes(length))
        with buffer.getbuffer() as out:
            fill(out)
        data = buffer.getvalue()
        if length >= _SMALLEST:
            self._keep(buffer)
        return data

    def _taken(self, length: int) -> _Buffer:
        with self._lock:
            free = []
            for position, buffer in enumerate(self._kept):
                if _references_to_content(buffer) == _NOT_SHARED:
                    free.append((abs(_length(buffer) - length), position))
            if not free:
                return _Buffer(bytes(length))
            buffer = self._kept.pop(min(free, key=itemgetter(0))[1])
        buffer.truncate(length)
        if _length(buffer) < length:
            buffer.seek(length - 1)
            buffer.write(b"\0")
        return buffer

    def _keep(self, buffer: _Buffer) -> None:
        with self._lock:
            self._kept.append(buffer)
            held = sum(map(_length, self._kept))
            while held > self._kept_bytes:
                held -= _length(self._kept.pop(0))


def _length(buffer: _Buffer) -> int:
    return buffer.seek(0, io.SEEK_END)


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
