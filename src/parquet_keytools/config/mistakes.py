"""Mistakes in a configuration, and the one error that reports all of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parquet_keytools.errors import ConfigurationError

YamlPath = tuple[str | int, ...]
"""Names and list positions that lead from the top of the document to a value."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
MOST_REPORTED = 20
"""How many mistakes, or names, one error lists."""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        path: Where in the document.
        message: What is wrong. It never quotes a value: that may be a key or a token.
        hint: What to do; may be empty.
        line: Counted from 1; None where the path says enough to find it.
    """

    path: YamlPath
    message: str
    hint: str = ""
    line: int | None = None

    @property
    def text(self) -> str:
        """Message and hint."""
        return f"{self.message} {self.hint}" if self.hint else self.message


def yaml_path_text(path: YamlPath) -> str:
    """Return a path as people write it: `tables.flights.column_keys.pii[0]`, `columns["a.b"]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not _PLAIN_NAME.fullmatch(step):
            quoted = step.encode("unicode_escape").decode("ascii").replace('"', '\\"')
            text += f'["{quoted}"]'
        else:
            text += f".{step}" if text else step
    return text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is closest to `name`, or nothing where none is close."""
    candidates = {known_name.casefold(): known_name for known_name in sorted(known)}
    close = difflib.get_close_matches(name.casefold(), candidates, n=1, cutoff=0.6)
    return f"Did you mean {candidates[close[0]]!r}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """Return a sentence that lists what is known, or nothing where nothing is."""
    known = sorted(names)
    listed = ", ".join(map(repr, known[:MOST_REPORTED]))
    more = f" and {len(known) - MOST_REPORTED} more" if len(known) > MOST_REPORTED else ""
    return f"Known: {listed}{more}." if known else ""


def line_of(path: YamlPath, lines: Mapping[YamlPath, int]) -> int | None:
    """Return the line of a path, or of the nearest part of the document around it."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def configuration_error(
    mistakes: Sequence[Mistake], *, file: str | None, lines: Mapping[YamlPath, int]
) -> ConfigurationError:
    """Make the one error that reports all mistakes, in the order of the document.

    Its attributes tell of the first mistake; the others follow in its text, one a line.
    """
    located = [(mistake, mistake.line or line_of(mistake.path, lines)) for mistake in dict.fromkeys(mistakes)]
    located.sort(key=lambda entry: entry[1] or 0)
    (first, first_line), *others = located
    first_path = yaml_path_text(first.path)
    if not others:
        return ConfigurationError(first.message, file=file, line=first_line, yaml_path=first_path, hint=first.hint)
    texts = [first.text, f"There are {len(others)} more mistakes:" if others[1:] else "There is one more:"]
    for mistake, line in others[: MOST_REPORTED - 1]:
        # The same form as the first: file, line, path.
        error = ConfigurationError(
            mistake.message, file=file, line=line, yaml_path=yaml_path_text(mistake.path), hint=mistake.hint
        )
        texts.append(f"  {error}")
    if len(others) >= MOST_REPORTED:
        texts.append(f"  and {len(others) - MOST_REPORTED + 1} more.")
    return ConfigurationError("\n".join(texts), file=file, line=first_line, yaml_path=first_path)
