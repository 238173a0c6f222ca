"""The base class of clients of a KMS across a network: one deadline, one pool of threads, one loop of retries.

Backends switch off the retries of their SDKs, so that retries have one policy, and one place. Within an attempt,
Vault and AWS send a request once more with new credentials if these have expired.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Self, TypeVar, cast

from pydantic import Field

from parquet_keytools import telemetry
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    value_or_raise,
    without_frames,
)
from parquet_keytools.kms.client import KmsClient, KmsSettings, R, outcome_name
from parquet_keytools.kms.transport import REFUSED, SILENT, connection_failure
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, PerProcess, SharedWork

S = TypeVar("S")
T = TypeVar("T")

_ATTEMPTS_AT_INVALID_ANSWERS = 3
"""An answer that was damaged on its way is requested again; an answer that is wrong each time is an error."""

_LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS: dict[type[KmsError], float] = {
    KmsUnavailableError: 0.05,
    KmsThrottledError: 0.1,
    KmsResponseInvalidError: 0.02,
}

_REFUSED_SECONDS = 8.0
"""How long commands retry refused connections, to end within 10 seconds: nothing listens, and someone waits."""

_LONGEST_SLEEP_SECONDS = 0.25
"""A thread that pauses notices within this time that its operation was cancelled."""

_SECONDS_OF_SILENCE = 2.0

_log = logging.getLogger("parquet_keytools.kms.remote_call")  # docs/operations.md promises this name


# --- settings ---


class RemoteKmsSettings(KmsSettings):
    """Settings that every KMS across a network has.

    Attributes:
        call_timeout_seconds: Timeout of one attempt, including the connection.
        timeout_seconds: How long an operation waits for an answer of the KMS, in all attempts of all its calls; at
            most 8 seconds in a command whose connections are refused.
        max_tries: Maximum number of attempts of a call.
        max_concurrent_calls: Maximum number of calls at a time.
        max_calls_per_second: Maximum number of calls started per second; None for no limit.
    """

    call_timeout_seconds: float = Field(
        default=5.0, gt=0, le=600, description="Timeout of one attempt of a call, in seconds."
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Timeout of an operation with all its retries, in seconds: it fails if "
        "the KMS has answered none of its calls for this long.",
    )
    max_tries: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="Maximum number of attempts of a call; with the defaults, timeout_seconds ends a call first.",
    )
    max_concurrent_calls: int = Field(default=32, ge=1, le=1000, description="Maximum number of calls at a time.")
    max_calls_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Maximum number of calls started per second. Default: no limit.",
    )

    def shared_by(self, processes: int) -> Self:
        """Return the settings of each of several processes that share the limits of one."""
        per_second = self.max_calls_per_second
        if processes == 1:
            return self
        return self.model_copy(
            update={
                "max_concurrent_calls": max(1, self.max_concurrent_calls // processes),
                "max_calls_per_second": None if per_second is None else per_second / processes,
            }
        )


def bytes_of_context(context: str | Mapping[str, str] | None) -> bytes:
    """Return the bytes that are bound to each wrapped key. The order of a mapping makes no difference."""
    if isinstance(context, Mapping):
        context = json.dumps(context, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return (context or "").encode()


# --- the client ---


@dataclass(frozen=True)
class Time:
    """Clock, pauses and random numbers. Tests inject others."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = field(default=random.uniform)


