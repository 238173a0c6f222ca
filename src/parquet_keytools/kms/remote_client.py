"""What clients of a KMS across a network have in common: deadlines, retries, limits and a circuit breaker.

The SDKs' own retries are switched off by the backends, so that there is one policy, and one place for it.
"""

from __future__ import annotations

import contextvars
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from parquet_keytools import telemetry
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    value_or_raise,
)
from parquet_keytools.kms.call_traffic import (
    CallRate,
    CircuitBreaker,
    ConcurrentCalls,
    RetryBudget,
    current_task,
)
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract import CallFacts, RemoteKmsSettings, outcome_name
from parquet_keytools.runtime.fork_safety import PerProcess, SharedWork
from parquet_keytools.runtime.presentation import waiting_for

__all__ = ["RemoteKmsClient", "RemoteKmsSettings", "Time"]

T = TypeVar("T")
S = TypeVar("S")


class RemoteKmsClient(KmsClient):
    """A KMS across a network. Backends make one attempt with `_call`, and many calls with `_map`.

    Throttled calls are retried until `timeout_seconds` are over or `max_tries` are used up, while all threads
    slow down; so are calls to a KMS that cannot be reached, as far as the budget for retries allows; answers
    that are not valid are asked for three times; all other errors are final.
    """

    def __init__(self, limits: RemoteKmsSettings, time_source: Time | None = None) -> None:
        super().__init__()
        self.limits = limits
        self._time = time_source or Time()
        self._traffic = PerProcess(lambda: Traffic(limits, self._time))

    def close(self) -> None:
        """Give back threads and connections. Calls under way end as they would; later ones make new ones."""
        traffic = self._traffic.take()
        if traffic is not None:
            traffic.concurrent_calls.close()

    def _call(self, operation: str, master_key_id: str | None, send: Callable[[float], T]) -> T:
        """Call the KMS, with as many attempts as the errors allow.

        A call within an attempt of another one, such as a login, is a part of that attempt: it is made once, and
        retried with it.

        Args:
            operation: For errors, metrics and traces.
            master_key_id: For errors; None for a call about many.
            send: Makes one attempt within the seconds it is given. What it raises goes through `_translate`.

        Raises:
            KmsError: The last attempt's error, with `tries`.
        """
        traffic = self._traffic.get()
        left = traffic.seconds_of_attempt()
        if left is not None:
            # It has the slot, the deadline and the retries of the attempt that it is a part of.
            return self._guard(operation, master_key_id, send, max(left, 0.0))
        facts = self._call_facts(operation, master_key_id)
        server = self._server()
        call = RemoteCall(
            facts, self.limits, traffic, lambda error: self._translated(error, operation, master_key_id), server
        )
        about = call.about
        key = {"master_key_id": master_key_id} if self.telemetry_key_ids and master_key_id is not None else {}
        what = f"the KMS ({self.backend})" + (f" at {server}" if server else "")
        with telemetry.Span("kms.call", about | key) as span, waiting_for(what):
            outcome = call.run(send, span)
            about = about | {"outcome": outcome_name(outcome)}
            span.note(tries=call.tries)
            if isinstance(outcome, KmsError):
                span.failed(about["outcome"])
            telemetry.count("kms.calls", 1, about)
            telemetry.measure("kms.call.duration", self._time.clock() - call.started, about)
        return value_or_raise(outcome.at(server) if isinstance(outcome, KmsUnavailableError) else outcome)

    def _server(self) -> str:
        """Return where the KMS is, for people who look for why it cannot be reached; a backend may know."""
        return ""

    def _map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function that does not raise, called for several items at a time.

        When the KMS has answered nothing for `timeout_seconds`, calls for items that are left fail at once.
        """
        if len(items) <= 1:
            return [function(item) for item in items]
        return self._traffic.get().concurrent_calls.map(function, items)


_ATTEMPTS_AT_INVALID_ANSWERS = 3
"""An answer that was damaged on its way is asked for again; one that is wrong each time is not."""

_LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS: dict[type[KmsError], float] = {
    KmsUnavailableError: 0.05,
    KmsThrottledError: 0.1,
    KmsResponseInvalidError: 0.02,
}

_LOOK_AGAIN_SECONDS = 0.25
"""Whoever waits sees by then that the rate has changed, the KMS is back, or nobody wants the result."""

_PART_OF_AGE = 0.1
"""A call that lasts ten seconds may take a turn that comes one second later than a new call may."""

_SECONDS_OF_SILENCE = 2.0

_RETRIES_PER_SECOND = 2.0
"""How many calls to a KMS that answers nothing are retried each second, after the first few."""

_log = logging.getLogger("parquet_keytools.kms.remote_call")  # a name that docs/operations.md promises


@dataclass(frozen=True)
class Time:
    """Clock, pauses and chance; tests pass others."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = field(default=random.uniform)


