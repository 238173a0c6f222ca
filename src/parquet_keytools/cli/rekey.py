"""`parquet-keytools rekey`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    JsonOption,
    OverwriteOption,
    SourceArgument,
    TargetArgument,
)

TableOfSourceOption = Annotated[
    str | None,
    typer.Option("--table", metavar="NAME", help="The table of SRC. Not needed where there is only one."),
]
ToConfigOption = Annotated[
    Path | None,
    typer.Option("--to-config", metavar="FILE", help="The configuration of DST, if it is another one."),
]
ToTableOption = Annotated[
    str | None, typer.Option("--to-table", metavar="NAME", help="The table of DST, if it is another one.")
]


def run(
    source: SourceArgument,
    target: TargetArgument,
    config: ConfigOption,
    table: TableOfSourceOption = None,
    to_config: ToConfigOption = None,
    to_table: ToTableOption = None,
    aad_prefix: AadPrefixOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Encrypt encrypted files with new data keys.

    They are encrypted as before, or as another table or configuration says. All keys of a file are needed.
    """
    from parquet_keytools.cli.file_work import convert_files, open_keytools

    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(open_keytools(config))
        if table is not None:
            keytools.configuration.select_table(table)
        new_keytools = keytools
        if to_config is not None:
            new_keytools = stack.enter_context(open_keytools(to_config))
        wanted = to_table or (table if to_config is None else None)
        new_table_name, _ = new_keytools.configuration.select_table(wanted)
        convert_files(
            source,
            target,
            "rekeyed",
            partial(
                keytools.rekey_file,
                table_name=table,
                new_table_name=new_table_name,
                new_keytools=new_keytools,
                aad_prefix=aad_prefix,
            ),
            overwrite=overwrite,
            as_json=as_json,
        )