class RemoteKmsClient(KmsClient):
    """A KMS across a network. Hooks send their requests with `_operation`.

    Throttled calls, and calls to a KMS that cannot be reached, are retried until the deadline of the operation, in
    commands for 8 seconds if connections are refused, or until `max_tries` are used up. A call with an invalid
    answer is attempted three times. Other errors are final.
    """

    address_setting: ClassVar[str] = "url"
    """The setting with the address of the KMS, for hints."""

    certificates_setting: ClassVar[str] = "ca_file"
    """The setting with the certificates to trust, for hints."""

    def __init__(self, limits: RemoteKmsSettings, time_source: Time | None = None) -> None:
        super().__init__()
        self.limits = limits
        self._time = time_source or Time()
        self._traffic = PerProcess(lambda: _Traffic(limits))
        self._end = math.inf

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client whose constructor takes settings and folder; it connects when it is first used."""
        make = cast("Callable[[KmsSettings, Path], Self]", cls)
        return make(settings, folder)

    def end_within(self, seconds: float) -> None:
        """Limit all later operations together; see `KmsClient.end_within`."""
        self._end = self._time.clock() + seconds

    def close(self) -> None:
        """Close threads and connections. Calls under way finish; later calls make new ones."""
        traffic = self._traffic.take()
        if traffic is not None:
            traffic.pool.shutdown(wait=False)

    def _operation(self, name: str) -> RemoteOperation:
        """Begin an operation, such as `wrap`: its calls share a deadline."""
        return RemoteOperation(self, name, self._traffic.get(), self._time)

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        meaning = connection_failure(error, self.address_setting, self.certificates_setting)
        return meaning.error() if meaning is not None else super()._translate(error, operation, master_key_id)

    def _server(self) -> str:
        """Return the address of the KMS, for errors about a KMS that cannot be reached; empty if unknown."""
        return ""


class RemoteOperation:
    """The calls of one operation, with one deadline: it fails when the KMS has answered none of them in time.

    Each answer moves the deadline to `timeout_seconds` from now, so a long list of keys may take longer.
    """

    def __init__(self, client: RemoteKmsClient, name: str, traffic: _Traffic, time_source: Time) -> None:
        self.name = name
        self._client = client
        self._limits = client.limits
        self._traffic = traffic
        self._time = time_source
        self._refused_until = math.inf
        self._wait_for_answer()
        self._last_failure: type[KmsError] = KmsUnavailableError
        self._is_cancelled = False

    def call(self, master_key_id: str | None, send: Callable[[float], T]) -> T:
        """Call the KMS once, in this thread.

        Args:
            master_key_id: For errors; None for a call about several master keys or none.
            send: Makes one attempt within the seconds that it is given. May raise anything.

        Raises:
            KmsError: The error of the last attempt, with `tries`.
        """
        return value_or_raise(self._outcome(master_key_id, send))

    def each(
        self,
        items: Sequence[S],
        send: Callable[[S, float], T],
        master_key_of: Callable[[S], str] = attrgetter("master_key_id"),
    ) -> list[T | KmsError]:
        """Call the KMS for each item, several at a time.

        Args:
            items: The requests of the operation, or parts of them.
            send: Makes one attempt for an item within the seconds that it is given. May raise anything.
            master_key_of: Returns the master key of an item, for errors.

        Returns:
            In the order of the items, the result, or the error of the last attempt.
        """
        if len(items) == 1:
            return [self._outcome(master_key_of(items[0]), partial(send, items[0]))]
        # A window, so that a small operation does not wait in the pool behind all items of a large one.
        window = threading.Semaphore(self._limits.max_concurrent_calls)
        futures: list[Future[T | KmsError]] = []
        try:
            for item in items:
                window.acquire()
                # Each call needs a context of its own, with the trace and the file that the call is about.
                context = contextvars.copy_context()
                call = partial(self._outcome_in_pool, master_key_of(item), partial(send, item))
                future: Future[T | KmsError] = self._traffic.submit(partial(context.run, call))
                future.add_done_callback(lambda _: window.release())
                futures.append(future)
            return [future.result() for future in futures]
        except BaseException:
            self._is_cancelled = True
            for future in futures:
                future.cancel()
            raise

    def in_batches(
        self, requests: Sequence[R], size: int, send: Callable[[Sequence[R], float], Sequence[T | KmsError]]
    ) -> list[T | KmsError]:
        """Call the KMS for each batch of at most `size` requests with one master key, several at a time.

        Args:
            requests: The requests of the operation.
            size: Maximum number of requests in a batch.
            send: As for `each`, for a batch; returns the outcome of each of its requests.

        Returns:
            In the order of the requests, the outcome.
        """
        of_key: dict[str, list[R]] = defaultdict(list)
        for request in requests:
            of_key[request.master_key_id].append(request)
        batches = [some[start : start + size] for some in of_key.values() for start in range(0, len(some), size)]
        outcomes: dict[int, T | KmsError] = {}
        answers = self.each(batches, send, lambda batch: batch[0].master_key_id)
        for batch, answer in zip(batches, answers, strict=True):
            found = [answer] * len(batch) if isinstance(answer, KmsError) else answer
            outcomes |= zip(map(id, batch), found, strict=True)
        return [outcomes[id(request)] for request in requests]

    def _outcome_in_pool(self, master_key_id: str | None, send: Callable[[float], T]) -> T | KmsError:
        try:
            return self._outcome(master_key_id, send)
        except BaseException:
            self._is_cancelled = True
            raise

    def _outcome(self, master_key_id: str | None, send: Callable[[float], T]) -> T | KmsError:
        """Attempt a call until it has an answer, or no further attempt makes sense, and report it."""
        client, started, tries = self._client, self._time.clock(), 0
        about = {"backend": client.backend, "operation": self.name}
        key = {"master_key_id": master_key_id} if client.telemetry_key_ids and master_key_id is not None else {}
        with telemetry.Span("kms.call", about | key) as span:
            while True:
                with self._turn() as refusal:
                    if refusal is None:
                        outcome = self._attempt(master_key_id, send)
                        tries += 1
                    elif tries == 0:
                        outcome = refusal
                    # Otherwise, the last failure says more than that there was no time for another attempt.
                if not isinstance(outcome, KmsError):
                    break
                pause = self._pause(outcome, tries) if refusal is None else math.inf
                if pause >= self._seconds_left() or not self._sleep(pause):
                    outcome = outcome.after(tries, self._time.clock() - started)
                    outcome = outcome.about(client.backend, self.name, master_key_id)
                    if SharedWork.someone_waits and tries and outcome.detail.startswith((REFUSED, SILENT)):
                        self._traffic.down = outcome
                    break
                self._warn_of_waiting(outcome, started)
                kind = outcome_name(outcome)
                span.event("retry", error=kind)
                telemetry.count("kms.retries", 1, {**about, "error": kind})
            span.note(tries=tries)
            if isinstance(outcome, KmsError):
                span.failed(outcome_name(outcome))
            about = about | {"outcome": outcome_name(outcome)}
            telemetry.count("kms.calls", 1, about)
            telemetry.measure("kms.call.duration", self._time.clock() - started, about)
        return outcome.at(client._server()) if isinstance(outcome, KmsUnavailableError) else outcome

    @contextlib.contextmanager
    def _turn(self) -> Iterator[KmsError | None]:
        """Hold one of the process's calls at a time in a block, or yield why the call must not be sent."""
        if self._traffic.down is not None:
            yield self._last_failure(f"not attempted: {self._traffic.down.detail}")
            return
        if self._is_cancelled or self._seconds_left() <= 0:
            now = self._time.clock()
            silence = f"the KMS answered no call for {now - self._waits_since:.3g} seconds"
            is_over = now >= self._client._end
            yield self._last_failure(f"not attempted: {'the time for all calls is over' if is_over else silence}")
            return
        # Only `max_calls_per_second` makes a call wait that the KMS did not delay.
        kind = self._last_failure if self._limits.max_calls_per_second is None else KmsThrottledError
        if not self._traffic.slots.acquire(timeout=max(0.0, self._seconds_left())):
            yield kind(f"{self._traffic.limits.max_concurrent_calls} calls were under way all the time")
            return
        try:
            wait = self._traffic.seconds_to_turn(self._time.clock(), self._seconds_left())
            if wait:
                about = {"backend": self._client.backend, "operation": self.name}
                telemetry.measure("kms.throttle.wait", wait, about)
            is_in_time = wait is not None and self._sleep(wait)
            yield None if is_in_time else kind("could not be sent in time")
        finally:
            self._traffic.slots.release()

    def _attempt(self, master_key_id: str | None, send: Callable[[float], T]) -> T | KmsError:
        """Make one attempt. Returns the answer, or the error that replaces it."""
        try:
            answer = send(min(self._limits.call_timeout_seconds, self._seconds_left()))
        except Exception as error:
            failure = self._client._kms_error(error, self.name, master_key_id)
        else:
            self._note_answer()
            return answer
        if isinstance(failure, (KmsUnavailableError, KmsThrottledError)):
            self._last_failure = type(failure)
            if SharedWork.someone_waits and failure.detail.startswith(REFUSED):
                self._refused_until = min(self._refused_until, self._time.clock() + _REFUSED_SECONDS)
        elif not isinstance(failure, KmsConfigurationError):  # which may have been found before anything was sent
            self._note_answer()
        return without_frames(failure)

    def _note_answer(self) -> None:
        self._wait_for_answer()
        self._traffic.has_warned, self._traffic.down = False, None

    def _wait_for_answer(self) -> None:
        self._waits_since = self._time.clock()
        self._deadline = self._waits_since + self._limits.timeout_seconds
        self._refused_until = math.inf

    def _pause(self, failure: KmsError, tries: int) -> float:
        """Return how long to wait for the next attempt, or infinity: doubling, full jitter, Retry-After."""
        most = self._limits.max_tries
        if isinstance(failure, KmsResponseInvalidError):
            most = min(most, _ATTEMPTS_AT_INVALID_ANSWERS)
        first = next((first for kind, first in _FIRST_PAUSE_SECONDS.items() if isinstance(failure, kind)), None)
        if first is None or tries >= most:
            return math.inf
        longest = min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** (tries - 1))
        return max(self._time.uniform(0, longest), failure.retry_after_seconds)

    def _sleep(self, seconds: float) -> bool:
        """Sleep. Returns whether the caller still waits for the operation."""
        while seconds > 0 and not self._is_cancelled:
            step = min(seconds, _LONGEST_SLEEP_SECONDS)
            self._time.sleep(step)
            seconds -= step
        return not self._is_cancelled

    def _seconds_left(self) -> float:
        return min(self._deadline, self._refused_until, self._client._end) - self._time.clock()

    def _warn_of_waiting(self, failure: KmsError, started: float) -> None:
        """Warn once, in all threads, until the KMS answers: otherwise the program seems to hang."""
        if not isinstance(failure, KmsUnavailableError) or self._traffic.has_warned:
            return
        if self._time.clock() - started < _SECONDS_OF_SILENCE:
            return
        self._traffic.has_warned = True
        server = self._client._server()
        _log.warning(
            "%s: waiting for the KMS%s (%s); calls are retried for up to %g seconds",
            self._client.backend,
            f" at {server}" if server else "",
            failure.detail or "no answer",
            self._limits.timeout_seconds,
        )