class Traffic:
    """What the calls of one process share."""

    def __init__(self, limits: RemoteKmsSettings, time_source: Time) -> None:
        clock = time_source.clock
        # Processes that do one work together have the limits of one.
        self.limits = limits = limits.shared_by(SharedWork.processes)
        self.time = time_source
        self.slots = threading.BoundedSemaphore(limits.max_concurrent_calls)
        self.rate = CallRate(limits.max_calls_per_second, clock)
        self.retries = RetryBudget(2 * limits.max_concurrent_calls, _RETRIES_PER_SECOND, clock)
        self.breaker = CircuitBreaker(limits.fail_fast_after_seconds, limits.probe_every_seconds, clock)
        self.concurrent_calls = ConcurrentCalls(limits.max_concurrent_calls)
        self.waits_are_told = False

    def is_first_wait(self) -> bool:
        """Return whether nobody was told yet that the KMS is waited for; then somebody is."""
        was_told, self.waits_are_told = self.waits_are_told, True
        return not was_told

    def seconds_of_attempt(self) -> float | None:
        """Return how long the attempt may still take that this thread is in; None where it is in none."""
        attempt = _attempt.get()
        return attempt[1] - self.time.clock() if attempt is not None and attempt[0] is self else None


_attempt: contextvars.ContextVar[tuple[Traffic, float] | None] = contextvars.ContextVar(
    "parquet_keytools_attempt", default=None
)
"""Whose attempt is under way in this thread, and when it has to end."""


