"""YAML text to plain values, with the line of each; bounded, and without the surprises of YAML 1.1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from parquet_keytools.config.document import Mistake, YamlPath

MOST_BYTES = 1 << 20
"""Size of the largest document that is read, in bytes."""

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
    """A document as it was written: environment variables are not expanded yet.

    Attributes:
        value: Texts, numbers, booleans, None, lists and mappings of them.
        lines: Path to line, counted from 1. A value in a mapping has the line of its name.
        mistakes: What YAML allows and a configuration does not; `value` leaves that out.
    """

    value: Any = None
    lines: dict[YamlPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)


def read_yaml(content: bytes | str) -> YamlDocument:
    """Read one YAML document.

    Raises:
        UnreadableYamlError: It is too large, not UTF-8, not YAML, empty, or more than one document.
    """
    node = _compose(_decode(content))
    if node is None:
        raise UnreadableYamlError("the configuration is empty.", 1, "It starts with `version: 1`.")
    document = YamlDocument(lines={(): _line(node)})
    document.value = _Walk(document).value(node, (), 0)
    return document


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
    # Raised outside of the handlers: PyYAML's error quotes the document, and with it secrets.
    raise unreadable


def _explained(error: yaml.MarkedYAMLError) -> UnreadableYamlError:
    """Return what PyYAML says in words of ours, without a piece of the document."""
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    problem = error.problem or ""
    if "'\\t'" in problem:
        return UnreadableYamlError("there is a tab where YAML allows only spaces.", line, "Indent with spaces.")
    if "cannot start any token" in problem:
        return UnreadableYamlError("no text may start with this character.", line, _QUOTE)
    if "undefined alias" in problem:
        message = "an alias (`*name`) stands for an anchor (`&name`) that is not there."
        return UnreadableYamlError(message, line, "Put a text that starts with `*` in quotes.")
    if "another document" in problem:
        return UnreadableYamlError("a second document starts.", line, "A configuration is one document.")
    if "mapping values" in problem:
        hint = "Check the indentation, and put a text that contains `: ` in quotes."
        return UnreadableYamlError("this is not valid YAML: there is a `:` in a wrong place.", line, hint)
    # `{token: ${NAME}}`: there the brace begins a mapping.
    hint = "Within braces or brackets, put ${NAME} in quotes." if "got '{'" in problem else ""
    if error.context and error.context_mark:
        problem = f"{error.context} that starts on line {error.context_mark.line + 1}, {problem}"
    return UnreadableYamlError(f"this is not valid YAML: {_QUOTED.sub(_harmless, problem)}.", line, hint)


def _harmless(quoted: re.Match[str]) -> str:
    """Return what PyYAML put in quotes, unless it may come from the document."""
    return quoted[0] if re.fullmatch(r"'(?:\W|<[a-z ]+>)'", quoted[0]) else "..."


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's composer with limits; it makes nodes only, no values."""

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
        raise UnreadableYamlError(f"there are more than {_MOST_NODES} values, aliases counted.", line)
    if depth > _DEEPEST:
        raise UnreadableYamlError(
            f"values lie more than {_DEEPEST} levels deep, or in an alias of themselves.", line
        )


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Walk:
    """Turns nodes into values. Aliases are walked as often as they are used, within the same limits."""

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
                self._mistake(name_node, (*path, name), f"this name is already on line {lines[name]} already.")
                continue
            lines[name] = self._document.lines[*path, name] = _line(name_node)
            values[name] = self.value(value_node, (*path, name), depth + 1)
        return values

    def _entries(self, node: MappingNode, path: YamlPath, depth: int) -> Iterator[tuple[Node, Node, bool]]:
        """Yield name, value, and whether a merge (`<<: *name`) brought them; the mapping's own come first."""
        self._nodes += 1
        _check_limits(self._nodes, depth, _line(node))
        merged: list[Node] = []
        for name_node, value_node in node.value:
            if name_node.tag != _MERGE:
                yield name_node, value_node, False
            elif isinstance(value_node, SequenceNode):
                merged.extend(value_node.value)
            else:
                merged.append(value_node)
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
