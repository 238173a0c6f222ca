"""Locks, connections and writers in a forked child."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from parquet_keytools.runtime.operating_system import register_at_fork

T = TypeVar("T")

_all_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


class ForkSafeLock:
    """A `threading.Lock` that is released in a forked child, which lacks the thread that would release it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all_locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def held_within(self, seconds: float) -> Iterator[None]:
        """Hold the lock in a block; raise `TimeoutError` if others hold it longer."""
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
    """The process that made an object; forked children have copies of the object."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process_id


class SharedWork:
    """What the processes of one command have in common.

    Attributes:
        processes: How many share the work, and limits such as concurrent calls of the KMS.
        someone_waits: Whether this is the command line: a service can wait longer for a KMS that restarts.
    """

    processes = 1
    someone_waits = False


@contextlib.contextmanager
def someone_waiting(waits: bool = True) -> Iterator[None]:
    """Set `SharedWork.someone_waits` in a block."""
    former, SharedWork.someone_waits = SharedWork.someone_waits, waits
    try:
        yield
    finally:
        SharedWork.someone_waits = former


_inherited: list[object] = []
"""Objects of the parent that a child may neither use nor destroy: some SDKs hang when they clean up there."""

_begun: weakref.WeakSet[object] = weakref.WeakSet()


def leave_to_parent(writer: object) -> None:
    """Keep a writer in forked children: C++ finishes the file when the writer is destroyed."""
    _begun.add(writer)


register_at_fork(after_in_child=lambda: _inherited.extend(_begun))


class PerProcess(Generic[T]):
    """Makes an object when it is first needed, and another one in a forked child.

    The child keeps the parent's object, but neither uses nor closes it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ForkSafeLock()
        self._process_id = 0
        self._object: T | None = None

    def get(self) -> T:
        """Return the object of this process."""
        with self._lock:
            self._leave_to_parent()
            if self._object is None:
                self._object = self._make()
                self._process_id = os.getpid()
            return self._object

    def take(self) -> T | None:
        """Return and forget the object of this process, if any: the next `get` makes another."""
        with self._lock:
            self._leave_to_parent()
            found, self._object = self._object, None
            return found

    def _leave_to_parent(self) -> None:
        if self._object is not None and self._process_id != os.getpid():
            _inherited.append(self._object)
            self._object = None


_LONGEST_FORK_WAIT_SECONDS = 10.0
"""After this, the fork continues anyway: a hung call must not block the start of a process."""


class CallGate:
    """Lets calls into a library through, any number at a time, but none while the process forks.

    Some libraries, such as gRPC, are unusable in a child whose parent had a thread inside them. So a fork waits
    until the calls of this package are done, and new calls wait for the fork.
    """

    def __init__(self) -> None:
        self.renew()
        register_at_fork(before=self.before_fork, after_in_parent=self.after_fork, after_in_child=self.renew)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Close the gate, and wait for the calls in flight."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._calls, _LONGEST_FORK_WAIT_SECONDS)

    def after_fork(self) -> None:
        """Open the gate again in the parent."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def renew(self) -> None:
        """Reset the gate: a child has none of its parent's calls."""
        self._changed = threading.Condition()
        self._calls = 0
        self._forks = 0
