"""What clients of a KMS across a network have in common: deadlines, tries, limits and a circuit breaker.

The SDKs' own retries are switched off by the backends, so that there is one policy, and one place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import Field

from parquet_keytools import telemetry
from parquet_keytools.errors import KmsError
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.per_process import PerProcess
from parquet_keytools.kms.remote_call import RemoteCall, Time, Traffic, call_that_sends

__all__ = ["RemoteKmsClient", "RemoteKmsSettings", "Time"]

T = TypeVar("T")
S = TypeVar("S")


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
        default=50,
        ge=1,
        le=1000,
        description="How often a call is tried that may succeed later; by default the time ends first.",
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
        self._traffic = PerProcess(lambda: Traffic(limits, self._time))

    def close(self) -> None:
        """Give back threads and connections. Calls under way end as they would; later ones make new ones."""
        traffic = self._traffic.take()
        if traffic is not None:
            traffic.concurrent_calls.close()

    def _call(self, operation: str, master_key_id: str | None, send: Callable[[float], T]) -> T:
        """Call the KMS, with as many tries as the errors allow.

        A call that is made while another one sends, such as a login, is a part of that one.

        Args:
            operation: For errors, metrics and traces.
            master_key_id: For errors; None for a call about many.
            send: Makes one try within the seconds it is given. What it raises goes through `_translate`.

        Raises:
            KmsError: The last try's error, with `tries`.
        """
        call = RemoteCall(self, self._traffic.get(), operation, master_key_id, call_that_sends(self))
        about: dict[str, str] = {"backend": self.backend, "operation": operation}
        key = {"master_key_id": master_key_id} if self.telemetry_key_ids and master_key_id is not None else {}
        with telemetry.Span("kms.call", about | key) as span:
            outcome = call.run(send, span)
            is_error = isinstance(outcome, KmsError)
            about["outcome"] = type(outcome).__name__ if is_error else "ok"
            span.note(tries=call.tries)
            if is_error:
                span.failed(about["outcome"])
            telemetry.count("kms.calls", 1, about)
            telemetry.measure("kms.call.duration", self._time.clock() - call.started, about)
        if isinstance(outcome, KmsError):
            if call.outer is not None:
                call.outer.failure_of_inner = outcome
            raise outcome
        return outcome

    def _map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function that does not raise, called for several items at a time.

        When the KMS has answered nothing for `timeout_seconds`, calls for items that are left fail at once.
        """
        if len(items) <= 1:
            return [function(item) for item in items]
        return self._traffic.get().concurrent_calls.map(function, items)
