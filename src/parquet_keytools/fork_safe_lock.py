"""A lock that a forked child finds open."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType

_all_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A `threading.Lock` that is fresh in a child process.

    A fork copies locks as they are, but not the threads that would open them: a child of a busy process would
    wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all_locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def held_within(self, seconds: float) -> Iterator[None]:
        """Hold the lock in a block.

        Raises:
            TimeoutError: It could not be had in so many seconds.
        """
        if not self._lock.acquire(timeout=max(seconds, 0)):
            raise TimeoutError
        try:
            yield
        finally:
            self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in _all_locks:
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
