"""What commands print, how far they are, and what an error means for whoever gave one: a text and an exit status.

Standard output gets the answer to what was asked for: text for people, or with `--json` a document for programs.
Standard error gets errors, warnings and progress, and with `--json` also the text for people.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import typer

_STYLES = re.compile(r"(\x1b\[(?:0|1|3[1-7])m)")
"""What `typer.style` puts around text: bold, colours, and the end of them."""

_json_wanted = ContextVar("json_wanted", default=False)

MOST_SAID = 20

WIDTH_WITHOUT_TERMINAL = 160
"""In columns; what is longer is broken, never cut."""


def say(text: str) -> None:
    """Print an error, a warning or what happens meanwhile, to stderr."""
    _print(text, to_stderr=True)


def answer(text: str) -> None:
    """Print text that answers what the command was asked for, to stdout unless `--json` asks for a document."""
    _print(text, to_stderr=_json_wanted.get())


def _print(text: str, *, to_stderr: bool) -> None:
    # Names of files, columns and keys are anyone's: control characters in them must not steer the terminal.
    parts = _STYLES.split(text)
    parts[::2] = map(without_controls, parts[::2])
    typer.echo("".join(parts), err=to_stderr)


def answer_with_json(context: typer.Context, wanted: bool) -> bool:
    """Leave stdout to a document, or not, until the command ends: the callback of `--json`."""
    token = _json_wanted.set(wanted)
    context.call_on_close(lambda: _json_wanted.reset(token))
    return wanted


def say_first(texts: Sequence[str], rest: str) -> None:
    """Print the first of many texts, as `say` does, and then that there are more.

    Args:
        texts: All of them.
        rest: What is said of the others, with `{}` for their number.
    """
    for text in texts[:MOST_SAID]:
        say(text)
    if len(texts) > MOST_SAID:
        say(rest.format(len(texts) - MOST_SAID))


def without_controls(text: str) -> str:
    """Return a text of lines with escapes for what is not printable."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def print_json(document: Any) -> None:
    """Give programs a document."""
    import json

    typer.echo(json.dumps(document, indent=2))


class FilesDocument:
    """One document of JSON whose first field, `files`, is printed file by file: none of a million is kept.

    Used in a `with` block. If that is left by an error, the document ends with `"complete": false`, so that it is
    still JSON; where no file had its turn, nothing is printed.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._is_begun = self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_begun and not self._is_ended:
            self.end({"complete": False})

    def add(self, file: Mapping[str, Any]) -> None:
        """Print what became of a file."""
        if self._wanted:
            import json

            _echo((",\n" if self._is_begun else '{\n  "files": [\n') + "    " + json.dumps(file))
            self._is_begun = True

    def end(self, fields: Mapping[str, Any]) -> None:
        """Print the other fields."""
        if self._wanted and not self._is_ended:
            import json

            begin = "\n  ],\n" if self._is_begun else '{\n  "files": [],\n'
            # Without the brace that opens it.
            _echo(begin + json.dumps(fields, indent=2)[2:] + "\n")
        self._is_ended = True


def _echo(text: str) -> None:
    typer.echo(text, nl=False)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str | None]]) -> None:
    """Print a table that answers what the command was asked for, where `answer` prints text."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = [Column(heading, overflow="fold") for heading in headings]
    table = Table(*columns, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(without_controls(cell or "")) for cell in row))
    console = Console(stderr=_json_wanted.get())
    console.print(table, width=None if console.is_terminal else WIDTH_WITHOUT_TERMINAL)


def number_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 file` and `1,000 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(size_bytes: float) -> str:
    """Return a size as people read it."""
    units = ["bytes", "kB", "MB", "GB"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1000
        units.pop(0)
    return f"{size_bytes:,.0f} bytes" if units[0] == "bytes" else f"{size_bytes:,.1f} {units[0]}"


# --- how a command ends ---


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
        # What is wrong with a file is the same whether the file was named or found in a folder.
        case errors.ParquetFormatError() | errors.DecryptionError() | errors.TableMismatchError():
            return ExitStatus.NO
        case errors.IncompleteDataSetError() | errors.ReusedKeysError() | errors.WorkerProcessEndedError():
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


def status_of_all(errors: Iterable[Exception]) -> ExitStatus:
    """Return the exit status where some files failed: that of the KMS if it alone is at fault."""
    kms_failed = all(status_of(error) is ExitStatus.KMS_FAILED for error in errors)
    return ExitStatus.KMS_FAILED if kms_failed else ExitStatus.NO


def failure_text(path: str, error: Exception) -> str:
    """Return what failed, and why."""
    text = error_text(error)
    return text if path in text else f"{path}: {text}"


def error_fields(error: Exception | None) -> dict[str, str | None]:
    """Return class and text of an error, if there is one."""
    return {
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else error_text(error),
    }


# --- how far it is ---


@dataclass
class ByteProgress:
    """How far the work is.

    Attributes:
        advance: Takes the number of bytes that were done since; may be called by any thread.
        move_to: Takes the number of bytes that are done in all.
    """

    advance: Callable[[int], None]
    move_to: Callable[[int], None]


@contextlib.contextmanager
def progress_bar(total_bytes: int, *, wanted: bool = True) -> Iterator[ByteProgress]:
    """Show a progress bar on stderr while the block runs, if people are looking."""
    if not (wanted and sys.stderr.isatty()):
        yield ByteProgress(lambda _: None, lambda _: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total_bytes)
        yield ByteProgress(
            lambda size_bytes: progress.advance(task, size_bytes),
            lambda size_bytes: progress.update(task, completed=size_bytes),
        )


@contextlib.contextmanager
def file_counter(*, wanted: bool = True) -> Iterator[Callable[[object], None]]:
    """Show on stderr how many files are done while the block runs, if people are looking.

    How many there are in all is not known while they are looked for. Call what it yields after each file.
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.completed:.0f} files"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda _: progress.advance(task)
