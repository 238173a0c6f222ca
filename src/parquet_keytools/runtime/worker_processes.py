"""One function in several processes: many small files are work for Python, which one process does on one core.

Workers are started afresh, never forked, with this interpreter and its paths; a script that starts them needs no
`if __name__ == "__main__"`. Each has one connection to its parent, and ends when that closes, however the parent
ended. Signals that mean the whole command, as Ctrl-C does, are for the parent alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self, TypeVar

from parquet_keytools.errors import WorkerProcessEndedError
from parquet_keytools.runtime.operating_system import POSIX, signals_blocked
from parquet_keytools.runtime.presentation import (
    levels_inside,
    say_what_is_waited_for_elsewhere,
)
from parquet_keytools.runtime.worker_program import WorkerSetup, outcome_of_call

P = ParamSpec("P")
R = TypeVar("R")

MOST_PROCESSES = 8
"""The parent hands files out, and takes results in, for no more of them than that."""

FILES_PER_PROCESS = 200
"""From so many small files on a process pays: its start takes as long as 100 of them (benchmarks/processes.py)."""

_END_SECONDS = 10.0

_log = logging.getLogger(__name__)


def automatic_processes(files: int) -> int:
    """Return how many processes pay for so many small files: 1 for this process alone."""
    return max(1, min(available_processors(), MOST_PROCESSES, files // FILES_PER_PROCESS))


def available_processors() -> int:
    """Return how many processors this process may use: by its affinity, and by the quota of its container."""
    # macOS has no affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    number = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        number = min(number, max(1, int(quota) // int(period)))
    return number


def check_number_of_processes(processes: int | None) -> None:
    """Raise `ValueError` for what is not a number of processes."""
    if processes is not None and processes < 1:
        raise ValueError(f"the number of processes is 1 or more, or None for as many as pay; not {processes}")


class StaysInParent:
    """What is not copied to workers: there its methods are calls of the parent's object.

    They are called by a thread that takes the results in, too: they must not take long.
    """


class _Pickler(pickle.Pickler):
    """Pickles for workers."""

    def __init__(self, file: io.BytesIO, staying: list[StaysInParent]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._staying = staying

    def persistent_id(self, thing: object) -> int | None:
        if not isinstance(thing, StaysInParent):
            return None
        if thing not in self._staying:
            self._staying.append(thing)
        return self._staying.index(thing)


_PROGRAM = """\
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[2]))
sys.path[:] = connection.recv()
from parquet_keytools.runtime.worker_program import work
work(connection)
"""


class WorkerProcesses(Generic[P, R]):
    """Calls a function for files, in this process or in others. May be called by any number of threads.

    Worker processes start with the first call; what those cannot do that never come to work, this one does. What
    they log and warn of comes out here. They call the KMS no more often at a time than one process would.

    Attributes:
        calls_at_a_time: How many calls all of them make at a time; more of them wait.

    Args:
        function: Is pickled once for all processes, without secrets, with what it is bound to. A configuration is
            handed over as it was read; a process reads it again where secrets stand in it, and environment
            variables and files that it names in any case. What cannot be pickled, such as a KMS client that was
            passed in, or a configuration with secrets that came from a pipe, is called in this process.
        files: How many files there are.
        processes: How many processes work; None takes as many as pay, and 1 this one alone.
        calls_at_a_time: How many calls each makes at a time.

    Raises:
        ValueError: `processes` is not a number of processes.
    """

    def __init__(self, function: Callable[P, R], files: int, processes: int | None, calls_at_a_time: int) -> None:
        self._function = function
        self._staying: list[StaysInParent] = []
        check_number_of_processes(processes)
        # Windows hands no sockets over to other programs as file descriptors.
        if not POSIX:
            processes = 1
        self._processes = min(processes, files) if processes else automatic_processes(files)
        self._setup = self._pickled(calls_at_a_time) if self._processes > 1 and _runs_python() else None
        self.calls_at_a_time = calls_at_a_time * (1 if self._setup is None else self._processes)
        place = sys._getframe(levels_inside() - 1)
        self._warn = partial(
            warnings.warn_explicit, filename=place.f_code.co_filename, lineno=place.f_lineno, registry={}
        )
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def _pickled(self, calls_at_a_time: int) -> bytes | None:
        file = io.BytesIO()
        try:
            _Pickler(file, self._staying).dump(self._function)
        # Whatever a plug-in or a file system raises.
        except Exception as error:
            _log.info("one process does all of the work, for what it needs cannot be pickled: %s", error)
            return None
        return WorkerSetup(file.getvalue(), self._processes, calls_at_a_time).pickled()

    @property
    def are_others(self) -> bool:
        """Whether other processes than this one do the work."""
        return self._setup is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; one that works ends at once, as if it were killed.

        Calls that wait for one that never came to work are not made here, either.
        """
        with self._lock:
            self.hang_up()
            for worker in self._workers:
                worker.wait()

    def hang_up(self) -> None:
        """Let the processes end without a wait for them: calls that they have begun end with an error."""
        for worker in tuple(self._workers):
            worker.hang_up()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and return or raise what it does.

        Raises:
            WorkerProcessEndedError: A process ended, and nobody knows what it had done: of this call, or before
                this call began. Then the others begin no more calls either.
        """
        with self._lock:
            if self._setup is not None and not self._workers:
                self._start(self._setup)
        if self._setup is None:
            return self._function(*args, **kwargs)
        worker = self._free.get()
        try:
            if any(other.has_ended for other in self._workers):
                raise _ended_before()
            result = worker.call(args, kwargs)
        finally:
            self._free.put(worker)
        return self._function(*args, **kwargs) if result is _NEVER_WORKED else result

    def _start(self, setup: bytes) -> None:
        """Start the processes: as many as the system allows, or none, and then this one does all of the work."""
        try:
            for _ in range(self._processes):
                self._workers.append(_Worker(setup, self._staying, self._warn))
        # The second is of threads.
        except (OSError, RuntimeError) as error:
            _log.info("only %d worker processes could be started: %s", len(self._workers), error)
        if not self._workers:
            self._setup = None
        for worker in self._workers * (self.calls_at_a_time // self._processes):
            self._free.put(worker)


class _Worker:
    """One process, as its parent sees it.

    Attributes:
        has_ended: Whether it ended while it was needed.
    """

    def __init__(self, setup: bytes, staying: list[StaysInParent], warn: Callable[..., None]) -> None:
        self.has_ended = False
        self._is_ready = self._is_unusable = self._is_over = False
        self._staying = staying
        self._warn = warn
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        with theirs:
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            # -P: nothing is imported from the current folder, which may be anyone's data.
            command = [
                sys.executable,
                *flags,
                "-P",
                "-c",
                _PROGRAM,
                "parquet-keytools-worker",
                str(theirs.fileno()),
            ]
            # The masks of threads are inherited; those of this process's other threads are not touched.
            try:
                with signals_blocked(signal.SIGINT, signal.SIGTERM):
                    self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                        command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()]
                    )
            except OSError:
                self._connection.close()
                self._socket.close()
                raise
        # Where it ended already, the reader hears of it.
        with contextlib.suppress(OSError):
            self._connection.send(sys.path)
            self._connection.send_bytes(setup)
        self._reader = threading.Thread(target=self._read, name="parquet-keytools-worker", daemon=True)
        self._reader.start()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if self.has_ended or self._is_over:
                raise _ended_before()
            if self._is_unusable:
                return _NEVER_WORKED
            number = next(self._numbers)
            self._waiting[number] = future
            # Where it ended just now, the reader hears of it, too.
            with contextlib.suppress(OSError):
                self._connection.send((number, args, kwargs))
        return future.result()

    def hang_up(self) -> None:
        """Let it end; what it has not begun is not done."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """Wait until it ended."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()
        self._socket.close()

    def _read(self) -> None:
        """Take in what it sends, until it ended."""
        try:
            while True:
                kind, *content = self._connection.recv()
                self._take(kind, *content)
        except (EOFError, OSError):
            pass
        # Whatever cannot be taken in: nobody may wait for it.
        except Exception:
            _log.exception("a worker process is ended, for its parent does not understand it")
            self._process.kill()
            # Nobody knows what it had begun.
            self._is_ready = True
        with self._lock:
            self.has_ended, self._is_unusable = self._is_ready, not self._is_ready
            waiting = self._waiting
        if self._is_over and self._is_unusable:
            for future in waiting.values():
                future.set_exception(_ended_before())
            return
        if self._is_unusable:
            _log.info("a worker process ended before it began to work; its work is done by this process")
            for future in waiting.values():
                future.set_result(_NEVER_WORKED)
            return
        if not waiting:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        status = self._process.returncode
        how = f"was ended by {signal.Signals(-status).name}" if status and status < 0 else "ended"
        for future in waiting.values():
            error = WorkerProcessEndedError(
                f"its worker process {how} before it reported what became of this.",
                has_begun=True,
                hint="If memory is short, give a smaller number of --processes.",
            )
            future.set_exception(error)

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "ready":
            self._is_ready = True
        elif kind == "unusable":
            _log.info("a worker process lacks what it needs: %s", *content)
        elif kind == "done":
            number, has_failed, result = content
            with self._lock:
                future = self._waiting.pop(number)
            future.set_exception(result) if has_failed else future.set_result(result)
        elif kind == "ask":
            number, thing, name, args, kwargs = content
            answer = outcome_of_call(partial(getattr(self._staying[thing], name), *args, **kwargs))
            with self._lock, contextlib.suppress(OSError):
                self._connection.send((number, *answer))
        elif kind == "log":
            (record,) = content
            logging.getLogger(record.name).handle(record)
        elif kind == "warn":
            # A filter that makes errors of warnings is the worker's, too; there it was raised already.
            with contextlib.suppress(Warning):
                self._warn(*content)
        elif kind == "wait":
            say_what_is_waited_for_elsewhere(*content)


_NEVER_WORKED = object()
"""In place of a result: nothing was begun."""


def _runs_python() -> bool:
    """Return whether `sys.executable` is Python; a program with Python in it would do whatever it does, again."""
    name = Path(sys.executable or "").name.lower()
    return any(word in name for word in ("python", "pypy", "graalpy")) and not getattr(sys, "frozen", False)


def _ended_before() -> WorkerProcessEndedError:
    return WorkerProcessEndedError("a worker process ended before this was begun.", has_begun=False)
