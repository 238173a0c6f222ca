"""Many calls at a time, in threads that all callers share."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from parquet_keytools.errors import KmsError

S = TypeVar("S")
T = TypeVar("T")


class ConcurrentCalls:
    """Calls a function for many items in as many threads as there are, and in that of the caller.

    Threads take one item after the other of every caller in turn, so a small task does not wait for the end of
    a large one. As the caller works too, nobody waits for a thread, and a task within a task locks nothing up.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="parquet-keytools-kms")

    def map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function, in the order of the items.

        What interrupts the caller, or is raised by the function, ends the task: what has not begun does not
        begin, and nobody waits for what has.
        """
        task = Task(function, items, current_task())
        token = _current_task.set(task)
        try:
            for _ in range(min(len(items) - 1, self._max_threads)):
                # Each thread needs a context of its own; it carries the trace and the file the calls are about.
                if not self._help_later(task, contextvars.copy_context()):
                    break
            while task.do_one():
                pass
            return task.results()
        except BaseException:
            task.cancel()
            raise
        finally:
            _current_task.reset(token)

    def close(self) -> None:
        """Let the threads end when they have done what there is to do."""
        self._pool.shutdown(wait=False)

    def _help_later(self, task: Task[S, T], context: contextvars.Context) -> bool:
        """Queue help for a task. Returns whether that is possible: not after `close`, nor as the process ends."""
        try:
            self._pool.submit(self._help, task, context)
        except RuntimeError:
            return False
        return True

    def _help(self, task: Task[S, T], context: contextvars.Context) -> None:
        """Do one item of a task, and queue for the next; others may be in the queue."""
        # What an item raises is raised where its caller waits.
        with contextlib.suppress(BaseException):
            while context.run(task.do_one) and not self._help_later(task, context):
                pass


class Progress:
    """Whether the KMS answers the calls of a task, and of the tasks within it.

    Attributes:
        failure: Why the rest of the calls shall fail at once: with this one ended, after all the time that a call
            has, while no other one was answered.
    """

    def __init__(self) -> None:
        self.failure: KmsError | None = None
        self._last_answer: float | None = None

    def answered(self, now: float) -> None:
        """Note that the KMS answered a call."""
        self._last_answer, self.failure = now, None

    def give_up(self, failure: KmsError, started: float) -> None:
        """Note that a call used up its time."""
        if self._last_answer is None or self._last_answer < started:
            self.failure = failure


class Task(Generic[S, T]):
    """One function to be called for many items."""

    def __init__(self, function: Callable[[S], T], items: Sequence[S], outer: Task[Any, Any] | None) -> None:
        self._function = function
        self._items = items
        self._results: list[T | None] = [None] * len(items)
        self._outer = outer
        self._state = threading.Condition()
        self._begun = 0
        self._under_way = 0
        self._cancelled = False
        self._error: BaseException | None = None
        self.progress: Progress = outer.progress if outer is not None else Progress()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled or (self._outer is not None and self._outer.is_cancelled)

    def do_one(self) -> bool:
        """Call the function for the next item. Returns whether there was one."""
        with self._state:
            if self.is_cancelled or self._begun == len(self._items):
                return False
            position = self._begun
            self._begun += 1
            self._under_way += 1
        try:
            self._results[position] = self._function(self._items[position])
        except BaseException as error:
            with self._state:
                self._error = self._error or error
                self._cancelled = True
            raise
        finally:
            with self._state:
                self._under_way -= 1
                self._state.notify_all()
        return True

    def results(self) -> list[T]:
        """Wait until all that has begun has ended, and return the results."""
        with self._state:
            self._state.wait_for(lambda: self._under_way == 0 or self._error is not None)
            if self._error is not None:
                raise self._error
            if self._begun < len(self._items):
                raise InterruptedError("the calls were given up")
        return self._results  # type: ignore[return-value]  # each of them was done

    def cancel(self) -> None:
        """Begin nothing more."""
        with self._state:
            self._cancelled = True


_current_task: contextvars.ContextVar[Task[Any, Any] | None] = contextvars.ContextVar(
    "parquet_keytools_task", default=None
)


def current_task() -> Task[Any, Any] | None:
    """Return the task that the caller does an item of."""
    return _current_task.get()
