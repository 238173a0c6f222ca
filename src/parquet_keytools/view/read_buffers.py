"""Memory for what is read, taken again when the reader is done with it.

The operating system hands out memory zeroed, page by page as it is touched first. That costs more than reading and
decrypting what goes there.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from operator import itemgetter

from parquet_keytools.runtime.fork_safety import ForkSafeLock

KEPT_BYTES = 128 * 1024 * 1024
"""How much memory is kept for the next readers, in bytes."""

_SMALLEST = 128 * 1024
"""Below that, the allocator of C keeps memory itself."""

_NOT_SHARED = 3
"""References to bytes that only their buffer has: its own, a local variable, and the argument of `getrefcount`."""


class ReadBuffers:
    """Makes bytes objects in place; for any number of threads.

    A buffer shares its memory with the bytes that came from it. If these are still in use when it is written to,
    it takes other memory: what was given out never changes.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[io.BytesIO] = []
        self._lock = ForkSafeLock()

    def filled(self, length: int, fill: Callable[[memoryview], None]) -> bytes:
        """Return bytes of a length.

        Args:
            length: How many.
            fill: Writes each of them: what is there before is of another read.
        """
        buffer = self._taken(length) if length >= _SMALLEST else io.BytesIO(bytes(length))
        with buffer.getbuffer() as out:
            fill(out)
        data = buffer.getvalue()
        if length >= _SMALLEST:
            self._keep(buffer)
        return data

    def _taken(self, length: int) -> io.BytesIO:
        with self._lock:
            free = []
            for position, buffer in enumerate(self._kept):
                data = buffer.getvalue()
                if sys.getrefcount(data) == _NOT_SHARED:
                    free.append((abs(len(data) - length), position))
                del data
            if not free:
                return io.BytesIO(bytes(length))
            buffer = self._kept.pop(min(free, key=itemgetter(0))[1])
        buffer.truncate(length)
        if _length(buffer) < length:
            buffer.seek(length - 1)
            buffer.write(b"\0")
        return buffer

    def _keep(self, buffer: io.BytesIO) -> None:
        with self._lock:
            self._kept.append(buffer)
            held = sum(map(_length, self._kept))
            while held > self._kept_bytes:
                held -= _length(self._kept.pop(0))


def _length(buffer: io.BytesIO) -> int:
    return buffer.seek(0, io.SEEK_END)
