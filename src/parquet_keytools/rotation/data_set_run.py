"""One run over a file or a data set: files are changed, retried if they changed at the same time, and reported.

From the command line, several processes change small files, each several at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

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
from parquet_keytools.storage.local_files import exclusive_folder, storage_failure, without_leftovers
from parquet_keytools.storage.locations import FileLocation, real_location
from parquet_keytools.storage.walk import (
    BehindLink,
    Entry,
    LeftOut,
    ParquetFile,
    Unseen,
    data_set_in_place,
    file_or_folder,
)

CONCURRENT_FILES = 8

FILES_AT_A_TIME = 8
"""How many small files a process changes at a time: they wait for the disk or the store."""

SMALL_BYTES = 4 << 20
"""Larger files are changed by the main process: they keep its threads busy."""

_AGAIN = "Repeat the command; if memory is short, with a smaller number of --processes."

OnFile = Callable[[FileRotation], None]
"""Called with the result of each file."""

FileOutcome = FileRotation | ChangedMeanwhileError
"""The result of a file, or the error for a file that has to be retried."""

Outcomes = Generator[tuple[FileLocation, FileOutcome], None, None]

ChangeFiles = Callable[[Executor, Iterator[FileLocation]], Outcomes]
"""Changes files: takes a pool, which reads and writes them, and the files; yields the outcome of each."""

ChangeFile = Callable[[FileLocation], FileRotation]
"""Changes one file."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        keep_results: Whether the report lists all files, or only those that failed.
        raises_failures: Whether to raise the error of a file: for a run over a single file.
        follow_links: Whether to change files outside the given folder that links lead to.
        on_left_out: Called with each entry that does not belong to the data set.
    """

    keep_results: bool = True
    on_file: OnFile | None = None
    raises_failures: bool = False
    follow_links: bool = False
    on_left_out: Callable[[LeftOut], None] | None = None


def changed_file(change: ChangeFile, location: FileLocation) -> FileOutcome:
    """Change a file, and return the result, or the failure as a result."""
    try:
        with audit.about(location):
            return change(location)
    except (KeytoolsError, OSError) as error:
        return outcome_of(location, error)


@dataclass(frozen=True)
class _SmallFileChange:
    """Changes a file if it is small, and returns None for a large one; pickled for worker processes."""

    change: ChangeFile

    def __call__(self, location: FileLocation) -> FileOutcome | None:
        # The change itself reports a file that cannot be read.
        with contextlib.suppress(OSError):
            if location.size_bytes() > SMALL_BYTES:
                return None
        return changed_file(self.change, location)


class EachFile:
    """Changes files one by one, or small files in worker processes."""

    def __init__(self, change: ChangeFile) -> None:
        self._change = change
        self._workers: FileWorkers[FileLocation, FileOutcome | None] | None = None

    @contextlib.contextmanager
    def spread(self, files: int) -> Iterator[None]:
        """Use worker processes within the block, if this number of small files is worth it."""
        with FileWorkers(_SmallFileChange(UntilKmsFails(self._change)), files, FILES_AT_A_TIME) as workers:
            self._workers = workers if workers.processes > 1 else None
            yield

    def __call__(self, pool: Executor, locations: Iterator[FileLocation]) -> Outcomes:
        """Change files; see `ChangeFiles`."""
        # Once: another attempt holds the lock of the folder, and workers would wait for it.
        workers, self._workers = self._workers, None
        if workers is None:
            for location in locations:
                yield location, changed_file(self._change, location)
            return
        has_ended = False
        for location, found in workers.outcomes(locations):
            if found is None and has_ended:
                found = FileRotation(str(location), RotationOutcome.NOT_ATTEMPTED)
            elif found is None:
                # A large file in this thread, which Ctrl-C interrupts at once.
                found = changed_file(self._change, location)
            elif isinstance(found, Exception) and not isinstance(found, ChangedMeanwhileError):
                raise found
            if isinstance(found, FileRotation) and found.error is not None:
                has_ended |= _end_of_run(found.error, location) is not None
            yield location, found


def _end_of_run(error: KeytoolsError | OSError, path: object) -> KeytoolsError | None:
    """Return the error that ends a run, because other files would fail, too; None if only this file failed."""
    return storage_failure(error, path) or kms_failure(error)


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
    entries: Iterable[Entry], on_unseen: Callable[[Unseen], None], on_left_out: Callable[[LeftOut], None] | None
) -> Iterator[FileLocation]:
    """Yield the Parquet files of a walk; call a function for all other entries."""
    for entry in entries:
        if isinstance(entry, ParquetFile):
            yield entry.location
        elif isinstance(entry, Unseen):
            on_unseen(entry)
        elif on_left_out is not None:
            on_left_out(entry)


def change_each_file(path: FileLocation, change: ChangeFile, options: RunOptions) -> RotationReport:
    """Change a file, or each Parquet file under a folder on its own.

    Raises the failure of a file that is given itself.
    """
    report = RotationReport()
    is_file = file_or_folder(path).is_file
    options = replace(options, raises_failures=is_file, on_left_out=report.skipped.append)
    change_data_set(path, EachFile(change), report, options)
    return report


def change_data_set(path: FileLocation, change: ChangeFiles, report: RotationReport, options: RunOptions) -> None:
    """Change a file, or all Parquet files under a folder."""

    def note(result: FileRotation) -> None:
        if result.error is not None:
            if options.raises_failures:
                raise result.error
            end = _end_of_run(result.error, result.path)
            if end is not None and report.stopped_by is not None:
                # One file says why the run ends. This one was attempted at the same time, and is unchanged.
                result = FileRotation(result.path, RotationOutcome.NOT_ATTEMPTED)
            report.stopped_by = report.stopped_by or end
        report.add(result, keep_results=options.keep_results)
        if options.on_file is not None:
            options.on_file(result)

    def noting_links() -> Iterator[Entry]:
        for entry in data_set_in_place(path, follow_links=options.follow_links):
            if isinstance(entry, BehindLink):
                note(FileRotation.of_link(entry))
            else:
                yield entry

    with audit.about(path), contextlib.ExitStack() as stack:
        entries: Iterator[Entry] = noting_links()
        if isinstance(change, EachFile) and path.is_for_all_processes and may_start_processes():
            first = list(itertools.islice(entries, MOST_PROCESSES * FILES_PER_PROCESS))
            entries = itertools.chain(first, entries)
            small = sum(isinstance(entry, ParquetFile) and entry.size_bytes <= SMALL_BYTES for entry in first)
            stack.enter_context(change.spread(small))
        pool = stack.enter_context(ThreadPoolExecutor(CONCURRENT_FILES, "parquet-keytools-rotation"))
        locations = files_of(entries, lambda unseen: note(FileRotation.of_unseen(unseen)), options.on_left_out)
        if not report.dry_run:
            locations = without_leftovers(locations)
        changed: list[FileLocation] = []
        # Closed at once if this ends early, so that begun files are finished then.
        outcomes = stack.enter_context(contextlib.closing(change(pool, _until_stopped(report, locations))))
        try:
            for location, outcome in outcomes:
                if isinstance(outcome, ChangedMeanwhileError):
                    changed.append(location)
                else:
                    note(outcome)
        except WorkerProcessEndedError as error:
            # It may have completed a file: what is left is not listed.
            report.stopped_by = WorkerProcessEndedError(error.args[0], hint=_AGAIN)
            return
        for location in _until_stopped(report, again := iter(changed)):
            note(_result_under_lock(change, pool, location))
        for location in itertools.chain(again, locations) if report.stopped_by is not None else ():
            note(FileRotation(str(location), RotationOutcome.NOT_ATTEMPTED))


def _until_stopped(report: RotationReport, locations: Iterator[FileLocation]) -> Iterator[FileLocation]:
    """Yield files until the run ends; the others stay in the iterator."""
    while report.stopped_by is None and (location := next(locations, None)) is not None:
        yield location


def _result_under_lock(change: ChangeFiles, pool: Executor, location: FileLocation) -> FileRotation:
    """Change a file that others changed, with its folder locked, so that one of several runs makes progress."""
    try:
        with exclusive_folder(real_location(location)):
            ((_, outcome),) = change(pool, iter([location]))
    except (KeytoolsError, OSError) as error:
        outcome = outcome_of(location, error)
    if isinstance(outcome, FileRotation):
        return outcome
    return FileRotation.failed(
        str(location),
        OutputError(f"{location} is constantly being changed by others.", hint="Stop its writers, then retry."),
    )
