"""`parquet-keytools`: the command line."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parquet_keytools import __version__
from parquet_keytools.cli import check, convert, demo, iceberg, keys, keystore, rotate, serve, spark
from parquet_keytools.cli.failures import CommandGroup

_EPILOG = (
    "Exit status: 0 done; 1 the check failed, or some files failed; 2 wrong usage or configuration; "
    "3 the KMS refused or could not be reached."
)

# Typer's own tracebacks would show local variables, and with them keys.
app = typer.Typer(
    name="parquet-keytools",
    cls=CommandGroup,
    epilog=_EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"parquet-keytools {__version__}")
        raise typer.Exit()


@app.callback()
def _parquet_keytools(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    """Protect columns of Parquet files with master keys in a KMS."""


app.command("demo", short_help="Encrypt 336,776 flights, and read them back.")(demo.demo_command)
app.command("check")(check.check_command)
app.command("encrypt")(convert.encrypt_command)
app.command("decrypt")(convert.decrypt_command)
app.command("rekey")(convert.rekey_command)
app.command("rotate")(rotate.rotate_command)
app.command("keys")(keys.keys_command)
app.command("hash-key")(keys.hash_key_command)
app.command("inspect")(check.inspect_command)
app.command("verify")(check.verify_command)
app.command("serve", short_help="Serve files as plain Parquet over HTTP and S3.")(serve.serve_command)
app.command("mount", short_help="Mount files as a folder of plain Parquet files.")(serve.mount_command)
app.add_typer(keystore.app, name="keystore")
app.add_typer(spark.app, name="spark")
app.add_typer(iceberg.app, name="iceberg")


def _open_closed_streams() -> None:
    """Open streams that are closed (`>&-`): else a file gets their number, and what is printed ends there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for the whole command


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    app()