class _Traffic:
    """The calls of all operations of one process: their threads, their number, and the time between them."""

    def __init__(self, limits: RemoteKmsSettings) -> None:
        # Worker processes of one command divide its limits among themselves.
        self.limits = limits = limits.shared_by(SharedWork.processes)
        self.slots = threading.BoundedSemaphore(limits.max_concurrent_calls)
        self.pool = ThreadPoolExecutor(limits.max_concurrent_calls, thread_name_prefix="parquet-keytools-kms")
        self.has_warned = False
        # Why a command has given up; its later operations do not wait for the same KMS again.
        self.down: KmsError | None = None
        self._spacing_seconds = 1 / limits.max_calls_per_second if limits.max_calls_per_second else 0.0
        self._lock = ForkSafeLock()
        self._next_turn = 0.0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in the pool; or here, after the client was closed, or while the process ends."""
        try:
            return self.pool.submit(call)
        except RuntimeError:
            future: Future[T] = Future()
            future.set_result(call())
            return future

    def seconds_to_turn(self, now: float, within_seconds: float) -> float | None:
        """Take the next turn of `max_calls_per_second`. Returns the wait for it, or None if it is too long."""
        with self._lock:
            turn = max(self._next_turn, now)
            if turn - now > within_seconds:
                return None
            self._next_turn = turn + self._spacing_seconds
            return turn - now
