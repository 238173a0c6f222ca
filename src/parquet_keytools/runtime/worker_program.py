"""What a worker process does: it calls the one function, and has its parent log, warn and keep what is common."""

from __future__ import annotations

import contextlib
import contextvars
import io
import itertools
import logging
import os
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.runtime.fork_safety import SharedWork
from parquet_keytools.runtime.presentation import saying_what_is_waited_for


class WorkerSetup:
    """What a worker has to know.

    Args:
        function: Pickled.
        processes: How many share what the KMS is spared.
        threads: How many calls it makes at a time.
    """

    def __init__(self, function: bytes, processes: int, threads: int) -> None:
        self.function = function
        self.processes = processes
        self.threads = threads
        self.filters = list(warnings.filters)
        self.disabled_level = logging.root.manager.disable
        # An audit log is written whatever the level of the root is.
        self.levels = {"": logging.root.level} | {
            name: logger.level
            for name, logger in list(logging.root.manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
        }

    def pickled(self) -> bytes:
        """Return it as bytes."""
        try:
            return pickle.dumps(self)
        except Exception:
            # A filter with a class of the program itself.
            self.filters = []
            return pickle.dumps(self)


def outcome_of_call(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether a call failed, and what it returned or raised."""
    try:
        return False, call()
    except BaseException as error:
        return True, error


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, parent: _Parent) -> None:
        super().__init__(io.BytesIO(data))
        self._parent = parent

    def persistent_load(self, number: Any) -> Any:
        return _InParent(self._parent, number)


class _InParent:
    def __init__(self, parent: _Parent, number: int) -> None:
        self._parent = parent
        self._number = number

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._parent.ask, self._number, name)


class _Parent:
    """The parent, as a worker sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count(-1, -1)
        self._asked: dict[int, Future[Any]] = {}

    def send(self, kind: str, *content: Any) -> None:
        data = pickle.dumps((kind, *content), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self._connection.send_bytes(data)
            except OSError:
                # Nobody is there to whom anything would matter.
                os._exit(1)

    def ask(self, thing: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an object of the parent."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._asked[number] = future
        self.send("ask", number, thing, name, args, kwargs)
        return future.result()

    def answer(self, number: int, has_failed: bool, result: Any) -> None:
        """Take what the parent answers."""
        future = self._asked.pop(number)
        future.set_exception(result) if has_failed else future.set_result(result)


class _ToParent(logging.Handler):
    """Has the parent's handlers take what is logged."""

    def __init__(self, parent: _Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            self._parent.send("log", record)
        except Exception:
            self.handleError(record)


def work(connection: Connection) -> None:
    """Make the calls that come through a connection, until it is closed: what a worker process does."""
    setup: WorkerSetup = pickle.loads(connection.recv_bytes())  # noqa: S301 - of the parent
    parent = _Parent(connection)
    SharedWork.processes = setup.processes
    logging.root.addHandler(_ToParent(parent))
    logging.disable(setup.disabled_level)
    for name, level in setup.levels.items():
        logging.getLogger(name).setLevel(level)
    if setup.filters:
        warnings.resetwarnings()
        warnings.filters.extend(setup.filters)  # type: ignore[attr-defined]
    warnings.showwarning = lambda message, category, *_: parent.send("warn", str(message), category)
    has_failed, function = outcome_of_call(_Unpickler(setup.function, parent).load)
    if has_failed:
        # What others raise may quote what is secret.
        parent.send("unusable", str(function) if isinstance(function, KeytoolsError) else type(function).__name__)
        return
    parent.send("ready")
    running = set[int]()

    def call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        failed, result = outcome_of_call(partial(function, *args, **kwargs))
        running.discard(number)
        try:
            if failed:
                # Some foreign errors do not come out of a pickle.
                pickle.loads(pickle.dumps(result))  # noqa: S301 - made here
            parent.send("done", number, failed, result)
        # Whatever it holds: it must not leave the parent waiting.
        except Exception as error:
            text = "".join(traceback.format_exception_only(result if failed else error))
            parent.send("done", number, True, RuntimeError(text.strip()))

    with saying_what_is_waited_for(partial(parent.send, "wait")), ThreadPoolExecutor(setup.threads) as pool:
        for number, *content in _messages(connection):
            if number < 0:
                parent.answer(number, *content)
            else:
                running.add(number)
                pool.submit(contextvars.Context().run, call, number, *content)
        if running:
            # The parent was killed, or interrupted twice. What is half done has no name yet.
            os._exit(1)


def _messages(connection: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv()
