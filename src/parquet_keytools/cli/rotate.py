"""`parquet-keytools rotate`, and rotations as people and programs read them."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    DryRunOption,
    FollowLinksOption,
    FromOption,
    JsonOption,
    NewKeksOption,
    OlderThanOption,
    OnlyOption,
    OtherKmsOption,
    PathsArgument,
    TableOption,
    ToOption,
    locations_of,
    moves_of,
)
from parquet_keytools.cli.output import (
    ExitStatus,
    FilesDocument,
    answer,
    error_fields,
    error_text,
    failure_text,
    file_counter,
    number_of,
    print_table,
    say,
    say_first,
    size_text,
    status_of_all,
)

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.report import FileRotation, KeyChange, KmsCalls, RotationOutcome, RotationReport
    from parquet_keytools.storage.locations import FileLocation


def rotate_command(
    paths: PathsArgument,
    config: ConfigOption,
    table: TableOption = None,
    from_keys: FromOption = None,
    to_keys: ToOption = None,
    to_config: OtherKmsOption = None,
    only_master_keys: OnlyOption = None,
    older_than: OlderThanOption = None,
    new_keks: NewKeksOption = False,
    dry_run: DryRunOption = False,
    aad_prefix: AadPrefixOption = None,
    follow_links: FollowLinksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    The keys are re-wrapped under the current version of their master keys, or under other master keys. After an
    interrupted run, give the same command again.
    """
    moves = moves_of(from_keys or [], to_keys or [])

    from parquet_keytools.cli.file_work import open_keytools

    location = locations_of(paths, "PATH")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(config))
        if table is not None:
            keytools.configuration.select_table(table)
        options: dict[str, Any] = {
            "moves": moves or None,
            "only_master_keys": only_master_keys or None,
            "older_than": older_than,
            "new_keks": new_keks,
            "dry_run": dry_run,
            "to": stack.enter_context(open_keytools(to_config)) if to_config is not None else None,
            "table_name": table,
            "aad_prefix": aad_prefix,
            "follow_links": follow_links,
        }
        _rotate(keytools, location, options, as_json=as_json)


def _rotate(keytools: Keytools, location: FileLocation, options: dict[str, Any], *, as_json: bool) -> None:
    tally = RotationTally()
    again = "Give the same command again."
    with FilesDocument(wanted=as_json) as document:
        with file_counter() as count, saying_what_was_done(again) as done:

            def on_file(file: FileRotation) -> None:
                count(file)
                done[file.outcome] += 1
                tally.add(file)
                if as_json:
                    document.add(rotation_document(file))

            report = keytools.rotate(location, keep_results=False, on_file=on_file, **options)
        document.end(tally.document(report))
    tally.tell(report)
    exit_with(report)


# --- what became of files ---


MOST_SHARED_SHOWN = 5


def rotation_document(file: FileRotation) -> dict[str, Any]:
    """Return what became of a file as a document of JSON."""
    return {
        "path": file.path,
        "outcome": file.outcome.value,
        "keys": [asdict(change) for change in file.keys],
        "how": file.how,
        "bytes_written": file.bytes_written,
        "bytes_copied": file.bytes_copied,
        **error_fields(file.error),
    }


def rekeyed_document(file: FileRotation) -> dict[str, Any]:
    """Return what became of a file with new data keys as a document of JSON."""
    return {
        "path": file.path,
        "outcome": file.outcome.value,
        "old_size_bytes": file.old_size_bytes,
        "new_size_bytes": file.new_size_bytes,
        **error_fields(file.error),
    }


def rekeyed_summary(report: RotationReport) -> dict[str, Any]:
    """Return the summary of files with new data keys as a document of JSON."""
    return {
        "complete": report.stopped_by is None,
        "counts": {outcome.value: number for outcome, number in report.counts.items()},
        "bytes_written": report.bytes_written,
        "left_behind": report.left_behind,
        "stopped_by": None if report.stopped_by is None else error_text(report.stopped_by),
    }


def say_failures(report: RotationReport) -> None:
    """Tell which files failed, and what stays in a store because it could not be removed, or looked for."""
    failures = [failure_text(file.path, file.error) for file in report.failures if file.error is not None]
    say_first([f"Failed: {text}" for text in failures], "Failed: {} more; --json lists all.")
    say_first([f"Left behind: {text}." for text in report.left_behind], "Left behind: more; --json lists it.")


def say_stopped(report: RotationReport) -> None:
    """Tell why a run ended before all files were processed; what a failed file said is not said again."""
    if report.stopped_by is None:
        return
    why = error_text(report.stopped_by)
    if why in (error_text(file.error) for file in report.failures if file.error is not None):
        why = "files after it were not processed, because they would fail, too."
    say(f"Stopped: {why}")


@contextlib.contextmanager
def saying_what_was_done(again: str) -> Iterator[Counter[RotationOutcome]]:
    """Yield counts of files by outcome, and print them if Ctrl-C or SIGTERM ends the block.

    Args:
        again: How the run is continued.
    """
    done: Counter[RotationOutcome] = Counter()
    try:
        yield done
    except KeyboardInterrupt:
        if done:
            say(f"Before this: {files_text(done)}. {again}")
        raise


