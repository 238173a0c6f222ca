"""How many calls a second a KMS gets: as many as it takes, fewer while it throttles."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.fork_safe_lock import ForkSafeLock

_CUT = 0.7
"""What is left of the rate when the KMS throttles."""

_CUT_PAUSE_SECONDS = 0.5
"""Calls that were under way when the rate was cut are throttled too: they do not cut again."""

_GROWTH = 1.02
_GROWTH_PAUSE_SECONDS = 0.1
_LEAST_CALLS_PER_SECOND = 1.0
_MEASURED_SECONDS = 1.0


class CallRate:
    """Spaces calls out. All threads share it, so a throttled KMS is asked less by all of them.

    Args:
        max_calls_per_second: Never more than these; None for no limit other than what the KMS itself sets.
        clock: Seconds from some start, never going back.
    """

    def __init__(self, max_calls_per_second: float | None, clock: Callable[[], float]) -> None:
        self._most = max_calls_per_second
        self._clock = clock
        self._lock = ForkSafeLock()
        self._rate = max_calls_per_second
        self._next_call = 0.0
        self._last_cut = self._last_growth = self._window_start = clock()
        self._calls_in_window = 0
        self._measured = 0.0

    def reserve(self) -> float:
        """Take the next place in the row of calls. Returns how many seconds to wait for it."""
        with self._lock:
            now = self._clock()
            self._measure(now)
            if self._rate is None:
                return 0.0
            start = max(self._next_call, now)
            self._next_call = start + 1 / self._rate
            return start - now

    def throttled(self) -> None:
        """Note that the KMS asked for fewer calls."""
        with self._lock:
            now = self._clock()
            if now - self._last_cut < _CUT_PAUSE_SECONDS:
                return
            self._last_cut = self._last_growth = now
            measured = max(self._measured, self._calls_in_window / max(now - self._window_start, 0.1))
            rate = measured if self._rate is None else min(self._rate, measured)
            self._rate = max(_LEAST_CALLS_PER_SECOND, rate * _CUT)

    def answered(self) -> None:
        """Note that the KMS did what it was asked for."""
        with self._lock:
            now = self._clock()
            if self._rate is None or self._rate == self._most or now - self._last_growth < _GROWTH_PAUSE_SECONDS:
                return
            self._last_growth = now
            self._rate *= _GROWTH
            if self._most is not None:
                self._rate = min(self._rate, self._most)
            elif self._rate > 4 * max(self._measured, _LEAST_CALLS_PER_SECOND):
                self._rate = None

    def _measure(self, now: float) -> None:
        passed = now - self._window_start
        if passed >= _MEASURED_SECONDS:
            self._measured = self._calls_in_window / passed
            self._window_start, self._calls_in_window = now, 0
        self._calls_in_window += 1
