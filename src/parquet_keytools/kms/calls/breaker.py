"""What a failing KMS is spared: all calls but a probe now and then while it is down, and too many retries."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.runtime.fork_safety import ForkSafeLock

_LEAST_FAILURES = 5
"""Fewer than these open nothing: a lone caller may have met a single broken connection twice in a while."""


class CircuitBreaker:
    """Opens when a KMS could not be reached for a time, without one answer in between.

    A KMS that is restarted is down for some seconds, and callers shall go on then; so what counts is for how
    long it has been failing, not how often.

    Args:
        open_after_seconds: How long a KMS may be failing before calls are refused.
        probe_every_seconds: How often a call is let through while it is open.
        clock: Seconds from some start, never going back.
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
        clock: Seconds from some start, never going back.
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
