"""`parquet-keytools rotate` and `rekey --in-place`: changes of keys in place, and their results."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from parquet_keytools.cli.options import (
    ListKeyOption,
    PathsArgument,
    RotationOptions,
    UpdateListOption,
    locations_of,
    open_keytools,
    with_options,
)
from parquet_keytools.cli.output import (
    FilesDocument,
    Messages,
    answer,
    answer_plaintext_columns,
    error_text,
    grouped_rows,
    number_of,
    print_table,
    progress_bar,
    say,
    say_left_out,
    say_not_attempted,
    size_text,
    status_of_all,
    to_dict,
)

if TYPE_CHECKING:
    from parquet_keytools.rotation.report import FileRotation, KmsCalls, RotationOutcome, RotationReport
    from parquet_keytools.storage.locations import FileLocation


@with_options(RotationOptions)
def rotate_command(
    paths: PathsArgument,
    options: RotationOptions,
    update_list: UpdateListOption = None,
    list_key: ListKeyOption = None,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    The keys are re-wrapped under the current version of their master keys, or under other master keys. After an
    interrupted run, repeat the command.
    """
    arguments = options.arguments()
    location = locations_of(paths, "PATH")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(options.config))
        if options.table is not None:
            keytools.configuration.select_table(options.table)
        with progress_bar() as progress, _Run("Repeat the command.") as run:

            def on_file(file: FileRotation) -> None:
                progress.count(file)
                run.add(file)

            report = keytools.rotate(
                location,
                keep_results=False,
                on_file=on_file,
                update_list=update_list,
                list_key=list_key,
                **arguments,
            )
            run.end(report, is_rotation=True)
    run.show_rotation(report, keytools.configuration.template_of)
    _exit_with(report)


def change_in_place(change: Callable[..., RotationReport], location: FileLocation, again: str) -> None:
    """Replace files one by one, and report each.

    Args:
        change: `Keytools.encrypt_in_place` or `rekey_in_place`, with its other arguments.
        location: The file or folder.
        again: How to continue an interrupted run.
    """
    is_folder = location.is_folder()
    size_bytes = None if is_folder else location.info().size or 0
    with progress_bar(size_bytes) as progress, _Run(again) as run:

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
    _exit_with(report)


def _exit_with(report: RotationReport) -> None:
    """End the command with the status of its failures.

    Raises:
        typer.Exit: Some files failed or were not processed.
    """
    if not report.succeeded:
        errors: list[Exception] = [file.error for file in report.failures if file.error is not None]
        raise typer.Exit(status_of_all(errors + ([report.stopped_by] if report.stopped_by else [])))


@dataclass
class _Change:
    keys: int = 0
    files: int = 0


