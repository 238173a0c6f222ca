"""The document behind a configuration: mistakes in it, its environment variables, and it without secrets.

Environment variables stand in its texts as `${NAME}`; a literal `${` is written `$${`.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.contract import holds_secret

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


def list_of_names(argument: str, names: Any) -> list[str]:
    """Return the names that a caller gave for an argument.

    Raises:
        TypeError: It is one name, whose letters would be taken for names, or holds something else than names.
    """
    if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} takes a list of names, not {names!r}.")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes names, each a str, not {name!r}.")
    return listed


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


# --- environment variables ---


_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
_REFERENCES_ONLY = re.compile(r"(?:\$\{[A-Za-z_][A-Za-z0-9_]*\})+")


def references_only(text: str) -> bool:
    """Return whether a text is made of environment variables alone, so that it gives away nothing itself."""
    return _REFERENCES_ONLY.fullmatch(text) is not None


def expand(value: Any, environment: Mapping[str, str], mistakes: list[Mistake], path: YamlPath = ()) -> Any:
    """Return a document with the environment variables in its texts replaced by their values.

    Args:
        value: A text, a mapping, a list, or anything else, which stays as it is.
        environment: Name to value; an empty value is a value.
        mistakes: Takes what is found: variables that are not set, and `${` that is no reference.
        path: Where `value` stands in the document.
    """
    if isinstance(value, str):
        if value == WITHHELD:
            message = "the secret was withheld when this configuration was shown."
            mistakes.append(Mistake(path, message, "Give it again, best as ${NAME} of the environment."))
        text = _expand_text(value, environment, mistakes, path)
        _check_unicode(text, mistakes, path)
        return text
    if isinstance(value, dict):
        return {
            _expand_name(name, mistakes, (*path, name)): expand(item, environment, mistakes, (*path, name))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [expand(item, environment, mistakes, (*path, position)) for position, item in enumerate(value)]
    return value


def _expand_text(text: str, environment: Mapping[str, str], mistakes: list[Mistake], path: YamlPath) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        if name is None:
            mistakes.append(
                Mistake(path, "`${` is not followed by a name and `}`.", "A literal `${` is written `$${`.")
            )
            return ""
        if name not in environment:
            hint = "Set it, or write `$${` for a literal `${`."
            mistakes.append(Mistake(path, f"the environment variable {name} is not set.", hint))
            return ""
        return environment[name]

    return _REFERENCE.sub(replace, text)


def _expand_name(name: Any, mistakes: list[Mistake], path: YamlPath) -> Any:
    """Names lead to values in error texts, so they must not depend on what may be a secret."""
    if not isinstance(name, str):
        return name
    if any(match[0] != "$${" for match in _REFERENCE.finditer(name)):
        mistakes.append(Mistake(path, "environment variables are expanded in values only, not in names."))
    _check_unicode(name, mistakes, path)
    return name.replace("$${", "${")


def _check_unicode(text: str, mistakes: list[Mistake], path: YamlPath) -> None:
    # YAML escapes, and environment variables that are not UTF-8, give halves of surrogate pairs.
    if any("\ud800" <= character <= "\udfff" for character in text):
        mistakes.append(Mistake(path, "this is not valid Unicode."))


class Redacted(enum.Enum):
    """What stands in place of a secret that was written into the document itself."""

    SECRET = "redacted"  # noqa: S105 - this is what is left of a secret


WITHHELD = "(secret withheld)"
"""What a document that is shown has in place of a secret; no configuration can be made of it."""


@dataclass(frozen=True)
class DocumentSource:
    """The document behind a configuration. Holds no secret, so that it may be pickled.

    Attributes:
        file: The YAML file as the caller named it, for error texts; None where there is none.
        path: The same, absolute; None where other processes cannot read it, or not what it was: for pipes.
        folder: Where relative paths in the document start; absolute.
        lines: Path in the document to line, counted from 1.
        document: The document with `${NAME}` as written and `Redacted.SECRET` for secrets.
        exposed_to: Who else may read the file; empty where nobody may.
    """

    file: str | None
    path: Path | None
    folder: Path
    lines: Mapping[YamlPath, int]
    document: Any = field(default=None, repr=False)
    exposed_to: str = field(default="", compare=False)

    def error(self, mistakes: Sequence[Mistake]) -> ConfigurationError:
        """Make the one error that reports all mistakes, with file and lines."""
        return configuration_error(mistakes, file=self.file, lines=self.lines)

    @property
    def redacted_paths(self) -> list[YamlPath]:
        """Where the document holds a secret itself."""
        return list(_redacted_paths(self.document, ()))

    @property
    def shown(self) -> Any:
        """The document as JSON can hold it, with a text in place of each secret."""
        return _shown(self.document)


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return WITHHELD if value is Redacted.SECRET else value


def _redacted_paths(value: Any, path: YamlPath) -> Sequence[YamlPath]:
    if value is Redacted.SECRET:
        return [path]
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in _redacted_paths(item, (*path, name))]
    if isinstance(value, list):
        return [found for place, item in enumerate(value) for found in _redacted_paths(item, (*path, place))]
    return []


def redacted(document: Mapping[str, Any], kms: pydantic.BaseModel | None) -> dict[str, Any]:
    """Return a document without its secrets: data keys, and every field of the KMS settings that holds one."""
    safe = {name: _without_objects(value) for name, value in document.items()}
    if "data_keys" in document:
        safe["data_keys"] = _redact(document["data_keys"])
    if isinstance(document.get("kms"), dict) and kms is not None:
        safe["kms"] = {
            name: _redact(value) if _is_secret(kms, name) else _without_objects(value)
            for name, value in document["kms"].items()
        }
    return safe


def _is_secret(settings: pydantic.BaseModel, name: str) -> bool:
    """Return whether a field holds a secret. A name that is no field is an alias, and counts as one."""
    return name not in type(settings).model_fields or holds_secret(getattr(settings, name))


def _redact(value: Any) -> Any:
    """Return a value with everything in it redacted that is not a name or an environment variable."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and references_only(value)):
        return value
    if isinstance(value, dict):
        return {name: _redact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return Redacted.SECRET


def _without_objects(value: Any) -> Any:
    """Return a value with everything redacted that YAML could not have said, such as a `SecretStr`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        safe = {name: _without_objects(item) for name, item in items}
        return safe if isinstance(value, dict) else list(safe.values())
    return Redacted.SECRET
