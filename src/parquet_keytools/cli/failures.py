"""What an error means for whoever gave a command: an exit status, and one text."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from parquet_keytools.cli.output import say
from parquet_keytools.runtime.presentation import saying_what_is_waited_for


class ExitStatus(IntEnum):
    """The exit statuses; those above 128 are what shells say of a process that a signal has ended."""

    DONE = 0
    NO = 1
    WRONG_USAGE = 2
    KMS_FAILED = 3
    INTERRUPTED = 130
    NOBODY_READS = 141
    TERMINATED = 143


def status_of(error: Exception) -> ExitStatus:
    """Return the exit status of a command that ends with this error."""
    from parquet_keytools import errors

    match error:
        case errors.KmsConfigurationError():
            return ExitStatus.WRONG_USAGE
        case errors.KmsError():
            return ExitStatus.KMS_FAILED
        case errors.DecryptionError() | errors.TableMismatchError() | errors.WorkerProcessEndedError():
            return ExitStatus.NO
        case errors.IncompleteDataSetError() | errors.NoParquetFilesError() | errors.ReusedKeysError():
            return ExitStatus.NO
        case errors.ColumnAccessDeniedError():
            return max(map(status_of, error.causes), default=ExitStatus.NO)
        case _:
            return ExitStatus.WRONG_USAGE


def error_text(error: Exception) -> str:
    """Return the one text that says what happened."""
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror.removesuffix('.')}."
    if isinstance(error, UnicodeEncodeError):
        # Bytes of an argument or a file name that are not UTF-8 are kept by Python as lone surrogates.
        return f"{error.object.encode(errors='backslashreplace').decode()}: this name or text is not valid UTF-8."
    return str(error) or type(error).__name__


class CommandGroup(TyperGroup):
    """All commands. Errors go to stderr, without a traceback unless `--debug` asks for it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return self._invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(ExitStatus.NOBODY_READS) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_on_stderr(), _interrupted_by_sigterm(), saying_what_is_waited_for(say):
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
    """SIGTERM came: as with Ctrl-C, what is half done is removed, and what was done is reported."""


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    def raise_terminated(*_: object) -> None:
        raise TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        # None is a handler that is not of Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print each warning as one line, without the place in the program that Python would show."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        say(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _drop_output() -> None:
    """Keep Python from writing what is left to a pipe that nobody reads, when it exits."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
