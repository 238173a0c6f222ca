"""What calls to a KMS share: their threads, and what spares it too many of them: a rate, a breaker, a budget."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from parquet_keytools.errors import KmsError
from parquet_keytools.runtime.fork_safety import ForkSafeLock

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
                self._help_later(task, contextvars.copy_context())
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


class Task(Generic[S, T]):
    """One function to be called for many items, and whether the KMS answers the calls for them."""

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
        self._root: Task[Any, Any] = self if outer is None else outer._root
        self._failure: KmsError | None = None
        self._last_answer: float | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled or (self._outer is not None and self._outer.is_cancelled)

    @property
    def failure(self) -> KmsError | None:
        """Why the rest of the calls shall fail at once, those of tasks around it and within it included.

        One ended with this, after all the time that a call has, while no other one was answered.
        """
        return self._root._failure

    def answered(self, now: float) -> None:
        """Note that the KMS answered a call."""
        self._root._last_answer, self._root._failure = now, None

    def give_up(self, failure: KmsError, started: float) -> None:
        """Note that a call used up its time."""
        if self._root._last_answer is None or self._root._last_answer < started:
            self._root._failure = failure

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


# --- the rate of calls ---


_CUT = 0.85
"""What is left, when the KMS throttles, of the rate at which it answered."""

_CUT_PAUSE_SECONDS = 0.5
"""Calls that were under way when the rate was cut are throttled too: they do not cut again."""

_DOUBLINGS_PER_SECOND = 2.0
"""Growth while nobody knows what the KMS takes, or far below that."""

_PROBING_PER_SECOND = 0.03
"""Growth near the rate at which it throttled last, as a part of that rate."""

_OUTGROWN = 1.2
"""Beyond so many times that rate it is forgotten: the KMS takes more now."""

_UNLIMITED_AFTER_SECONDS = 5.0
_UNNEEDED = 4.0
_LEAST_CALLS_PER_SECOND = 1.0


class CallRate:
    """Spaces calls out. All threads share it, so a throttled KMS is asked less by all of them."""

    def __init__(self, max_calls_per_second: float | None, clock: Callable[[], float]) -> None:
        self._most = max_calls_per_second
        self._clock = clock
        self._lock = ForkSafeLock()
        self._rate = max_calls_per_second
        self._throttled_at: float | None = None
        """Calls a second at which the KMS throttled last."""
        self._next_call = 0.0
        self._last_cut = self._last_growth = clock()
        self._answers = _Counter(clock())
        self._turns = _Counter(clock())

    @property
    def calls_per_second(self) -> float | None:
        """How many calls are started in a second now; None where that has no limit."""
        with self._lock:
            return self._rate

    def reserve(self, within_seconds: float) -> float | None:
        """Take the next place in the row of calls, if it comes soon.

        A place far ahead is not given away: the rate may have changed a lot before it comes.

        Returns:
            How many seconds to wait for it; None if it comes later: nothing is taken then.
        """
        with self._lock:
            if self._rate is None:
                return 0.0
            now = self._clock()
            start = max(self._next_call, now)
            if start - now > within_seconds:
                return None
            self._next_call = start + 1 / self._rate
            self._turns.add(now)
            return start - now

    def throttled(self) -> None:
        """Note that the KMS asked for fewer calls."""
        with self._lock:
            now = self._clock()
            if now - self._last_cut < _CUT_PAUSE_SECONDS and self._rate is not None:
                return
            self._last_cut = self._last_growth = now
            # What it answered, not what it was asked: it may have been asked many times what it takes.
            answered = self._answers.per_second(now)
            rate = answered if self._rate is None else min(self._rate, answered)
            if rate > _LEAST_CALLS_PER_SECOND:
                self._throttled_at = None if self._rate is None else rate
            self._rate = self._bounded(rate * _CUT)

    def answered(self) -> None:
        """Note that the KMS did what it was asked for."""
        with self._lock:
            now = self._clock()
            self._answers.add(now)
            if self._rate is None or self._rate == self._most:
                return
            passed = min(now - self._last_growth, 1.0)
            self._last_growth = now
            known = self._throttled_at
            if known is None or self._rate < known * _CUT:
                self._rate = self._bounded(self._rate * 2.0 ** (passed * _DOUBLINGS_PER_SECOND))
            else:
                self._rate = self._bounded(self._rate + known * _PROBING_PER_SECOND * passed)
                if self._rate > known * _OUTGROWN:
                    self._throttled_at = None
            self._lift_limit(now)

    def _lift_limit(self, now: float) -> None:
        """Drop the limit when it is far above what callers ask for."""
        if self._most is None and self._rate is not None and now - self._last_cut > _UNLIMITED_AFTER_SECONDS:
            needed = max(self._turns.per_second(now), _LEAST_CALLS_PER_SECOND)
            if self._rate > _UNNEEDED * needed:
                self._rate = self._throttled_at = None

    def _bounded(self, rate: float) -> float:
        least = _LEAST_CALLS_PER_SECOND if self._most is None else min(_LEAST_CALLS_PER_SECOND, self._most)
        return max(least, rate if self._most is None else min(rate, self._most))


class _Counter:
    """Counts what happened in the last second, roughly."""

    def __init__(self, now: float) -> None:
        self._start = now
        self._here = 0
        self._before: int | None = None

    def add(self, now: float) -> None:
        self._turn(now)
        self._here += 1

    def per_second(self, now: float) -> float:
        self._turn(now)
        passed = now - self._start
        if self._before is None:
            return self._here / max(passed, 0.1)
        return self._before * (1 - passed) + self._here

    def _turn(self, now: float) -> None:
        passed = now - self._start
        if passed >= 1:
            self._before = self._here if passed < 2 else 0
            self._here = 0
            self._start = now - passed % 1


# --- while the KMS fails ---


_LEAST_FAILURES = 5
"""Fewer than these open nothing: a lone caller may have met a single broken connection twice in a while."""


class CircuitBreaker:
    """Opens when a KMS could not be reached for a time, without one answer in between.

    A KMS that is restarted is down for some seconds, and callers shall go on then; so what counts is for how
    long it has been failing, not how often.
    """

    def __init__(self, open_after_seconds: float, probe_every_seconds: float, clock: Callable[[], float]) -> None:
        self._open_after_seconds = open_after_seconds
        self._probe_every_seconds = probe_every_seconds
        self._clock = clock
        self._lock = ForkSafeLock()
        self._failures = 0
        self._failing_since = 0.0
        self._last_failure = 0.0
        self._next_probe = 0.0
        self._reported = False

    def is_open(self) -> bool:
        """Return whether calls are refused."""
        with self._lock:
            return self._is_open(self._clock())

    def seconds_to_wait(self) -> float:
        """Return 0 if a call may be made now; while open, that takes the probe. Else for how long not.

        A probe that is never sent delays the next one by no more than the time between two.
        """
        with self._lock:
            now = self._clock()
            if not self._is_open(now):
                return 0.0
            if now >= self._next_probe:
                self._next_probe = now + self._probe_every_seconds
                return 0.0
            return self._next_probe - now

    def answered(self) -> bool:
        """Note that the KMS answered, if only to refuse. Returns whether that closes the breaker."""
        with self._lock:
            self._failures = 0
            was_reported, self._reported = self._reported, False
            return was_reported

    def failed(self) -> bool:
        """Note that the KMS could not be reached. Returns whether that opens the breaker."""
        with self._lock:
            now = self._clock()
            if self._failures == 0 or self._is_forgotten(now):
                self._failures, self._failing_since, self._reported = 0, now, False
            self._failures += 1
            self._last_failure = now
            if self._reported or not self._is_open(now):
                return False
            self._next_probe = now + self._probe_every_seconds
            self._reported = True
            return True

    def _is_open(self, now: float) -> bool:
        return (
            self._failures >= _LEAST_FAILURES
            and self._last_failure - self._failing_since >= self._open_after_seconds
            and not self._is_forgotten(now)
        )

    def _is_forgotten(self, now: float) -> bool:
        """Return whether the last failure is so long ago that nobody knows what is the case now."""
        return now - self._last_failure > 2 * max(self._open_after_seconds, self._probe_every_seconds)


class RetryBudget:
    """A bucket for a burst of retries: each answer of the KMS puts one in, and time does so slowly.

    So there are about as many retries as answers: a KMS that answers nothing gets little beyond the calls
    that begin, and one that is back soon gets all that waited. An empty bucket delays and never gives up.
    """

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._lock = ForkSafeLock()
        self._left = burst
        self._filled_at = clock()

    def take(self) -> float:
        """Take a retry and return 0; or take none, and return in how many seconds there will be one."""
        with self._lock:
            now = self._clock()
            self._left = min(self._burst, self._left + (now - self._filled_at) * self._per_second)
            self._filled_at = now
            # Sums of small floats may end just below 1, which would let callers wait for next to nothing.
            if self._left >= 1 - 1e-6:
                self._left = max(self._left - 1, 0.0)
                return 0.0
            return (1 - self._left) / self._per_second

    def answered(self) -> None:
        """Note that the KMS answered: that allows one retry."""
        with self._lock:
            self._left = min(self._burst, self._left + 1)
