"""A cache of keys that are expensive to get: expiring, and loading each key once however many ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from parquet_keytools import telemetry
from parquet_keytools.errors import KmsError
from parquet_keytools.fork_safe_lock import ForkSafeLock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Seconds from some start, never going back; `time.monotonic` unless a test passes another."""


@dataclass(frozen=True)
class _Entry(Generic[V]):
    value: V
    loaded_at: float
    expires_at: float


class KekCache(Generic[K, V]):
    """Keeps keys for a time. Belongs to one KMS client, and so to one backend, configuration and principal.

    Errors are given to everybody who waits for them and are not kept. A forked child starts with an empty
    cache.
    """

    def __init__(self, clock: Clock, name: str = "other") -> None:
        """Make one.

        Args:
            clock: Seconds for expiry.
            name: What metrics call it.
        """
        self._clock = clock
        self._name = name
        self._lock = ForkSafeLock()
        self._process_id = os.getpid()
        self._entries: dict[K, _Entry[V]] = {}
        self._loading: dict[K, Future[V | KmsError]] = {}
        self._next_purge = 0.0
        self._clearings = 0

    def get_many(
        self,
        wanted: Sequence[K],
        load: Callable[[list[K]], Sequence[V | KmsError]],
        lifetime_seconds: float,
    ) -> list[V | KmsError]:
        """Return what is kept, and load the rest in one call.

        Args:
            wanted: What to get; the same may come twice.
            load: Called without a lock, with what neither is kept nor being loaded by another thread.
            lifetime_seconds: For how long what is loaded now may be used; also the age at which what is kept
                is too old for this caller.
        """
        found: dict[K, V | KmsError] = {}
        mine: dict[K, Future[V | KmsError]] = {}
        others: dict[K, Future[V | KmsError]] = {}
        now = self._clock()
        with self._lock:
            self._start_anew_after_fork()
            clearings = self._clearings
            self._purge(now, lifetime_seconds)
            for key in dict.fromkeys(wanted):
                entry = self._entries.get(key)
                if entry and now < min(entry.expires_at, entry.loaded_at + lifetime_seconds):
                    found[key] = entry.value
                elif key in self._loading:
                    others[key] = self._loading[key]
                else:
                    mine[key] = self._loading[key] = Future()
        for result, number in {"hit": len(found), "wait": len(others), "miss": len(mine)}.items():
            telemetry.count("kek_cache.requests", number, {"cache": self._name, "result": result})
        if mine:
            self._load(mine, load, lifetime_seconds, clearings)
        # One's own are loaded first: two threads that wait for each other's keys cannot lock each other out.
        given_up: list[K] = []
        for key, future in {**mine, **others}.items():
            try:
                found[key] = future.result()
            except CancelledError:
                given_up.append(key)
        if given_up:
            found.update(zip(given_up, self.get_many(given_up, load, lifetime_seconds), strict=True))
        return [found[key] for key in wanted]

    def clear(self) -> None:
        """Forget everything, also what is being loaded now."""
        with self._lock:
            self._clearings += 1
            self._entries.clear()

    def _load(
        self,
        mine: dict[K, Future[V | KmsError]],
        load: Callable[[list[K]], Sequence[V | KmsError]],
        lifetime_seconds: float,
        clearings: int,
    ) -> None:
        try:
            loaded = load(list(mine))
            with self._lock:
                now = self._clock()
                for key, value in zip(mine, loaded, strict=True):
                    del self._loading[key]
                    if not isinstance(value, KmsError) and clearings == self._clearings:
                        self._entries[key] = _Entry(value, now, now + lifetime_seconds)
            for future, value in zip(mine.values(), loaded, strict=True):
                future.set_result(value)
        except BaseException as error:
            with self._lock:
                for key in mine:
                    self._loading.pop(key, None)
            for future in mine.values():
                # What interrupts this thread, such as Ctrl-C, is not for those who wait: they load for themselves.
                if not isinstance(error, Exception):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
            raise

    def _purge(self, now: float, lifetime_seconds: float) -> None:
        if now < self._next_purge:
            return
        self._next_purge = now + lifetime_seconds
        self._entries = {key: entry for key, entry in self._entries.items() if now < entry.expires_at}

    def _start_anew_after_fork(self) -> None:
        if self._process_id != os.getpid():
            # The threads that were loading do not exist here; and a child gets its own KEKs.
            self._process_id = os.getpid()
            self._entries = {}
            self._loading = {}
