"""Threads that have all ended when their caller goes on: callers then close, rename or remove files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int) -> None:
    """Have threads work on items, each taking the next item itself; after an error no other item is taken.

    To hand over each item and its result would take longer than many of the calls.

    Args:
        work: Called once by each thread, with an iterator over the items that this thread takes.
        items: Made as they are taken, by one thread at a time.
        threads: How many threads work, including the calling one.

    Raises:
        BaseException: The exception of the calling thread, else the first error of another one. All threads have
            ended then.
    """
    shared = _Shared(items)

    def help_out() -> None:
        try:
            work(shared)
        except BaseException:
            shared.stop()
            raise

    pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="parquet-keytools")
    futures: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            futures.append(pool.submit(help_out))
        work(shared)
        wait(futures)
    except BaseException:
        shared.stop()
        raise
    finally:
        end(pool, futures)
    for future in futures:
        future.result()


def in_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return the results of a function for items, in their order; after an error it is called for no other item.

    The calling thread only waits, so that no signal, such as Ctrl-C, interrupts a call.

    Raises:
        BaseException: What interrupted the calling thread, else the error of the first item that failed. All
            threads have ended then.
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
    """Cancel the calls of a pool that have not begun, and wait for the others, even when interrupted.

    Raises:
        KeyboardInterrupt: The wait was interrupted; the calls have ended all the same.
    """
    interruption: KeyboardInterrupt | None = None
    have_ended = False
    while not have_ended:
        try:
            for future in futures:
                future.cancel()
            # Not for the threads: up to Python 3.12, a thread whose `join` was interrupted counts as ended.
            wait([future for future in futures if not future.cancelled()])
            have_ended = True
        except KeyboardInterrupt as error:
            interruption = error
    pool.shutdown()
    if interruption is not None:
        raise interruption


class _Shared(Iterator[T]):
    """The remaining items, until it is stopped."""

    def __init__(self, items: Iterable[T]) -> None:
        self._is_stopped = False
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            if self._is_stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        """Let no thread take another item."""
        self._is_stopped = True
