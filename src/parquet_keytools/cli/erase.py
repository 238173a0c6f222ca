"""`parquet-keytools erase`: deletes the master keys of one tenant, or removes rows, and records it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.erasure.key_erasure import Certificate, ErasedKey, Plan
    from parquet_keytools.rotation.data_set_run import OnFile
    from parquet_keytools.rotation.report import FileRotation, RotationReport
    from parquet_keytools.storage.locations import FileLocation


@opt.with_options(opt.ReportOptions)
def erase_command(
    paths: opt.PathsArgument,
    config: Path,
    where: str,
    table: str | None = None,
    dry_run: bool = False,
    yes: str | None = None,
    waiting_days: int | None = None,
    certificate: str | None = None,
    ignore_skipped: bool = False,
    status: bool = False,
    cancel: bool = False,
    rewrite: bool = False,
    record: str | None = None,
    processes: int | None = None,
) -> None:
    """Delete one tenant's master keys, or remove rows.

    Finds the master keys that only the data of one tenant is under, and shows which files and columns are under
    them. Asks for the value, deletes the keys in the KMS at once or after its waiting period, proves that the KMS
    no longer unwraps with them, and writes a certificate. After an interrupted run, repeat the command.

    With --rewrite, for data that shares its master keys with other data: replaces each file that has matching rows
    by a file without them.

    Options:
        --where NAME=VALUE|FILTER: Whose data: a placeholder of key_values, and its value. With --rewrite,
            which rows: conditions joined by AND, such as `customer_id = 4711`.
        --dry-run: Change nothing; show what would be erased, and what forbids it.
        --yes VALUE: The value again, so that the command does not ask for it; for scripts.
        --waiting-days N: Days until AWS KMS deletes a key: 7 to 30. Default: 30. Other KMSs have settings of
            their own.
        --certificate FILE: Write the certificate to this new file, as JSON.
        --status: Only show whether the master keys are deleted.
        --cancel: Cancel a scheduled deletion, where the KMS can. Nothing else is done.
        --rewrite: Rewrite the files that hold matching rows.
        --record LIST: With --rewrite: write the files before and after to this new file, as JSON.
    """
    if rewrite:
        if any((yes, waiting_days, certificate, ignore_skipped, status, cancel)):
            raise typer.BadParameter(
                "only --table, --dry-run, --record and --processes go with it.", param_hint="--rewrite"
            )
        if len(paths) != 1:
            raise typer.BadParameter("give one file or folder.", param_hint="PATH")
        _erase_rows(paths[0], config, where, table, dry_run=dry_run, record=record, processes=processes)
        return
    for option, value in (("--record", record), ("--processes", processes)):
        if value is not None:
            raise typer.BadParameter("it needs --rewrite.", param_hint=option)
    from parquet_keytools.storage.outputs import discarded_unless_done, pending_output

    if status + cancel + dry_run > 1:
        raise typer.BadParameter("give one of --dry-run, --status and --cancel.", param_hint="--status")
    location = opt.locations_of(paths, "PATH")
    target = opt.new_file(certificate, "--certificate")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(opt.open_keytools(config))
        erasure = keytools.erasure(location, opt.pairs_of([where], "--where"), table_name=table)
        if status or cancel:
            _show_states(erasure.cancel() if cancel else erasure.states(), was_cancelled=cancel)
            return
        with out.progress_bar() as progress:
            plan = erasure.plan(ignore_skipped=ignore_skipped, on_file=progress.count)
        if dry_run or plan.problems:
            if out.json_wanted():
                out.print_json(plan.to_dict())
            _show_plan(plan, out.answer)
            if plan.problems:
                out.say("Nothing was changed.")
                raise typer.Exit(out.ExitStatus.NO)
            return
        _show_plan(plan, out.say)
        _confirm(plan, yes)
        # Begun now: it is too late after the deletion to find that a certificate cannot be written.
        pending = None
        if target is not None:
            pending = stack.enter_context(discarded_unless_done(pending_output(target, overwrite=False)))
        made = erasure.run(plan, waiting_days=waiting_days)
        if pending is not None:
            with pending.open_sink() as sink:
                sink.write_at(0, json.dumps(made.to_dict(), indent=1).encode() + b"\n")
            pending.commit()
            out.say(f"The certificate is in {target}.")
    _show_certificate(made)


def _confirm(plan: Plan, yes: str | None) -> None:
    """Require the value, from --yes or a line of stdin."""
    given, where = yes, "--yes"
    if given is None:
        where = "stdin"
        out.say(f"A deleted key never comes back, and the data is lost. Type {plan.value} to erase:")
        given = sys.stdin.readline().rstrip("\r\n")
    if given != plan.value:
        raise typer.BadParameter(f"it is not {plan.value!r}: nothing was changed.", param_hint=where)


def _show_plan(plan: Plan, show: Callable[[str], None]) -> None:
    columns = Counter(column.column for file in plan.files for column in file.columns)
    older = sum(file.version_id is not None for file in plan.files)
    show(
        f"{plan.placeholder}={plan.value}: {out.number_of(len(plan.files) - older, 'file')}, "
        f"{out.number_of(older, 'older version')} of objects."
    )
    for key in plan.keys:
        show(f"Master key: {key.deletion.key} ({key.deletion.state})")
    for name, count in columns.items():
        show(f"Column {printable(name)} in {out.number_of(count, 'file')}")
    for label, notes in (("Refused", plan.problems), ("Not reached", plan.not_reached)):
        for note in notes:
            more = f", and {len(note.examples) - 3:,} more" if len(note.examples) > 3 else ""
            examples = f": {', '.join(note.examples[:3])}{more}" if note.examples else ""
            show(f"{label}: {note.text}{examples}.")


def _show_states(keys: Sequence[ErasedKey], *, was_cancelled: bool) -> None:
    from parquet_keytools.erasure.key_erasure import state_text

    if out.json_wanted():
        out.print_json({"keys": [key.to_dict() for key in keys]})
    else:
        rows = [(key.deletion.key, key.deletion.state, state_text(key)) for key in keys]
        out.print_table("Master keys", ["master key", "state", "meaning"], rows)
    if was_cancelled and any(key.deletion.state == "disabled" for key in keys):
        out.say("The KMS keeps a key disabled after a cancelled deletion: enable it there to read the data again.")
    if not was_cancelled and not all(key.deletion.is_gone for key in keys):
        raise typer.Exit(out.ExitStatus.NO)


def _show_certificate(made: Certificate) -> None:
    if out.json_wanted():
        out.print_json(made.to_dict())
    else:
        for line in made.lines():
            out.answer(line)
    if not made.proof.obtained:
        raise typer.Exit(out.ExitStatus.KMS_FAILED if made.proof.unreachable else out.ExitStatus.NO)


# --- rows ---


def _erase_rows(
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
    from parquet_keytools.cli.file_work import change_in_place
    from parquet_keytools.erasure.rewrite import NOT_COVERED

    location = opt.location_of(path, "PATH")
    with opt.open_keytools(config) as keytools:
        table_name, _ = keytools.configuration.select_table(table)
        about = {"path": str(location), "table": table_name, "where": where, "dry_run": dry_run}
        kept = _Record(opt.new_file(record, "--record"), about)
        wanted: dict[str, Any] = {"where": where, "dry_run": dry_run, "table_name": table_name}
        wanted["on_search"] = kept.plan

        def erase(
            location: FileLocation, *, on_file: OnFile, on_progress: object = None, **options: Any
        ) -> RotationReport:
            def on_file_done(file: FileRotation) -> None:
                kept.add([file])
                on_file(file)

            is_complete = False
            try:
                report = keytools.erase_rows(location, on_file=on_file_done, **wanted, **options)
                is_complete = report.succeeded
                return report
            finally:
                kept.write(complete=is_complete)

        try:
            again = "Repeat the command: it goes on with the files that still have matching rows."
            change_in_place(erase, location, again, processes=processes)
        finally:
            if kept.rows_removed:
                out.answer(f"{'To remove' if dry_run else 'Removed'}: {out.number_of(kept.rows_removed, 'row')}.")
                out.answer(f"Not covered: {'; '.join(NOT_COVERED)}.")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class _Record:
    """The files before and after, as JSON, written before the first file is replaced, and at the end."""

    target: FileLocation | None
    about: dict[str, Any]
    rows_removed: int = 0
    started_at: str = field(default_factory=_now)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plan(self, files: Iterable[FileRotation]) -> None:
        """Record the files that were found, before the first is replaced."""
        self.add(files)
        self.write(complete=False)
        self.rows_removed = 0

    def add(self, files: Iterable[FileRotation]) -> None:
        for file in files:
            entry = out.to_dict(file)
            self.rows_removed += entry.get("rows_removed", 0)
            names = "path", "outcome", "rows", "rows_removed", "before", "after", "error", "message"
            self.files[file.path] = {name: entry.get(name) for name in names}

    def write(self, *, complete: bool) -> None:
        from parquet_keytools.erasure.rewrite import NOT_COVERED
        from parquet_keytools.storage.outputs import write_whole

        if self.target is None or not self.files:
            return
        document = {
            "format": "parquet-keytools record of removed rows",
            "version": 1,
            **self.about,
            "started_at": self.started_at,
            "written_at": _now(),
            "complete": complete,
            "not_covered": NOT_COVERED,
            "files": list(self.files.values()),
        }
        write_whole(self.target, json.dumps(document, indent=1, default=out.plain_value).encode() + b"\n")
