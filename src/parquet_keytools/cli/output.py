"""How commands print results, failures and progress, and which exit status an error has.

Results go to standard output: text, or with `--json` one JSON document. Errors, warnings and progress go to
standard error, and with `--json` the text of results, too.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Self

import typer

from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.storage.walk import LeftOut

_STYLES = re.compile(r"(\x1b\[(?:0|1|3[1-7])m)")
"""The escape sequences of `typer.style`: bold, colours, and their end."""

_arguments: ContextVar[Sequence[str]] = ContextVar("arguments", default=())
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("options", default=None)

WIDTH_WITHOUT_TERMINAL = 160
"""Width of tables in columns; longer cells are wrapped, never cut."""


def keep_arguments(context: typer.Context, arguments: Sequence[str]) -> None:
    """Make the arguments of the program known here until its command ends."""
    token = _arguments.set(arguments)
    context.call_on_close(lambda: _arguments.reset(token))


@contextlib.contextmanager
def known_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Make a command's options known here in the block: `--json`, `--verbose` and `--wide`."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def _is_given(option: str) -> bool:
    return bool((_options.get() or {}).get(option))


def json_wanted() -> bool:
    """Return whether stdout is reserved for a JSON document."""
    return _is_given("json")


def is_verbose() -> bool:
    """Return whether each message of a group is printed."""
    return _is_given("verbose")


# --- text ---


def say(text: str) -> None:
    """Print an error, a warning or a remark to stderr."""
    _print(text, to_stderr=True)


def answer(text: str) -> None:
    """Print a result to stdout, or with `--json` to stderr."""
    _print(text, to_stderr=json_wanted())


def _print(text: str, *, to_stderr: bool) -> None:
    # Anyone may have named the files, columns and keys: control characters must not reach the terminal.
    parts = _STYLES.split(text)
    parts[::2] = map(without_controls, parts[::2])
    typer.echo("".join(parts), err=to_stderr)


def without_controls(text: str) -> str:
    """Return lines of text with unprintable characters escaped."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def number_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 file` and `1,000 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(size_bytes: float) -> str:
    """Return a size with a unit."""
    units = ["bytes", "kB", "MB", "GB"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1000
        units.pop(0)
    return f"{size_bytes:,.0f} bytes" if units[0] == "bytes" else f"{size_bytes:,.1f} {units[0]}"


def answer_plaintext_columns(columns: Iterable[str]) -> None:
    """Print which columns are in plaintext, if any are."""
    if names := list(dict.fromkeys(columns)):
        answer(f"In plaintext: {number_of(len(names), 'column')}: {', '.join(map(printable, names))}")


def say_not_attempted(number: int, total: int, option: str = "") -> None:
    """Print how many files were left, if any were, and that the command, with an option, does the rest."""
    if number:
        say(
            f"Not attempted: {number:,} of {number_of(total, 'file')}, because they would fail, too. Solve the "
            f"problem, then repeat the command{option and f' with {option}'}{again(*([option] if option else []))}"
        )


def again(*more: str) -> str:
    """Return how to repeat this command with more arguments, as the end of a sentence."""
    arguments = _arguments.get()
    # A URI may contain credentials, before its host or in its query.
    if not arguments or any("://" in text and ("@" in text or "?" in text) for text in arguments):
        return "."
    added = [option for option in more if not any(text.startswith(option) for text in arguments)]
    command = ["parquet-keytools", *arguments, *added]
    return f": {shlex.join(command)}"


# --- messages about many files ---


_MOST_GROUPS = 20
_MOST_EXAMPLES = 3


@dataclass
class _Group:
    count: int = 0
    texts: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


class Messages:
    """Messages about files. Messages that differ only in paths share a line, with a count and three examples.

    `--verbose` prints each message; without it, the messages of a million files take little memory.
    """

    def __init__(self, label: str, show: Callable[[str], None] = say, noun: str = "file") -> None:
        self._label = label
        self._show = show
        self._noun = noun
        self._groups: dict[str, _Group] = {}

    def add(self, path: str, text: str, *other_paths: str) -> None:
        """Add a message about a file; its text may contain the path, and other paths such as of the output."""
        group = self._groups.setdefault(_general(text, path, *other_paths), _Group())
        group.count += 1
        if len(group.texts) < (sys.maxsize if is_verbose() else _MOST_EXAMPLES):
            group.texts.append(text if path in text else f"{path}: {text}")
            group.paths.append(path)

    def add_error(self, path: str, error: Exception, *other_paths: str) -> None:
        """Add the message of an error."""
        self.add(path, error_text(error), *other_paths)

    def print(self) -> None:
        """Print the messages."""
        groups = list(self._groups.items())
        most = len(groups) if is_verbose() else _MOST_GROUPS
        for general, group in groups[:most]:
            texts = group.texts
            if group.count > 1 and not is_verbose():
                examples = ", ".join(group.paths)
                texts = [f"{number_of(group.count, self._noun)}: {general} For example: {examples}"]
            for text in texts:
                self._show(f"{self._label}: {text}")
        if rest := sum(group.count for _, group in groups[most:]):
            self._show(f"{self._label}: {rest:,} more; --verbose shows all.")


def say_left_out(entries: Iterable[LeftOut]) -> None:
    """Print which entries of a folder do not belong to the data set; first the files that may be data."""
    left_out = Messages("Skipped")
    for left in sorted(entries, key=lambda left: ".parquet" not in left.location.name.lower()):
        left_out.add(left.path, f"{left.path}: {left.reason}.")
    left_out.print()


def _general(text: str, path: str, *other_paths: str) -> str:
    """Return a message without the paths of its file."""
    text = text.removeprefix(f"{path}: ")
    for place in filter(None, (path, *other_paths)):
        text = text.replace(place, "<file>")
        name = place.rstrip("/").rpartition("/")[2]
        if "." in name:
            text = text.replace(name, "<file>")
    return text if text.endswith(".") else f"{text}."


# --- JSON ---


def to_dict(result: Any) -> dict[str, Any]:
    """Return the fields of a result, a dataclass. Its error becomes the fields `error` and `message`."""
    document = {part.name: getattr(result, part.name) for part in fields(result)}
    if "error" in document:
        document |= error_fields(document["error"])
    return document


def picked(result: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a result."""
    return {name: getattr(result, name) for name in names}


def left_out_document(entries: Iterable[LeftOut]) -> list[dict[str, Any]]:
    """Return which entries of a folder do not belong to the data set."""
    return [picked(left, "path", "reason") for left in entries]


def error_fields(error: Exception | None) -> dict[str, str | None]:
    """Return the class and the text of an error; None without an error."""
    return {
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else error_text(error),
    }


def plain_value(value: Any) -> Any:
    """Return a value of a result as `json.dumps` takes it."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return to_dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def print_json(document: Any) -> None:
    """Print a document, which may contain dataclasses and enums."""
    typer.echo(json.dumps(document, indent=2, default=plain_value))


class FilesDocument:
    """With `--json`, prints a document whose first field, `files`, is printed file by file and not kept in memory.

    If an error ends its `with` block, the document ends with `"complete": false`, unless it was not yet begun.
    """

    def __init__(self) -> None:
        self._is_begun = self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_begun and not self._is_ended:
            self.end({"complete": False})

    def add(self, file: Mapping[str, Any]) -> None:
        """Print the result for a file."""
        if json_wanted():
            begin = ",\n" if self._is_begun else '{\n  "files": [\n'
            typer.echo(f"{begin}    {json.dumps(file, default=plain_value)}", nl=False)
            self._is_begun = True

    def end(self, summary: Mapping[str, Any]) -> None:
        """Print the other fields."""
        if json_wanted():
            begin = "\n  ]," if self._is_begun else '{\n  "files": [],'
            typer.echo(begin + json.dumps(summary, indent=2, default=plain_value).removeprefix("{"))
        self._is_ended = True


# --- tables and trees ---


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str | None]]) -> None:
    """Print a table as a result."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(stderr=json_wanted())
    columns = [Column(heading, overflow="fold") for heading in headings]
    table = Table(*columns, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    cells = [[without_controls(cell or "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    if console.is_terminal and _is_given("wide"):
        console.width = max(console.width, sum(widths) + _around(widths))
    elif console.is_terminal:
        cells = _fitting(cells, widths, console.width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table, width=None if console.is_terminal else WIDTH_WITHOUT_TERMINAL)


_LEAST_NAME = 20
"""Least width of a column of shortened names."""


MOST_OF_A_TEMPLATE = 3
"""How many keys of one template have lines of their own."""


def grouped_rows(
    rows: Iterable[tuple[str | int, ...]],
    template_of: Callable[[str], str | None],
    names: Collection[int] = (0,),
) -> Iterator[list[str]]:
    """Yield rows for a table; rows of many keys of one template that are alike are one row, with sums.

    Cells at the positions `names` are identifiers of master keys; numbers are summed. `template_of` returns the
    template of an identifier; None if it has none.
    """

    def alike(position: int, cell: str | int) -> str | None:
        if isinstance(cell, int):
            return None
        return (template_of(cell) if position in names else None) or cell

    groups: dict[tuple[str | None, ...], list[tuple[str | int, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple(alike(*cell) for cell in enumerate(row)), []).append(row)
    for cells, members in groups.items():
        if len(members) > MOST_OF_A_TEMPLATE:
            sums = [sum(cell for cell in column if isinstance(cell, int)) for column in zip(*members, strict=True)]
            name = f"{cells[0]} ({len(members):,} values)"
            rest = [total if cell is None else cell for cell, total in zip(cells[1:], sums[1:], strict=True)]
            members = [(name, *rest)]
        for row in members:
            yield [f"{cell:,}" if isinstance(cell, int) else cell for cell in row]


def _around(widths: Sequence[int]) -> int:
    """Return the width of what surrounds cells: two spaces, and one between each column and the next."""
    return 3 * len(widths) + 1


def _fitting(rows: list[list[str]], widths: list[int], width: int) -> list[list[str]]:
    """Return rows in which long names, such as ARNs, lack their middle if lines would be too long."""
    widths = widths.copy()
    while sum(widths) + _around(widths) > width and max(widths) > _LEAST_NAME:
        widths[widths.index(max(widths))] -= 1
    return [[_shortened(cell, limit) for cell, limit in zip(row, widths, strict=True)] for row in rows]


def _shortened(name: str, limit: int) -> str:
    if len(name) <= limit or " " in name:
        return name  # Sentences are wrapped.
    # Most of the end: identifiers differ there.
    end = limit * 2 // 3
    return f"{name[: limit - end - 1]}…{name[-end:]}"


Style = Callable[[str], str]


@dataclass
class Branch:
    """A tree of lines."""

    text: str
    style: Style = str
    children: list[Branch] = field(default_factory=list)

    def add(self, text: str, style: Style = str) -> Branch:
        """Add a child, and return it."""
        branch = Branch(text, style)
        self.children.append(branch)
        return branch

    def lines(self, first: str = "", rest: str = "") -> Iterator[str]:
        """Yield the lines of the tree."""
        yield f"{first}{self.style(self.text)}"
        for child in self.children:
            begin, beside = ("└─ ", "   ") if child is self.children[-1] else ("├─ ", "│  ")
            yield from child.lines(f"{rest}{begin}", f"{rest}{beside}")


# --- exit status ---


class ExitStatus(IntEnum):
    """The exit statuses. Shells use statuses above 128 for processes that a signal ended."""

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
        case errors.ColumnAccessDeniedError():
            return max(map(status_of, error.causes), default=ExitStatus.NO)
        case (
            errors.ParquetFormatError()
            | errors.DecryptionError()
            | errors.TableMismatchError()
            | errors.FileListError()
            | errors.ErasureRefusedError()
            | errors.IncompleteDataSetError()
            | errors.ReusedKeysError()
            | errors.WorkerProcessEndedError()
        ):
            return ExitStatus.NO
    return ExitStatus.WRONG_USAGE


def status_of_all(errors: Sequence[Exception]) -> ExitStatus:
    """Return the exit status if files failed: of the KMS or of credentials only if nothing else failed."""
    from parquet_keytools.errors import KmsConfigurationError

    if errors and all(isinstance(error, KmsConfigurationError) for error in errors):
        return ExitStatus.WRONG_USAGE
    if errors and all(status_of(error) is ExitStatus.KMS_FAILED for error in errors):
        return ExitStatus.KMS_FAILED
    return ExitStatus.NO


def error_text(error: Exception) -> str:
    """Return the text of an error."""
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror.removesuffix('.')}."
    if isinstance(error, UnicodeEncodeError):
        # Python keeps bytes that are not UTF-8, in arguments and file names, as lone surrogates.
        return f"{error.object.encode(errors='backslashreplace').decode()}: this name or text is not valid UTF-8."
    return str(error) or type(error).__name__


# --- progress ---


@dataclass
class ProgressBar:
    """A progress bar of bytes or files, advanced from any thread by an amount, or moved to a total."""

    advance: Callable[[int], None]
    move_to: Callable[[int], None]

    def count(self, _: object) -> None:
        """Count a file."""
        self.advance(1)


@contextlib.contextmanager
def progress_bar(total_bytes: int | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar while the block runs, if stderr is a terminal; without a total, it counts files."""
    if not sys.stderr.isatty():
        yield ProgressBar(lambda _: None, lambda _: None)
        return
    from rich import progress
    from rich.console import Console

    columns: list[progress.ProgressColumn] = [progress.BarColumn()]
    if total_bytes is None:
        columns += [progress.TextColumn("{task.completed:.0f} files"), progress.TimeElapsedColumn()]
    else:
        columns += [progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes)
        yield ProgressBar(
            lambda amount: bar.advance(task, amount),
            lambda amount: bar.update(task, completed=amount),
        )
