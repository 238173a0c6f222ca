"""`parquet-keytools rotate`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    JsonOption,
    PathsArgument,
    TableOption,
    location_of,
    locations_of,
)
from parquet_keytools.cli.output import (
    MOST_SAID,
    ExitStatus,
    FilesDocument,
    answer,
    file_counter,
    number_of,
    print_json,
    say,
)

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.storage.locations import FileLocation

FromOption = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="KEY", help="Move keys from this master key to the --to that follows."),
]
ToOption = Annotated[
    list[str] | None, typer.Option("--to", metavar="KEY", help="The master key that replaces it.")
]
ToConfigOption = Annotated[
    Path | None,
    typer.Option("--to-config", metavar="FILE", help="Another configuration, whose KMS re-wraps the keys."),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only-master-key", metavar="KEY", help="Rotate only keys that this master key wraps. Repeatable."
    ),
]
OlderThanOption = Annotated[
    str | None,
    typer.Option(
        "--older-than", metavar="VERSION", help="Rotate only keys under older versions of their master key."
    ),
]
NewKeksOption = Annotated[
    bool, typer.Option("--new-keks", help="Make new KEKs, after a KEK leaked. DEKs stay: see rekey.")
]
KeepOldOption = Annotated[
    bool | None, typer.Option("--keep-old/--no-keep-old", help="Keep the old keys beside the files, for --undo.")
]
UndoOption = Annotated[bool, typer.Option("--undo", help="Restore the keys that --keep-old kept.")]
DropOldOption = Annotated[bool, typer.Option("--drop-old", help="Remove the keys that --keep-old kept.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; tell what would change, and the KMS be asked for.")
]
JournalOption = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="Where a run that is cut off leaves what it made; not in PATH. Default: the folder of your state.",
    ),
]


def rotate_command(
    paths: PathsArgument,
    config: ConfigOption,
    table: TableOption = None,
    from_keys: FromOption = None,
    to_keys: ToOption = None,
    to_config: ToConfigOption = None,
    only_master_keys: OnlyOption = None,
    older_than: OlderThanOption = None,
    new_keks: NewKeksOption = False,
    keep_old: KeepOldOption = None,
    undo: UndoOption = False,
    drop_old: DropOldOption = False,
    dry_run: DryRunOption = False,
    journal: JournalOption = None,
    aad_prefix: AadPrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    The keys are re-wrapped under the current version of their master keys, or under other master keys. To continue
    an interrupted run, give the same command again.
    """
    moves = moves_of(from_keys or [], to_keys or [])
    chosen = {
        "--from": bool(moves),
        "--to-config": to_config is not None,
        "--only-master-key": bool(only_master_keys),
        "--older-than": older_than is not None,
        "--new-keks": new_keks,
        "--keep-old": keep_old is not None,
        "--dry-run": dry_run,
        "--journal": journal is not None,
    }
    if undo or drop_old:
        _refuse("--undo" if undo else "--drop-old", {"--drop-old": undo and drop_old, **chosen})
    if dry_run:
        _refuse("--dry-run", {"--keep-old": keep_old is True, "--journal": journal is not None})

    from parquet_keytools.cli.file_work import open_keytools

    if (undo or drop_old) and len(paths) > 1:
        raise typer.BadParameter("name one file or folder.", param_hint="--undo" if undo else "--drop-old")
    location = location_of(paths[0], "PATH") if undo or drop_old else locations_of(paths, "PATH")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(config))
        if table is not None:
            keytools.configuration.select_table(table)
        if undo:
            _undo(keytools, location, table, aad_prefix, as_json=as_json)
            return
        if drop_old:
            _drop_old(keytools, location, as_json=as_json)
            return
        options: dict[str, Any] = {
            "moves": moves or None,
            "only_master_keys": only_master_keys or None,
            "older_than": older_than,
            "new_keks": new_keks,
            "keep_old": False if dry_run else keep_old,
            "dry_run": dry_run,
            "journal": journal,
            "to": stack.enter_context(open_keytools(to_config)) if to_config is not None else None,
            "table_name": table,
            "aad_prefix": aad_prefix,
        }
        _rotate(keytools, location, options, as_json=as_json)


def moves_of(old: list[str], new: list[str]) -> dict[str, str]:
    """Return the moves that pairs of --from and --to mean.

    Raises:
        typer.BadParameter: They are no pairs.
    """
    if len(old) != len(new):
        raise typer.BadParameter(
            f"each --from needs its --to: there are {len(old)} of one and {len(new)} of the other.",
            param_hint="--from",
        )
    twice = [key for key in old if old.count(key) > 1]
    if twice:
        raise typer.BadParameter(f"{twice[0]!r} comes twice: it can move to one master key.", param_hint="--from")
    return dict(zip(old, new, strict=True))


def _refuse(option: str, others: dict[str, bool]) -> None:
    """Refuse options that contradict one that was chosen."""
    for other, is_chosen in others.items():
        if is_chosen:
            raise typer.BadParameter(f"{option} and {other} contradict each other.", param_hint=option)


def _rotate(keytools: Keytools, location: FileLocation, options: dict[str, Any], *, as_json: bool) -> None:
    from parquet_keytools.cli.rotation_report import (
        RotationTally,
        exit_with,
        rotation_document,
        saying_what_was_done,
    )
    from parquet_keytools.rotation.report import FileRotation

    tally = RotationTally()
    again = "Give the same command again: it does the rest."
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


def _undo(
    keytools: Keytools, location: FileLocation, table: str | None, aad_prefix: str | None, *, as_json: bool
) -> None:
    from parquet_keytools.cli.rotation_report import RotationTally, exit_with, rotation_document

    report = keytools.undo_rotation(location, table_name=table, aad_prefix=aad_prefix)
    tally = RotationTally()
    with FilesDocument(wanted=as_json) as document:
        for file in report.files:
            tally.add(file)
            document.add(rotation_document(file))
        document.end(tally.document(report))
    tally.tell(report)
    exit_with(report)


def _drop_old(keytools: Keytools, location: FileLocation, *, as_json: bool) -> None:
    left: list[tuple[str, str]] = []
    dropped = keytools.drop_old_keys(location, on_left=lambda path, why: left.append((path, why)))
    if as_json:
        print_json({"dropped": dropped} | ({"left": [path for path, _ in left]} if left else {}))
    answer(f"Removed {number_of(dropped, 'file')} with old keys.")
    for path, why in left[:MOST_SAID]:
        say(f"Not removed: {path}: {why}.")
    if left:
        say(f"{len(left)} not removed: check them, and remove them by hand.")
        raise typer.Exit(ExitStatus.NO)
