"""One run over a file or a data set: files are changed, tried again where others change them, and reported.

Small files are changed several at a time, by several processes, each as the one process of a run would do it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from parquet_keytools import audit
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    FileChangedError,
    KeytoolsError,
    KmsUnavailableError,
    OutputError,
    WorkerProcessEndedError,
)
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.rotation.tail import changed_while_rotated
from parquet_keytools.runtime.worker_processes import (
    FILES_PER_PROCESS,
    MOST_PROCESSES,
    FileWorkers,
    may_start_processes,
)
from parquet_keytools.storage.failures import naming_left_behind, storage_failure, warn_left_behind
from parquet_keytools.storage.locations import FileLocation, folder_path, real_location
from parquet_keytools.storage.locks import exclusive_folder
from parquet_keytools.storage.temporary_files import without_leftovers
from parquet_keytools.storage.walk import (
    BehindLink,
    Entry,
    LeftOut,
    ParquetFile,
    Unseen,
    data_set,
    data_set_in_place,
)

CONCURRENT_FILES = 8
ATTEMPTS = 3
"""How often a file is attempted that others change at the same time, before its folder is kept from them."""

FILES_AT_A_TIME = 8
"""How many small files a process changes at a time: they wait for the disk, or for a store."""

_FILES_PER_TURN = 1000
"""After so many small files those get another turn that others changed meanwhile."""

SMALL_BYTES = 4 << 20
"""Larger files are changed by the process of the run: they keep its threads busy."""

_AGAIN = "Give the same command again; if memory is short, with a smaller number of --processes."

_log = logging.getLogger(__name__)

OnFile = Callable[[FileRotation], None]
"""Called with what became of each file, as soon as that is known."""

OnUnseen = Callable[[Unseen], None]
"""Called with each thing that could not be checked: what is said of all files must not pass over it."""

OnLeftOut = Callable[[LeftOut], None]
"""Called with each thing that readers of data sets leave out, also in folders that they pass over."""

FileOutcome = FileRotation | ChangedMeanwhileError
"""What became of a file; one that changed meanwhile is to be attempted again."""


@dataclass(frozen=True)
class RunOptions:
    """How a run goes about it.

    Attributes:
        keep_results: Whether the report has all files, or only those that failed.
        on_file: Called with each result.
        raises_failures: Whether what fails with a file is raised: for a run over a single one.
        follow_links: Whether files are changed that links lead to, outside of what was named.
    """

    keep_results: bool = True
    on_file: OnFile | None = None
    raises_failures: bool = False
    follow_links: bool = False


class FileChange(ABC):
    """What a run does with files: it re-wraps their keys, or encrypts them with new ones."""

    @abstractmethod
    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Take the next files, as many as go together, and yield what became of each; of none at the end.

        When nothing can be written any more, the files that were not processed are not among them.

        Args:
            pool: Reads and writes files.
            locations: The files that are left.
            locked_folder: Path of a folder whose lock the caller has.
        """

    @abstractmethod
    def take_end(self) -> KeytoolsError | None:
        """Return why the files that are left would fare no better; None where they may."""


ChangeFile = Callable[[FileLocation, "str | None"], FileRotation]
"""Changes a file; the second argument is the path of a folder whose lock the caller has."""


def changed_file(change: ChangeFile, location: FileLocation, locked_folder: str | None) -> FileOutcome:
    """Change a file, and return what became of it, also where it failed."""
    try:
        with audit.about(location):
            return change(location, locked_folder)
    except (KeytoolsError, OSError) as error:
        return outcome_of(location, error)


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


