"""What `parquet-keytools rekey --in-place` does: files are replaced one by one, and each is told of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from parquet_keytools.cli.failures import error_text
from parquet_keytools.cli.file_argument import location_of
from parquet_keytools.cli.output import FilesDocument, say, size_text
from parquet_keytools.cli.progress import file_counter, progress_bar
from parquet_keytools.cli.rotation_report import error_fields, failure_status, say_failures
from parquet_keytools.keytools import Keytools
from parquet_keytools.rotation.rekeying import FileRekeying, RekeyOutcome, RekeyReport


@dataclass(frozen=True)
class InPlaceOptions:
    """What a caller asks for; see `Keytools.rekey_in_place`."""

    table: str | None
    to_table: str | None
    aad_prefix: str | None
    verify: bool
    journal: Path | None


def rekey_in_place(
    keytools: Keytools, new_keytools: Keytools | None, source: str, options: InPlaceOptions, *, as_json: bool
) -> None:
    """Give a file, or all files under a folder, new data keys.

    Raises:
        typer.Exit: Some files of a folder failed.
        KeytoolsError: The one file failed, or there is no such table.
    """
    started = time.monotonic()
    location = location_of(source, "SRC")
    with FilesDocument(wanted=as_json) as document, contextlib.ExitStack() as stack:
        on_progress: Callable[[int], None] | None = None
        count: Callable[[object], None] = _nothing
        if location.is_folder():
            count = stack.enter_context(file_counter())
        else:
            on_progress = stack.enter_context(progress_bar(location.info().size or 0)).advance

        def on_file(file: FileRekeying) -> None:
            count(file)
            document.add(_file_document(file))

        report = keytools.rekey_in_place(
            location,
            table_name=options.table,
            new_table_name=options.to_table,
            new_keytools=new_keytools,
            aad_prefix=options.aad_prefix,
            verify=options.verify,
            journal=options.journal,
            keep_results=False,
            on_file=on_file,
            on_progress=on_progress,
        )
        stack.close()
        document.end(_summary_document(report))
    _tell(report, time.monotonic() - started)
    if not report.succeeded:
        raise typer.Exit(failure_status([file.error for file in report.failures if file.error is not None]))


def _nothing(_: object) -> None:
    """Nobody counts."""


def _file_document(file: FileRekeying) -> dict[str, Any]:
    return {
        "path": file.path,
        "outcome": file.outcome.value,
        "old_size_bytes": file.old_size_bytes,
        "new_size_bytes": file.new_size_bytes,
        **error_fields(file.error),
    }


def _summary_document(report: RekeyReport) -> dict[str, Any]:
    return {
        "complete": report.stopped_by is None,
        "counts": {outcome.value: number for outcome, number in report.counts.items()},
        "bytes_written": report.bytes_written,
        "journal": report.journal,
        "stopped_by": None if report.stopped_by is None else error_text(report.stopped_by),
    }


def _tell(report: RekeyReport, seconds: float) -> None:
    say_failures([(file.path, file.error) for file in report.failures if file.error is not None])
    total = sum(report.counts.values())
    parts = [f"{report.counts[outcome]:,} {outcome.value}" for outcome in RekeyOutcome if report.counts[outcome]]
    files = f"{total:,} {'file' if total == 1 else 'files'}: {', '.join(parts)}" if total else "No Parquet files"
    say(f"{files}; {size_text(report.bytes_written)} written in {seconds:.1f} s.")
    if report.stopped_by is not None:
        say(f"Stopped: {error_text(report.stopped_by)}")
