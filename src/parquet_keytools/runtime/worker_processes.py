"""One function for many files at a time: in threads of this process, or of worker processes.

With small files, most of the work is Python's, and one process uses one core. Only the command line starts worker
processes: `multiprocessing` imports the main module again in each of them, and a script without
`if __name__ == "__main__"` would start itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing.managers import BaseManager, DictProxy
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from parquet_keytools.errors import KeytoolsError, WorkerProcessEndedError, kms_failure, without_frames
from parquet_keytools.runtime.operating_system import POSIX, signals_blocked
from parquet_keytools.runtime.threads_and_forks import SharedWork, end

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
R = TypeVar("R")

MOST_PROCESSES = 8
"""The process that distributes files and collects results cannot keep more processes busy."""

FILES_PER_PROCESS = 200
"""A process is worth starting for this number of small files: its start takes as long as 100 files."""

_log = logging.getLogger(__name__)

_wanted: contextvars.ContextVar[int | None] = contextvars.ContextVar("parquet_keytools_processes", default=1)


@contextlib.contextmanager
def command_line_processes(processes: int | None) -> Iterator[None]:
    """Let `FileWorkers` in the block start processes (None: as many as are useful); only for the command line."""
    token = _wanted.set(processes if _is_safe_to_start_from() else 1)
    try:
        yield
    finally:
        _wanted.reset(token)


def may_start_processes() -> bool:
    """Return whether `FileWorkers` may start processes here."""
    return _wanted.get() != 1


def _is_safe_to_start_from() -> bool:
    """Return whether a new Python process can import the main module of this one without running other code."""
    # Only POSIX is tested. Unless the environment says otherwise, a child has the current folder on its path,
    # which may be anyone's data.
    if not POSIX or getattr(sys, "frozen", False) or (sys.flags.ignore_environment and not sys.flags.safe_path):
        return False
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        # `python -m parquet_keytools` is not imported again.
        return spec.name == "__main__" or str(spec.name).endswith(".__main__")
    return file is None or Path(file).stem == "parquet-keytools"


_TERMINATE_SECONDS = 0.5


def available_processors() -> int:
    """Return how many processors this process may use, by its affinity and the quota of its container."""
    # macOS has no affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    number = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        number = min(number, max(1, int(quota) // int(period)))
    return number


class UntilKmsFails(Generic[R]):
    """Calls a function for files until the KMS fails; files that wait for a thread get that error at once."""

    def __init__(self, function: Callable[..., R]) -> None:
        self._function = function
        self._failure: KeytoolsError | None = None

    def __call__(self, *arguments: Any) -> R:
        """Call the function."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._function(*arguments)
        except KeytoolsError as error:
            failure = kms_failure(error)
            if failure is not None:
                self._failure = without_frames(failure)
            raise


