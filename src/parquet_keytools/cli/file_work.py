"""Converts files, or changes them in place, and reports the results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsConfigurationError,
    KmsError,
    WorkerProcessEndedError,
    kms_failure,
)
from parquet_keytools.files.conversion import FilePlan, FileResult, PlannedFile, SkipExisting, plan_files
from parquet_keytools.rotation.report import FileRotation, KmsCalls, RotationOutcome, RotationReport
from parquet_keytools.runtime.presentation import printable
from parquet_keytools.runtime.worker_processes import FileWorkers, UntilKmsFails, command_line_processes
from parquet_keytools.storage.local_files import storage_failure
from parquet_keytools.storage.locations import OBJECT_STORES, FileLocation

if TYPE_CHECKING:
    from parquet_keytools.conformance.verification import SalvageResult

_SMALL_BYTES = 4 << 20
"""Larger files are written by several threads each."""

_SMALL_FILES_AT_A_TIME = 4

_Numbered = tuple[int, PlannedFile]
"""A file, and its position in the plan."""

SALVAGED = "salvaged"
"""Salvaging has no --skip-existing: nothing shows that a result is complete."""

Convert = Callable[..., FileResult]
"""Converts one file, such as `Keytools.encrypt_file`."""


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
    configuration or credentials: then all would fail. `participle` is the past participle of the conversion, such
    as `encrypted`. `check` refuses paths of files, relative to the folder, before anything is written.
    """
    started = time.monotonic()
    may_exist = overwrite or bool(skip_existing)
    plan = plan_files(opt.locations_of(sources, "SRC"), opt.location_of(target, "DST"), overwrite=may_exist)
    check(plan.paths_in_folder)
    with out.progress_bar(plan.size_bytes) as progress:
        work = _Work(plan, convert, progress, overwrite=overwrite)
        try:
            with command_line_processes(processes):
                work.run()
        except (KeyboardInterrupt, WorkerProcessEndedError):
            if plan.source_is_folder:
                begin = "Do" if participle == SALVAGED else "Continue with --skip-existing, or do"
                out.say(
                    f"{len(work.results):,} of {out.number_of(len(plan.files), 'file')} were {participle} before "
                    f"this. {begin} all of them again with --overwrite."
                )
            raise
    if out.json_wanted():
        out.print_json(_document(work))
    _tell(work, participle, time.monotonic() - started, unauthenticated=skip_existing == "unauthenticated")
    if work.failures or plan.unseen:
        raise typer.Exit(
            out.ExitStatus.NO if plan.unseen else out.status_of_all([error for _, error in work.failures])
        )


class _Work:
    """Converts the files of a plan; several small files at a time, since they mostly wait for the disk."""

    def __init__(self, plan: FilePlan, convert: Convert, progress: out.ProgressBar, *, overwrite: bool) -> None:
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

    def _planned(self) -> Iterator[tuple[PlannedFile, FileResult | Exception | None]]:
        return ((file, self._outcomes.get(number)) for number, file in enumerate(self.plan.files))

    @property
    def results(self) -> list[FileResult]:
        return [outcome for _, outcome in self._planned() if isinstance(outcome, FileResult)]

    @property
    def failures(self) -> list[tuple[PlannedFile, Exception]]:
        return [(file, outcome) for file, outcome in self._planned() if isinstance(outcome, Exception)]

    @property
    def not_attempted(self) -> list[PlannedFile]:
        return [file for file, outcome in self._planned() if outcome is None]

    def run(self) -> None:
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
        """Keep an outcome; if the storage or the KMS fails, keep the first failure of files attempted together.

        A single file that fails, or whose failure the others would share, raises its error.
        """
        if isinstance(outcome, Exception):
            is_expected = isinstance(outcome, KeytoolsError | OSError | UnicodeEncodeError | pa.ArrowException)
            if not (is_expected and self.plan.source_is_folder):
                raise outcome
            if isinstance(outcome, ConfigurationError | KmsConfigurationError) and not self._outcomes:
                out.say(f"Stopped at the first of {out.number_of(len(self.plan.files), 'file')}, {file.source}.")
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
    failures: list[dict[str, str | None]] = [
        {"source": str(file.source), "target": str(file.target), **out.error_fields(error)}
        for file, error in work.failures
    ]
    document: dict[str, Any] = {
        "files": work.results,
        "failures": failures
        + [{"source": each.path, "target": None, **out.error_fields(each.error)} for each in work.plan.unseen],
        "skipped": out.left_out_document(work.plan.left_out),
    }
    if work.not_attempted:
        document["not_attempted"] = [str(file.source) for file in work.not_attempted]
    return document


