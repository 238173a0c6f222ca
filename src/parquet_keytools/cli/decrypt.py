"""`parquet-keytools decrypt`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    JsonOption,
    ModeOption,
    OverwriteOption,
    SkipExistingOption,
    SourcesArgument,
    TableOption,
    TargetArgument,
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
    as_json: JsonOption = False,
) -> None:
    """Decrypt a Parquet file, or all those of a folder.

    The written files are not encrypted. All keys of a file are needed.
    """
    from parquet_keytools.cli.file_work import convert_files, open_keytools, parsed_mode, salvage_files
    from parquet_keytools.files.file_identities import FileIdentities

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
            as_json=as_json,
        )
