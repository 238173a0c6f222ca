"""Keeps forks away from gRPC calls that are under way.

A process that forks while another of its threads is inside gRPC gets a child in which the next use of gRPC may
crash. So a fork waits here until the calls of this package are done, and calls that begin wait for the fork.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

_LONGEST_WAIT_SECONDS = 10.0
"""Then the fork goes on all the same: a hung call must not hang whoever starts a process."""


class CallGate:
    """Let calls through, any number at a time, but none while the process forks."""

    def __init__(self) -> None:
        self._renew()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Close the gate, and wait for the calls under way."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._calls, _LONGEST_WAIT_SECONDS)

    def after_fork(self) -> None:
        """Open the gate again in the parent."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def _renew(self) -> None:
        """Start anew; a child has none of its parent's calls."""
        self._changed = threading.Condition()
        self._calls = 0
        self._forks = 0


GRPC_CALLS = CallGate()
"""One for all clients of a process: a call of any of them would break a fork."""

os.register_at_fork(
    before=GRPC_CALLS.before_fork,
    after_in_parent=GRPC_CALLS.after_fork,
    after_in_child=GRPC_CALLS._renew,
)
