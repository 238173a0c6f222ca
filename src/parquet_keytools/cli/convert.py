"""`parquet-keytools encrypt`, `decrypt` and `rekey`: files that are written again."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    FollowLinksOption,
    JsonOption,
    ModeOption,
    OverwriteOption,
    ProcessesOption,
    SkipExistingOption,
    SourceArgument,
    SourcesArgument,
    TableOption,
    TargetArgument,
    locations_of,
)
from parquet_keytools.cli.output import FilesDocument, answer, file_counter, progress_bar, size_text
from parquet_keytools.cli.rotate import (
    exit_with,
    files_text,
    rekeyed_document,
    rekeyed_summary,
    say_failures,
    say_stopped,
    saying_what_was_done,
)

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.report import FileRotation


def encrypt_command(
    sources: SourcesArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    processes: ProcessesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Encrypt a Parquet file, or all those of a folder.

    Works page by page, without decoding values.
    """
    from parquet_keytools.cli.file_work import convert_files, open_keytools
    from parquet_keytools.files.table_check import TableCheck

    with open_keytools(config) as keytools:
        table_name, _ = keytools.configuration.select_table(table)
        convert_files(
            sources,
            target,
            "encrypted",
            partial(keytools.encrypt_file, table_name=table_name, skip_existing=skip_existing),
            overwrite=overwrite,
            skip_existing=skip_existing,
            processes=processes,
            as_json=as_json,
            check=TableCheck(keytools.configuration, table_name).refuse_folder_names,
        )


SalvageOption = Annotated[bool, typer.Option("--salvage", help="Write the intact row groups of damaged files.")]


def decrypt_command(
    sources: SourcesArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    salvage: SalvageOption = False,
    mode: ModeOption = None,
    processes: ProcessesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decrypt a Parquet file, or all those of a folder.

    The written files are not encrypted. All keys of a file are needed.
    """
    from parquet_keytools.cli.file_work import convert_files, open_keytools, parsed_mode, salvage_files
    from parquet_keytools.files.opened_file import FileIdentities

    options: dict[str, Any] = {"table_name": table, "aad_prefix": aad_prefix, "mode": parsed_mode(mode)}
    with open_keytools(config) as keytools:
        keytools.configuration.table_of_files(table)
        if salvage and skip_existing:
            raise typer.BadParameter("it goes without --salvage only.", param_hint="--skip-existing")
        if salvage:
            salvaged = partial(keytools.salvage_file, **options)
            salvage_files(sources, target, salvaged, overwrite=overwrite, as_json=as_json)
            return
        convert_files(
            sources,
            target,
            "decrypted",
            partial(
                keytools.decrypt_file,
                **options,
                skip_existing=skip_existing,
                identities=FileIdentities(refuses=True),
            ),
            overwrite=overwrite,
            skip_existing=skip_existing,
            processes=processes,
            as_json=as_json,
        )


OptionalTargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DST", help="File or folder to be written, or its URI. A folder mirrors SRC.", show_default=False
    ),
]
TableOfSourceOption = Annotated[
    str | None, typer.Option("--table", metavar="NAME", help="The table of SRC. Not needed if there is only one.")
]
ToConfigOption = Annotated[
    Path | None,
    typer.Option("--to-config", metavar="FILE", help="The configuration of DST, if it is another one."),
]
ToTableOption = Annotated[
    str | None, typer.Option("--to-table", metavar="NAME", help="The table of DST, if it is another one.")
]
InPlaceOption = Annotated[
    bool, typer.Option("--in-place", help="Replace each file of SRC when the new one is complete and checked.")
]
VerifyOption = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="With --in-place: whether to authenticate each page of a new file before it replaces the old one. "
        "Default: yes.",
        show_default=False,
    ),
]


def rekey_command(
    source: SourceArgument,
    config: ConfigOption,
    target: OptionalTargetArgument = None,
    table: TableOfSourceOption = None,
    to_config: ToConfigOption = None,
    to_table: ToTableOption = None,
    aad_prefix: AadPrefixOption = None,
    overwrite: OverwriteOption = False,
    skip_existing: SkipExistingOption = False,
    in_place: InPlaceOption = False,
    verify: VerifyOption = None,
    follow_links: FollowLinksOption = False,
    processes: ProcessesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Encrypt encrypted files with new data keys.

    They are encrypted as before, or as another table or configuration says. All keys of a file are needed.
    """
    if in_place and target is not None:
        raise typer.BadParameter("DST and --in-place contradict each other.", param_hint="DST")
    if in_place and skip_existing:
        raise typer.BadParameter(
            "this goes with DST only; --in-place encrypts all files again.", param_hint="--skip-existing"
        )
    if in_place and overwrite:
        raise typer.BadParameter("--in-place replaces files in any case.", param_hint="--overwrite")
    if not in_place and target is None:
        raise typer.BadParameter("a file or folder to write is needed, or --in-place.", param_hint="DST")
    if not in_place and (verify is not None or follow_links):
        option = "--follow-links" if follow_links else "--verify"
        raise typer.BadParameter("this goes with --in-place only.", param_hint=option)

    from parquet_keytools.cli.file_work import convert_files, open_keytools
    from parquet_keytools.runtime.worker_processes import command_line_processes

    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(config))
        keytools.configuration.table_of_files(table)
        new_keytools = keytools
        if in_place:
            options = {
                "table_name": table,
                "new_table_name": to_table,
                "new_keytools": stack.enter_context(open_keytools(to_config)) if to_config is not None else None,
                "aad_prefix": aad_prefix,
                "verify": verify is not False,
                "follow_links": follow_links,
            }
            with command_line_processes(processes):
                _in_place(keytools, source, options, as_json=as_json)
            return
        assert target is not None
        if to_config is not None:
            new_keytools = stack.enter_context(open_keytools(to_config))
        wanted = to_table or (table if to_config is None else None)
        new_table_name, _ = new_keytools.configuration.select_table(wanted)
        convert_files(
            [source],
            target,
            "rekeyed",
            partial(
                keytools.rekey_file,
                table_name=table,
                new_table_name=new_table_name,
                new_keytools=new_keytools,
                aad_prefix=aad_prefix,
                skip_existing=skip_existing,
            ),
            overwrite=overwrite,
            skip_existing=skip_existing,
            processes=processes,
            as_json=as_json,
        )


def _in_place(keytools: Keytools, source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Replace files one by one, and report each; `options` are those of `Keytools.rekey_in_place`."""
    started = time.monotonic()
    again = "Give the same command again: it starts with the first file."
    location = locations_of([source], "SRC")
    is_folder = location.is_folder()
    with FilesDocument(wanted=as_json) as document:
        size = 0 if is_folder else location.info().size or 0
        with progress_bar(size, wanted=not is_folder) as progress, file_counter(wanted=is_folder) as count:

            def on_file(file: FileRotation) -> None:
                count(file)
                done[file.outcome] += 1
                document.add(rekeyed_document(file))

            with saying_what_was_done(again) as done:
                report = keytools.rekey_in_place(
                    location,
                    keep_results=False,
                    on_file=on_file,
                    on_progress=None if is_folder else progress.advance,
                    **options,
                )
        document.end(rekeyed_summary(report))
    say_failures(report)
    seconds = time.monotonic() - started
    answer(f"{files_text(report.counts)}; {size_text(report.bytes_written)} written in {seconds:.1f} s.")
    say_stopped(report)
    exit_with(report)
