"""One call to a KMS across a network, with all its tries."""

from __future__ import annotations

import contextvars
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from parquet_keytools import telemetry
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.kms.call_rate import CallRate
from parquet_keytools.kms.circuit_breaker import CircuitBreaker
from parquet_keytools.kms.concurrent_calls import ConcurrentCalls, current_task
from parquet_keytools.kms.retry_budget import RetryBudget

if TYPE_CHECKING:
    from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings

T = TypeVar("T")
E = TypeVar("E", bound=KmsError)

_TRIES_OF_INVALID_ANSWERS = 3
"""An answer that was damaged on its way is asked for again; one that is wrong each time is not."""

_LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS: dict[type[KmsError], float] = {
    KmsUnavailableError: 0.05,
    KmsThrottledError: 0.1,
    KmsResponseInvalidError: 0.02,
}

_LOOK_AGAIN_SECONDS = 0.25
"""Those who wait for a turn see by then that the rate has changed, the KMS is back, or nobody wants the result."""

_PART_OF_AGE = 0.1
"""A call that lasts ten seconds may take a turn that comes one second later than a new call may."""

_RETRIES_PER_SECOND = 2.0
"""How many calls to a KMS that answers nothing are tried again each second, after the first few."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Time:
    """Clock, pauses and chance; tests pass others."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = field(default=random.uniform)


