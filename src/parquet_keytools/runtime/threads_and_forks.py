"""Locks, connections and writers in a forked child; threads that work together; and the end of a process.

After a read, threads of Arrow still drop objects that belong to Python. Up to Python 3.13, if such a thread needs
the interpreter while it is finalised, C++ aborts the process. So the end of a process waits for these threads.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

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

    `processes` share the work, and limits such as concurrent calls of the KMS. `someone_waits` at the command
    line: a service can wait longer for a KMS that restarts.
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
    """Makes an object when it is first needed, and another in a forked child, which leaves the parent's alone."""

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


class ExceptionWatch:
    """Finds the exception that closes a file; created when the file is opened."""

    def __init__(self) -> None:
        self._known = sys.exception()

    def refuse(self, target: object) -> None:
        """Raise the exception that was raised since the file was opened: the file must not be written then."""
        error, known, self._known = sys.exception(), self._known, None
        # The end of an iterator is not a failure.
        if error is None or error is known or isinstance(error, StopIteration | StopAsyncIteration):
            return
        error.add_note(
            f"{target} is not written, because it was closed while this exception was handled: rows may be "
            "missing. To keep what was written, close it outside of `except` and `finally`."
        )
        raise error


# --- the end of a process ---

_WAIT_SECONDS = 5.0
"""How long the end of a process is delayed at most."""

_LOOK_SECONDS = 0.001

_LOOKS = 5
"""How many looks in a row must find no other thread at work.

A thread that waits for the interpreter sleeps while this one looks, and runs in the next look.
"""

_BLIND_LOOKS = 200
"""The same where only the number of shared objects is known, and not the states of threads.

Looks are counted, not seconds: on an overloaded machine, both threads are late.
"""

_TASKS = Path("/proc/self/task")

_shared: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""By number, because objects may be equal, or not hashable yet."""

_numbers = itertools.count()
_has_shared = False
_in_use: set[int] = set()


def share_with_arrow(shared: object) -> None:
    """Register an object that a thread of Arrow may be the last to hold."""
    global _has_shared
    _has_shared = True
    _shared[next(_numbers)] = shared


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Mark this thread as working for Arrow, even while it waits for a server."""
    thread = threading.get_ident()
    is_outermost = thread not in _in_use
    _in_use.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _in_use.discard(thread)


def _wait_for_arrow() -> None:
    if not _has_shared:
        return
    end = time.monotonic() + _WAIT_SECONDS
    count = -1
    quiet_looks = 0
    while time.monotonic() < end:
        at_work = _other_threads_work()
        is_quiet = not _in_use and not at_work and count == len(_shared)
        quiet_looks = quiet_looks + 1 if is_quiet else 0
        if quiet_looks >= (_BLIND_LOOKS if at_work is None else _LOOKS):
            return
        count = len(_shared)
        time.sleep(_LOOK_SECONDS)


def _other_threads_work() -> bool | None:
    """Return whether another thread of this process runs, or waits for a disk; None if unknown."""
    own = str(threading.get_native_id())
    try:
        states = [_state(task) for task in _TASKS.iterdir() if task.name != own]
    except OSError:  # Only Linux has these files.
        return None
    return not {"R", "D"}.isdisjoint(states)


def _state(task: Path) -> str:
    try:
        # The name of a thread, in parentheses, may hold anything.
        return (task / "stat").read_bytes().rpartition(b") ")[2][:1].decode()
    except (FileNotFoundError, ProcessLookupError):  # It ended.
        return ""


def _forget_parent() -> None:
    """Forget objects shared with threads, which do not exist in a child."""
    global _has_shared
    _has_shared = False
    _shared.clear()
    _in_use.clear()


atexit.register(_wait_for_arrow)
register_at_fork(after_in_child=_forget_parent)


R = TypeVar("R")

_LOOK_FOR_SIGNALS_SECONDS = 1.0


def share_out(work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int) -> None:
    """Have threads work on items, of which each takes the next one by itself; after an error none takes another.

    Handing over each item and its result would take longer than much of the work that is done here. The calling
    thread is among the threads. Items are made as they are taken, by one thread at a time. Raises what was raised
    in the calling thread, else the first error of another one; no thread works then.
    """
    shared = _Shared(items)
    pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="parquet-keytools")
    futures: list[Future[None]] = []
    try:
        # A thread whose `submit` was interrupted is not among ours: until all are known, none takes an item.
        with shared.lock:
            for _ in range(threads - 1):
                futures.append(pool.submit(shared.help, work))
            shared.is_open = True
        work(shared)
        _wait_for(futures)
    except BaseException:
        shared.is_open = False
        raise
    finally:
        end(pool, futures)
    for future in futures:
        future.result()


def in_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what a function returns for each item, in their order; after an error it is called for no other one.

    The calling thread only waits: no signal, such as of Ctrl-C, interrupts a call that was begun. Raises what
    interrupted it, else the error for the first item that has one; no thread works then.
    """
    caller = threading.get_ident()
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}

    def work(taken: Iterator[tuple[int, T]]) -> None:
        if threading.get_ident() == caller:
            return
        for position, item in taken:
            try:
                results[position] = function(item)
            except Exception as error:
                errors[position] = error
                raise

    try:
        share_out(work, enumerate(items), 1 + min(threads, len(items)))
    except Exception:
        if not errors:
            raise
        # All items before one that failed were taken before it, and their calls have ended.
        raise errors[min(errors)] from None
    return [results[position] for position in range(len(items))]


def end(pool: Executor, futures: Collection[Future[Any]]) -> None:
    """Let a pool begin no other call, and wait for the calls that it has begun, also when interrupted."""
    interruption: KeyboardInterrupt | None = None
    have_ended = False
    while not have_ended:
        try:
            for future in futures:
                future.cancel()
            # Not for threads: up to Python 3.12, a thread whose `join` was interrupted counts as ended.
            _wait_for(futures)
            have_ended = True
        except KeyboardInterrupt as error:
            interruption = error
    pool.shutdown()
    if interruption is not None:
        raise interruption


def _wait_for(futures: Collection[Future[Any]]) -> None:
    """Wait until calls have ended or are cancelled, whatever their outcome.

    Not by `concurrent.futures.wait`: if it is interrupted, it may keep locks that the threads need at their end.
    And not for long at a time, because a signal just before a wait is noticed only after it.
    """
    for future in futures:
        while not future.done():
            with contextlib.suppress(TimeoutError):
                future.exception(_LOOK_FOR_SIGNALS_SECONDS)


class _Shared(Iterator[T]):
    """The items that are left; threads take them while it is open."""

    def __init__(self, items: Iterable[T]) -> None:
        self.is_open = False
        self.lock = threading.Lock()
        self._items = iter(items)

    def __next__(self) -> T:
        with self.lock:
            if not self.is_open:
                raise StopIteration
            return next(self._items)

    def help(self, work: Callable[[Iterator[T]], None]) -> None:
        """Work in this thread."""
        with self.lock:
            if not self.is_open:
                return
        try:
            work(self)
        except BaseException:
            self.is_open = False
            raise
