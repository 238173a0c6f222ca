"""Which key each column of a file gets."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from parquet_keytools.config.mistakes import MOST_REPORTED, Mistake, YamlPath, did_you_mean
from parquet_keytools.config.settings import Configuration
from parquet_keytools.config.table_settings import TableSettings

ColumnPath = tuple[str, ...]
"""Names from the top of the schema to a leaf column."""

_WILDCARD = re.compile(r"[*?]")


@dataclass(frozen=True)
class ChosenKey:
    """The key of a column.

    A column that is listed under the very name of the footer's key is still a `column_key`: it gets a DEK of
    its own, wrapped by the same master key. Unlisted columns are encrypted with the footer's DEK, and so are those
    listed under a data key that is the footer's, too: such a column has no metadata of its own (spec 5.4).

    Attributes:
        kind: `plaintext`; `footer_key`, which means the footer's DEK; or `column_key`, a DEK of its own.
        key_name: Name of the key in the configuration; None for plaintext.
    """

    kind: Literal["plaintext", "footer_key", "column_key"]
    key_name: str | None


def resolve_columns(
    configuration: Configuration,
    table_name: str,
    leaf_paths: Sequence[ColumnPath],
    *,
    for_reading: bool = False,
    ignores_case: bool = False,
) -> dict[ColumnPath, ChosenKey]:
    """Return the key of every leaf column of a schema, in the order of `leaf_paths`.

    A pattern covers a leaf column where it is its dotted path or that of a parent, letter for letter. Only a
    pattern that covers nothing in this way is taken as a glob, which covers a leaf column where it fits its
    dotted path or that of a parent: `*` stands for any text, dots included, `?` for one character, and
    nothing else has a meaning.

    Args:
        configuration: Where the table is.
        table_name: The table whose settings are meant.
        leaf_paths: Every leaf column of the schema.
        for_reading: Whether the schema is that of a file that is there. Then patterns may cover nothing, for
            schemas change over time; and a glob is one also where a column has its very name, for whoever made
            the file chose the names: such a column must not take the key from the others.
        ignores_case: Whether a column that no pattern covers otherwise is covered by one that differs in the
            case of letters, as for readers that make no difference.

    Raises:
        ConfigurationError: Reports all patterns that cover no column, all columns with two keys, and all that are
            not listed where the table has `unlisted_columns: error`.
    """
    _, table = configuration.select_table(table_name)
    if table.unlisted_columns == "footer_key":
        unlisted = ChosenKey("footer_key", table.footer_key)
    else:
        unlisted = ChosenKey("plaintext", None)
    shared = table.footer_key if table.footer_key in configuration.data_keys else None
    keys = dict.fromkeys(leaf_paths, unlisted)
    dotted_paths = _DottedPaths(leaf_paths)
    mistakes: list[Mistake] = []

    def give_keys(
        covers: Callable[[str], list[ColumnPath]], *, must_cover: bool, spared: Collection[ColumnPath]
    ) -> Collection[ColumnPath]:
        """Give columns the keys of the patterns that cover them; returns the columns."""
        covered_by: dict[ColumnPath, tuple[str, str]] = {}
        for key_name, patterns in table.column_keys.items():
            for position, pattern in enumerate(patterns):
                path: YamlPath = ("tables", table_name, "column_keys", key_name, position)
                covered = covers(pattern)
                if not covered and must_cover:
                    # What is not shown needs no hint; each costs a look at every column.
                    hint = did_you_mean(pattern, dotted_paths) if len(mistakes) < MOST_REPORTED else ""
                    mistakes.append(Mistake(path, f"{pattern!r} matches no column.", hint))
                for leaf in covered:
                    if leaf in spared:
                        continue
                    other_key, other_pattern = covered_by.setdefault(leaf, (key_name, pattern))
                    if other_key != key_name:
                        message = (
                            f"column {'.'.join(leaf)!r} has two keys: {key_name!r} by {pattern!r}, "
                            f"and {other_key!r} by {other_pattern!r}."
                        )
                        mistakes.append(Mistake(path, message))
                    keys[leaf] = ChosenKey("footer_key" if key_name == shared else "column_key", key_name)
        return covered_by.keys()

    covered = give_keys(dotted_paths.covered_by, must_cover=not for_reading, spared=())
    if for_reading:
        more = partial(dotted_paths.also_covered_by, ignores_case=ignores_case)
        give_keys(more, must_cover=False, spared=covered)
    if table.unlisted_columns == "error" and not for_reading:
        mistakes += _unlisted(
            table_name, table, dotted_paths, [leaf for leaf in leaf_paths if leaf not in covered]
        )
        mistakes += _listed_as_plaintext(table_name, table, dotted_paths, covered)
    if mistakes:
        raise configuration.error_for(mistakes)
    return keys


def digest_columns(
    table: TableSettings, leaf_paths: Sequence[ColumnPath], keyed: Collection[ColumnPath]
) -> frozenset[ColumnPath]:
    """Return the leaf columns of a file that are shown as digests with `denied_columns: hash`.

    These are all that the table has under column_keys, but for its `shown_columns`. A mistake in a pattern there
    leaves a column a digest.

    Args:
        table: The table of the file.
        leaf_paths: Every leaf column.
        keyed: Those that have a key of their own in the file, whatever the table says.
    """
    dotted_paths = _DottedPaths(leaf_paths)
    covered = set(keyed)
    for pattern in (pattern for patterns in table.column_keys.values() for pattern in patterns):
        covered.update(dotted_paths.covered_by(pattern))
        covered.update(dotted_paths.also_covered_by(pattern, ignores_case=False))
    for pattern in table.shown_columns:
        covered.difference_update(dotted_paths.covered_by(pattern))
    return frozenset(covered)


def _unlisted(
    table_name: str, table: TableSettings, dotted_paths: _DottedPaths, without_key: Sequence[ColumnPath]
) -> Iterator[Mistake]:
    """Yield columns without a key that are not said to stay plaintext."""
    plaintext = {leaf for pattern in table.plaintext_columns for leaf in dotted_paths.covered_by(pattern)}
    for leaf in without_key:
        if leaf not in plaintext:
            yield Mistake(
                ("tables", table_name, "unlisted_columns"),
                f"column {'.'.join(leaf)!r} is not listed, and nothing is written in this case.",
                "List it under column_keys or plaintext_columns.",
            )


def _listed_as_plaintext(
    table_name: str, table: TableSettings, dotted_paths: _DottedPaths, covered: Collection[ColumnPath]
) -> Iterator[Mistake]:
    """Yield columns that have a key and are said to stay plaintext."""
    for position, pattern in enumerate(table.plaintext_columns):
        for leaf in dotted_paths.covered_by(pattern):
            if leaf in covered:
                message = f"column {'.'.join(leaf)!r} has a key under column_keys, and is listed as plaintext too."
                yield Mistake(("tables", table_name, "plaintext_columns", position), message)


class _DottedPaths:
    """Dotted paths of all leaf columns and their parents, and the leaf columns under each."""

    def __init__(self, leaf_paths: Sequence[ColumnPath]) -> None:
        self._leaves: dict[str, dict[ColumnPath, None]] = {}
        for leaf in leaf_paths:
            for length in range(1, len(leaf) + 1):
                self._leaves.setdefault(".".join(leaf[:length]), {})[leaf] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def covered_by(self, pattern: str) -> list[ColumnPath]:
        """Return the leaf columns that a pattern covers."""
        if pattern in self._leaves or not _WILDCARD.search(pattern):
            return list(self._leaves.get(pattern, ()))
        return self._matching(pattern)

    def also_covered_by(self, pattern: str, *, ignores_case: bool) -> list[ColumnPath]:
        """Return what a pattern covers as a glob beside a column of its own name, or in another case."""
        is_glob = _WILDCARD.search(pattern) is not None
        if is_glob and (ignores_case or pattern in self._leaves):
            return self._matching(pattern, re.IGNORECASE if ignores_case else 0)
        if ignores_case and not is_glob:
            return list(self._lowered.get(pattern.lower(), ()))
        return []

    @cached_property
    def _lowered(self) -> dict[str, dict[ColumnPath, None]]:
        lowered: dict[str, dict[ColumnPath, None]] = {}
        for dotted_path, leaves in self._leaves.items():
            lowered.setdefault(dotted_path.lower(), {}).update(leaves)
        return lowered

    def _matching(self, pattern: str, flags: int = 0) -> list[ColumnPath]:
        # Brackets are ordinary characters of column names, and mean nothing here.
        glob = re.compile(fnmatch.translate(pattern.replace("[", "[[]")), flags)
        matching = (leaves for dotted_path, leaves in self._leaves.items() if glob.match(dotted_path))
        return list({leaf: None for leaves in matching for leaf in leaves})