def exit_with(report: RotationReport) -> None:
    """End the command as a rotation ended: with the KMS's status where it alone is at fault, or credentials.

    Raises:
        typer.Exit: Some files were not rotated.
    """
    from parquet_keytools.errors import KmsConfigurationError

    if not report.succeeded:
        errors: list[Exception] = [file.error for file in report.failures if file.error is not None]
        if report.stopped_by is not None:
            errors.append(report.stopped_by)
        if errors and all(isinstance(error, KmsConfigurationError) for error in errors):
            raise typer.Exit(ExitStatus.WRONG_USAGE)
        raise typer.Exit(status_of_all(errors))


class RotationTally:
    """Counts what a rotation does to files, one by one."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._changes: Counter[tuple[str, str, str | None, str | None]] = Counter()
        self._files: Counter[tuple[str, str, str | None, str | None]] = Counter()
        self._reasons: Counter[str] = Counter()

    def add(self, file: FileRotation) -> None:
        """Count a file."""
        from parquet_keytools.rotation.report import RotationOutcome

        for change in file.keys:
            self._changes[_names(change)] += change.keys
            self._files[_names(change)] += 1
        if file.outcome is RotationOutcome.NOTHING_TO_ROTATE:
            self._reasons[file.how] += 1

    def document(self, report: RotationReport) -> dict[str, Any]:
        """Return the summary as a document of JSON."""
        from parquet_keytools.rotation.report import KeyChange

        return {
            "complete": report.stopped_by is None,
            "dry_run": report.dry_run,
            "counts": {outcome.value: number for outcome, number in report.counts.items()},
            "keys": [
                {**asdict(KeyChange(*names, self._changes[names])), "files": self._files[names]}
                for names in self._sorted()
            ],
            "bytes_written": report.bytes_written,
            "bytes_copied": report.bytes_copied,
            "kms_calls": asdict(report.kms_calls),
            "expected_kms_calls": asdict(report.expected_kms_calls) if report.dry_run else None,
            "shared_keys": report.shared_keys,
            "left_behind": report.left_behind,
            "stopped_by": None if report.stopped_by is None else error_text(report.stopped_by),
        }

    def tell(self, report: RotationReport) -> None:
        """Tell people the summary."""
        from parquet_keytools.files.opened_file import REMEDY

        if self._changes:
            self._show_keys(report)
        say_failures(report)
        if report.shared_keys:
            shown = "; ".join(report.shared_keys[:MOST_SHARED_SHOWN])
            more = "; and more" if len(report.shared_keys) > MOST_SHARED_SHOWN else ""
            say(
                f"Warning: these share data keys and file unique, and readers refuse them: {shown}{more}. {REMEDY}"
            )
        answer(f"{files_text(report.counts)}{self._reasons_text()} in {time.monotonic() - self._started:.1f} s.")
        if report.dry_run:
            answer(
                f"Nothing was changed. The rotation would ask the KMS {_calls_text(report.expected_kms_calls)}."
            )
        else:
            written, copied = size_text(report.bytes_written), size_text(report.bytes_copied)
            answer(f"{written} written, {copied} copied by the operating system or the store.")
            answer(f"The KMS was asked {_calls_text(report.kms_calls)}.")
        say_stopped(report)

    def _sorted(self) -> list[tuple[str, str, str | None, str | None]]:
        return sorted(self._changes, key=lambda names: tuple(name or "" for name in names))

    def _show_keys(self, report: RotationReport) -> None:
        rows = []
        for names in self._sorted():
            old, new, version, new_version = names
            moved_to = "" if new == old else new
            numbers = f"{self._changes[names]:,}", f"{self._files[names]:,}"
            rows.append((old, version or "?", moved_to, new_version or "?", *numbers))
        title = "What would change" if report.dry_run else "What changed"
        headings = ["master key", "version", "new master key", "new version", "keys", "files"]
        print_table(title, headings, rows)

    def _reasons_text(self) -> str:
        if not self._reasons:
            return ""
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self._reasons.most_common())
        return f" ({reasons})"


def _names(change: KeyChange) -> tuple[str, str, str | None, str | None]:
    return change.master_key_id, change.new_master_key_id, change.version, change.new_version


def files_text(counts: Counter[RotationOutcome]) -> str:
    """Return how many files had each outcome."""
    from parquet_keytools.rotation.report import RotationOutcome

    total = sum(counts.values())
    if not total:
        return "No Parquet files"
    parts = ", ".join(f"{counts[outcome]:,} {outcome.value}" for outcome in RotationOutcome if counts[outcome])
    return f"{number_of(total, 'file')}: {parts}"


def _calls_text(calls: KmsCalls) -> str:
    """Return for how many keys a KMS was asked; it takes many at a time where it can."""
    numbers = {name: number for name, number in asdict(calls).items() if number}
    if not numbers:
        return "nothing"
    return "to " + ", ".join(f"{name} {number:,}" for name, number in numbers.items()) + " keys"