class EachFile(FileChange):
    """Changes files one after the other, or small ones by worker processes, where that is wanted and pays."""

    def __init__(self, change: ChangeFile) -> None:
        self._change = change
        self._end: KeytoolsError | None = None
        self._workers: FileWorkers[FileLocation, _Found] | None = None

    @contextlib.contextmanager
    def spread(self, files: int) -> Iterator[None]:
        """Have worker processes work within the block, if this number of small files is worth it."""
        with FileWorkers(_SmallFileChange(self._change), files, FILES_AT_A_TIME) as workers:
            self._workers = workers if workers.processes > 1 else None
            yield

    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Change the next file, or the next small ones together."""
        if self._workers is None or locked_folder is not None:
            for location in itertools.islice(locations, 1):
                outcome = changed_file(self._change, location, locked_folder)
                if isinstance(outcome, FileRotation) and isinstance(outcome.error, KmsUnavailableError):
                    self._end = outcome.error
                yield location, outcome
            return
        # What is at an end gets no other file.
        small = itertools.takewhile(lambda _: self._end is None, itertools.islice(locations, _FILES_PER_TURN))
        try:
            for location, found in self._workers.outcomes(small):
                result = self._result(location, found)
                if result is not None:
                    yield location, result
        except WorkerProcessEndedError as error:
            self._end = WorkerProcessEndedError(error.args[0], hint=_AGAIN)

    def take_end(self) -> KeytoolsError | None:
        """Return why the files that are left would fare no better: the KMS does not answer, or a process ended."""
        error, self._end = self._end, None
        return error

    def _result(self, location: FileLocation, found: _Found | Exception) -> FileOutcome | None:
        """Return what became of a file; None where it counts as not processed, for another one ended the run."""
        if isinstance(found, Exception):
            raise found
        outcome, left_behind = found
        for text in left_behind:
            warn_left_behind(_log, text, is_logged=False)
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


def outcome_of(location: FileLocation, error: KeytoolsError | OSError) -> FileOutcome:
    """Return what an error means for a file."""
    if isinstance(error, ChangedMeanwhileError):
        return error
    is_gone = isinstance(error, FileNotFoundError)
    if isinstance(error, FileChangedError) or (is_gone and location.is_file()):
        # Not there for a moment, or its key material: somebody replaces it just now.
        return changed_while_rotated(location)
    if is_gone:
        return FileRotation(str(location), RotationOutcome.NOTHING_TO_ROTATE, how="removed meanwhile")
    return FileRotation.failed(str(location), error)


def data_set_files(
    path: FileLocation, on_unseen: OnUnseen, on_left_out: OnLeftOut | None = None
) -> Iterator[FileLocation]:
    """Yield a file, or the Parquet files under a folder, without listing all of them first.

    Raises:
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: There are no Parquet files under the folder, and nothing that may hold some.
    """
    return _files_of(data_set(path, into_passed_over=on_left_out is not None), on_unseen, on_left_out)


def _files_of(
    entries: Iterable[Entry], on_unseen: OnUnseen, on_left_out: OnLeftOut | None = None
) -> Iterator[FileLocation]:
    for entry in entries:
        if isinstance(entry, ParquetFile):
            yield entry.location
        elif isinstance(entry, Unseen):
            on_unseen(entry)
        elif on_left_out is not None:
            on_left_out(entry)


def _entries(entries: Iterable[Entry | BehindLink], note: Callable[[FileRotation], None]) -> Iterator[Entry]:
    """Yield what is to be changed, and note what is behind links that are not followed."""
    for entry in entries:
        if isinstance(entry, BehindLink):
            note(FileRotation.of_link(entry))
        else:
            yield entry


def change_data_set(path: FileLocation, change: FileChange, report: RotationReport, options: RunOptions) -> None:
    """Change a file, or all Parquet files under a folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: The folder has no Parquet files.
    """

    def note(result: FileRotation) -> None:
        if result.error is not None and options.raises_failures:
            raise result.error
        report.add([result], keep_results=options.keep_results)
        if options.on_file is not None:
            options.on_file(result)

    with audit.about(path), naming_left_behind(report.note_left_behind), contextlib.ExitStack() as stack:
        entries = _entries(data_set_in_place(path, follow_links=options.follow_links), note)
        if isinstance(change, EachFile) and path.is_for_all_processes and may_start_processes():
            first = list(itertools.islice(entries, MOST_PROCESSES * FILES_PER_PROCESS))
            entries = itertools.chain(first, entries)
            small = sum(isinstance(entry, ParquetFile) and entry.size_bytes <= SMALL_BYTES for entry in first)
            stack.enter_context(change.spread(small))
        locations = _files_of(entries, lambda unseen: note(FileRotation.of_unseen(unseen)))
        if not report.dry_run:
            locations = without_leftovers(locations)
        # Closed at once if this ends early: files that were begun are finished then.
        results = stack.enter_context(contextlib.closing(_Run(change, report).results(locations)))
        for result in results:
            note(result)


class _Run:
    def __init__(self, change: FileChange, report: RotationReport) -> None:
        self._change = change
        self._report = report

    def results(self, locations: Iterator[FileLocation]) -> Generator[FileRotation, None, None]:
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="parquet-keytools-rotation") as pool:
            is_last = False
            while not is_last and self._report.stopped_by is None:
                is_last = True
                for result in self._together(pool, locations):
                    is_last = False
                    failure = None if result.error is None else storage_failure(result.error, result.path)
                    self._report.stopped_by = self._report.stopped_by or failure
                    yield result
                self._report.stopped_by = self._report.stopped_by or self._change.take_end()

    def _together(self, pool: Executor, locations: Iterator[FileLocation]) -> Iterator[FileRotation]:
        """Yield what became of the next files that go together, however often they are changed by others."""
        for attempt in range(ATTEMPTS):
            if self._report.stopped_by is not None:
                return
            changed: list[FileLocation] = []
            for location, outcome in self._change.change(pool, locations, None):
                if isinstance(outcome, ChangedMeanwhileError):
                    changed.append(location)
                else:
                    yield outcome
            if attempt:
                changed += locations
            locations = iter(changed)
        for location in locations:
            if self._report.stopped_by is None:
                yield self._alone(pool, location)

    def _alone(self, pool: Executor, location: FileLocation) -> FileRotation:
        """Change one file while all who honour the lock of its folder wait: one of many rotations gets on."""
        try:
            with exclusive_folder(real_location(location)):
                ((_, outcome),) = self._change.change(pool, iter([location]), folder_path(location))
        except (KeytoolsError, OSError) as error:
            outcome = outcome_of(location, error)
        if isinstance(outcome, FileRotation):
            return outcome
        return FileRotation.failed(
            str(location),
            OutputError(
                f"{location} is constantly being changed by others.", hint="Stop its writers, then retry."
            ),
        )