class RemoteCall:
    """One call with all its attempts."""

    def __init__(
        self,
        facts: CallFacts,
        limits: RemoteKmsSettings,
        traffic: Traffic,
        translate: Callable[[Exception], KmsError],
        address: str,
    ) -> None:
        self.tries = 0
        self.started = traffic.time.clock()
        self.about = {"backend": facts.backend, "operation": facts.operation}
        self._facts = facts
        self._limits = limits
        self._traffic = traffic
        self._translate = translate
        self._address = address
        self._time = traffic.time
        self._deadline = self.started + limits.timeout_seconds
        self._task = current_task()

    def run(self, send: Callable[[float], T], span: telemetry.Span) -> T | KmsError:
        """Attempt it until there is an answer, or no further attempt makes sense."""
        if refusal := self._refusal():
            refusal.tries = 0
            return refusal
        while True:
            outcome = self._attempt(send)
            if not isinstance(outcome, KmsError):
                return outcome
            pause = self._pause(outcome)
            if pause is None:
                break
            if not self._wait(outcome, pause):
                if self._task is not None:
                    self._task.give_up(outcome, self.started)
                break
            kind = type(outcome).__name__
            span.event("retry", error=kind)
            telemetry.count("kms.retries", 1, self.about | {"error": kind})
        return outcome.after(self.tries, self._time.clock() - self.started)

    def _refusal(self) -> KmsError | None:
        """Return why the KMS is not even asked."""
        failure = self._task.failure if self._task is not None else None
        if failure is not None:
            detail = f"not tried, for calls before it failed for {self._limits.timeout_seconds:g} seconds"
            kind = KmsThrottledError if isinstance(failure, KmsThrottledError) else KmsUnavailableError
            return self._facts.error(kind, detail)
        refused_for = self._traffic.breaker.seconds_to_wait()
        if not refused_for:
            return None
        detail = (
            f"the KMS has not answered for {self._limits.fail_fast_after_seconds:g} seconds or more, "
            f"and is asked again in {refused_for:.1f} seconds"
        )
        return self._facts.error(KmsUnavailableError, detail, wait=refused_for)

    # --- one attempt ---

    def _attempt(self, send: Callable[[float], T]) -> T | KmsError:
        """Make one attempt. Returns what came back, or why nothing did."""
        # The slot is taken before the turn: so few wait for turns, and whoever gets one can use it.
        if not self._await_slot():
            is_limited = self._traffic.rate.calls_per_second is not None
            kind = KmsThrottledError if is_limited else KmsUnavailableError
            detail = f"{self._traffic.limits.max_concurrent_calls} calls were under way all the time"
            return self._facts.error(kind, detail)
        try:
            if not self._await_turn():
                return self._facts.error(KmsThrottledError, "could not be sent in time")
            self.tries += 1
            return self._answer(send)
        except KmsError as error:
            failure = error
        except Exception as error:
            failure = self._translate(error)
        finally:
            self._traffic.slots.release()
        self._note_failure(failure)
        return failure

    def _answer(self, send: Callable[[float], T]) -> T:
        seconds = min(self._limits.call_timeout_seconds, self._seconds_left())
        token = _attempt.set((self._traffic, self._time.clock() + seconds))
        try:
            answer = send(seconds)
        finally:
            _attempt.reset(token)
        self._note_answer()
        self._traffic.rate.answered()
        return answer

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
        telemetry.measure("kms.throttle.wait", self._time.clock() - started, self.about)
        return self._seconds_left() > 0 and not self._is_cancelled()

    def _turn_within_seconds(self) -> float:
        """Return how far ahead a turn may be taken: the longer a call lasts, the farther, so that none starves."""
        lasted = self._time.clock() - self.started
        return min(_LOOK_AGAIN_SECONDS + _PART_OF_AGE * lasted, self._seconds_left())

    # --- between attempts ---

    def _pause(self, failure: KmsError) -> float | None:
        """Return how long to wait at least for the next attempt, or None without one: full jitter, doubling."""
        most = self._limits.max_tries
        if isinstance(failure, KmsResponseInvalidError):
            most = min(most, _ATTEMPTS_AT_INVALID_ANSWERS)
        first = next((first for kind, first in _FIRST_PAUSE_SECONDS.items() if isinstance(failure, kind)), None)
        if first is None or self.tries >= most:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** (self.tries - 1))
        return max(self._time.uniform(0, longest), failure.retry_after_seconds)

    def _wait(self, failure: KmsError, pause: float) -> bool:
        """Wait for the next attempt. Returns whether there is time for one."""
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
        if self._traffic.breaker.is_open():
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

    # --- what others get to know of it ---

    def _note_answer(self) -> None:
        self._traffic.waits_are_told = False
        self._traffic.retries.answered()
        self._close_breaker()
        if self._task is not None:
            self._task.answered(self._time.clock())

    def _note_failure(self, failure: KmsError) -> None:
        if isinstance(failure, KmsUnavailableError):
            self._tell_of_waiting(failure)
            if self._traffic.breaker.failed():
                _log.warning(
                    "%s: the KMS has not answered for %g seconds: until it does, calls fail at once",
                    self._facts.backend,
                    self._limits.fail_fast_after_seconds,
                )
        elif isinstance(failure, KmsThrottledError):
            # For the budget it is no answer: throttled calls do not use it either.
            self._close_breaker()
            self._traffic.rate.throttled()
        elif not isinstance(failure, KmsConfigurationError):
            # Which says nothing of the KMS: most are found before anything is sent.
            self._note_answer()

    def _tell_of_waiting(self, failure: KmsUnavailableError) -> None:
        """Say once why nothing happens: else a call that may take a minute looks as if it hangs."""
        if self._time.clock() - self.started >= _SECONDS_OF_SILENCE and self._traffic.is_first_wait():
            _log.warning(
                "%s: waiting for the KMS%s (%s); calls are retried for up to %g seconds",
                self._facts.backend,
                f" at {self._address}" if self._address else "",
                failure.detail or "no answer",
                self._limits.timeout_seconds,
            )

    def _close_breaker(self) -> None:
        if self._traffic.breaker.answered():
            _log.warning("%s: the KMS answers again", self._facts.backend)
