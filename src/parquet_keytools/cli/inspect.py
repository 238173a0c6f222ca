"""`parquet-keytools inspect`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli.options import CONFIG_VARIABLE, AadPrefixOption, JsonOption, TableOption

if TYPE_CHECKING:
    from parquet_keytools.conformance.inspection import Inspection

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A Parquet file, or its URI.")]
OptionalConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="The YAML configuration: its keys open what is encrypted.",
    ),
]


def inspect_command(
    file: FileArgument,
    config: OptionalConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a Parquet file is protected.

    Without keys, what anyone can see of it; with those of a configuration, every module of it. Only the footer is
    read, and with keys the headers of pages. Nothing is compared with a table: `verify` does that. Exits 1 if
    nothing can be read.
    """
    if table is not None and config is None:
        raise typer.BadParameter("--table needs --config.")
    shown = _inspect(file, config, table, aad_prefix)
    if as_json:
        from parquet_keytools.cli.output import print_json
        from parquet_keytools.conformance.report import document_of

        print_json(document_of(shown))
    else:
        from parquet_keytools.cli.inspect_tree import render_inspection
        from parquet_keytools.cli.output import answer

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        answer(render_inspection(shown, width))
        if config is not None:
            answer("Nothing was compared with a table: `verify --config` does that.")
    if shown.mode is None:
        from parquet_keytools.cli.failures import ExitStatus

        raise typer.Exit(ExitStatus.NO)


def _inspect(file: str, config: Path | None, table: str | None, aad_prefix: str | None) -> Inspection:
    if Path(file).expanduser().is_dir():
        raise typer.BadParameter(
            f"{file} is a folder, and `inspect` shows one file. `verify` checks all files of a folder, and `keys` "
            "shows the master keys that they need.",
            param_hint="FILE",
        )
    if config is not None:
        from parquet_keytools.cli.options import location_of
        from parquet_keytools.keytools import Keytools

        with Keytools.from_yaml(config) as keytools:
            return keytools.inspect_file(location_of(file, "FILE"), table_name=table, aad_prefix=aad_prefix)
    from parquet_keytools.conformance.inspector import inspect_source
    from parquet_keytools.encryption.aad_prefix import ExpectedAadPrefix

    prefix = None if aad_prefix is None else ExpectedAadPrefix.of_text(aad_prefix)
    if "://" not in file:
        from parquet_keytools.conformance.inspector import open_local

        _refuse_irregular(file)
        with open_local(file) as local_source:
            return inspect_source(local_source, aad_prefix=prefix)
    from parquet_keytools.cli.options import location_of
    from parquet_keytools.storage.sources import open_source

    with open_source(location_of(file, "FILE")) as source:
        return inspect_source(source, aad_prefix=prefix)


def _refuse_irregular(file: str) -> None:
    """Refuse a pipe before it is opened: that would wait for its other end."""
    path = Path(file).expanduser()
    if path.exists() and not path.is_file() and not path.is_dir():
        raise typer.BadParameter(f"{file} is not a regular file.", param_hint="FILE")
