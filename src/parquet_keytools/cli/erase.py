"""`parquet-keytools erase`: deletes the master keys of one tenant, and writes a certificate."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli.erase_rows import RecordOption, RewriteOption, erase_rows
from parquet_keytools.cli.options import (
    ConfigOption,
    IgnoreSkippedOption,
    PathsArgument,
    ProcessesOption,
    ReportOptions,
    TableOption,
    locations_of,
    new_file,
    open_keytools,
    pairs_of,
    with_options,
)
from parquet_keytools.cli.output import (
    ExitStatus,
    answer,
    json_wanted,
    number_of,
    print_json,
    print_table,
    progress_bar,
    say,
)
from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.erasure.certificate import Certificate
    from parquet_keytools.erasure.plan import ErasedKey, Note, Plan

WhereOption = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="NAME=VALUE|FILTER",
        help="Whose data: a placeholder of key_values, and its value. With --rewrite, which rows: conditions "
        "joined by AND, such as `customer_id = 4711`.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; show what would be erased, and what forbids it.")
]
YesOption = Annotated[
    str | None,
    typer.Option(
        "--yes", metavar="VALUE", help="The value again, so that the command does not ask for it; for scripts."
    ),
]
WaitingDaysOption = Annotated[
    int | None,
    typer.Option(
        "--waiting-days",
        metavar="N",
        help="Days until AWS KMS deletes a key: 7 to 30. Default: 30. Other KMSs have settings of their own.",
        show_default=False,
    ),
]
CertificateOption = Annotated[
    str | None,
    typer.Option("--certificate", metavar="FILE", help="Write the certificate to this new file, as JSON."),
]
StatusOption = Annotated[bool, typer.Option("--status", help="Only show whether the master keys are deleted.")]
CancelOption = Annotated[
    bool, typer.Option("--cancel", help="Cancel a scheduled deletion, where the KMS can. Nothing else is done.")
]


@with_options(ReportOptions)
def erase_command(
    paths: PathsArgument,
    config: ConfigOption,
    where: WhereOption,
    table: TableOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = None,
    waiting_days: WaitingDaysOption = None,
    certificate: CertificateOption = None,
    ignore_skipped: IgnoreSkippedOption = False,
    status: StatusOption = False,
    cancel: CancelOption = False,
    rewrite: RewriteOption = False,
    record: RecordOption = None,
    processes: ProcessesOption = None,
) -> None:
    """Delete one tenant's master keys, or remove rows.

    Finds the master keys that only the data of one tenant is under, and shows which files and columns are under
    them. Asks for the value, deletes the keys in the KMS at once or after its waiting period, proves that the KMS
    no longer unwraps with them, and writes a certificate. After an interrupted run, repeat the command.

    With --rewrite, for data that shares its master keys with other data: replaces each file that has matching rows
    by a file without them.
    """
    if rewrite:
        if any((yes, waiting_days, certificate, ignore_skipped, status, cancel)):
            raise typer.BadParameter(
                "only --table, --dry-run, --record and --processes go with it.", param_hint="--rewrite"
            )
        if len(paths) != 1:
            raise typer.BadParameter("give one file or folder.", param_hint="PATH")
        erase_rows(paths[0], config, where, table, dry_run=dry_run, record=record, processes=processes)
        return
    if record is not None or processes is not None:
        raise typer.BadParameter(
            "it needs --rewrite.", param_hint="--record" if record is not None else "--processes"
        )
    from parquet_keytools.storage.outputs import discarded_unless_done, pending_output

    if status + cancel + dry_run > 1:
        raise typer.BadParameter("give one of --dry-run, --status and --cancel.", param_hint="--status")
    location = locations_of(paths, "PATH")
    target = new_file(certificate, "--certificate")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(config))
        erasure = keytools.erasure(location, pairs_of([where], "--where"), table_name=table)
        if status or cancel:
            _show_states(erasure.cancel() if cancel else erasure.states(), was_cancelled=cancel)
            return
        with progress_bar() as progress:
            plan = erasure.plan(ignore_skipped=ignore_skipped, on_file=progress.count)
        if dry_run or plan.problems:
            if json_wanted():
                print_json(plan.to_dict())
            _show_plan(plan, answer)
            if plan.problems:
                say("Nothing was changed.")
                raise typer.Exit(ExitStatus.NO)
            return
        _show_plan(plan, say)
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
            say(f"The certificate is in {target}.")
    _show_certificate(made)


def _confirm(plan: Plan, yes: str | None) -> None:
    """Require the value, from --yes or a line of stdin."""
    given = yes
    if given is None:
        say(f"A deleted key never comes back, and the data is lost. Type {plan.value} to erase:")
        given = sys.stdin.readline().rstrip("\r\n")
    if given != plan.value:
        raise typer.BadParameter(
            f"it is not {plan.value!r}: nothing was changed.", param_hint="--yes" if yes is not None else "stdin"
        )


def _show_plan(plan: Plan, show: Callable[[str], None]) -> None:
    columns: dict[str, int] = {}
    for file in plan.files:
        for column in file.columns:
            columns[column.column] = columns.get(column.column, 0) + 1
    older = sum(file.version_id is not None for file in plan.files)
    show(
        f"{plan.placeholder}={plan.value}: {number_of(len(plan.files) - older, 'file')}, "
        f"{number_of(older, 'older version')} of objects."
    )
    for key in plan.keys:
        show(f"Master key: {key.deletion.key} ({key.deletion.state})")
    for name, count in columns.items():
        show(f"Column {printable(name)} in {number_of(count, 'file')}")
    for label, notes in (("Refused", plan.problems), ("Not reached", plan.not_reached)):
        for note in notes:
            show(f"{label}: {_note_text(note)}")


def _note_text(note: Note) -> str:
    if not note.examples:
        return f"{note.text}."
    more = f", and {len(note.examples) - 3:,} more" if len(note.examples) > 3 else ""
    return f"{note.text}: {', '.join(note.examples[:3])}{more}."


def _show_states(keys: Sequence[ErasedKey], *, was_cancelled: bool) -> None:
    from parquet_keytools.erasure.certificate import state_text

    if json_wanted():
        print_json({"keys": [key.to_dict() for key in keys]})
    else:
        rows = [(key.deletion.key, key.deletion.state, state_text(key)) for key in keys]
        print_table("Master keys", ["master key", "state", "meaning"], rows)
    if was_cancelled and any(key.deletion.state == "disabled" for key in keys):
        say("The KMS keeps a key disabled after a cancelled deletion: enable it there to read the data again.")
    if not was_cancelled and not all(key.deletion.is_gone for key in keys):
        raise typer.Exit(ExitStatus.NO)


def _show_certificate(made: Certificate) -> None:
    if json_wanted():
        print_json(made.to_dict())
    else:
        for line in made.lines():
            answer(line)
    if not made.proof.obtained:
        raise typer.Exit(ExitStatus.KMS_FAILED if made.proof.unreachable else ExitStatus.NO)
