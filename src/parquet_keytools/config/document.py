"""The document behind a configuration: YAML, mistakes, environment variables and secrets.

YAML is read within limits, with the line of each value. Dates and other types that YAML 1.1 guesses are mistakes.
Texts refer to environment variables as `${NAME}`; a literal `${` is written `$${`.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.client import holds_secret
from parquet_keytools.kms.named import NamedKmsSettings
from parquet_keytools.runtime.operating_system import own_user_id, permissions

YamlPath = tuple[str | int, ...]
"""Names and list positions from the top of the document to a value."""

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
MOST_REPORTED = 20
"""Most mistakes or names that one error lists."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a configuration. Its message never quotes a value, which may be a key or a token.

    `line` is counted from 1; None stands for the line of the path.
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
    """Return a path in the usual notation: `tables.flights.column_keys.pii[0]`, `columns["a.b"]`."""
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
    """Return a sentence with the known name that is closest to `name`; empty if no name is close."""
    candidates = {known_name.casefold(): known_name for known_name in sorted(known)}
    close = difflib.get_close_matches(name.casefold(), candidates, n=1, cutoff=0.6)
    return f"Did you mean {candidates[close[0]]!r}?" if close else ""


def list_of_names(argument: str, names: Any) -> list[str]:
    """Return the names that a caller passed for an argument; `TypeError` if it is no list of them."""
    if isinstance(names, (str, bytes, Mapping)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} takes a list of names, not {names!r}.")
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes names, each a str, not {name!r}.")
    return found


def one_of(names: Iterable[str]) -> str:
    """Return a sentence that lists the known names; empty if there are none."""
    known = sorted(names)
    return f"Known: {listed(known)}." if known else ""


def listed(names: Sequence[str]) -> str:
    """Return the first names, quoted, and how many more there are."""
    more = f" and {len(names) - MOST_REPORTED} more" if len(names) > MOST_REPORTED else ""
    return ", ".join(map(repr, names[:MOST_REPORTED])) + more


def configuration_error(
    mistakes: Sequence[Mistake], *, file: str | None, lines: Mapping[YamlPath, int]
) -> ConfigurationError:
    """Make one error that reports all mistakes in the order of the document.

    Its attributes describe the first mistake; its text lists the others, one per line.
    """
    located: list[tuple[Mistake, int | None]] = []
    for mistake in dict.fromkeys(mistakes):
        # The line of the path, or of its nearest parent.
        parents = (mistake.path[:length] for length in range(len(mistake.path), -1, -1))
        line = next((lines[path] for path in parents if path in lines), None)
        located.append((mistake, mistake.line or line))
    located.sort(key=lambda entry: entry[1] or 0)
    errors = [
        ConfigurationError(
            mistake.message, file=file, line=line, yaml_path=yaml_path_text(mistake.path), hint=mistake.hint
        )
        for mistake, line in located[:MOST_REPORTED]
    ]
    first, others = errors[0], len(located) - 1
    if not others:
        return first
    texts = [located[0][0].text, f"There are {others} more mistakes:" if others > 1 else "There is one more:"]
    texts += [f"  {error}" for error in errors[1:]]
    if others >= MOST_REPORTED:
        texts.append(f"  and {others - MOST_REPORTED + 1} more.")
    return ConfigurationError("\n".join(texts), file=file, line=first.line, yaml_path=first.yaml_path)


# --- YAML ---


MOST_BYTES = 1 << 20
"""Size limit of a document, in bytes."""

_MOST_NODES = 100_000
_DEEPEST = 50

_MERGE = "tag:yaml.org,2002:merge"
_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:value")
_NULL = "tag:yaml.org,2002:null"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_CONSTRUCTORS = {
    "tag:yaml.org,2002:bool": SafeConstructor.construct_yaml_bool,
    "tag:yaml.org,2002:int": SafeConstructor.construct_yaml_int,
    "tag:yaml.org,2002:float": SafeConstructor.construct_yaml_float,
}
_CONSTRUCTOR = SafeConstructor()
_KINDS = {
    "tag:yaml.org,2002:bool": "true or false (that is what yes, no, on and off mean)",
    "tag:yaml.org,2002:int": "a number",
    "tag:yaml.org,2002:float": "a number",
    _NULL: "nothing",
    _TIMESTAMP: "a date",
}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_QUOTE = "Put it in quotes."


