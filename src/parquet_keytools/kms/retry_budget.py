"""How many tries more a client makes: a KMS that breaks down must not get many times its usual load."""

from __future__ import annotations

from collections.abc import Callable

from parquet_keytools.fork_safe_lock import ForkSafeLock


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
