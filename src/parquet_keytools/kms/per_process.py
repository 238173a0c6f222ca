"""Something that a forked child must not share with its parent, such as a connection or a pool of threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

from parquet_keytools.fork_safe_lock import ForkSafeLock

T = TypeVar("T")

_inherited: list[object] = []
"""What a child has from its parent and may neither use nor destroy: some SDKs hang when they tidy up there."""


class PerProcess(Generic[T]):
    """Makes a thing when it is first asked for, and anew in a forked child.

    What the parent made is kept in the child, unused and never closed: it is the parent's.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ForkSafeLock()
        self._process_id = 0
        self._thing: T | None = None

    def get(self) -> T:
        """Return this process's one."""
        with self._lock:
            self._leave_to_parent()
            if self._thing is None:
                self._thing = self._make()
                self._process_id = os.getpid()
            return self._thing

    def take(self) -> T | None:
        """Return this process's one, if there is one, and forget it, so that the next `get` makes another."""
        with self._lock:
            self._leave_to_parent()
            thing, self._thing = self._thing, None
            return thing

    def _leave_to_parent(self) -> None:
        if self._thing is not None and self._process_id != os.getpid():
            _inherited.append(self._thing)
            self._thing = None