def _tell(work: _Work, participle: str, seconds: float, *, unauthenticated: bool = False) -> None:
    plan, results = work.plan, work.results
    out.say_left_out(plan.left_out)
    failed = out.Messages("Failed")
    for file, error in work.failures:
        failed.add_error(str(file.source), error, str(file.target))
    for unseen in plan.unseen:
        failed.add(unseen.path, f"could not be checked: {out.error_text(unseen.error)}")
    failed.print()
    option = "--overwrite" if participle == SALVAGED else "--skip-existing"
    out.say_not_attempted(len(work.not_attempted), len(plan.files), option)
    written = [result for result in results if not result.skipped]
    if copied := sum(result.copied for result in written):
        out.say(
            f"Copied as they are: {out.number_of(copied, 'file')} in plaintext, as `plaintext_files: allow` says."
        )
    plaintext_columns = (name for result in written for name in result.plaintext_columns)
    without_keys = " They were compared without keys: nothing was authenticated." if unauthenticated else ""
    size = out.size_text(sum(result.target_bytes for result in written))
    skipped = len(results) - len(written)
    if not plan.source_is_folder:
        (result,) = results
        if skipped:
            out.answer(f"Skipped: {result.target} was made from {result.source} before.{without_keys}")
            return
        what, rest = f"{result.source} to {result.target}", ""
    else:
        total = len(plan.files) + len(plan.unseen)
        what = f"{f'{len(written):,} of ' if len(written) < total else ''}{out.number_of(total, 'file')}"
        rest = f" {skipped:,} skipped, made before.{without_keys}" if skipped else ""
    out.answer(f"{participle.capitalize()} {what}: {size} in {seconds:.1f} s.{rest}")
    out.answer_plaintext_columns(plaintext_columns)


def salvage_files(
    sources: Sequence[str], target: str, salvage: Callable[..., SalvageResult], *, overwrite: bool
) -> None:
    """Decrypt the intact row groups of files by `Keytools.salvage_file`, and list the missing ones."""
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
        raise typer.Exit(out.ExitStatus.NO)


def _say_missing(result: SalvageResult) -> None:
    from parquet_keytools.cli.conformance_report import loss_text

    if result.missing_row_groups:
        ordinals = ", ".join(map(str, result.missing_row_groups))
        out.answer(f"Missing in {printable(result.target)}: row groups {ordinals} of {result.row_groups}.")
    for loss in result.losses:
        out.answer(f"  lost: {loss_text(loss)}")
    for row_group_ordinal, column_ordinal in result.dropped_indexes:
        out.answer(
            f"  without page index and Bloom filter: row group {row_group_ordinal}, column {column_ordinal}"
        )


# --- changes in place ---


def change_in_place(change: Callable[..., RotationReport], location: FileLocation, again: str) -> None:
    """Replace files one by one, and report each; `again` says how to continue an interrupted run."""
    is_folder = location.is_folder()
    size_bytes = None if is_folder else location.info().size or 0
    with out.progress_bar(size_bytes) as progress, InPlaceRun(again) as run:

        def on_file(file: FileRotation) -> None:
            if is_folder:
                progress.count(file)
            run.add(file)

        report = change(
            location,
            keep_results=False,
            on_file=on_file,
            on_progress=None if is_folder else progress.advance,
        )
        run.end(report, is_rotation=False)
    run.show_changes(report)
    exit_with(report)


_Names = tuple[str, str, str | None, str | None]


def exit_with(report: RotationReport) -> None:
    """End the command with the status of its failures, if files failed or were not processed."""
    if not report.succeeded:
        errors: list[Exception] = [file.error for file in report.failures if file.error is not None]
        raise typer.Exit(out.status_of_all(errors + ([report.stopped_by] if report.stopped_by else [])))