class UnreadableYamlError(Exception):
    """The text is not one YAML document within the limits."""

    def __init__(self, message: str, line: int, hint: str = "") -> None:
        super().__init__(message)
        self.mistake = Mistake((), message, hint, line)


@dataclass
class YamlDocument:
    """A document as written, before environment variables are expanded.

    A value in a mapping has the line of its name. `mistakes` are constructs that YAML allows and a configuration
    does not; `value` leaves them out.
    """

    value: Any = None
    lines: dict[YamlPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)


def read_yaml(content: bytes | str) -> YamlDocument:
    """Read one YAML document, or raise `UnreadableYamlError`."""
    node = _compose(_decode(content))
    if node is None:
        raise UnreadableYamlError("the configuration is empty.", 1, "It starts with `version: 1`.")
    document = YamlDocument(lines={(): _line(node)})
    document.value = _Walk(document).value(node, (), 0)
    return document


def as_yaml(value: Any) -> str:
    """Return YAML to paste into a configuration."""
    text: str = yaml.safe_dump(value, default_flow_style=None, sort_keys=False, width=100)
    return text.strip()


def _decode(content: bytes | str) -> str:
    try:
        encoded = content.encode() if isinstance(content, str) else content
        if len(encoded) > MOST_BYTES:
            raise UnreadableYamlError(f"the configuration is larger than {MOST_BYTES} bytes.", 1)
        return encoded.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start) + 1
    except UnicodeEncodeError as error:
        line = error.object.count("\n", 0, error.start) + 1
    raise UnreadableYamlError("the configuration is not UTF-8 text.", line)


def _compose(text: str) -> Node | None:
    try:
        return _BoundedLoader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        unreadable = UnreadableYamlError("the configuration contains a control character.", line)
    except yaml.MarkedYAMLError as error:
        unreadable = _explained(error)
    # Raised outside the handlers, since PyYAML's error quotes the document, which may hold secrets.
    raise unreadable


def _explained(error: yaml.MarkedYAMLError) -> UnreadableYamlError:
    """Return PyYAML's error in our own words, without any part of the document."""
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    problem = error.problem or ""
    if "'\\t'" in problem:
        return UnreadableYamlError("YAML allows only spaces here, not a tab.", line, "Indent with spaces.")
    # In `{token: ${NAME}}`, the second brace begins a mapping.
    hint = "Within braces or brackets, put ${NAME} in quotes." if "got '{'" in problem else ""
    if error.context and error.context_mark:
        problem = f"{error.context} that starts on line {error.context_mark.line + 1}, {problem}"
    return UnreadableYamlError(f"this is not valid YAML: {_QUOTED.sub(_harmless, problem)}.", line, hint)