class FileWorkers(Generic[T, R]):
    """Calls a function for files, within `command_line_processes` in worker processes.

    The function is pickled for worker processes without secrets: a process reads the secrets of a configuration
    again. What cannot be pickled, such as a configuration with secrets from a pipe, and files that are not
    `visible` to other processes, are for this process alone. `prepare` is a method of the same object; a worker
    process calls it with the files of each task, before the function.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        files: int,
        threads: int,
        *,
        visible: bool = True,
        prepare: Callable[[list[T]], None] | None = None,
    ) -> None:
        self._function = function
        self._files = files
        self._threads = threads
        wanted = _wanted.get() if visible else 1
        if wanted is None:
            wanted = min(available_processors(), MOST_PROCESSES, files // FILES_PER_PROCESS)
        self.processes = max(1, min(wanted, files))
        self._pickled = b""
        self._is_broken = False
        self._waiting: deque[tuple[list[T], Future[_Answer[R]]]] = deque()
        if self.processes > 1:
            try:
                with _tables_shared():
                    self._pickled = pickle.dumps((function, prepare))
            # A plug-in or a file system may raise anything.
            except Exception as error:
                _log.info("one process does all of the work, because its arguments cannot be pickled: %s", error)
                self.processes = 1

    def __enter__(self) -> Self:
        self._pool: Executor
        if self.processes == 1:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="parquet-keytools-files")
        else:
            levels = {name: logging.getLogger(name).level for name in ("", "parquet_keytools")}
            setup = (self._pickled, self.processes, self._threads, levels)
            context = multiprocessing.get_context("spawn")
            with _starting_processes():
                self._pool = ProcessPoolExecutor(self.processes, context, initializer=_begin, initargs=setup)
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for calls that have begun, and end the processes."""
        if not self._is_broken:
            end(self._pool, [future for _, future in self._waiting])
            return
        # The pool waits for a process that was starting when another one was killed, and does not end it.
        have_ended = threading.Event()
        terminating = threading.Thread(target=_terminate_until, args=(have_ended,), daemon=True)
        terminating.start()
        try:
            end(self._pool, [future for _, future in self._waiting])
        finally:
            have_ended.set()
            terminating.join()

    def outcomes(self, files: Iterable[T]) -> Iterator[tuple[T, R | Exception]]:
        """Yield each file with the result or exception of the function, in order; after Ctrl-C, those begun."""
        remaining = iter(files)
        at_once, tasks = 1, 2 * self._threads
        if self.processes > 1:
            # Enough for all threads, and so few that all processes end at about the same time.
            at_once = max(1, min(2 * self._threads, self._files // (2 * self.processes)))
            tasks = self.processes + 1
        try:
            while task := list(itertools.islice(remaining, at_once)):
                self._waiting.append((task, self._submit(task)))
                if len(self._waiting) >= tasks:
                    yield from self._next()
            while self._waiting:
                yield from self._next()
        except KeyboardInterrupt:
            yield from self._begun()
            raise
        except BrokenProcessPool:
            self._is_broken = True
            yield from self._begun()
            raise WorkerProcessEndedError(
                "a worker process was killed, perhaps for lack of memory. Each file that it was working on is "
                "whole: as it was, or done.",
                hint="If memory is short, give a smaller number of --processes.",
            ) from None

    def _submit(self, files: list[T]) -> Future[_Answer[R]]:
        if self.processes == 1:
            return self._pool.submit(contextvars.copy_context().run, _call_here, self._function, files)
        try:
            with _starting_processes():
                return self._pool.submit(_call, files)
        except OSError as error:
            if error.errno is None:
                # The pool closed its pipe just now, because a process was killed.
                raise BrokenProcessPool(str(error)) from None
            raise WorkerProcessEndedError(
                f"a worker process cannot be started: {error.strerror}.", hint="Use --processes 1."
            ) from None

    def _next(self) -> Iterator[tuple[T, R | Exception]]:
        """Yield the results of the oldest task."""
        files, future = self._waiting[0]
        answer = future.result()
        self._waiting.popleft()
        yield from _taken(files, answer)

    def _begun(self) -> Iterator[tuple[T, R | Exception]]:
        """Yield the results of all tasks that have begun, and cancel the others."""
        for files, future in self._waiting:
            if not future.cancel() and future.exception() is None:
                yield from _taken(files, future.result())


def _terminate_until(have_ended: threading.Event) -> None:
    while not have_ended.wait(_TERMINATE_SECONDS):
        for process in multiprocessing.active_children():
            process.terminate()


def _taken(files: list[T], answer: _Answer[R]) -> Iterator[tuple[T, R | Exception]]:
    for record in answer.records:
        logging.getLogger(record.name).handle(record)
    for text, category in answer.warnings:
        warnings.warn(text, category, stacklevel=2)
    yield from zip(files, answer.outcomes, strict=True)


@contextlib.contextmanager
def _starting_processes() -> Iterator[None]:
    """Let processes that start in the block import nothing from the current folder, and ignore Ctrl-C."""
    former = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        with signals_blocked(signal.SIGINT):
            yield
    finally:
        if former is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = former


# --- what worker processes share with their parent ---


class _Tables(BaseManager):
    """Serves dictionaries of this process to worker processes."""

    table: Callable[[dict[Any, Any]], Any]


_Tables.register("table", dict, DictProxy)

_tables: contextvars.ContextVar[list[_Tables] | None] = contextvars.ContextVar(
    "parquet_keytools_tables", default=None
)


@contextlib.contextmanager
def _tables_shared() -> Iterator[None]:
    token = _tables.set([])
    try:
        yield
    finally:
        _tables.reset(token)


def shared_with_workers(table: MutableMapping[K, V]) -> MutableMapping[K, V] | None:
    """Return, for `__reduce__`, a copy of a dictionary that worker processes share; None for other pickles."""
    serving = _tables.get()
    if serving is None or isinstance(table, DictProxy):
        return None if serving is None else table
    if not serving:
        server: Any = _Tables(ctx=multiprocessing.get_context("spawn")).get_server()
        threading.Thread(target=server.serve_forever, name="parquet-keytools-tables", daemon=True).start()
        serving.append(_Tables(server.address, authkey=bytes(multiprocessing.current_process().authkey)))
        serving[0].connect()
    shared: MutableMapping[K, V] = serving[0].table(dict(table))
    return shared


# --- what worker processes do ---


@dataclass(frozen=True)
class _Answer(Generic[R]):
    """The outcomes of the files of a task, and the log records and warnings meanwhile."""

    outcomes: list[R | Exception]
    records: Sequence[logging.LogRecord] = ()
    warnings: Sequence[tuple[str, type[Warning]]] = ()


class _Worker:
    """The state of a worker process, which works on one task at a time."""

    function: Callable[[Any], Any]
    prepare: Callable[[list[Any]], None] | None
    failure: KeytoolsError | None = None
    pool: ThreadPoolExecutor
    records: SimpleQueue[Any] = SimpleQueue()
    warnings: SimpleQueue[tuple[str, type[Warning]]] = SimpleQueue()


def _begin(pickled: bytes, processes: int, threads: int, levels: Mapping[str, int]) -> None:
    """Prepare a worker process; raise nothing, because the pool would print it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Only the parent writes answers.
    sys.stdout = sys.stderr
    SharedWork.processes, SharedWork.someone_waits = processes, True
    logging.getLogger().addHandler(QueueHandler(_Worker.records))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    warnings.showwarning = lambda message, category, *_: _Worker.warnings.put((str(message), category))
    _Worker.pool = ThreadPoolExecutor(threads)
    try:
        _Worker.function, _Worker.prepare = pickle.loads(pickled)  # noqa: S301 - of the parent
    except KeytoolsError as error:
        _Worker.failure = error
    except Exception as error:
        # The texts of other exceptions may quote secrets.
        text = f"a worker process lacks what it needs: {type(error).__name__}."
        _Worker.failure = WorkerProcessEndedError(text, hint="Use --processes 1.")


def _end_with_parent() -> None:
    """End when the parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(files: list[Any]) -> _Answer[Any]:
    if _Worker.failure is not None:
        raise _Worker.failure
    if _Worker.prepare is not None:
        _Worker.prepare(files)
    outcomes = _Worker.pool.map(partial(_outcome, _Worker.function), files)
    return _Answer(list(map(_portable, outcomes)), _said(_Worker.records), _said(_Worker.warnings))


def _said(queue: SimpleQueue[T]) -> list[T]:
    """Take what this process has for the parent so far."""
    return [queue.get() for _ in range(queue.qsize())]


def _call_here(function: Callable[[T], R], files: list[T]) -> _Answer[R]:
    return _Answer([_outcome(function, file) for file in files])


def _outcome(function: Callable[[T], R], file: T) -> R | Exception:
    try:
        return function(file)
    except Exception as error:
        return error


def _portable(outcome: Any) -> Any:
    """Return an outcome that the parent can unpickle: some exceptions of other packages cannot be."""
    if isinstance(outcome, Exception):
        try:
            pickle.loads(pickle.dumps(outcome))  # noqa: S301 - made here
        except Exception:
            return RuntimeError("".join(traceback.format_exception_only(outcome)).strip())
    return outcome
