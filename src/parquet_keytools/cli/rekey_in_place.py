"""What `parquet-keytools rekey --in-place` does: files are replaced one by one, and each is reported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from parquet_keytools.cli.failures import error_text
from parquet_keytools.cli.file_argument import locations_of
from parquet_keytools.cli.output import FilesDocument, answer, size_text
from parquet_keytools.cli.progress import file_counter, progress_bar
from parquet_keytools.cli.rotation_report import (
    error_fields,
    exit_with,
    files_text,
    say_failures,
    say_left_behind,
    say_stopped,
)
from parquet_keytools.keytools import Keytools
from parquet_keytools.rotation.report import FileRotation, RotationReport


def rekey_in_place(keytools: Keytools, source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Give a file, or all files under a folder, new data keys.

    Args:
        keytools: Opens the files.
        source: A path or URI.
        options: For `Keytools.rekey_in_place`.
        as_json: Whether the outcome goes to stdout as JSON.

    Raises:
        typer.Exit: Some files of a folder failed.
        KeytoolsError: The one file failed, or there is no such table.
    """
    started = time.monotonic()
    location = locations_of([source], "SRC")
    with FilesDocument(wanted=as_json) as document, contextlib.ExitStack() as stack:
        on_progress: Callable[[int], None] | None = None
        count: Callable[[object], None] = _nothing
        if location.is_folder():
            count = stack.enter_context(file_counter())
        else:
            on_progress = stack.enter_context(progress_bar(location.info().size or 0)).advance

        def on_file(file: FileRotation) -> None:
            count(file)
            document.add(_file_document(file))

        report = keytools.rekey_in_place(
            location, keep_results=False, on_file=on_file, on_progress=on_progress, **options
        )
        stack.close()
        document.end(_summary_document(report))
    _tell(report, time.monotonic() - started)
    exit_with(report)


def _nothing(_: object) -> None:
    """Nobody counts."""


def _file_document(file: FileRotation) -> dict[str, Any]:
    return {
        "path": file.path,
        "outcome": file.outcome.value,
        "old_size_bytes": file.old_size_bytes,
        "new_size_bytes": file.new_size_bytes,
        **error_fields(file.error),
    }


def _summary_document(report: RotationReport) -> dict[str, Any]:
    return {
        "complete": report.stopped_by is None,
        "counts": {outcome.value: number for outcome, number in report.counts.items()},
        "bytes_written": report.bytes_written,
        "journal": report.journal,
        "left_behind": report.left_behind,
        "stopped_by": None if report.stopped_by is None else error_text(report.stopped_by),
    }


def _tell(report: RotationReport, seconds: float) -> None:
    say_failures([(file.path, file.error) for file in report.failures if file.error is not None])
    say_left_behind(report.left_behind)
    answer(f"{files_text(report.counts)}; {size_text(report.bytes_written)} written in {seconds:.1f} s.")
    say_stopped(report)