def _harmless(quoted: re.Match[str]) -> str:
    """Return text that PyYAML quoted, or `...` if it may come from the document."""
    return quoted[0] if re.fullmatch(r"'(?:\W|<[a-z ]+>)'", quoted[0]) else "..."


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's composer with limits; it makes nodes, not values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._nodes += 1
        self._depth += 1
        _check_limits(self._nodes, self._depth, self.get_mark().line + 1)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _check_limits(nodes: int, depth: int, line: int) -> None:
    if nodes > _MOST_NODES:
        raise UnreadableYamlError(f"there are more than {_MOST_NODES} values, including aliases.", line)
    if depth > _DEEPEST:
        raise UnreadableYamlError(
            f"values are nested more than {_DEEPEST} levels deep, or an alias contains itself.", line
        )


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Walk:
    """Converts nodes to values. Each use of an alias counts towards the limits."""

    def __init__(self, document: YamlDocument) -> None:
        self._document = document
        self._nodes = 0

    def value(self, node: Node, path: YamlPath, depth: int) -> Any:
        self._nodes += 1
        _check_limits(self._nodes, depth, _line(node))
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = []
            for position, item in enumerate(node.value):
                self._document.lines[*path, position] = _line(item)
                items.append(self.value(item, (*path, position), depth + 1))
            return items
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        return self._mistake(node, path, "tags (`!name`) are not supported.")

    def _mapping(self, node: MappingNode, path: YamlPath, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name_node, value_node, merged in self._entries(node, path, depth):
            name = self._name(name_node, path)
            if name is None or (merged and name in values):
                continue
            if name in values:
                self._mistake(name_node, (*path, name), f"this name is on line {lines[name]} already.")
                continue
            lines[name] = self._document.lines[*path, name] = _line(name_node)
            values[name] = self.value(value_node, (*path, name), depth + 1)
        return values

    def _entries(self, node: MappingNode, path: YamlPath, depth: int) -> Iterator[tuple[Node, Node, bool]]:
        """Yield name, value, and whether a merge (`<<: *name`) added them; merged entries come last."""
        self._nodes += 1
        _check_limits(self._nodes, depth, _line(node))
        merged: list[Node] = []
        for name_node, value_node in node.value:
            if name_node.tag != _MERGE:
                yield name_node, value_node, False
            else:
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        for source in merged:
            if isinstance(source, MappingNode):
                for name_node, value_node, _ in self._entries(source, path, depth + 1):
                    yield name_node, value_node, True
            else:
                self._mistake(source, path, "`<<` takes an alias of a mapping.")

    def _name(self, node: Node, path: YamlPath) -> str | None:
        if not isinstance(node, ScalarNode):
            self._mistake(node, path, "a name is a text, not a list or a mapping.")
            return None
        if node.tag not in _TEXTS:
            kind = _KINDS.get(node.tag, "something else")
            self._mistake(node, (*path, node.value), f"a name is a text, but YAML reads this as {kind}.", _QUOTE)
        return str(node.value)

    def _scalar(self, node: ScalarNode, path: YamlPath) -> Any:
        if node.tag in _TEXTS:
            return node.value
        if node.tag == _NULL:
            return None
        if node.tag == _TIMESTAMP:
            return self._mistake(node, path, "YAML reads this as a date.", _QUOTE)
        if node.tag not in _CONSTRUCTORS:
            return self._mistake(node, path, "tags (`!name`) are not supported.")
        try:
            return _CONSTRUCTORS[node.tag](_CONSTRUCTOR, node)
        except (ValueError, KeyError, IndexError, OverflowError):
            return self._mistake(node, path, f"this is not {_KINDS[node.tag]}.", _QUOTE)

    def _mistake(self, node: Node, path: YamlPath, message: str, hint: str = "") -> None:
        self._document.mistakes.append(Mistake(path, message, hint, _line(node)))


# --- environment variables ---


_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
_REFERENCES_ONLY = re.compile(r"(?:\$\{[A-Za-z_][A-Za-z0-9_]*\})+")


def expand(value: Any, environment: Mapping[str, str], mistakes: list[Mistake], path: YamlPath = ()) -> Any:
    """Return a document with the values of environment variables in place of references.

    `mistakes` receives variables that are not set, and `${` without a name.
    """

    def mistake(message: str, hint: str = "") -> str:
        mistakes.append(Mistake(path, message, hint))
        return ""

    def text_of(match: re.Match[str]) -> str:
        name = match["name"]
        if match[0] == "$${":
            return "${"
        if name is None:
            return mistake("`${` is not followed by a name and `}`.", "A literal `${` is written `$${`.")
        if name not in environment:
            hint = "Set it, or write `$${` for a literal `${`."
            return mistake(f"the environment variable {name} is not set.", hint)
        return environment[name]

    if isinstance(value, list):
        return [expand(item, environment, mistakes, (*path, position)) for position, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            _expand_name(name, mistakes, (*path, name)): expand(item, environment, mistakes, (*path, name))
            for name, item in value.items()
        }
    if not isinstance(value, str):
        return value
    if value == WITHHELD:
        hint = "Replace the text with the secret, preferably as ${NAME} from the environment."
        mistake("the secret was withheld when this configuration was printed.", hint)
    text = _REFERENCE.sub(text_of, value)
    _check_unicode(text, mistakes, path)
    return text


def _expand_name(name: Any, mistakes: list[Mistake], path: YamlPath) -> Any:
    """Return a name in a mapping. Errors show names, so variables, which may hold secrets, are not expanded."""
    if not isinstance(name, str):
        return name
    if any(match[0] != "$${" for match in _REFERENCE.finditer(name)):
        mistakes.append(Mistake(path, "environment variables are expanded in values only, not in names."))
    _check_unicode(name, mistakes, path)
    return name.replace("$${", "${")


def _check_unicode(text: str, mistakes: list[Mistake], path: YamlPath) -> None:
    # YAML escapes and environment variables that are not UTF-8 may contain lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in text):
        mistakes.append(Mistake(path, "this is not valid Unicode."))


# --- the document of a configuration, without its secrets ---


WITHHELD = "(secret withheld)"
"""Replaces a literal secret in a document; a configuration with this text is refused."""


@dataclass(frozen=True)
class DocumentSource:
    """The document behind a configuration, without secrets, so that it may be pickled.

    `file` is the YAML file as the caller named it, for errors; `path` its absolute path, or None if other
    processes cannot read the same content, as with pipes. Relative paths start in `folder`. In `document`,
    `${NAME}` is not expanded, and `WITHHELD` replaces each secret. `exposed_to` says which other users can read
    the file.
    """

    file: str | None
    path: Path | None
    folder: Path
    lines: Mapping[YamlPath, int]
    document: Any = field(default=None, repr=False)
    exposed_to: str = field(default="", compare=False)

    def error(self, mistakes: Sequence[Mistake]) -> ConfigurationError:
        """Return one error that reports all mistakes with file and lines."""
        return configuration_error(mistakes, file=self.file, lines=self.lines)

    @property
    def redacted_paths(self) -> list[YamlPath]:
        """Paths of the literal secrets in the document."""
        return list(_redacted_paths(self.document, ()))


def exposed_to(found: os.stat_result) -> str:
    """Return which users may read a file besides this user and root; empty if none, or on Windows."""
    if permissions(found, stat.S_IROTH):
        return "every user of this machine"
    if permissions(found, stat.S_IRGRP):
        return "its group"
    # The owner of a file can change its permissions.
    return "" if found.st_uid in (0, own_user_id()) else "its owner, another user,"


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a document, in the types that YAML produces, with the results of a function in place of values."""
    if isinstance(value, Mapping):
        return {name: map_values(item, function) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_values(item, function) for item in value]
    return function(value)


def _redacted_paths(value: Any, path: YamlPath) -> Iterator[YamlPath]:
    if value == WITHHELD:
        yield path
    elif isinstance(value, dict | list):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _redacted_paths(item, (*path, step))


def redacted(document: Mapping[str, Any], kms: pydantic.BaseModel | None) -> dict[str, Any]:
    """Return a document without data keys and without the secret fields of the KMS settings."""
    safe = {name: map_values(value, _without_object) for name, value in document.items()}
    if "data_keys" in document:
        safe["data_keys"] = map_values(document["data_keys"], _redact)
    if isinstance(document.get("kms"), dict) and kms is not None:
        safe["kms"] = _redacted_kms(document["kms"], kms)
    return safe


def _redacted_kms(document: Mapping[str, Any], kms: pydantic.BaseModel) -> dict[str, Any]:
    if isinstance(kms, NamedKmsSettings):
        return {
            name: _redacted_kms(value, kms.kmss[name]) if name in kms.kmss else value
            for name, value in document.items()
        }
    safe = {}
    for name, value in document.items():
        # A name that is not a field is an alias, and counts as a secret.
        is_secret = name not in type(kms).model_fields or holds_secret(getattr(kms, name))
        safe[name] = map_values(value, _redact if is_secret else _without_object)
    return safe


def _redact(value: Any) -> Any:
    """Redact everything except None, booleans and environment variables."""
    is_reference = isinstance(value, str) and _REFERENCES_ONLY.fullmatch(value)
    is_safe = value is None or isinstance(value, bool) or is_reference
    return value if is_safe else WITHHELD


def _without_object(value: Any) -> Any:
    """Redact what YAML cannot express, such as a `SecretStr`."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else WITHHELD
