"""`parquet-keytools keys`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from parquet_keytools.cli.options import (
    CONFIG_VARIABLE,
    AadPrefixOption,
    IgnorePassedOverOption,
    JsonOption,
    PathsArgument,
    TableOption,
)

OptionalConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="The YAML configuration: its KMS opens footers that hide keys of columns.",
    ),
]
FailIfUsesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if-uses",
        metavar="KEY[@VERSION]",
        help="Exit with 1 if a file needs this master key, or if that is unknown. Repeatable.",
    ),
]


def keys_command(
    paths: PathsArgument,
    config: OptionalConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    fail_if_uses: FailIfUsesOption = None,
    ignore_passed_over: IgnorePassedOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which files and columns depend on which master key.

    Run this before you disable or destroy a key, or a version of one. Without a configuration no KMS is called, so
    column keys inside encrypted footers are not visible, and versions are unknown.
    """
    from parquet_keytools.cli.failures import ExitStatus
    from parquet_keytools.cli.keys_report import KeysTally, key_uses_document, wanted_key
    from parquet_keytools.cli.options import locations_of
    from parquet_keytools.cli.output import FilesDocument, file_counter
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.master_key_versions import same_master_key

    location = locations_of(paths, "PATH")
    with Keytools.from_mapping({"version": 1}) if config is None else Keytools.from_yaml(config) as keytools:
        if table is not None:
            keytools.configuration.select_table(table)
        wanted = [wanted_key(keytools, text) for text in fail_if_uses or []]
        tally = KeysTally(wanted, same_master_key(keytools.kms))
        with FilesDocument(wanted=as_json) as document:
            try:
                with file_counter() as count:
                    for file in keytools.key_inventory(
                        location, table_name=table, aad_prefix=aad_prefix, ignore_passed_over=ignore_passed_over
                    ):
                        count(file)
                        tally.add(file)
                        if as_json:
                            document.add(key_uses_document(file))
            except FileNotFoundError as error:
                if len(paths) > 1:
                    raise
                raise FileNotFoundError(errno.ENOENT, "no such file or folder", paths[0]) from error
            document.end(tally.document())
    tally.tell()
    if not (tally.nothing_is_used and tally.is_complete):
        raise typer.Exit(ExitStatus.NO)
