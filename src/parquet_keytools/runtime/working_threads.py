"""Threads that work on many things together, and have surely ended when their caller goes on.

Whoever has them work closes, renames or removes files afterwards: no thread may still write there then. The pools
of the standard library do not promise that. They do not know of a thread that was being started when Ctrl-C came,
and a second Ctrl-C ends their wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int) -> None:
    """Have threads work on items, of which each takes the next one by itself; after an error none takes another.

    To hand over each item, and its result, would take longer than much of the work that is done here.

    Args:
        work: Is called once by each thread, with an iterator over the items that this thread takes.
        items: Are made as they are taken, by one thread at a time.
        threads: How many threads work; the calling one is among them.

    Raises:
        BaseException: What interrupted the calling thread, else the first error. No thread works then.
    """
    _raise(*_run(work, items, threads - 1, caller_works=True))


def in_threads(
    function: Callable[[T], R],
    items: Sequence[T],
    threads: int,
    *,
    give_up: Callable[[], object] = lambda: None,
) -> list[R]:
    """Return what a function returns for each item, in their order; after an error it is called for no other one.

    The calling thread only waits: no signal, such as of Ctrl-C, interrupts a call that was begun.

    Args:
        function: Is called by several threads.
        items: What it is called with.
        threads: How many threads work, at most.
        give_up: Is called when the wait is interrupted again. It may let calls end that were begun.

    Raises:
        BaseException: What interrupted the calling thread, else the error for the first item that has one. No
            thread works then.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def work(taken: Iterator[tuple[int, T]]) -> None:
        for position, item in taken:
            try:
                results[position] = function(item)
            except BaseException as error:
                errors[position] = error
                raise

    helpers = min(threads, len(items))
    interruption, _ = _run(work, enumerate(items), helpers, caller_works=False, give_up=give_up)
    # All items before one that failed were taken before it, and their calls have ended.
    _raise(interruption, errors.pop(min(errors)) if errors else None)
    return [results[position] for position in range(len(items))]


def _raise(own: BaseException | None, failure: BaseException | None) -> None:
    """Raise what was raised in the calling thread, or the failure of another one, if there is one."""
    error = own if failure is None or not isinstance(own, Exception | None) else failure
    if error is not None:
        try:
            raise error
        finally:
            # What it holds is not kept by a circle of references.
            del error, own, failure


def _run(
    work: Callable[[Iterator[T]], None],
    items: Iterable[T],
    helpers: int,
    *,
    caller_works: bool,
    give_up: Callable[[], object] = lambda: None,
) -> tuple[BaseException | None, BaseException | None]:
    """Return what was raised in the calling thread, and the first failure of another one, when none works."""
    shared = _Shared(items)
    raised: BaseException | None = None
    is_again = has_ended = False
    try:
        for number in range(1, helpers + 1):
            # A daemon: one that is never known to have started must not keep the process from ending.
            threading.Thread(
                target=shared.help, args=(work,), name=f"parquet-keytools-{number}", daemon=True
            ).start()
        if caller_works:
            work(shared)
    except BaseException as error:
        shared.is_stopped, raised = True, error
    # Signals are handled where a function is called. None is called outside of the `try`: so a signal does not end
    # the wait, however often it comes.
    while not has_ended:
        try:
            if is_again:
                give_up()
            has_ended = shared.wait(helpers)
        except BaseException as error:
            is_again, shared.is_stopped, raised = raised is not None, True, error
    return raised, shared.failure


class _Shared(Iterator[T]):
    """The items that are left, and which threads are at work on them.

    The calling thread takes their lock by `with` alone: no signal comes between the lock and the block, and no
    thread waits for it for ever.

    Attributes:
        is_stopped: Whether no thread takes another item.
        failure: The first error of another thread than the calling one.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.is_stopped = False
        self.failure: BaseException | None = None
        self._items = iter(items)
        self._lock = threading.Lock()
        self._working = self._ended = 0
        self._changes: SimpleQueue[None] = SimpleQueue()

    def __next__(self) -> T:
        with self._lock:
            if self.is_stopped:
                raise StopIteration
            return next(self._items)

    def help(self, work: Callable[[Iterator[T]], None]) -> None:
        """Work in this thread; one that starts too late finds no item."""
        with self._lock:
            self._working += 1
        failure = None
        try:
            work(self)
        except BaseException as error:
            failure = error
        with self._lock:
            if failure is not None:
                self.is_stopped, self.failure = True, self.failure or failure
            self._working -= 1
            self._ended += 1
        self._changes.put(None)

    def wait(self, helpers: int) -> bool:
        """Wait until so many threads have ended; of those that were stopped, until none of them works.

        Returns:
            Whether that is so: always.
        """
        while True:
            with self._lock:
                if self._ended == helpers or (self.is_stopped and not self._working):
                    return True
            # What is put there after that look is still there. One who is woken for nothing looks again.
            self._changes.get()
