"""Converts a file or a folder of files, and reports the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import typer

from parquet_keytools.cli.options import location_of, locations_of
from parquet_keytools.cli.output import (
    ExitStatus,
    Messages,
    ProgressBar,
    answer,
    answer_plaintext_columns,
    error_fields,
    error_text,
    json_wanted,
    number_of,
    print_json,
    progress_bar,
    say,
    say_left_out,
    say_not_attempted,
    size_text,
    status_of_all,
)
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsConfigurationError,
    WorkerProcessEndedError,
    kms_failure,
)
from parquet_keytools.files.conversion import FilePlan, FileResult, PlannedFile, SkipExisting, plan_files
from parquet_keytools.runtime.presentation import printable
from parquet_keytools.runtime.worker_processes import FileWorkers, UntilKmsFails, command_line_processes
from parquet_keytools.storage.local_files import storage_failure
from parquet_keytools.storage.locations import OBJECT_STORES

if TYPE_CHECKING:
    from parquet_keytools.conformance.verification import SalvageResult

_SMALL_BYTES = 4 << 20
"""Larger files are written by several threads each."""

_SMALL_FILES_AT_A_TIME = 4

_Numbered = tuple[int, PlannedFile]

SALVAGED = "salvaged"
"""Salvaging has no --skip-existing: nothing shows that a result is complete."""
"""A file, and its position in the plan."""


class Convert(Protocol):
    """Converts one file, such as `Keytools.encrypt_file`."""

    def __call__(
        self,
        source: str,
        target: str,
        *,
        source_filesystem: Any,
        target_filesystem: Any,
        on_progress: Callable[[int], None] | None,
        overwrite: bool,
    ) -> FileResult:
        """Read the source and write the target."""
        ...


def convert_files(
    sources: Sequence[str],
    target: str,
    participle: str,
    convert: Convert,
    *,
    overwrite: bool,
    skip_existing: SkipExisting = False,
    check: Callable[[list[str]], object] = lambda _: None,
    processes: int | None = 1,
) -> None:
    """Convert a file, or all Parquet files of a folder.

    If a file of a folder fails, the others are still converted, unless it is the first and fails because of the
    configuration or credentials: then all would fail.

    Args:
        sources: Paths, URIs or globs.
        target: A path or URI.
        participle: The past participle of the conversion, such as `encrypted`.
        convert: Converts one file.
        overwrite: Whether the target may exist.
        skip_existing: Whether `convert` skips the results of an earlier run.
        check: Refuses paths of files, relative to the folder; called before anything is written.
        processes: Number of processes that convert small files; None chooses it.

    Raises:
        typer.Exit: Some files of a folder failed.
        KeytoolsError: The plan is not possible, a single file failed, or the configuration fits no file.
    """
    started = time.monotonic()
    may_exist = overwrite or bool(skip_existing)
    plan = plan_files(locations_of(sources, "SRC"), location_of(target, "DST"), overwrite=may_exist)
    check(plan.paths_in_folder)
    with progress_bar(plan.size_bytes) as progress:
        work = _Work(plan, convert, progress, overwrite=overwrite)
        try:
            with command_line_processes(processes):
                work.run()
        except (KeyboardInterrupt, WorkerProcessEndedError):
            if plan.source_is_folder:
                skips = "" if participle == SALVAGED else "Continue with --skip-existing, or "
                say(
                    f"{len(work.results):,} of {number_of(len(plan.files), 'file')} were {participle} before "
                    f"this. {skips}{'do' if skips else 'Do'} all of them again with --overwrite."
                )
            raise
    if json_wanted():
        print_json(_document(work))
    _tell(work, participle, time.monotonic() - started, unauthenticated=skip_existing == "unauthenticated")
    if work.failures or plan.unseen:
        raise typer.Exit(ExitStatus.NO if plan.unseen else status_of_all([error for _, error in work.failures]))


class _Work:
    """Converts the files of a plan; several small files at a time, since they mostly wait for the disk."""

    def __init__(self, plan: FilePlan, convert: Convert, progress: ProgressBar, *, overwrite: bool) -> None:
        self.plan = plan
        self._progress = progress
        first = plan.files[0] if plan.files else None
        self._visible = first is None or (first.source.is_for_all_processes and first.target.is_for_all_processes)
        # All sources of a plan are on one file system, and so are all targets.
        self._convert = partial(
            convert,
            source_filesystem=first and first.source.filesystem,
            target_filesystem=first and first.target.filesystem,
            overwrite=overwrite,
        )
        self._outcomes: dict[int, FileResult | Exception] = {}
        self._done_bytes = 0
        self._is_stopped = False

    @property
    def results(self) -> list[FileResult]:
        """The results of converted files, in the order of the plan."""
        found = (self._outcomes.get(number) for number in range(len(self.plan.files)))
        return [outcome for outcome in found if isinstance(outcome, FileResult)]

    @property
    def failures(self) -> list[tuple[PlannedFile, Exception]]:
        """The files that failed, in the order of the plan."""
        found = ((file, self._outcomes.get(number)) for number, file in enumerate(self.plan.files))
        return [(file, outcome) for file, outcome in found if isinstance(outcome, Exception)]

    @property
    def not_attempted(self) -> list[PlannedFile]:
        """The files that were left when the file system or the KMS failed."""
        return [file for number, file in enumerate(self.plan.files) if number not in self._outcomes]

    def run(self) -> None:
        """Convert all files.

        Raises:
            KeytoolsError: A single file failed, or the configuration fits no file.
            WorkerProcessEndedError: A worker process was killed.
        """
        convert = partial(self._convert, on_progress=self._progress.advance)
        numbered = list(enumerate(self.plan.files))
        small = sum(file.size_bytes <= _SMALL_BYTES for _, file in numbered[1:])
        # No progress within small files.
        convert_small = UntilKmsFails(
            partial(_converted, partial(self._convert, on_progress=None), self.plan.source_is_folder)
        )
        with FileWorkers(convert_small, small, _SMALL_FILES_AT_A_TIME, visible=self._visible) as workers:
            # The first file alone: if the configuration is wrong, all would fail.
            self._one_by_one(convert, numbered[:1])
            for is_small, files in groupby(numbered[1:], key=lambda entry: entry[1].size_bytes <= _SMALL_BYTES):
                if not is_small:
                    # In this thread, which Ctrl-C interrupts at once; a pool would first finish the file.
                    self._one_by_one(convert, files)
                    continue
                for (number, file), outcome in workers.outcomes(self._left(files)):
                    self._take(number, file, outcome)

    def _left(self, files: Iterable[_Numbered]) -> Iterator[_Numbered]:
        return takewhile(lambda _: not self._is_stopped, files)

    def _one_by_one(self, convert: Callable[[str, str], FileResult], files: Iterable[_Numbered]) -> None:
        for number, file in self._left(files):
            try:
                outcome: FileResult | Exception = _converted(convert, self.plan.source_is_folder, (number, file))
            except Exception as error:
                outcome = error
            self._take(number, file, outcome)

    def _take(self, number: int, file: PlannedFile, outcome: FileResult | Exception) -> None:
        """Keep an outcome. If the storage or the KMS fails, keep the first failure only.

        The other files were not attempted, or were attempted at the same time.

        Raises:
            Exception: A single file failed, or the others would fail, too.
        """
        if isinstance(outcome, Exception):
            is_expected = isinstance(outcome, KeytoolsError | OSError | UnicodeEncodeError | pa.ArrowException)
            if not (is_expected and self.plan.source_is_folder):
                raise outcome
            if isinstance(outcome, ConfigurationError | KmsConfigurationError) and not self._outcomes:
                say(f"Stopped at the first of {number_of(len(self.plan.files), 'file')}, {file.source}.")
                raise outcome
            if storage_failure(outcome, file.target) or kms_failure(outcome):
                if self._is_stopped:
                    return
                self._is_stopped = True
        self._outcomes[number] = outcome
        self._done_bytes += file.size_bytes
        self._progress.move_to(self._done_bytes)


def _converted(
    convert: Callable[[str, str], FileResult], source_is_folder: bool, numbered: _Numbered
) -> FileResult:
    """Convert a file; also called in worker processes."""
    _, file = numbered
    target = file.target
    if source_is_folder and target.filesystem.type_name not in OBJECT_STORES:
        target.filesystem.create_dir(target.path.rpartition("/")[0], recursive=True)
    return convert(file.source.path, target.path)


def _document(work: _Work) -> dict[str, Any]:
    failures: list[tuple[str, str | None, Exception]] = [
        (str(file.source), str(file.target), error) for file, error in work.failures
    ]
    failures += [(unseen.path, None, unseen.error) for unseen in work.plan.unseen]
    document: dict[str, Any] = {
        "files": work.results,
        "failures": [
            {"source": source, "target": target, **error_fields(error)} for source, target, error in failures
        ],
        "skipped": [{"path": left.path, "reason": left.reason} for left in work.plan.left_out],
    }
    if work.not_attempted:
        document["not_attempted"] = [str(file.source) for file in work.not_attempted]
    return document


def _tell(work: _Work, participle: str, seconds: float, *, unauthenticated: bool = False) -> None:
    plan, results = work.plan, work.results
    say_left_out(plan.left_out)
    failed = Messages("Failed")
    for file, error in work.failures:
        failed.add_error(str(file.source), error, str(file.target))
    for unseen in plan.unseen:
        failed.add(unseen.path, f"could not be checked: {error_text(unseen.error)}")
    failed.print()
    option = "--overwrite" if participle == SALVAGED else "--skip-existing"
    say_not_attempted(len(work.not_attempted), len(plan.files), option)
    written = [result for result in results if not result.skipped]
    if copied := sum(result.copied for result in written):
        say(f"Copied as they are: {number_of(copied, 'file')} in plaintext, as `plaintext_files: allow` says.")
    plaintext_columns = (name for result in written for name in result.plaintext_columns)
    without_keys = " They were compared without keys: nothing was authenticated." if unauthenticated else ""
    size = size_text(sum(result.target_bytes for result in written))
    if not plan.source_is_folder:
        if not written:
            answer(f"Skipped: {results[0].target} was made from {results[0].source} before.{without_keys}")
            return
        answer(f"{participle.capitalize()} {results[0].source} to {results[0].target}: {size} in {seconds:.1f} s.")
        answer_plaintext_columns(plaintext_columns)
        return
    total = len(plan.files) + len(plan.unseen)
    of_all = f"{len(written):,} of " if len(written) < total else ""
    skipped_files = len(results) - len(written)
    skipped = f" {skipped_files:,} skipped, made before.{without_keys}" if skipped_files else ""
    answer(f"{participle.capitalize()} {of_all}{number_of(total, 'file')}: {size} in {seconds:.1f} s.{skipped}")
    answer_plaintext_columns(plaintext_columns)


def salvage_files(
    sources: Sequence[str], target: str, salvage: Callable[..., SalvageResult], *, overwrite: bool
) -> None:
    """Decrypt the intact row groups of files by `Keytools.salvage_file`, and list the missing ones.

    Raises:
        typer.Exit: Something is missing.
    """
    results: list[SalvageResult] = []

    def convert(source: str, target: str, **options: Any) -> SalvageResult:
        results.append(salvage(source, target, **options))
        return results[-1]

    try:
        convert_files(sources, target, SALVAGED, convert, overwrite=overwrite)
    finally:
        for result in results:
            _say_missing(result)
    if not all(result.is_whole for result in results):
        raise typer.Exit(ExitStatus.NO)


def _say_missing(result: SalvageResult) -> None:
    from parquet_keytools.cli.conformance_report import loss_text

    if result.missing_row_groups:
        ordinals = ", ".join(map(str, result.missing_row_groups))
        answer(f"Missing in {printable(result.target)}: row groups {ordinals} of {result.row_groups}.")
    for loss in result.losses:
        answer(f"  lost: {loss_text(loss)}")
    for row_group_ordinal, column_ordinal in result.dropped_indexes:
        answer(f"  without page index and Bloom filter: row group {row_group_ordinal}, column {column_ordinal}")
