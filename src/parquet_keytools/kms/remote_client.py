"""What clients of a KMS across a network have in common: deadlines, tries, limits and a circuit breaker.

The SDKs' own retries are switched off by the backends, so that there is one policy, and one place for it.
"""

from __future__ import annotations

import contextvars
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import Field

from parquet_keytools.errors import (
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.kms.call_rate import CallRate
from parquet_keytools.kms.circuit_breaker import CircuitBreaker
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.per_process import PerProcess
from parquet_keytools.kms.retry_budget import RetryBudget

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E", bound=KmsError)

_TRIES_OF_INVALID_ANSWERS = 3
"""An answer that was damaged on its way is asked for again; one that is wrong each time is not."""

_LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = {KmsUnavailableError: 0.05, KmsThrottledError: 0.1, KmsResponseInvalidError: 0.02}


class RemoteKmsSettings(KmsSettings):
    """Settings that every KMS across a network has.

    Attributes:
        call_timeout_seconds: How long one try may take, connecting included.
        timeout_seconds: How long a call may take with all its tries.
        max_tries: How often a call is tried that may succeed later.
        max_concurrent_calls: How many calls are under way at a time.
        max_calls_per_second: How many are started in a second; None lets the KMS's own throttling decide.
        fail_fast_after_seconds: When the KMS could not be reached for so long, new calls fail at once.
        probe_every_seconds: How often one is let through then, to see whether it is back.
    """

    call_timeout_seconds: float = Field(
        default=5.0, gt=0, le=600, description="How long one try of a call may take, in seconds."
    )
    timeout_seconds: float = Field(
        default=60.0, gt=0, le=3600, description="How long a call may take with all its tries, in seconds."
    )
    max_tries: int = Field(
        default=10, ge=1, le=100, description="How often a call is tried that may succeed later."
    )
    max_concurrent_calls: int = Field(
        default=32, ge=1, le=1000, description="How many calls to the KMS are under way at a time."
    )
    max_calls_per_second: float | None = Field(
        default=None,
        gt=0,
        description="How many calls are started in a second; without it the KMS's own throttling decides.",
    )
    fail_fast_after_seconds: float = Field(
        default=20.0,
        gt=0,
        description="When the KMS could not be reached for so many seconds, new calls fail at once.",
    )
    probe_every_seconds: float = Field(
        default=2.0, gt=0, description="How often a call is let through then, to see whether the KMS is back."
    )


@dataclass(frozen=True)
class Time:
    """Clock, pauses and chance; tests pass others."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = field(default=random.uniform)


class RemoteKmsClient(KmsClient):
    """A KMS across a network. Backends send one try with `_call`, and many calls with `_map`.

    Throttled calls are tried until `timeout_seconds` are over or `max_tries` are used up, while all threads
    slow down; so are calls to a KMS that cannot be reached, as far as the budget for retries allows; answers
    that are not valid are asked for three times; all other errors are final.
    """

    def __init__(self, limits: RemoteKmsSettings, time_source: Time | None = None) -> None:
        super().__init__()
        self.limits = limits
        self._time = time_source or Time()
        self._traffic = PerProcess(lambda: _Traffic(limits, self._time))

    def close(self) -> None:
        """Give back threads and connections. A call after this makes new ones."""
        traffic = self._traffic.take()
        if traffic is not None:
            traffic.close()

    def _call(self, operation: str, master_key_id: str | None, send: Callable[[float], T]) -> T:
        """Call the KMS, with as many tries as the errors allow.

        Args:
            operation: For errors, metrics and traces.
            master_key_id: For errors; None for a call about many.
            send: Makes one try within the seconds it is given. What it raises goes through `_translate`.

        Raises:
            KmsError: The last try's error, with `tries`.
        """
        traffic = self._traffic.get()
        refused_for = traffic.breaker.seconds_to_wait()
        if refused_for:
            raise self._down(operation, master_key_id, refused_for)
        started = self._time.clock()
        deadline = started + self.limits.timeout_seconds
        tries = 0
        while True:
            tries += 1
            outcome = self._try(traffic, operation, master_key_id, send, deadline)
            if not isinstance(outcome, KmsError):
                return outcome
            pause = self._pause(traffic, outcome, tries)
            if pause is None or not self._wait(traffic, pause, deadline):
                break
        raise outcome.after(tries, self._time.clock() - started)

    def _map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function that does not raise, called for several items at a time."""
        if len(items) <= 1:
            return [function(item) for item in items]
        pool = self._traffic.get().pool
        # Each thread needs a context of its own; it carries the trace and the file the calls are about.
        calls = [pool.submit(contextvars.copy_context().run, function, item) for item in items]
        try:
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def _try(
        self,
        traffic: _Traffic,
        operation: str,
        master_key_id: str | None,
        send: Callable[[float], T],
        deadline: float,
    ) -> T | KmsError:
        """Make one try. Returns what came back, or why nothing did."""
        if not traffic.slots.acquire(timeout=max(deadline - self._time.clock(), 0)):
            detail = f"{self.limits.max_concurrent_calls} calls were under way all the time"
            return self._error(KmsUnavailableError, operation, master_key_id, detail)
        try:
            wait = traffic.rate.reserve()
            if wait:
                self._time.sleep(min(wait, max(deadline - self._time.clock(), 0)))
            seconds = min(self.limits.call_timeout_seconds, deadline - self._time.clock())
            if seconds <= 0:
                return self._error(KmsThrottledError, operation, master_key_id, "no turn in time")
            result = send(seconds)
        except KmsError as error:
            failure = error
        except Exception as error:
            failure = self._translate(error, operation, master_key_id)
        else:
            traffic.breaker.answered()
            traffic.rate.answered()
            return result
        finally:
            traffic.slots.release()
        if isinstance(failure, KmsUnavailableError):
            traffic.breaker.failed()
        else:
            traffic.breaker.answered()
        if isinstance(failure, KmsThrottledError):
            traffic.rate.throttled()
        return failure

    def _wait(self, traffic: _Traffic, pause: float, deadline: float) -> bool:
        """Wait for the next try. Returns whether there is time for one."""
        # A call that began before the KMS was known to be down may wait for it to come back.
        while pause:
            if self._time.clock() + pause >= deadline:
                return False
            self._time.sleep(pause)
            pause = traffic.breaker.seconds_to_wait()
        return True

    def _pause(self, traffic: _Traffic, failure: KmsError, tries: int) -> float | None:
        """Return how long to wait for the next try, or None if there is none: full jitter, doubling."""
        first = _FIRST_PAUSE_SECONDS.get(type(failure))
        most = self.limits.max_tries
        if isinstance(failure, KmsResponseInvalidError):
            most = min(most, _TRIES_OF_INVALID_ANSWERS)
        if first is None or tries >= most:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** (tries - 1))
        pause = self._time.uniform(0, longest)
        if isinstance(failure, KmsUnavailableError):
            pause = max(pause, traffic.retries.take())
        return max(pause, failure.retry_after_seconds)

    def _down(self, operation: str, master_key_id: str | None, seconds: float) -> KmsUnavailableError:
        detail = (
            f"it has not answered for {self.limits.fail_fast_after_seconds:g} seconds or more, "
            f"and is asked again in {seconds:.1f} seconds"
        )
        return self._error(KmsUnavailableError, operation, master_key_id, detail)

    def _error(self, kind: type[E], operation: str, master_key_id: str | None, detail: str = "") -> E:
        return kind(detail, backend=self.backend, operation=operation, master_key_id=master_key_id)


class _Traffic:
    """What the calls of one process share."""

    def __init__(self, limits: RemoteKmsSettings, time_source: Time) -> None:
        clock = time_source.clock
        self.slots = threading.BoundedSemaphore(limits.max_concurrent_calls)
        self.rate = CallRate(limits.max_calls_per_second, clock)
        self.retries = RetryBudget(2 * limits.max_concurrent_calls, limits.max_concurrent_calls, clock)
        self.breaker = CircuitBreaker(limits.fail_fast_after_seconds, limits.probe_every_seconds, clock)
        self.pool = ThreadPoolExecutor(limits.max_concurrent_calls, thread_name_prefix="parquet-keytools-kms")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
