"""Silence in the logs of SDKs while keys and tokens pass through them: they log requests and answers at DEBUG."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar


class SdkLogs:
    """The loggers of an SDK, silent in the threads that are in a call of ours.

    Args:
        *names: Loggers; those below them are silenced too.
        least_level: Of what is let through all the same, without its traceback, which has texts of answers in it.
    """

    def __init__(self, *names: str, least_level: int = logging.WARNING) -> None:
        self._names = names
        self._least_level = least_level
        self._in_our_call: ContextVar[bool] = ContextVar(f"parquet_keytools_call_of_{names[0]}", default=False)
        self._loggers_seen = 0

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Keep the loggers silent in a block."""
        self.add_filters()
        token = self._in_our_call.set(True)
        try:
            yield
        finally:
            self._in_our_call.reset(token)

    def add_filters(self) -> None:
        """Filter the loggers that were added since the last time."""
        # Loggers are never removed. Going over all of them takes as long as signing a request.
        for name in self._names:
            logging.getLogger(name)
        number = len(logging.root.manager.loggerDict)
        if number == self._loggers_seen:
            return
        # A filter of a logger does not hold for the loggers below it, so each of them needs it.
        for name in list(logging.root.manager.loggerDict):
            if any(f"{name}.".startswith(f"{ours}.") for ours in self._names):
                logging.getLogger(name).addFilter(self._may_pass)
        # Only now: another thread that comes meanwhile must not take them for silent.
        self._loggers_seen = number

    def _may_pass(self, record: logging.LogRecord) -> bool:
        if not self._in_our_call.get():
            return True
        record.exc_info = record.exc_text = None
        return record.levelno >= self._least_level