@dataclass
class _Run:
    """The results of a run, counted file by file.

    If an error, Ctrl-C or SIGTERM ends its `with` block, the files that were processed are reported.

    Attributes:
        again: How to continue an interrupted run.
    """

    again: str
    started: float = field(default_factory=time.monotonic)
    document: FilesDocument = field(default_factory=FilesDocument)
    outcomes: Counter[RotationOutcome] = field(default_factory=Counter)
    changes: dict[tuple[str, str, str | None, str | None], _Change] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    plaintext_columns: dict[str, None] = field(default_factory=dict)
    failed: Messages = field(default_factory=lambda: Messages("Failed"))

    def __enter__(self) -> _Run:
        self.document.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.document.__exit__(kind, error, trace)
        if kind is not None and self.outcomes:
            from parquet_keytools.errors import KmsError

            self.failed.print()
            again = self.again if issubclass(kind, KeyboardInterrupt | KmsError) else ""
            say(f"Before this: {_files_text(self.outcomes)}. {again}".rstrip())

    def add(self, file: FileRotation) -> None:
        """Count a file."""
        from parquet_keytools.rotation.report import RotationOutcome

        self.outcomes[file.outcome] += 1
        if file.error is not None:
            self.failed.add_error(file.path, file.error)
        for change in file.keys:
            names = change.master_key_id, change.new_master_key_id, change.version, change.new_version
            counted = self.changes.setdefault(names, _Change())
            counted.keys += change.keys
            counted.files += 1
        if file.outcome is RotationOutcome.NOTHING_TO_ROTATE:
            self.reasons[file.how] += 1
        self.plaintext_columns.update(dict.fromkeys(file.plaintext_columns))
        self.document.add(to_dict(file))

    def end(self, report: RotationReport, *, is_rotation: bool) -> None:
        """Complete the JSON document."""
        summary: dict[str, Any] = {
            "complete": report.succeeded,
            "dry_run": report.dry_run,
            "counts": {outcome.value: number for outcome, number in report.counts.items()},
            "bytes_written": report.bytes_written,
            "stopped_by": None if report.stopped_by is None else error_text(report.stopped_by),
        }
        if is_rotation:
            fields = "master_key_id", "new_master_key_id", "version", "new_version"
            summary |= {
                "keys": [
                    {**dict(zip(fields, names, strict=True)), "keys": change.keys, "files": change.files}
                    for names, change in self._sorted()
                ],
                "bytes_copied": report.bytes_copied,
                "kms_calls": report.kms_calls,
                "expected_kms_calls": report.expected_kms_calls if report.dry_run else None,
            }
        else:
            summary["skipped"] = [{"path": left.path, "reason": left.reason} for left in report.skipped]
        self.document.end(summary)

    def show_changes(self, report: RotationReport) -> None:
        """Print the summary of files that were encrypted or got new data keys."""
        from parquet_keytools.rotation.report import RotationOutcome

        self._say_failures(report)
        written = size_text(report.bytes_written)
        answer(f"{_files_text(report.counts)}; {written} written in {time.monotonic() - self.started:.1f} s.")
        answer_plaintext_columns(self.plaintext_columns)
        if report.counts[RotationOutcome.ENCRYPTED]:
            answer(
                "The plaintext was replaced, not erased: its blocks remain on the disk until the file system "
                "reuses them, and backups, snapshots and older versions of objects keep it."
            )
        _say_stopped(report)

    def show_rotation(self, report: RotationReport, template_of: Callable[[str], str | None]) -> None:
        """Print the summary of a rotation."""
        if self.changes:
            changes = (
                ((old, "" if new == old else new), (version or "?", new_version or "?"), (n.keys, n.files))
                for (old, new, version, new_version), n in self._sorted()
            )
            rows = [
                (old, version, new, new_version, f"{keys:,}", f"{files:,}")
                for (old, new), (version, new_version), (keys, files) in grouped_rows(changes, template_of)
            ]
            title = "What would change" if report.dry_run else "What changed"
            headings = ["master key", "version", "new master key", "new version", "keys", "files"]
            print_table(title, headings, rows)
        self._say_failures(report)
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.reasons.most_common())
        why = f" ({reasons})" if reasons else ""
        answer(f"{_files_text(report.counts)}{why} in {time.monotonic() - self.started:.1f} s.")
        if report.dry_run:
            calls = _calls_text(report.expected_kms_calls)
            answer(f"Nothing was changed. The rotation would ask the KMS {calls}.")
        else:
            written, copied = size_text(report.bytes_written), size_text(report.bytes_copied)
            answer(f"{written} written, {copied} copied by the operating system or the store.")
            answer(f"The KMS was asked {_calls_text(report.kms_calls)}.")
        _say_stopped(report)

    def _say_failures(self, report: RotationReport) -> None:
        """Print which files were left out or failed."""
        say_left_out(report.skipped)
        self.failed.print()

    def _sorted(self) -> list[tuple[tuple[str, str, str | None, str | None], _Change]]:
        return sorted(self.changes.items(), key=lambda item: tuple(name or "" for name in item[0]))


def _say_stopped(report: RotationReport) -> None:
    """Print why a run ended early, unless the message of a failed file says so, and how to continue."""
    from parquet_keytools.rotation.report import RotationOutcome

    if report.stopped_by is None:
        return
    why = error_text(report.stopped_by)
    if why not in (error_text(file.error) for file in report.failures if file.error is not None):
        say(f"Stopped: {why}")
    say_not_attempted(report.counts[RotationOutcome.NOT_ATTEMPTED], report.counts.total())


def _files_text(counts: Counter[RotationOutcome]) -> str:
    from parquet_keytools.rotation.report import RotationOutcome

    total = sum(counts.values())
    if not total:
        return "No Parquet files"
    parts = ", ".join(f"{counts[outcome]:,} {outcome.value}" for outcome in RotationOutcome if counts[outcome])
    return f"{number_of(total, 'file')}: {parts}"


def _calls_text(calls: KmsCalls) -> str:
    """Return for how many keys the KMS was called, by operation."""
    numbers = {name: number for name, number in to_dict(calls).items() if number}
    if not numbers:
        return "nothing"
    return "to " + ", ".join(f"{name} {number:,}" for name, number in numbers.items()) + " keys"