@dataclass
class InPlaceRun:
    """The results of a run, counted file by file.

    If an error, Ctrl-C or SIGTERM ends its `with` block, the files that were processed are reported.
    """

    again: str
    started: float = field(default_factory=time.monotonic)
    document: out.FilesDocument = field(default_factory=out.FilesDocument)
    outcomes: Counter[RotationOutcome] = field(default_factory=Counter)
    keys: Counter[_Names] = field(default_factory=Counter)
    """Old and new master key, old and new version -> number of keys that changed."""
    files: Counter[_Names] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    plaintext_columns: dict[str, None] = field(default_factory=dict)
    failed: out.Messages = field(default_factory=lambda: out.Messages("Failed"))

    def __enter__(self) -> InPlaceRun:
        self.document.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.document.__exit__(kind, error, trace)
        if kind is not None and self.outcomes:
            self.failed.print()
            again = self.again if issubclass(kind, KeyboardInterrupt | KmsError) else ""
            out.say(f"Before this: {_files_text(self.outcomes)}. {again}".rstrip())

    def add(self, file: FileRotation) -> None:
        """Count a file."""
        self.outcomes[file.outcome] += 1
        if file.error is not None:
            self.failed.add_error(file.path, file.error)
        for change in file.keys:
            names = change.master_key_id, change.new_master_key_id, change.version, change.new_version
            self.keys[names] += change.keys
            self.files[names] += 1
        if file.outcome is RotationOutcome.NOTHING_TO_ROTATE:
            self.reasons[file.how] += 1
        self.plaintext_columns.update(dict.fromkeys(file.plaintext_columns))
        self.document.add(out.to_dict(file))

    def end(self, report: RotationReport, *, is_rotation: bool) -> None:
        """Complete the JSON document."""
        summary: dict[str, Any] = {
            "complete": report.succeeded,
            "dry_run": report.dry_run,
            "counts": {outcome.value: number for outcome, number in report.counts.items()},
            "bytes_written": report.bytes_written,
            "stopped_by": None if report.stopped_by is None else out.error_text(report.stopped_by),
        }
        if is_rotation:
            fields = "master_key_id", "new_master_key_id", "version", "new_version"
            summary |= {
                "keys": [
                    {**dict(zip(fields, names, strict=True)), "keys": self.keys[names], "files": self.files[names]}
                    for names in self._sorted()
                ],
                "bytes_copied": report.bytes_copied,
                "kms_calls": report.kms_calls,
                "expected_kms_calls": report.expected_kms_calls if report.dry_run else None,
            }
        else:
            summary["skipped"] = out.left_out_document(report.skipped)
        self.document.end(summary)

    def show_changes(self, report: RotationReport) -> None:
        """Print the summary of files that were encrypted or got new data keys."""
        out.say_left_out(report.skipped)
        self.failed.print()
        written = out.size_text(report.bytes_written)
        out.answer(f"{_files_text(report.counts)}; {written} written in {time.monotonic() - self.started:.1f} s.")
        out.answer_plaintext_columns(self.plaintext_columns)
        if report.counts[RotationOutcome.ENCRYPTED]:
            out.answer(
                "The plaintext was replaced, not erased: its blocks remain on the disk until the file system "
                "reuses them, and backups, snapshots and older versions of objects keep it."
            )
        _say_stopped(report)

    def show_rotation(self, report: RotationReport, template_of: Callable[[str], str | None]) -> None:
        """Print the summary of a rotation."""
        if self.keys:
            changes = (
                (
                    (names[0], "" if names[1] == names[0] else names[1]),
                    (names[2] or "?", names[3] or "?"),
                    (self.keys[names], self.files[names]),
                )
                for names in self._sorted()
            )
            rows = [
                (old, version, new, new_version, f"{keys:,}", f"{files:,}")
                for (old, new), (version, new_version), (keys, files) in out.grouped_rows(changes, template_of)
            ]
            title = "What would change" if report.dry_run else "What changed"
            headings = ["master key", "version", "new master key", "new version", "keys", "files"]
            out.print_table(title, headings, rows)
        out.say_left_out(report.skipped)
        self.failed.print()
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.reasons.most_common())
        why = f" ({reasons})" if reasons else ""
        out.answer(f"{_files_text(report.counts)}{why} in {time.monotonic() - self.started:.1f} s.")
        if report.dry_run:
            calls = _calls_text(report.expected_kms_calls)
            out.answer(f"Nothing was changed. The rotation would ask the KMS {calls}.")
        else:
            written, copied = out.size_text(report.bytes_written), out.size_text(report.bytes_copied)
            out.answer(f"{written} written, {copied} copied by the operating system or the store.")
            out.answer(f"The KMS was asked {_calls_text(report.kms_calls)}.")
        _say_stopped(report)

    def _sorted(self) -> list[_Names]:
        return sorted(self.keys, key=lambda names: tuple(name or "" for name in names))


def _say_stopped(report: RotationReport) -> None:
    """Print why a run ended early, unless the message of a failed file says so, and how to continue."""
    if report.stopped_by is None:
        return
    why = out.error_text(report.stopped_by)
    if why not in (out.error_text(file.error) for file in report.failures if file.error is not None):
        out.say(f"Stopped: {why}")
    out.say_not_attempted(report.counts[RotationOutcome.NOT_ATTEMPTED], report.counts.total())


def _files_text(counts: Counter[RotationOutcome]) -> str:
    total = sum(counts.values())
    if not total:
        return "No Parquet files"
    parts = ", ".join(f"{counts[outcome]:,} {outcome.value}" for outcome in RotationOutcome if counts[outcome])
    return f"{out.number_of(total, 'file')}: {parts}"


def _calls_text(calls: KmsCalls) -> str:
    """Return for how many keys the KMS was called, by operation."""
    numbers = {name: number for name, number in out.to_dict(calls).items() if number}
    if not numbers:
        return "nothing"
    return "to " + ", ".join(f"{name} {number:,}" for name, number in numbers.items()) + " keys"
