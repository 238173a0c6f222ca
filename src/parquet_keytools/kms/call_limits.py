"""What a KMS is spared: more calls than it takes, all but a probe while it is down, and too many retries."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.runtime.fork_safety import ForkSafeLock

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
_WINDOW_SECONDS = 1.0


class CallRate:
    """Spaces calls out. All threads share it, so a throttled KMS is asked less by all of them.

    Args:
        max_calls_per_second: Never more than these; None for no limit other than what the KMS itself sets.
    """

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
        return self._before * (1 - passed / _WINDOW_SECONDS) + self._here

    def _turn(self, now: float) -> None:
        passed = now - self._start
        if passed >= _WINDOW_SECONDS:
            self._before = self._here if passed < 2 * _WINDOW_SECONDS else 0
            self._here = 0
            self._start = now - passed % _WINDOW_SECONDS


# --- while the KMS fails ---


_LEAST_FAILURES = 5
"""Fewer than these open nothing: a lone caller may have met a single broken connection twice in a while."""


class CircuitBreaker:
    """Opens when a KMS could not be reached for a time, without one answer in between.

    A KMS that is restarted is down for some seconds, and callers shall go on then; so what counts is for how
    long it has been failing, not how often.

    Args:
        open_after_seconds: How long a KMS may be failing before calls are refused.
        probe_every_seconds: How often a call is let through while it is open.
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
    """A bucket of retries: each answer of the KMS puts one in, and time does so slowly.

    So there are about as many retries as answers: a KMS that answers nothing gets little beyond the calls
    that begin, and one that is back soon gets all that waited. An empty bucket delays and never gives up.

    Args:
        burst: How many retries may be made at once.
        per_second: How many come back each second, whatever happens.
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
