"""Time for threads that mostly sleep: once all are asleep, it jumps to the next wake-up."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable

from parquet_keytools.kms.remote_client import Time

_HANGS_AFTER_SECONDS = 250
"""Real seconds: a busy machine may leave threads waiting for long."""


class VirtualTime:
    """A clock for a known number of threads, which wait only in `sleep`.

    Attributes:
        slept: All requested pauses.
    """

    def __init__(self, seed: int = 1) -> None:
        self._state = threading.Lock()
        self._now = 1000.0
        self._awake = 1
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()
        self._random = random.Random(seed)
        self.slept: list[float] = []

    def __call__(self) -> float:
        with self._state:
            return self._now

    def source(self) -> Time:
        """Return the time source that a client takes."""
        return Time(self, self.sleep, self._random.uniform)

    def sleep(self, seconds: float) -> None:
        """Sleep until this number of seconds has passed for all."""
        assert seconds >= 0
        with self._state:
            self.slept.append(seconds)
            woken = threading.Event()
            heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), woken))
            self._rest()
        assert woken.wait(_HANGS_AFTER_SECONDS)

    def advance(self, seconds: float) -> None:
        """Advance the time; for a single thread."""
        with self._state:
            self._now += seconds

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run each function in its own thread, until all have returned."""
        failures: list[BaseException] = []

        def run_one(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
            finally:
                with self._state:
                    self._rest()

        with self._state:
            self._awake = len(works)
        threads = [threading.Thread(target=run_one, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_HANGS_AFTER_SECONDS)
            assert not thread.is_alive()
        with self._state:
            self._awake = 1
        if failures:
            raise failures[0]

    def _rest(self) -> None:
        self._awake -= 1
        if self._awake == 0 and self._sleepers:
            self._now = max(self._now, self._sleepers[0][0])
            while self._sleepers and self._sleepers[0][0] <= self._now:
                _, _, woken = heapq.heappop(self._sleepers)
                self._awake += 1
                woken.set()
