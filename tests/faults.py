"""A KMS that fails on demand, and a clock that tests advance."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parquet_keytools.errors import KmsAccessDeniedError, KmsError
from parquet_keytools.kms.client import MasterKeyDescription, SingleKeyKmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.secret_bytes import SecretBytes

RESPONSE_SECRET = "s.CANARY-of-a-response-body"
"""Appears in the text of foreign exceptions, and must never be shown."""

FAILURES = ("refused", "timeout", "wrong_key", "wrong_length", "not_bytes", "foreign")


class TurnedClock:
    """Seconds that pass only when a test advances them."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class FaultyKms(SingleKeyKmsClient):
    """An in-memory KMS with fixed master keys that fails on demand, and records its requests.

    Attributes:
        failure: One of FAILURES, or None.
        failing: The master keys that fail; None for all.
        before_answer: Called in every hook before the answer; tests block in it.
        unwrap_rounds: The requests of each call of `unwrap_many` that reached the backend.
        keys_seen: Every key that was wrapped or unwrapped.
        threads: The threads that called.
        openers: The threads among these that open the files of data sets, without Arrow's own.
    """

    backend = "faulty"

    def __init__(self, master_keys: dict[str, bytes]) -> None:
        super().__init__()
        self._inner = InMemoryKms(master_keys)
        self._ids = frozenset(master_keys)
        self.failure: str | None = None
        self.failing: frozenset[str] | None = None
        self.before_answer: Callable[[], None] = lambda: None
        self.wrap_rounds: list[int] = []
        self.unwrap_rounds: list[int] = []
        self.keys_seen: list[bytes] = []
        self.threads: set[int] = set()
        self.openers: set[int] = set()

    @classmethod
    def from_settings(cls, settings: Any, folder: Path) -> FaultyKms:
        raise NotImplementedError

    def master_key_ids(self) -> frozenset[str]:
        return self._ids

    def fail(self, failure: str, *master_key_ids: str) -> None:
        """Fail from now on, for these master keys or for all."""
        self.failure, self.failing = failure, frozenset(master_key_ids) or None

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        self.wrap_rounds.append(len(requests))
        return super()._wrap_many(requests)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        self.unwrap_rounds.append(len(requests))
        return super()._unwrap_many(requests)

    def _wrap(self, key: SecretBytes, master_key_id: str) -> Any:
        self.keys_seen.append(key.reveal())
        failure = self._next_failure(master_key_id)
        if failure == "wrong_key":
            return wrap_one(self._inner, SecretBytes.random(key.length_bits), master_key_id)
        if failure == "wrong_length":
            return "A" * 100_000
        if failure == "not_bytes":
            return b"not a str"
        return wrap_one(self._inner, key, master_key_id)

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> Any:
        failure = self._next_failure(master_key_id)
        if failure == "wrong_key":
            return SecretBytes.random(128)
        if failure == "wrong_length":
            return SecretBytes(b"12345")
        if failure == "not_bytes":
            return RESPONSE_SECRET
        key = unwrap_one(self._inner, wrapped_key, master_key_id)
        self.keys_seen.append(key.reveal())
        return key

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self._inner.describe(master_key_id)

    def _next_failure(self, master_key_id: str) -> str | None:
        self.threads.add(threading.get_ident())
        if threading.current_thread().name.startswith("keytools-open"):
            self.openers.add(threading.get_ident())
        self.before_answer()
        if self.failing is not None and master_key_id not in self.failing:
            return None
        if self.failure == "refused":
            raise KmsAccessDeniedError(backend=self.backend, operation="use", master_key_id=master_key_id)
        if self.failure == "timeout":
            raise TimeoutError(f"read timed out, body was {RESPONSE_SECRET}")
        if self.failure == "foreign":
            raise RuntimeError(f"HTTP 500: {RESPONSE_SECRET}")
        return self.failure


def let_a_worker_die_at_work() -> threading.Thread:
    """Kill the first worker process that this process starts, as soon as it exists; return the thread that does.

    It has answered nothing by then: a process takes longer to start than to be found.
    """

    def kill() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for child in multiprocessing.active_children():
                child.kill()
                return
            time.sleep(0.001)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread
