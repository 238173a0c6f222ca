"""A rotation over a file or a data set: window by window, with a journal, until all files had their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from parquet_keytools import audit
from parquet_keytools.errors import OutputError
from parquet_keytools.rotation.claimed_output import without_leftovers
from parquet_keytools.rotation.external_material import state_with_material
from parquet_keytools.rotation.file_work import FileWork, read_window
from parquet_keytools.rotation.journal import JOURNAL_NAME, Journal, JournalInUseError
from parquet_keytools.rotation.replacement import folder_path
from parquet_keytools.rotation.report import FileRotation, Outcome, RotationReport
from parquet_keytools.rotation.rotation_files import rotation_files
from parquet_keytools.rotation.tail import ChangedMeanwhileError
from parquet_keytools.rotation.window import RotationContext, Window
from parquet_keytools.storage import FileLocation, exclusive_folder

CONCURRENT_FILES = 8
TURNS = 3
"""How often a file is tried that others change at the same time, before its folder is kept from them."""

OnFile = Callable[[FileRotation], None]
"""Called with what became of each file, as soon as that is known."""


@dataclass(frozen=True)
class RunOptions:
    """How a run goes about it.

    Attributes:
        journal: Where the journal is; None for the data set's own, which only local folders have.
        keep_results: Whether the report has all files, or only those that failed.
        on_file: Called with each result.
    """

    journal: Path | None = None
    keep_results: bool = True
    on_file: OnFile | None = None


def rotate_data_set(path: FileLocation, context: RotationContext, options: RunOptions) -> RotationReport:
    """Rotate the keys of a file, or of all Parquet files under a folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        OutputError: The journal is of a rotation with other parameters, or cannot be written.
    """
    report = RotationReport(dry_run=context.dry_run)
    is_folder = path.is_folder()
    if not is_folder and not path.is_file():
        raise FileNotFoundError(f"there is no file or folder {path}")
    journal = _open_journal(path, context, options, report, is_folder=is_folder)
    try:
        with audit.about(path):
            locations = rotation_files(path) if context.dry_run else without_leftovers(rotation_files(path))
            for result in _Run(context, journal, report).rotate(locations):
                report.add([result], keep_results=options.keep_results)
                if options.on_file is not None:
                    options.on_file(result)
    except BaseException:
        if journal is not None:
            journal.close(remove=False)
        raise
    finally:
        report.kms_calls = context.rewrapper.calls + context.versions.calls
        if context.dry_run:
            # To describe master keys changes nothing, so it was done.
            report.expected_kms_calls = context.rewrapper.expected_calls + context.versions.calls
    if journal is not None:
        journal.close(remove=report.stopped_by is None)
        report.journal = str(journal.path) if report.stopped_by is not None else None
    return report


def _open_journal(
    path: FileLocation, context: RotationContext, options: RunOptions, report: RotationReport, *, is_folder: bool
) -> Journal | None:
    place = options.journal
    if place is None and is_folder and path.is_local:
        place = Path(path.path) / JOURNAL_NAME
    if place is None or context.dry_run:
        return None
    parameters = {
        "path": str(path),
        **context.plan.parameters(),
        "keep_old": context.keep_old is not None,
        "kms": context.kms_digest,
    }
    try:
        journal = Journal(place, parameters)
    except JournalInUseError:
        # Two rotations of one data set do no harm; the second goes without.
        report.journal_in_use = True
        return None
    for master_key_id, version in journal.versions.items():
        now = context.versions.current_new(master_key_id)
        if None not in (version, now) and version != now:
            # A newer version is there since: what is finished is finished no more.
            journal.forget_finished()
            break
    return journal


class _Run:
    def __init__(self, context: RotationContext, journal: Journal | None, report: RotationReport) -> None:
        self._context = context
        self._journal = journal
        self._report = report
        self._finished_before: list[FileRotation] = []

    def rotate(self, locations: Iterator[FileLocation]) -> Iterator[FileRotation]:
        todo = self._without_finished(locations)
        with ThreadPoolExecutor(CONCURRENT_FILES, thread_name_prefix="parquet-keytools-rotation") as pool:
            while works := read_window(pool, todo):
                yield from self._take_finished()
                for location, result in self._window(pool, works):
                    self._note(location, result)
                    yield result
                error = self._context.rewrapper.take_unreachable()
                if error is not None:
                    # It did not answer once for a whole window: the other files would fare no better.
                    self._report.stopped_by = error
                    return
            yield from self._take_finished()

    def _window(
        self, pool: ThreadPoolExecutor, works: list[FileWork]
    ) -> Iterator[tuple[FileLocation, FileRotation]]:
        changed: list[FileLocation] = []
        for turn in range(TURNS):
            if turn:
                again = iter(changed)
                works, changed = read_window(pool, again), list(again)
            for location, outcome in Window(self._context, pool).rotate(works):
                if isinstance(outcome, ChangedMeanwhileError):
                    changed.append(location)
                else:
                    yield location, outcome
        for location in changed:
            yield location, self._alone(pool, location)

    def _alone(self, pool: ThreadPoolExecutor, location: FileLocation) -> FileRotation:
        """Rotate one file while all who honour the lock of its folder wait: one of many rotations gets on."""
        folder = folder_path(location)
        with exclusive_folder(FileLocation(location.filesystem, f"{folder}/{location.name}")):
            window = Window(self._context, pool, locked_folder=folder if location.is_local else None)
            ((_, outcome),) = window.rotate(read_window(pool, iter([location])))
        if isinstance(outcome, FileRotation):
            return outcome
        return FileRotation.failed(
            str(location),
            OutputError(f"{location} is changed by others all the time.", hint="Stop its writers, and try again."),
        )

    # --- journal ---

    def _without_finished(self, locations: Iterator[FileLocation]) -> Iterator[FileLocation]:
        """Yield the files that are not finished, and set the others aside."""
        for location in locations:
            if self._is_finished(location):
                self._finished_before.append(FileRotation(str(location), Outcome.FINISHED_BEFORE))
            else:
                yield location

    def _take_finished(self) -> Iterator[FileRotation]:
        finished, self._finished_before = self._finished_before, []
        yield from finished

    def _is_finished(self, location: FileLocation) -> bool:
        if self._journal is None or not self._journal.finished_count:
            return False
        try:
            return self._journal.is_finished(str(location), state_with_material(location))
        except OSError:
            return False

    def _note(self, location: FileLocation, result: FileRotation) -> None:
        if self._journal is None:
            return
        for key in result.keys:
            self._context.versions.current_new(key.new_master_key_id)
        # Also those of keys that stay, because they are current: with a newer version they are not any more.
        for master_key_id, version in self._context.versions.known_new.items():
            self._journal.add_version(master_key_id, version)
        try:
            state = state_with_material(location)
        except OSError:
            state = None
        self._journal.add(result, state)
