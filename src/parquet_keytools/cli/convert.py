"""`parquet-keytools encrypt`, `decrypt`, `rekey` and `rotate`."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out

if TYPE_CHECKING:
    from parquet_keytools.rotation.report import FileRotation

InPlaceOption = Annotated[
    bool, typer.Option("--in-place", help="Replace each file of SRC when the new file is complete and checked.")
]


KeyValuesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="The value of a placeholder in names of keys, such as tenant=acme; see key_values in the table.",
    ),
]


@opt.with_options(opt.ReportOptions)
def encrypt_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... [DST]",
            help="Files, folders or globs, or their URIs, such as s3://bucket/folder; then the file or folder to "
            "write, which mirrors SRC. With --in-place, there is no DST.",
        ),
    ],
    config: opt.ConfigOption,
    table: opt.TableOption = None,
    overwrite: opt.OverwriteOption = False,
    skip_existing: opt.SkipExistingOption = False,
    skip_unauthenticated: opt.SkipUnauthenticatedOption = False,
    in_place: InPlaceOption = False,
    follow_links: opt.FollowLinksOption = False,
    processes: opt.ProcessesOption = None,
    key_values: KeyValuesOption = None,
) -> None:
    """Encrypt a Parquet file, or all Parquet files of a folder.

    Works page by page, without decoding values. With --in-place, the plaintext is replaced, not erased: its blocks
    remain on the disk until the file system reuses them. After an interrupted run, repeat the command.
    """
    from parquet_keytools.cli.file_work import change_in_place, convert_files
    from parquet_keytools.files.conversion import SkipExisting
    from parquet_keytools.files.table_check import TableCheck
    from parquet_keytools.runtime.worker_processes import command_line_processes

    if in_place:
        _refuse(_NOT_IN_PLACE, overwrite=overwrite, skip_existing=skip_existing or skip_unauthenticated)
        values = opt.pairs_of(key_values, "--set")
        with opt.open_keytools(config) as keytools, command_line_processes(processes):
            change_in_place(
                partial(
                    keytools.encrypt_in_place,
                    table_name=table,
                    follow_links=follow_links,
                    key_values=values,
                ),
                opt.locations_of(paths, "SRC"),
                "Repeat the command: encrypted files stay as they are.",
            )
        return
    _refuse(_ONLY_IN_PLACE, follow_links=follow_links)
    if len(paths) == 1:
        raise typer.BadParameter("a file or folder to write is needed, or --in-place.", param_hint="DST")
    *sources, target = paths
    skip: SkipExisting = "unauthenticated" if skip_unauthenticated else skip_existing
    with opt.open_keytools(config) as keytools:
        table_name, _ = keytools.configuration.select_table(table)
        convert_files(
            sources,
            target,
            "encrypted",
            partial(
                keytools.encrypt_file,
                table_name=table_name,
                skip_existing=skip,
                key_values=opt.pairs_of(key_values, "--set"),
            ),
            overwrite=overwrite,
            skip_existing=skip,
            processes=processes,
            check=TableCheck(keytools.configuration, table_name).refuse_folder_names,
        )


_ONLY_IN_PLACE = "this works with --in-place only."
_NOT_IN_PLACE = "this does not work with --in-place."


def _refuse(why: str, **options: object) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")


def parsed_mode(text: str) -> int:
    """Return permissions that are given as octal digits, and let the owner read and write."""
    if not re.fullmatch(r"0?[0-7]{3}", text) or int(text, 8) & 0o600 != 0o600:
        raise typer.BadParameter("this is three octal digits, and the owner may read and write, such as 640.")
    return int(text, 8)


@opt.with_options(opt.ReportOptions)
def decrypt_command(
    sources: opt.SourcesArgument,
    target: opt.TargetArgument,
    config: opt.ConfigOption,
    table: opt.TableOption = None,
    aad_prefix: opt.AadPrefixOption = None,
    overwrite: opt.OverwriteOption = False,
    skip_existing: opt.SkipExistingOption = False,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Write the intact row groups of damaged files.")
    ] = False,
    mode: Annotated[
        int | None,
        typer.Option(
            "--mode",
            metavar="OCTAL",
            parser=parsed_mode,
            help="Permissions of the written files, such as 640. By default only their owner may read them.",
        ),
    ] = None,
    processes: opt.ProcessesOption = None,
) -> None:
    """Decrypt a Parquet file, or all Parquet files of a folder.

    The written files are not encrypted. All keys of a file are needed.
    """
    from parquet_keytools.cli.file_work import convert_files, salvage_files
    from parquet_keytools.files.opened_file import FileIdentities

    options: dict[str, Any] = {"table_name": table, "aad_prefix": aad_prefix, "mode": mode}
    with opt.open_keytools(config) as keytools:
        keytools.configuration.table_of_files(table)
        if salvage and skip_existing:
            raise typer.BadParameter("this does not work with --salvage.", param_hint="--skip-existing")
        if salvage:
            salvage_files(sources, target, partial(keytools.salvage_file, **options), overwrite=overwrite)
            return
        options |= {"skip_existing": skip_existing, "identities": FileIdentities(refuses=True)}
        convert_files(
            sources,
            target,
            "decrypted",
            partial(keytools.decrypt_file, **options),
            overwrite=overwrite,
            skip_existing=skip_existing,
            processes=processes,
        )


@opt.with_options(opt.ReportOptions)
def rekey_command(
    source: opt.SourceArgument,
    config: opt.ConfigOption,
    target: Annotated[
        str | None,
        typer.Argument(metavar="DST", help="File or folder to write, or its URI. A folder mirrors SRC."),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="NAME", help="The table of SRC. Not needed if there is only one."),
    ] = None,
    to_config: Annotated[
        Path | None,
        typer.Option("--to-config", metavar="FILE", help="The configuration of DST, if it is another one."),
    ] = None,
    to_table: Annotated[
        str | None, typer.Option("--to-table", metavar="NAME", help="The table of DST, if it is another one.")
    ] = None,
    aad_prefix: opt.AadPrefixOption = None,
    overwrite: opt.OverwriteOption = False,
    skip_existing: opt.SkipExistingOption = False,
    in_place: InPlaceOption = False,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="With --in-place: whether to authenticate each page of a new file before it replaces the old "
            "file. Default: yes.",
        ),
    ] = None,
    follow_links: opt.FollowLinksOption = False,
    update_list: opt.UpdateListOption = None,
    list_key: opt.ListKeyOption = None,
    processes: opt.ProcessesOption = None,
    key_values: KeyValuesOption = None,
) -> None:
    """Encrypt encrypted files with new data keys.

    The new files are encrypted as before, or for another table or configuration. All keys of a file are needed.
    """
    if in_place and target is not None:
        raise typer.BadParameter("DST and --in-place contradict each other.", param_hint="DST")
    if in_place:
        _refuse(_NOT_IN_PLACE, overwrite=overwrite, skip_existing=skip_existing)
    else:
        _refuse(_ONLY_IN_PLACE, verify=verify is not None, follow_links=follow_links, update_list=update_list)
    if not in_place and target is None:
        raise typer.BadParameter("a file or folder to write is needed, or --in-place.", param_hint="DST")

    from parquet_keytools.cli.file_work import change_in_place, convert_files
    from parquet_keytools.runtime.worker_processes import command_line_processes

    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(opt.open_keytools(config))
        keytools.configuration.table_of_files(table)
        new_keytools = stack.enter_context(opt.open_keytools(to_config)) if to_config is not None else None
        if target is None:
            again = "Repeat the command: files that are done stay as they are."
            if update_list is not None:
                again = "Verify the files, and record a new list."
            elif to_table in (None, table) and new_keytools is None:
                again = "Repeat the command: it starts with the first file."
            with command_line_processes(processes):
                change_in_place(
                    partial(
                        keytools.rekey_in_place,
                        table_name=table,
                        new_table_name=to_table,
                        new_keytools=new_keytools,
                        aad_prefix=aad_prefix,
                        verify=verify is not False,
                        follow_links=follow_links,
                        update_list=update_list,
                        list_key=list_key,
                        key_values=opt.pairs_of(key_values, "--set"),
                    ),
                    opt.locations_of([source], "SRC"),
                    again,
                )
            return
        wanted = to_table or (table if new_keytools is None else None)
        new_table_name, _ = (new_keytools or keytools).configuration.select_table(wanted)
        convert_files(
            [source],
            target,
            "rekeyed",
            partial(
                keytools.rekey_file,
                table_name=table,
                new_table_name=new_table_name,
                new_keytools=new_keytools or keytools,
                aad_prefix=aad_prefix,
                skip_existing=skip_existing,
                key_values=opt.pairs_of(key_values, "--set"),
            ),
            overwrite=overwrite,
            skip_existing=skip_existing,
            processes=processes,
        )


@opt.with_options(opt.RotationOptions)
def rotate_command(
    paths: opt.PathsArgument,
    options: opt.RotationOptions,
    update_list: opt.UpdateListOption = None,
    list_key: opt.ListKeyOption = None,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    The keys are re-wrapped under the current version of their master keys, or under other master keys. After an
    interrupted run, repeat the command.
    """
    from parquet_keytools.cli.file_work import InPlaceRun, exit_with

    arguments = options.arguments()
    location = opt.locations_of(paths, "PATH")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(opt.open_keytools(options.config))
        if options.table is not None:
            keytools.configuration.select_table(options.table)
        with out.progress_bar() as progress, InPlaceRun("Repeat the command.") as run:

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
    exit_with(report)
