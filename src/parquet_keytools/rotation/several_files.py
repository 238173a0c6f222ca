"""Small files changed several at a time, by several processes; each as the one process of a run would do it."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from parquet_keytools.errors import KeytoolsError, KmsUnavailableError, WorkerProcessEndedError
from parquet_keytools.rotation.data_set_run import SMALL_BYTES, ChangeFile, FileOutcome, OneByOne, changed_file
from parquet_keytools.rotation.report import FileRotation
from parquet_keytools.runtime.worker_processes import WorkerProcesses
from parquet_keytools.storage.failures import naming_left_behind, storage_failure, warn_left_behind
from parquet_keytools.storage.locations import FileLocation

FILES_AT_A_TIME = 8
"""How many files a process changes at a time: they wait for the disk, or for a store."""

_FILES_PER_TURN = 1000
"""After so many files those get another turn that others changed meanwhile."""

_AGAIN = "Give the same command again; if memory is short, with a smaller number of --processes."

_log = logging.getLogger(__name__)

_Found = tuple["FileOutcome | None", list[str]]
"""What became of a file, or that it is large; and what stays in its store, for people."""


class _SmallFileChange:
    """Changes a file if it is small; pickled for worker processes."""

    def __init__(self, change: ChangeFile) -> None:
        self._change = change

    def __call__(self, location: FileLocation) -> _Found:
        left_behind: list[str] = []
        with naming_left_behind(left_behind.append):
            # What cannot be looked at is said by the change.
            with contextlib.suppress(OSError):
                if location.size_bytes() > SMALL_BYTES:
                    return None, left_behind
            return changed_file(self._change, location, None), left_behind


class SeveralAtATime(OneByOne):
    """Changes files one after the other, or small ones by several processes, where that is wanted and pays.

    Args:
        change: Is pickled for each process.
        processes: See `FileChange`.
    """

    def __init__(self, change: ChangeFile, processes: int | None) -> None:
        super().__init__(change)
        self.processes = processes
        self._workers: WorkerProcesses[[FileLocation], _Found] | None = None
        self._pool: Executor | None = None

    @contextlib.contextmanager
    def spread(self, files: int) -> Iterator[None]:
        """Have several processes work within the block, if so many small files are worth it."""
        change = _SmallFileChange(self._change)
        with (
            WorkerProcesses(change, files, self.processes, FILES_AT_A_TIME) as workers,
            ThreadPoolExecutor(workers.calls_at_a_time, thread_name_prefix="parquet-keytools-files") as pool,
        ):
            if workers.are_others:
                self._workers, self._pool = workers, pool
            yield

    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Change the next file, or the next small ones together."""
        if self._workers is None or self._pool is None or locked_folder is not None:
            yield from super().change(pool, locations, locked_folder)
            return
        waiting: deque[tuple[FileLocation, Future[FileOutcome | None]]] = deque()
        try:
            for location in itertools.islice(locations, _FILES_PER_TURN):
                # Before it is begun: what is at an end gets no other one.
                yield from self._results(waiting, self._workers.calls_at_a_time - 1)
                if self._end is not None:
                    break
                context = contextvars.copy_context()
                waiting.append((location, self._pool.submit(context.run, self._changed_elsewhere, location)))
            yield from self._results(waiting, 0)
        finally:
            for _, future in waiting:
                future.cancel()

    def take_end(self) -> KeytoolsError | None:
        """Return why the files that are left would fare no better: the KMS does not answer, or a process ended."""
        return self._end

    def _changed_elsewhere(self, location: FileLocation) -> FileOutcome | None:
        assert self._workers is not None
        outcome, left_behind = self._workers(location)
        for text in left_behind:
            warn_left_behind(_log, text, is_logged=False)
        return outcome

    def _results(
        self, waiting: deque[tuple[FileLocation, Future[FileOutcome | None]]], left: int
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        while len(waiting) > left:
            location, future = waiting.popleft()
            outcome = self._result(location, future)
            if outcome is not None:
                yield location, outcome

    def _result(self, location: FileLocation, future: Future[FileOutcome | None]) -> FileOutcome | None:
        """Return what became of a file; None where it counts as not processed, for another one ended the run."""
        try:
            outcome = future.result()
        except WorkerProcessEndedError as error:
            return self._of_ended_process(location, error)
        if outcome is None:
            if self._end is not None:
                return None
            # In this thread, which Ctrl-C interrupts at once.
            outcome = changed_file(self._change, location, None)
        if isinstance(outcome, FileRotation) and outcome.error is not None:
            end: KeytoolsError | None = storage_failure(outcome.error, location)
            if isinstance(outcome.error, KmsUnavailableError):
                end = outcome.error
            if end is not None and self._end is not None:
                return None
            self._end = self._end or end
        return outcome

    def _of_ended_process(self, location: FileLocation, error: WorkerProcessEndedError) -> FileOutcome | None:
        if self._end is None:
            self._end = WorkerProcessEndedError(
                "a worker process ended, and no more files were begun.", has_begun=False, hint=_AGAIN
            )
        if not error.has_begun:
            return None
        text = f"{location}: {error.args[0]} The file is whole, as it was or changed."
        return FileRotation.failed(str(location), WorkerProcessEndedError(text, has_begun=True, hint=_AGAIN))