class RemoteCall:
    """One call with all its tries.

    Attributes:
        client: Whose call it is.
        outer: The call that it is a part of.
        tries: How many there were.
        started: When it began.
        failure_of_inner: With what the last call ended that is a part of this one, if it failed.
    """

    def __init__(
        self,
        client: RemoteKmsClient,
        traffic: Traffic,
        operation: str,
        master_key_id: str | None,
        outer: RemoteCall | None,
    ) -> None:
        self.client = client
        self.outer = outer
        self.tries = 0
        self.started = client._time.clock()
        self.failure_of_inner: KmsError | None = None
        self._operation = operation
        self._master_key_id = master_key_id
        self._limits = client.limits
        self._time = client._time
        self._traffic = traffic
        self._deadline = self.started + self._limits.timeout_seconds
        if outer is not None:
            self._deadline = min(self._deadline, outer._deadline)
        self._task = current_task()

    def run(self, send: Callable[[float], T], span: telemetry.Span) -> T | KmsError:
        """Try until there is an answer, or no further try makes sense."""
        if refusal := self._refusal():
            refusal.tries = 0
            return refusal
        while True:
            outcome = self._try(send)
            if not isinstance(outcome, KmsError):
                return outcome
            pause = self._pause(outcome)
            if pause is None or not self._wait(outcome, pause):
                break
            kind = type(outcome).__name__
            span.event("retry", error=kind)
            about = {"backend": self.client.backend, "operation": self._operation, "error": kind}
            telemetry.count("kms.retries", 1, about)
        self._note_stall(outcome)
        return outcome.after(self.tries, self._time.clock() - self.started)

    def _refusal(self) -> KmsError | None:
        """Return why the KMS shall not even be tried."""
        if self.outer is not None:
            # The outer call may be the one that finds out whether the KMS is back.
            return None
        stalled = None if self._task is None else self._task.outermost.stalled
        if stalled is not None:
            detail = f"not tried, for calls before it failed for {self._limits.timeout_seconds:g} seconds"
            kind = KmsThrottledError if isinstance(stalled, KmsThrottledError) else KmsUnavailableError
            return self._error(kind, detail)
        refused_for = self._traffic.breaker.seconds_to_wait()
        if not refused_for:
            return None
        detail = (
            f"it has not answered for {self._limits.fail_fast_after_seconds:g} seconds or more, "
            f"and is asked again in {refused_for:.1f} seconds"
        )
        return self._error(KmsUnavailableError, detail, retry_after_seconds=refused_for)

    def _try(self, send: Callable[[float], T]) -> T | KmsError:
        """Make one try. Returns what came back, or why nothing did."""
        # The slot is taken before the turn: so few wait for turns, and whoever gets one can use it.
        if self.outer is None and not self._await_slot():
            detail = f"{self._limits.max_concurrent_calls} calls were under way all the time"
            is_limited = self._traffic.rate.calls_per_second is not None
            return self._error(KmsThrottledError if is_limited else KmsUnavailableError, detail)
        try:
            if not self._await_turn():
                return self._error(KmsThrottledError, "no turn in time")
            seconds = min(self._limits.call_timeout_seconds, self._seconds_left())
            self.tries += 1
            token = _call_that_sends.set(self)
            try:
                result = send(seconds)
            finally:
                _call_that_sends.reset(token)
        except KmsError as error:
            failure = error
        except Exception as error:
            failure = self.client._translated(error, self._operation, self._master_key_id)
        else:
            self._note_answer()
            self._traffic.rate.answered()
            return result
        finally:
            if self.outer is None:
                self._traffic.slots.release()
        if failure is not self.failure_of_inner:
            self._note_failure(failure)
        return failure

    def _await_slot(self) -> bool:
        while not self._traffic.slots.acquire(timeout=max(min(_LOOK_AGAIN_SECONDS, self._seconds_left()), 0)):
            if self._seconds_left() <= 0 or self._is_cancelled():
                return False
        return True

    def _await_turn(self) -> bool:
        started = self._time.clock()
        wait = self._traffic.rate.reserve(self._turn_within_seconds())
        if wait == 0:
            return True
        while wait is None:
            if self._seconds_left() <= 0 or self._is_cancelled():
                return False
            self._time.sleep(max(min(self._time.uniform(0.5, 1) * _LOOK_AGAIN_SECONDS, self._seconds_left()), 0))
            wait = self._traffic.rate.reserve(self._turn_within_seconds())
        self._time.sleep(wait)
        about = {"backend": self.client.backend, "operation": self._operation}
        telemetry.measure("kms.throttle.wait", self._time.clock() - started, about)
        return self._seconds_left() > 0 and not self._is_cancelled()

    def _turn_within_seconds(self) -> float:
        """Return how far ahead a turn may be taken: the longer a call lasts, the farther, so that none starves."""
        lasted = self._time.clock() - self.started
        return min(_LOOK_AGAIN_SECONDS + _PART_OF_AGE * lasted, self._seconds_left())

    def _pause(self, failure: KmsError) -> float | None:
        """Return how long to wait at least for the next try, or None if there is none: full jitter, doubling."""
        most = self._limits.max_tries
        if isinstance(failure, KmsResponseInvalidError):
            most = min(most, _TRIES_OF_INVALID_ANSWERS)
        first = next((first for kind, first in _FIRST_PAUSE_SECONDS.items() if isinstance(failure, kind)), None)
        # What ended an inner call has been tried often enough.
        if first is None or self.tries >= most or failure is self.failure_of_inner:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** (self.tries - 1))
        return max(self._time.uniform(0, longest), failure.retry_after_seconds)

    def _wait(self, failure: KmsError, pause: float) -> bool:
        """Wait for the next try. Returns whether there is time for one."""
        if pause >= self._seconds_left() or not self._sleep(pause):
            return False
        # A call that began before the KMS was known to be down may wait for it to come back.
        while wait := self._seconds_to_retry(failure):
            if self._seconds_left() <= 0 or not self._sleep(
                min(wait, self._time.uniform(0.5, 1) * _LOOK_AGAIN_SECONDS, self._seconds_left())
            ):
                return False
        return self._seconds_left() > 0

    def _seconds_to_retry(self, failure: KmsError) -> float:
        # While the breaker is open it alone decides: it lets through less than the budget.
        if self.outer is None and self._traffic.breaker.is_open():
            return self._traffic.breaker.seconds_to_wait()
        return self._traffic.retries.take() if isinstance(failure, KmsUnavailableError) else 0.0

    def _sleep(self, seconds: float) -> bool:
        """Sleep. Returns whether somebody still waits for the call."""
        while seconds > 0 and not self._is_cancelled():
            # Nobody can cancel a call outside of a task but by an exception in this very thread.
            step = seconds if self._task is None else min(seconds, _LOOK_AGAIN_SECONDS)
            self._time.sleep(step)
            seconds -= step
        return not self._is_cancelled()

    def _is_cancelled(self) -> bool:
        return self._task is not None and self._task.is_cancelled

    def _seconds_left(self) -> float:
        return self._deadline - self._time.clock()

    def _note_answer(self) -> None:
        self._traffic.retries.answered()
        if self._traffic.breaker.answered():
            _log.warning("%s: the KMS answers again", self.client.backend)
        if self._task is not None:
            self._task.outermost.last_answer = self._time.clock()
            self._task.outermost.stalled = None

    def _note_failure(self, failure: KmsError) -> None:
        if isinstance(failure, KmsUnavailableError):
            if self._traffic.breaker.failed():
                _log.warning(
                    "%s: the KMS has not answered for %g seconds: until it does, calls fail at once",
                    self.client.backend,
                    self._limits.fail_fast_after_seconds,
                )
        elif isinstance(failure, KmsThrottledError):
            # For the budget it is no answer: throttled calls do not use it either.
            if self._traffic.breaker.answered():
                _log.warning("%s: the KMS answers again", self.client.backend)
            self._traffic.rate.throttled()
        elif not isinstance(failure, KmsConfigurationError):
            # Which says nothing of the KMS: most are found before anything is sent.
            self._note_answer()

    def _note_stall(self, failure: KmsError) -> None:
        """Let the rest of a task fail at once, when nothing of it was answered while this call was tried."""
        if self._task is None or not failure.retryable:
            return
        if max(_LONGEST_PAUSE_SECONDS, failure.retry_after_seconds) < self._seconds_left():
            return
        task = self._task.outermost
        if task.last_answer is None or task.last_answer < self.started:
            task.stalled = failure

    def _error(self, kind: type[E], detail: str, *, retry_after_seconds: float = 0.0) -> E:
        return kind(
            detail,
            backend=self.client.backend,
            operation=self._operation,
            master_key_id=self._master_key_id,
            retry_after_seconds=retry_after_seconds,
        )


_call_that_sends: contextvars.ContextVar[RemoteCall | None] = contextvars.ContextVar(
    "parquet_keytools_call", default=None
)


class Traffic:
    """What the calls of one process share."""

    def __init__(self, limits: RemoteKmsSettings, time_source: Time) -> None:
        clock = time_source.clock
        self.slots = threading.BoundedSemaphore(limits.max_concurrent_calls)
        self.rate = CallRate(limits.max_calls_per_second, clock)
        self.retries = RetryBudget(2 * limits.max_concurrent_calls, _RETRIES_PER_SECOND, clock)
        self.breaker = CircuitBreaker(limits.fail_fast_after_seconds, limits.probe_every_seconds, clock)
        self.concurrent_calls = ConcurrentCalls(limits.max_concurrent_calls)


def call_that_sends(client: RemoteKmsClient) -> RemoteCall | None:
    """Return the call of a client that sends just now, and for which we are called."""
    call = _call_that_sends.get()
    return call if call is not None and call.client is client else None
