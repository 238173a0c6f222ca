"""What clients of a KMS across a network have in common: deadlines, retries, limits and a circuit breaker.

The SDKs' own retries are switched off by the backends, so that there is one policy, and one place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from parquet_keytools.errors import KmsError, KmsUnavailableError, value_or_raise
from parquet_keytools.kms.calls.attempts import RemoteCall, Time, Traffic
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.settings import RemoteKmsSettings
from parquet_keytools.runtime import telemetry
from parquet_keytools.runtime.fork_safety import PerProcess
from parquet_keytools.runtime.waiting import waiting_for

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
        call = RemoteCall(
            facts,
            self.limits,
            traffic,
            lambda error: self._translated(error, operation, master_key_id),
            self._server(),
        )
        about: dict[str, str] = {"backend": self.backend, "operation": operation}
        key = {"master_key_id": master_key_id} if self.telemetry_key_ids and master_key_id is not None else {}
        server = self._server()
        what = f"the KMS ({self.backend})" + (f" at {server}" if server else "")
        with telemetry.Span("kms.call", about | key) as span, waiting_for(what):
            outcome = call.run(send, span)
            is_error = isinstance(outcome, KmsError)
            about["outcome"] = type(outcome).__name__ if is_error else "ok"
            span.note(tries=call.tries)
            if is_error:
                span.failed(about["outcome"])
            telemetry.count("kms.calls", 1, about)
            telemetry.measure("kms.call.duration", self._time.clock() - call.started, about)
        return value_or_raise(outcome.at(self._server()) if isinstance(outcome, KmsUnavailableError) else outcome)

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
