"""Threads that work on many things together, and have ended when their caller goes on.

Callers close, rename or remove files afterwards: no thread may still write to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int) -> None:
    """Have threads work on items, of which each takes the next one by itself; after an error none takes another.

    Handing over each item and its result would take longer than much of the work that is done here.

    Args:
        work: Is called once by each thread, with an iterator over the items that this thread takes.
        items: Are made as they are taken, by one thread at a time.
        threads: How many threads work; the calling one is among them.

    Raises:
        BaseException: What was raised in the calling thread, else the first error of another one. No thread works
            then.
    """
    shared = _Shared(items)
    pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="parquet-keytools")
    futures: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            futures.append(pool.submit(shared.help, work))
        work(shared)
        wait(futures)
    except BaseException:
        shared.stop()
        raise
    finally:
        try:
            end(pool, futures)
        finally:
            # Also for a thread of which `submit` was interrupted: its future is not among ours.
            shared.wait_for_helpers()
    for future in futures:
        future.result()


def in_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what a function returns for each item, in their order; after an error it is called for no other one.

    The calling thread only waits: no signal, such as of Ctrl-C, interrupts a call that was begun.

    Args:
        function: Is called by several threads.
        items: What it is called with.
        threads: How many threads work, at most.

    Raises:
        BaseException: What interrupted the calling thread, else the error for the first item that has one. No
            thread works then.
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
    """Let a pool begin no other call, and wait for the calls that it has begun, also when interrupted.

    Args:
        pool: The pool.
        futures: All calls that may be left.

    Raises:
        KeyboardInterrupt: The wait was interrupted; the calls have ended all the same.
    """
    interruption: KeyboardInterrupt | None = None
    have_ended = False
    while not have_ended:
        try:
            for future in futures:
                future.cancel()
            # Not for threads: up to Python 3.12, a thread whose `join` was interrupted counts as ended.
            wait([future for future in futures if not future.cancelled()])
            have_ended = True
        except KeyboardInterrupt as error:
            interruption = error
    pool.shutdown()
    if interruption is not None:
        raise interruption


class _Shared(Iterator[T]):
    """The items that are left, until it is stopped."""

    def __init__(self, items: Iterable[T]) -> None:
        self._is_stopped = False
        self._items = iter(items)
        self._lock = threading.Lock()
        self._helpers = 0
        self._helper_ended = threading.Condition()

    def __next__(self) -> T:
        with self._lock:
            if self._is_stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        """Let no thread take another item, and no thread begin."""
        with self._helper_ended:
            self._is_stopped = True

    def help(self, work: Callable[[Iterator[T]], None]) -> None:
        """Work in this thread."""
        with self._helper_ended:
            if self._is_stopped:
                return
            self._helpers += 1
        try:
            work(self)
        except BaseException:
            self.stop()
            raise
        finally:
            with self._helper_ended:
                self._helpers -= 1
                self._helper_ended.notify_all()

    def wait_for_helpers(self) -> None:
        """Wait until no thread works, also when interrupted.

        Raises:
            KeyboardInterrupt: The wait was interrupted; the threads have ended all the same.
        """
        interruption: KeyboardInterrupt | None = None
        have_ended = False
        while not have_ended:
            try:
                with self._helper_ended:
                    self._helper_ended.wait_for(lambda: not self._helpers)
                have_ended = True
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption
