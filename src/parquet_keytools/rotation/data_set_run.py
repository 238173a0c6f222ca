"""One run over a file or a data set: files are changed, retried if they changed at the same time, and reported.

From the command line, several processes change small files, each several at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from parquet_keytools import audit
from parquet_keytools.errors import (
    ChangedMeanwhileError,
    FileChangedError,
    KeytoolsError,
    OutputError,
    WorkerProcessEndedError,
    kms_failure,
)
from parquet_keytools.rotation.file_keys import changed_while_rotated
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.runtime.worker_processes import (
    FILES_PER_PROCESS,
    MOST_PROCESSES,
    FileWorkers,
    UntilKmsFails,
    may_start_processes,
)
from parquet_keytools.storage.local_files import (
    exclusive_folder,
    naming_left_behind,
    storage_failure,
    warn_left_behind,
    without_leftovers,
)
from parquet_keytools.storage.locations import FileLocation, folder_path, real_location
from parquet_keytools.storage.walk import BehindLink, Entry, LeftOut, ParquetFile, Unseen, data_set_in_place

CONCURRENT_FILES = 8
ATTEMPTS = 3
"""How often a file that others change is attempted before its folder is locked."""

FILES_AT_A_TIME = 8
"""How many small files a process changes at a time: they wait for the disk or the store."""

_FILES_PER_TURN = 1000
"""After how many small files the files that changed meanwhile are retried."""

SMALL_BYTES = 4 << 20
"""Larger files are changed by the main process: they keep its threads busy."""

_AGAIN = "Repeat the command; if memory is short, with a smaller number of --processes."

_log = logging.getLogger(__name__)

OnFile = Callable[[FileRotation], None]
"""Called with the result of each file."""

FileOutcome = FileRotation | ChangedMeanwhileError
"""The result of a file, or the error for a file that has to be retried."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        keep_results: Whether the report lists all files, or only those that failed.
        on_file: Called with each result.
        raises_failures: Whether to raise the error of a file: for a run over a single file.
        follow_links: Whether to change files outside the given folder that links lead to.
        on_left_out: Called with each entry that does not belong to the data set.
    """

    keep_results: bool = True
    on_file: OnFile | None = None
    raises_failures: bool = False
    follow_links: bool = False
    on_left_out: Callable[[LeftOut], None] = lambda _: None


@dataclass(frozen=True)
class InPlaceRequest:
    """What a user asks for when files are encrypted or re-keyed in place; see `Keytools.encrypt_in_place`."""

    table_name: str | None = None
    keep_results: bool = True
    on_file: OnFile | None = None
    on_progress: Callable[[int], None] | None = None
    follow_links: bool = False
    key_values: Mapping[str, str] | None = None


class FileChange(ABC):
    """The change of files in a run: their keys are re-wrapped, or they are encrypted with new keys."""

    @abstractmethod
    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Take the next files that go together, and yield the result of each; nothing at the end.

        Files that could not be processed because the storage is full have no result.

        Args:
            pool: Reads and writes files.
            locations: The remaining files.
            locked_folder: Path of a folder that the caller has locked.
        """

    @abstractmethod
    def take_end(self) -> KeytoolsError | None:
        """Return an error that all remaining files would have, too; None if there is none."""


ChangeFile = Callable[[FileLocation, "str | None"], FileRotation]
"""Changes a file; the second argument is the path of a folder that the caller has locked."""


def changed_file(change: ChangeFile, location: FileLocation, locked_folder: str | None) -> FileOutcome:
    """Change a file, and return the result, or the failure as a result."""
    try:
        with audit.about(location):
            return change(location, locked_folder)
    except (KeytoolsError, OSError) as error:
        return outcome_of(location, error)


_Found = tuple["FileOutcome | None", list[str]]
"""The result of a small file, or None for a large one; and what stays in its store, for people."""


@dataclass(frozen=True)
class _SmallFileChange:
    """Changes a file if it is small; pickled for worker processes."""

    change: ChangeFile

    def __call__(self, location: FileLocation) -> _Found:
        left_behind: list[str] = []
        with naming_left_behind(left_behind.append):
            # The change itself reports a file that cannot be read.
            with contextlib.suppress(OSError):
                if location.size_bytes() > SMALL_BYTES:
                    return None, left_behind
            return changed_file(self.change, location, None), left_behind


class EachFile(FileChange):
    """Changes files one by one, or small files in worker processes."""

    def __init__(self, change: ChangeFile) -> None:
        self._change = change
        self._end: KeytoolsError | None = None
        self._workers: FileWorkers[FileLocation, _Found] | None = None

    @contextlib.contextmanager
    def spread(self, files: int) -> Iterator[None]:
        """Use worker processes within the block, if this number of small files is worth it."""
        with FileWorkers(_SmallFileChange(UntilKmsFails(self._change)), files, FILES_AT_A_TIME) as workers:
            self._workers = workers if workers.processes > 1 else None
            yield

    def change(
        self, pool: Executor, locations: Iterator[FileLocation], locked_folder: str | None
    ) -> Iterator[tuple[FileLocation, FileOutcome]]:
        """Change the next file, or the next small files together."""
        if self._workers is None or locked_folder is not None:
            for location in itertools.islice(locations, 1):
                outcome = changed_file(self._change, location, locked_folder)
                if isinstance(outcome, FileRotation) and outcome.error is not None:
                    self._end = kms_failure(outcome.error)
                yield location, outcome
            return
        small = itertools.takewhile(lambda _: self._end is None, itertools.islice(locations, _FILES_PER_TURN))
        try:
            for location, found in self._workers.outcomes(small):
                result = self._result(location, found)
                if result is not None:
                    yield location, result
        except WorkerProcessEndedError as error:
            self._end = WorkerProcessEndedError(error.args[0], hint=_AGAIN)

    def take_end(self) -> KeytoolsError | None:
        """Return the error that ends the run: the KMS is unavailable, the storage is full, or a process ended."""
        error, self._end = self._end, None
        return error

    def _result(self, location: FileLocation, found: _Found | Exception) -> FileOutcome | None:
        """Return the result of a file; None if it counts as not processed, because another file ended the run."""
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
            end = storage_failure(outcome.error, location) or kms_failure(outcome.error)
            if end is not None and self._end is not None:
                return None
            self._end = self._end or end
        return outcome


def outcome_of(location: FileLocation, error: KeytoolsError | OSError) -> FileOutcome:
    """Return the result of a file that failed with an error."""
    if isinstance(error, ChangedMeanwhileError):
        return error
    is_gone = isinstance(error, FileNotFoundError)
    if isinstance(error, FileChangedError) or (is_gone and location.is_file()):
        # The file, or its key material, was missing for a moment: it was replaced just now.
        return changed_while_rotated(location)
    if is_gone:
        return FileRotation(str(location), RotationOutcome.NOTHING_TO_ROTATE, how="removed meanwhile")
    return FileRotation.failed(str(location), error)


def files_of(
    entries: Iterable[Entry], on_unseen: Callable[[Unseen], None], on_left_out: Callable[[LeftOut], None]
) -> Iterator[FileLocation]:
    """Yield the Parquet files of a walk; call a function for all other entries."""
    for entry in entries:
        if isinstance(entry, ParquetFile):
            yield entry.location
        elif isinstance(entry, Unseen):
            on_unseen(entry)
        else:
            on_left_out(entry)


def change_each_file(
    path: FileLocation, change: ChangeFile, request: InPlaceRequest, *, raises_failures: bool
) -> RotationReport:
    """Change a file, or each Parquet file under a folder on its own; errors as with `change_data_set`."""
    report = RotationReport()
    options = RunOptions(
        keep_results=request.keep_results,
        on_file=request.on_file,
        raises_failures=raises_failures,
        follow_links=request.follow_links,
        on_left_out=report.skipped.append,
    )
    change_data_set(path, EachFile(change), report, options)
    return report


def change_data_set(path: FileLocation, change: FileChange, report: RotationReport, options: RunOptions) -> None:
    """Change a file, or all Parquet files under a folder.

    Raises:
        FileNotFoundError: The file or folder does not exist.
        NoParquetFilesError: The folder has no Parquet files.
    """
    begun: dict[str, None] = {}

    def noting_begun(locations: Iterator[FileLocation]) -> Iterator[FileLocation]:
        for location in locations:
            begun[str(location)] = None
            yield location

    def note(result: FileRotation) -> None:
        begun.pop(result.path, None)
        if result.error is not None and options.raises_failures:
            raise result.error
        report.add([result], keep_results=options.keep_results)
        if options.on_file is not None:
            options.on_file(result)

    def noting_links() -> Iterator[Entry]:
        for entry in data_set_in_place(path, follow_links=options.follow_links):
            if isinstance(entry, BehindLink):
                note(FileRotation.of_link(entry))
            else:
                yield entry

    with audit.about(path), naming_left_behind(report.note_left_behind), contextlib.ExitStack() as stack:
        entries: Iterator[Entry] = noting_links()
        if isinstance(change, EachFile) and path.is_for_all_processes and may_start_processes():
            first = list(itertools.islice(entries, MOST_PROCESSES * FILES_PER_PROCESS))
            entries = itertools.chain(first, entries)
            small = sum(isinstance(entry, ParquetFile) and entry.size_bytes <= SMALL_BYTES for entry in first)
            stack.enter_context(change.spread(small))
        locations = files_of(entries, lambda unseen: note(FileRotation.of_unseen(unseen)), options.on_left_out)
        if not report.dry_run:
            locations = without_leftovers(locations)
        locations = noting_begun(locations)
        # Closed at once if this ends early, so that begun files are finished then.
        for result in stack.enter_context(contextlib.closing(_results(change, report, locations))):
            note(result)
        # A process that ended may have completed a file.
        if report.stopped_by is not None and not isinstance(report.stopped_by, WorkerProcessEndedError):
            for left in [*begun, *map(str, locations)]:
                note(FileRotation(left, RotationOutcome.NOT_ATTEMPTED))


def _results(
    change: FileChange, report: RotationReport, locations: Iterator[FileLocation]
) -> Generator[FileRotation, None, None]:
    with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="parquet-keytools-rotation") as pool:
        is_last = False
        while not is_last and report.stopped_by is None:
            is_last = True
            unreachable: list[FileRotation] = []
            for result in _results_together(change, report, pool, locations):
                is_last = False
                failure = None if result.error is None else storage_failure(result.error, result.path)
                report.stopped_by = report.stopped_by or failure
                if result.error is not None and kms_failure(result.error) is not None:
                    unreachable.append(result)
                else:
                    yield result
            report.stopped_by = report.stopped_by or change.take_end()
            # One says why the run ends; the others were attempted at the same time, and are unchanged.
            yield from unreachable if report.stopped_by is None else unreachable[:1]


def _results_together(
    change: FileChange, report: RotationReport, pool: Executor, locations: Iterator[FileLocation]
) -> Iterator[FileRotation]:
    """Yield the results of the next files that go together, with retries of files that changed."""
    for attempt in range(ATTEMPTS):
        if report.stopped_by is not None:
            return
        changed: list[FileLocation] = []
        for location, outcome in change.change(pool, locations, None):
            if isinstance(outcome, ChangedMeanwhileError):
                changed.append(location)
            else:
                yield outcome
        if attempt:
            changed += locations
        locations = iter(changed)
    for location in locations:
        if report.stopped_by is None:
            yield _result_under_lock(change, pool, location)


def _result_under_lock(change: FileChange, pool: Executor, location: FileLocation) -> FileRotation:
    """Change one file while its folder is locked, so that one of several rotations makes progress."""
    try:
        with exclusive_folder(real_location(location)):
            ((_, outcome),) = change.change(pool, iter([location]), folder_path(location))
    except (KeytoolsError, OSError) as error:
        outcome = outcome_of(location, error)
    if isinstance(outcome, FileRotation):
        return outcome
    return FileRotation.failed(
        str(location),
        OutputError(f"{location} is constantly being changed by others.", hint="Stop its writers, then retry."),
    )
