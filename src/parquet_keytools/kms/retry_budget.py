"""How many tries more a client makes: a KMS that breaks down must not get many times its usual load."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.fork_safe_lock import ForkSafeLock


class RetryBudget:
    """A bucket of retries that fills up with time.

    It fills whatever happens, so whoever waits gets a try: an empty bucket delays and never gives up.

    Args:
        burst: How many retries may be made at once.
        per_second: How many come back each second.
        clock: Seconds from some start, never going back.
    """

    def __init__(self, burst: int, per_second: float, clock: Callable[[], float]) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._clock = clock
        self._lock = ForkSafeLock()
        self._left = self._burst
        self._filled_at = clock()

    def take(self) -> float:
        """Take a retry. Returns how many seconds to wait until it may be made."""
        with self._lock:
            now = self._clock()
            self._left = min(self._burst, self._left + (now - self._filled_at) * self._per_second)
            self._filled_at = now
            self._left -= 1
            return max(0.0, -self._left / self._per_second)
