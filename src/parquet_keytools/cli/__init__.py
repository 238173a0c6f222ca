"""`parquet-keytools`: the command line."""

# Nothing slow is imported at the top of the files here, but of `file_work` and `conformance_report`: `--help` must
# be fast.
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from parquet_keytools import __version__
from parquet_keytools.cli import (
    check,
    convert,
    erase,
    iceberg,
    keys,
    keystore,
    report,
    scan,
    serve,
    spark,
)
from parquet_keytools.cli.options import with_flags, with_options
from parquet_keytools.cli.output import ExitStatus, error_text, keep_arguments, say, status_of
from parquet_keytools.runtime.threads_and_forks import someone_waiting


class CommandGroup(TyperGroup):
    """All commands. Errors go to stderr, with a traceback only if `--debug` is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments, and parse them."""
        keep_arguments(ctx, tuple(args))
        return super().parse_args(ctx, with_flags(args))

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            with someone_waiting():
                return self._invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(ExitStatus.NOBODY_READS) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_on_stderr(), _interrupted_by_signals():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except TerminatedError:
            say("Terminated.")
            raise typer.Exit(ExitStatus.TERMINATED) from None
        except (KeyboardInterrupt, typer.Abort):
            say("Interrupted.")
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except Exception as error:
            from parquet_keytools.errors import KeytoolsError

            if not isinstance(error, KeytoolsError | OSError | UnicodeEncodeError):
                raise
            if ctx.params.get("debug"):
                typer.echo(traceback.format_exc(), err=True, nl=False)
            else:
                say(f"Error: {error_text(error)}")
            raise typer.Exit(status_of(error)) from None


class TerminatedError(KeyboardInterrupt):
    """SIGTERM arrived: as with Ctrl-C, incomplete files are removed, and finished files are reported."""


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise an exception for SIGTERM and SIGINT; the same signal again ends the process at once."""

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    # Background jobs of a shell ignore SIGINT: leave it so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        former[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            # None stands for a handler that was not installed by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print each warning as one line, without its place in the source."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _drop_output() -> None:
    """Redirect stdout, so that Python does not write to a closed pipe when it exits."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


EXIT_STATUS = (
    "Exit status: 0 done; 1 the check failed, or some files failed or could not be checked; 2 wrong usage, "
    "configuration or credentials; 3 the KMS refused, or could not be reached; 130 or 143 ended by Ctrl-C or "
    "SIGTERM."
)
"""Ends each help text; README has the same sentence."""

# Typer's own tracebacks would show local variables, and with them keys.
app = typer.Typer(
    name="parquet-keytools",
    cls=CommandGroup,
    epilog=EXIT_STATUS,
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


@app.command("demo", short_help="Encrypt 336,776 flights, and read them back.")
@with_options()
def _demo(folder: Path = Path("demo")) -> None:
    """Encrypt 336,776 flights, read them back, lose access to a key, and rotate a key.

    Options:
        --folder DIR: Folder for the files. An earlier demo in it is replaced.
    """
    from parquet_keytools import demo

    # The commands that the demo prints can be pasted.
    called = sys.argv[0]
    is_path = Path(called).name == "parquet-keytools" and shutil.which("parquet-keytools") != called
    demo.run(folder, called if is_path else "parquet-keytools")


app.command("check")(check.check_command)
app.command("encrypt")(convert.encrypt_command)
app.command("decrypt")(convert.decrypt_command)
app.command("rekey")(convert.rekey_command)
app.command("rotate")(convert.rotate_command)
app.command("keys")(keys.keys_command)
app.command("hash-key")(keys.hash_key_command)
app.command("inspect")(check.inspect_command)
app.command("verify")(check.verify_command)
app.command("report")(report.report_command)
app.command("scan")(scan.scan_command)
app.command("erase")(erase.erase_command)
app.command("serve", short_help="Serve files as plain Parquet over HTTP and S3.")(serve.serve_command)
app.command("mount", short_help="Mount files as a folder of plain Parquet files.")(serve.mount_command)
app.add_typer(keystore.app, name="keystore", epilog=EXIT_STATUS)
app.add_typer(keystore.pkcs11_app, name="pkcs11", epilog=EXIT_STATUS)
app.add_typer(spark.app, name="spark", epilog=EXIT_STATUS)
app.add_typer(iceberg.app, name="iceberg", epilog=EXIT_STATUS)
app.add_typer(keys.tenants_app, name="tenants", epilog=EXIT_STATUS)
for _group in (app, keystore.app, keystore.pkcs11_app, spark.app, iceberg.app, keys.tenants_app):
    for _command in _group.registered_commands:
        _command.epilog = EXIT_STATUS


def _open_closed_streams() -> None:
    """Open closed streams (`>&-`): otherwise a file could get their number, and output would be written to it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for the whole command


def main() -> None:
    """Run the command line."""
    _open_closed_streams()
    app()
