"""Requests that wait for the KMS: what waits together is asked together."""

from __future__ import annotations

import threading
from collections import deque

from parquet_keytools.spark.frames import Frame

MOST_TOGETHER = 1000


class WaitingRequests:
    """A queue of requests, from which several threads take all that have the same operation."""

    def __init__(self) -> None:
        self._waiting: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, request: Frame) -> None:
        """Add a request."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def take(self) -> list[Frame]:
        """Wait for requests, and return the first with all others of its operation; nothing after the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            taken: list[Frame] = []
            others: deque[Frame] = deque()
            for request in self._waiting:
                same = not taken or request.kind == taken[0].kind
                (taken if same and len(taken) < MOST_TOGETHER else others).append(request)
            self._waiting = others
            if others:
                self._changed.notify()
            return taken

    def close(self) -> None:
        """Let every thread end that waits; what waits is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
