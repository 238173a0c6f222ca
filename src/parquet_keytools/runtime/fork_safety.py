"""What a forked child gets: locks that are open, and connections and threads of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from parquet_keytools.runtime.operating_system import register_at_fork

T = TypeVar("T")

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

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def held_within(self, seconds: float) -> Iterator[None]:
        """Hold the lock in a block.

        Raises:
            TimeoutError: It was held by others for so many seconds.
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


register_at_fork(after_in_child=_renew_all)


class OwnerProcess:
    """The process that made an object, of which its children have copies."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process_id


class SharedWork:
    """The work that this process does a part of.

    Attributes:
        processes: How many do it together: they have the limits of one, such as calls of the KMS at a time.
    """

    processes = 1


_begun: weakref.WeakSet[object] = weakref.WeakSet()


def leave_to_parent(writer: object) -> None:
    """Let no forked child end what this process has begun: C++ finishes a file when its writer is destroyed."""
    _begun.add(writer)


def _keep_for_ever() -> None:
    for writer in _begun:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(writer))


register_at_fork(after_in_child=_keep_for_ever)


_inherited: list[object] = []
"""What a child has from its parent and may neither use nor destroy: some SDKs hang when they tidy up there."""


class PerProcess(Generic[T]):
    """Makes a thing when it is first asked for, and another one in a forked child.

    What the parent made is kept in the child, unused and never closed: it is the parent's.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ForkSafeLock()
        self._process_id = 0
        self._thing: T | None = None

    def get(self) -> T:
        """Return this process's one."""
        with self._lock:
            self._leave_to_parent()
            if self._thing is None:
                self._thing = self._make()
                self._process_id = os.getpid()
            return self._thing

    def take(self) -> T | None:
        """Return this process's one, if there is one, and forget it, so that the next `get` makes another."""
        with self._lock:
            self._leave_to_parent()
            thing, self._thing = self._thing, None
            return thing

    def _leave_to_parent(self) -> None:
        if self._thing is not None and self._process_id != os.getpid():
            _inherited.append(self._thing)
            self._thing = None
