"""`parquet-keytools encrypt`, `decrypt`, `rekey` and `rotate`."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from parquet_keytools.cli import options as opt


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
    config: Path,
    table: str | None = None,
    overwrite: bool = False,
    skip_existing: bool = False,
    skip_existing_unauthenticated: bool = False,
    in_place: bool = False,
    follow_links: bool = False,
    processes: int | None = None,
    set: list[str] | None = None,
) -> None:
    """Encrypt a Parquet file, or all Parquet files of a folder.

    Works page by page, without decoding values. With --in-place, the plaintext is replaced, not erased: its blocks
    remain on the disk until the file system reuses them. After an interrupted run, repeat the command.

    Options:
        --skip-existing-unauthenticated: The same, for writers that may not unwrap keys; also
            --skip-existing=unauthenticated. Compares what files show without keys: algorithm, AAD prefix and
            footer key, with a plaintext footer also rows and columns. Nothing is authenticated.
    """
    from parquet_keytools.cli.file_work import change_in_place, convert_files
    from parquet_keytools.files.conversion import SkipExisting
    from parquet_keytools.files.table_check import TableCheck

    values = opt.pairs_of(set, "--set")
    if in_place:
        _refuse(_NOT_IN_PLACE, overwrite=overwrite, skip_existing=skip_existing or skip_existing_unauthenticated)
        with opt.open_keytools(config) as keytools:
            change_in_place(
                partial(keytools.encrypt_in_place, table_name=table, follow_links=follow_links, key_values=values),
                opt.locations_of(paths, "SRC"),
                "Repeat the command: encrypted files stay as they are.",
                processes=processes,
            )
        return
    _refuse(_ONLY_IN_PLACE, follow_links=follow_links)
    if len(paths) == 1:
        raise typer.BadParameter("a file or folder to write is needed, or --in-place.", param_hint="DST")
    *sources, target = paths
    skip: SkipExisting = "unauthenticated" if skip_existing_unauthenticated else skip_existing
    with opt.open_keytools(config) as keytools:
        table_name, _ = keytools.configuration.select_table(table)
        convert_files(
            sources,
            target,
            "encrypted",
            partial(keytools.encrypt_file, table_name=table_name, skip_existing=skip, key_values=values),
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
    config: Path,
    table: str | None = None,
    aad_prefix: str | None = None,
    overwrite: bool = False,
    skip_existing: bool = False,
    salvage: bool = False,
    mode: Annotated[
        int | None,
        typer.Option(
            "--mode",
            metavar="OCTAL",
            parser=parsed_mode,
            help="Permissions of the written files, such as 640. By default only their owner may read them.",
        ),
    ] = None,
    processes: int | None = None,
) -> None:
    """Decrypt a Parquet file, or all Parquet files of a folder.

    The written files are not encrypted. All keys of a file are needed.

    Options:
        --salvage: Write the intact row groups of damaged files.
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
    config: Path,
    target: Annotated[
        str | None,
        typer.Argument(metavar="DST", help="File or folder to write, or its URI. A folder mirrors SRC."),
    ] = None,
    table: str | None = None,
    to_config: Path | None = None,
    to_table: str | None = None,
    aad_prefix: str | None = None,
    overwrite: bool = False,
    skip_existing: bool = False,
    in_place: bool = False,
    follow_links: bool = False,
    update_list: str | None = None,
    list_key: str | None = None,
    processes: int | None = None,
    set: list[str] | None = None,
) -> None:
    """Encrypt encrypted files with new data keys.

    The new files are encrypted as before, or for another table or configuration. All keys of a file are needed.

    Options:
        --table NAME: The table of SRC. Not needed if there is only one.
        --to-config FILE: The configuration of DST, if it is another one.
        --to-table NAME: The table of DST, if it is another one.
    """
    if in_place and target is not None:
        raise typer.BadParameter("DST and --in-place contradict each other.", param_hint="DST")
    if in_place:
        _refuse(_NOT_IN_PLACE, overwrite=overwrite, skip_existing=skip_existing)
    else:
        _refuse(_ONLY_IN_PLACE, follow_links=follow_links, update_list=update_list)
    if not in_place and target is None:
        raise typer.BadParameter("a file or folder to write is needed, or --in-place.", param_hint="DST")

    from parquet_keytools.cli.file_work import change_in_place, convert_files

    options: dict[str, Any] = {"table_name": table, "aad_prefix": aad_prefix}
    options["key_values"] = opt.pairs_of(set, "--set")
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(opt.open_keytools(config))
        keytools.configuration.table_of_files(table)
        new_keytools = stack.enter_context(opt.open_keytools(to_config)) if to_config is not None else None
        if target is not None:
            wanted = to_table or (table if new_keytools is None else None)
            options["new_table_name"], _ = (new_keytools or keytools).configuration.select_table(wanted)
            options |= {"new_keytools": new_keytools or keytools, "skip_existing": skip_existing}
            convert_files(
                [source],
                target,
                "rekeyed",
                partial(keytools.rekey_file, **options),
                overwrite=overwrite,
                skip_existing=skip_existing,
                processes=processes,
            )
            return
        again = "Repeat the command: files that are done stay as they are."
        if update_list is not None:
            again = "Verify the files, and record a new list."
        elif to_table in (None, table) and new_keytools is None:
            again = "Repeat the command: it starts with the first file."
        options |= {"new_table_name": to_table, "new_keytools": new_keytools}
        options |= {"follow_links": follow_links, "update_list": update_list, "list_key": list_key}
        change = partial(keytools.rekey_in_place, **options)
        change_in_place(change, opt.locations_of([source], "SRC"), again, processes=processes)


@opt.with_options(opt.RotationOptions)
def rotate_command(
    paths: opt.PathsArgument,
    options: opt.RotationOptions,
    update_list: str | None = None,
    list_key: str | None = None,
) -> None:
    """Re-wrap the keys of files; their data stays as it is.

    The keys are re-wrapped under the current version of their master keys, or under other master keys. After an
    interrupted run, repeat the command.
    """
    from parquet_keytools.cli.file_work import change_in_place

    arguments = options.arguments()
    location = opt.locations_of(paths, "PATH")
    with opt.open_keytools(options.config) as keytools:
        if options.table is not None:
            keytools.configuration.select_table(options.table)
        change_in_place(
            partial(keytools.rotate, update_list=update_list, list_key=list_key, **arguments),
            location,
            "Repeat the command.",
            keytools.configuration.template_of,
        )
