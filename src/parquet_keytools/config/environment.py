"""Environment variables in the texts of a configuration: `${NAME}`, and `$${` for a literal `${`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from parquet_keytools.config.mistakes import Mistake, YamlPath

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
            hint = "Set it, or write `$${` where a literal `${` is meant."
            mistakes.append(Mistake(path, f"the environment variable {name} is not set.", hint))
            return ""
        return environment[name]

    return _REFERENCE.sub(replace, text)


def _expand_name(name: Any, mistakes: list[Mistake], path: YamlPath) -> Any:
    """Names lead to values in error texts, so they must not depend on what may be a secret."""
    if not isinstance(name, str):
        return name
    if any(match[0] != "$${" for match in _REFERENCE.finditer(name)):
        mistakes.append(Mistake(path, "environment variables stand in values only, not in names."))
    _check_unicode(name, mistakes, path)
    return name.replace("$${", "${")


def _check_unicode(text: str, mistakes: list[Mistake], path: YamlPath) -> None:
    # YAML escapes, and environment variables that are not UTF-8, give halves of surrogate pairs.
    if any("\ud800" <= character <= "\udfff" for character in text):
        mistakes.append(Mistake(path, "this is not valid Unicode."))
