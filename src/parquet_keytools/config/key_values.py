"""Keys by template: `tenant-{tenant}` names one master key for each value of `tenant`.

A value becomes part of a master key's identifier, and folders and arguments are not authenticated. So a value is
used only if the table's pattern matches all of it, and only in a template of the configuration.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

from parquet_keytools.runtime.presentation import is_url

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NEVER_IN_VALUES = re.compile(r"[%{}\x00-\x1f\x7f-\x9f]|__HIVE_DEFAULT_PARTITION__")
_SEPARATOR = re.compile(r"[/\\]")
_DOTS = {".", ".."}
"""A part of a path that a server may resolve, so that the identifier names another key."""


def placeholders(text: str) -> list[str]:
    """Return the placeholders of a key's name or identifier, in order."""
    return _PLACEHOLDER.findall(text)


def with_value(template: str, value: str) -> str:
    """Return a template whose placeholder is replaced by a value."""
    return _PLACEHOLDER.sub(lambda _: value, template)


def is_value(pattern: str, value: str) -> bool:
    """Return whether a pattern allows a value: it matches all of it, and keys can have such a name."""
    if _NEVER_IN_VALUES.search(value) or not _DOTS.isdisjoint(_SEPARATOR.split(value)):
        return False
    return re.fullmatch(pattern, value) is not None


def alike(identifier: str) -> str:
    """Return the same text for identifiers that differ only in case or Unicode form, which some KMSs ignore."""
    return unicodedata.normalize("NFKC", identifier).casefold()


def value_in(template: str, master_key_id: str) -> str | None:
    """Return the value with which a template gives an identifier; None if no value does."""
    before, after = _PLACEHOLDER.sub("\0", template).split("\0")
    if not master_key_id.startswith(before) or not master_key_id.endswith(after):
        return None
    return master_key_id[len(before) : len(master_key_id) - len(after)] or None


def values_in_folders(path: str, placeholder: str) -> set[str]:
    """Return the values that the folders of a path give to a placeholder, such as `tenant=acme`.

    Readers differ in the case of names and in what they decode, so every reading counts: one that differs makes
    the value ambiguous.

    Args:
        path: Path of a file, without following links; or a URL, possibly with a query.
        placeholder: Name of the placeholder.
    """
    text = path.partition("?")[0] if is_url(path) else path
    found: set[str] = set()
    while True:
        decoded = unquote(text)
        for folder in _SEPARATOR.split(text)[:-1]:
            name, mark, value = folder.partition("=")
            if mark and unquote(name).lower() == placeholder.lower():
                # As Arrow and Spark write it: percent-encoded once.
                found.add(unquote(value))
        if decoded == text:
            return found
        text = decoded


def one_value(values: Iterable[str], pattern: str) -> str | None:
    """Return the only one of some values if the pattern allows it; None otherwise."""
    found = set(values)
    value = found.pop() if len(found) == 1 else None
    return value if value is not None and is_value(pattern, value) else None


def mistakes_in_templates(
    names: Iterable[str], patterns: Mapping[str, str], identifiers: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield a template and what is wrong with it, for the names of keys of a table.

    Args:
        names: Names of keys, templates or not.
        patterns: Placeholder -> pattern of its values.
        identifiers: Template -> identifier under `master_keys`, if it has one.
    """
    for name in dict.fromkeys(names):
        found = placeholders(name)
        if len(found) > 1:
            # Two values could otherwise give the key of two other values.
            yield name, "the name of a key has at most one placeholder."
        elif found and found[0] not in patterns:
            yield name, f"key_values does not say where the values of {{{found[0]}}} come from."
        elif found and placeholders(identifiers.get(name, name)) != found:
            yield name, f"its identifier under master_keys needs the placeholder {{{found[0]}}}, once."
