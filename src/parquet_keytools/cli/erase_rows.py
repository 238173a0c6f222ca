"""`parquet-keytools erase --rewrite`: removes rows from files, and records what was removed."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import location_of, new_file, open_keytools
from parquet_keytools.cli.output import answer, number_of, plain_value, to_dict
from parquet_keytools.cli.rotate import change_in_place

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.report import FileRotation, RotationReport
    from parquet_keytools.storage.locations import FileLocation

_FORMAT = "parquet-keytools record of removed rows"
_VERSION = 1

RewriteOption = Annotated[bool, typer.Option("--rewrite", help="Rewrite the files that hold matching rows.")]
RecordOption = Annotated[
    str | None,
    typer.Option(
        "--record",
        metavar="LIST",
        help="With --rewrite: write the files before and after to this new file, as JSON.",
    ),
]


def erase_rows(
    path: str,
    config: Path,
    where: str,
    table: str | None,
    *,
    dry_run: bool,
    record: str | None,
    processes: int | None,
) -> None:
    """Remove rows from files, and report each; see `Keytools.erase_rows`."""
    from parquet_keytools.erasure.rewrite import NOT_COVERED
    from parquet_keytools.runtime.worker_processes import command_line_processes

    location = location_of(path, "PATH")
    with open_keytools(config) as keytools, command_line_processes(processes):
        table_name, _ = keytools.configuration.select_table(table)
        target = new_file(record, "--record")
        kept = _Record(target, {"path": str(location), "table": table_name, "where": where, "dry_run": dry_run})
        try:
            change_in_place(
                partial(_erase, keytools, kept, where, table_name, dry_run=dry_run),
                location,
                "Repeat the command: it goes on with the files that still have matching rows.",
            )
        finally:
            if kept.rows_removed:
                answer(f"{'To remove' if dry_run else 'Removed'}: {number_of(kept.rows_removed, 'row')}.")
                answer(f"Not covered: {'; '.join(NOT_COVERED)}.")


def _erase(
    keytools: Keytools,
    record: _Record,
    where: str,
    table_name: str,
    location: FileLocation,
    *,
    dry_run: bool,
    keep_results: bool,
    on_file: Callable[[FileRotation], None],
    on_progress: object,
) -> RotationReport:
    def on_file_done(file: FileRotation) -> None:
        record.add([file])
        on_file(file)

    is_complete = False
    try:
        report = keytools.erase_rows(
            location,
            where=where,
            table_name=table_name,
            dry_run=dry_run,
            keep_results=keep_results,
            on_file=on_file_done,
            on_search=record.plan,
        )
        is_complete = report.succeeded
        return report
    finally:
        record.write(complete=is_complete)


class _Record:
    """The files before and after, as JSON, written before the first file is replaced, and at the end.

    Attributes:
        rows_removed: Number of rows that this run removed, or would.
    """

    def __init__(self, target: FileLocation | None, about: dict[str, Any]) -> None:
        self.rows_removed = 0
        self._target = target
        self._about = about
        self._started_at = _now()
        self._files: dict[str, dict[str, Any]] = {}

    def plan(self, files: Iterable[FileRotation]) -> None:
        """Record the files that were found, before the first is replaced."""
        self.add(files)
        self.write(complete=False)
        self.rows_removed = 0

    def add(self, files: Iterable[FileRotation]) -> None:
        """Add the results for files."""
        for file in files:
            entry = to_dict(file)
            self.rows_removed += entry.get("rows_removed", 0)
            names = "path", "outcome", "rows", "rows_removed", "before", "after", "error", "message"
            self._files[file.path] = {name: entry.get(name) for name in names}

    def write(self, *, complete: bool) -> None:
        """Write the record, if one is wanted and there is something to record."""
        from parquet_keytools.erasure.rewrite import NOT_COVERED
        from parquet_keytools.storage.outputs import write_whole

        if self._target is None or not self._files:
            return
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            **self._about,
            "started_at": self._started_at,
            "written_at": _now(),
            "complete": complete,
            "not_covered": NOT_COVERED,
            "files": list(self._files.values()),
        }
        write_whole(self._target, json.dumps(document, indent=1, default=plain_value).encode() + b"\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
