"""Converts files, or changes them in place, and reports the results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, takewhile
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
        self.results: list[FileResult] = []
        self.failures: list[tuple[PlannedFile, Exception]] = []
        # The files of the plan that have neither a result nor a failure, by their identity.
        self._left = {id(file): file for file in plan.files}
        self._done_bytes = 0
        self._is_stopped = False

    @property
    def not_attempted(self) -> list[PlannedFile]:
        return list(self._left.values())

    def run(self) -> None:
        first, rest = self.plan.files[:1], self.plan.files[1:]
        each = partial(_converted, self._convert, self._progress.advance, self.plan.source_is_folder)
        # No progress within small files.
        small = UntilKmsFails(partial(_converted, self._convert, None, self.plan.source_is_folder))
        number = sum(map(_is_small, rest))
        with FileWorkers(small, number, _SMALL_FILES_AT_A_TIME, visible=self._visible) as workers:
            # The first file alone: if the configuration is wrong, all would fail.
            for are_small, files in chain([(False, iter(first))], groupby(rest, key=_is_small)):
                left = takewhile(lambda _: not self._is_stopped, files)
                # Large files in this thread, which Ctrl-C interrupts at once; a pool would first finish the file.
                for file, outcome in workers.outcomes(left) if are_small else _one_by_one(each, left):
                    self._take(file, outcome)

    def _take(self, file: PlannedFile, outcome: FileResult | Exception) -> None:
        """Keep an outcome; if the storage or the KMS fails, keep the first failure of files attempted together.

        A single file that fails, or whose failure the others would share, raises its error.
        """
        if isinstance(outcome, Exception):
            is_expected = isinstance(outcome, KeytoolsError | OSError | UnicodeEncodeError | pa.ArrowException)
            if not (is_expected and self.plan.source_is_folder):
                raise outcome
            if isinstance(outcome, ConfigurationError | KmsConfigurationError) and file is self.plan.files[0]:
                out.say(f"Stopped at the first of {out.number_of(len(self.plan.files), 'file')}, {file.source}.")
                raise outcome
            if storage_failure(outcome, file.target) or kms_failure(outcome):
                if self._is_stopped:
                    return
                self._is_stopped = True
            self.failures.append((file, outcome))
        else:
            self.results.append(outcome)
        del self._left[id(file)]
        self._done_bytes += file.size_bytes
        self._progress.move_to(self._done_bytes)


def _is_small(file: PlannedFile) -> bool:
    return file.size_bytes <= _SMALL_BYTES


def _one_by_one(
    convert: Callable[[PlannedFile], FileResult], files: Iterable[PlannedFile]
) -> Iterator[tuple[PlannedFile, FileResult | Exception]]:
    for file in files:
        try:
            yield file, convert(file)
        except Exception as error:
            yield file, error


def _converted(
    convert: Convert, on_progress: Callable[[int], None] | None, source_is_folder: bool, file: PlannedFile
) -> FileResult:
    """Convert a file; also called in worker processes."""
    target = file.target
    if source_is_folder and target.filesystem.type_name not in OBJECT_STORES:
        target.filesystem.create_dir(target.path.rpartition("/")[0], recursive=True)
    return convert(file.source.path, target.path, on_progress=on_progress)


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


def change_in_place(
    change: Callable[..., RotationReport],
    location: FileLocation,
    again: str,
    template_of: Callable[[str], str | None] | None = None,
    *,
    processes: int | None = 1,
) -> None:
    """Change files one by one, and report each; `again` says how to continue an interrupted run.

    A rotation has `template_of`; all other changes replace whole files, and show their progress within one file.
    """
    counts_files = template_of is not None or location.is_folder()
    size_bytes = None if counts_files else location.info().size or 0
    with out.progress_bar(size_bytes) as progress, _InPlaceRun(again) as run:

        def on_file(file: FileRotation) -> None:
            if counts_files:
                progress.count(file)
            run.add(file)

        options = {} if counts_files else {"on_progress": progress.advance}
        with command_line_processes(processes):
            report = change(location, keep_results=False, on_file=on_file, **options)
        run.document.end(run.summary(report, is_rotation=template_of is not None))
    run.show(report, template_of)
    if not report.succeeded:
        errors: list[Exception] = [file.error for file in report.failures if file.error is not None]
        raise typer.Exit(out.status_of_all(errors + ([report.stopped_by] if report.stopped_by else [])))


_Names = tuple[str, str, str | None, str | None]


@dataclass
class _InPlaceRun:
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

    def __enter__(self) -> _InPlaceRun:
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

    def summary(self, report: RotationReport, *, is_rotation: bool) -> dict[str, Any]:
        """Return the JSON document without its files."""
        summary: dict[str, Any] = {
            "complete": report.succeeded,
            "dry_run": report.dry_run,
            "counts": {outcome.value: number for outcome, number in report.counts.items()},
            "bytes_written": report.bytes_written,
            "stopped_by": None if report.stopped_by is None else out.error_text(report.stopped_by),
        }
        if not is_rotation:
            return summary | {"skipped": out.left_out_document(report.skipped)}
        fields = "master_key_id", "new_master_key_id", "version", "new_version"
        return summary | {
            "keys": [
                {**dict(zip(fields, names, strict=True)), "keys": self.keys[names], "files": self.files[names]}
                for names in self._sorted()
            ],
            "bytes_copied": report.bytes_copied,
            "kms_calls": report.kms_calls,
            "expected_kms_calls": report.expected_kms_calls if report.dry_run else None,
        }

    def show(self, report: RotationReport, template_of: Callable[[str], str | None] | None) -> None:
        """Print the summary."""
        if self.keys and template_of is not None:
            self._show_keys(report, template_of)
        out.say_left_out(report.skipped)
        self.failed.print()
        seconds = f"in {time.monotonic() - self.started:.1f} s."
        written, copied = out.size_text(report.bytes_written), out.size_text(report.bytes_copied)
        if template_of is None:
            out.answer(f"{_files_text(report.counts)}; {written} written {seconds}")
            out.answer_plaintext_columns(self.plaintext_columns)
            if report.counts[RotationOutcome.ENCRYPTED]:
                out.answer(
                    "The plaintext was replaced, not erased: its blocks remain on the disk until the file system "
                    "reuses them, and backups, snapshots and older versions of objects keep it."
                )
        else:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.reasons.most_common())
            out.answer(f"{_files_text(report.counts)}{reasons and f' ({reasons})'} {seconds}")
            if report.dry_run:
                calls = _calls_text(report.expected_kms_calls)
                out.answer(f"Nothing was changed. The rotation would ask the KMS {calls}.")
            else:
                out.answer(f"{written} written, {copied} copied by the operating system or the store.")
                out.answer(f"The KMS was asked {_calls_text(report.kms_calls)}.")
        _say_stopped(report)

    def _show_keys(self, report: RotationReport, template_of: Callable[[str], str | None]) -> None:
        rows: list[tuple[str | int, ...]] = []
        for names in self._sorted():
            old, new, version, new_version = names
            target = "" if new == old else new
            rows.append((old, version or "?", target, new_version or "?", self.keys[names], self.files[names]))
        title = "What would change" if report.dry_run else "What changed"
        headings = ["master key", "version", "new master key", "new version", "keys", "files"]
        out.print_table(title, headings, out.grouped_rows(rows, template_of, names=(0, 2)))

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
