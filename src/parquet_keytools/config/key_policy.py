"""Key policy: resolve the key names of a table, and the key of each column of a file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Literal

from parquet_keytools.config.document import MOST_REPORTED, Mistake, YamlPath, did_you_mean, listed, one_of
from parquet_keytools.config.labels import FieldLabels, Label, no_field_labels
from parquet_keytools.config.settings import (
    Configuration,
    TableSettings,
    alike,
    is_value,
    placeholders,
    with_value,
)


@dataclass(frozen=True)
class MasterKeyReference:
    """A master key, named by its identifier; see `Configuration.master_key_id`."""

    master_key_id: str


@dataclass(frozen=True)
class DataKeyReference:
    """A data key that the caller manages, named as under `data_keys`."""

    name: str


KeyReference = MasterKeyReference | DataKeyReference


def resolve_key(configuration: Configuration, name: str) -> KeyReference:
    """Return the key that a name refers to: under `master_keys`, under `data_keys`, or in the KMS.

    `data_keys` come before the keys of the KMS, which often cannot be listed. If they can be listed,
    `check_key_names` refuses a name that is in both.
    """
    reference = _lookup(configuration, name)
    if reference is None:
        raise configuration.error_for([Mistake((), *_unknown(configuration, name, frozenset()))])
    return reference


def keys_of_value(
    configuration: Configuration, table_name: str, values: Mapping[str, str]
) -> dict[str, MasterKeyReference]:
    """Return template -> master key, for each template of a table whose placeholder has a value.

    A value that the pattern refuses, or that would name another key, is a `ConfigurationError`.
    """
    _, table = configuration.select_table(table_name)
    names = {name: path for path, name in table.key_names()}
    fixed = [name for name in names if not placeholders(name)]
    own = {*fixed, *configuration.master_keys, *configuration.data_keys}
    others = {alike(configuration.master_key_id(name)) for name in own if not placeholders(name)}
    found: dict[str, MasterKeyReference] = {}
    mistakes: list[Mistake] = []
    for template, path in names.items():
        for placeholder in placeholders(template):
            if placeholder not in values:
                continue
            value, pattern = values[placeholder], table.key_values[placeholder].pattern
            where: YamlPath = ("tables", table_name, "key_values", placeholder)
            if not is_value(pattern, value):
                mistakes.append(Mistake(where, f"the pattern refuses the value {value[:200]!r} of {placeholder}."))
                continue
            identifier = with_value(configuration.master_key_id(template), value)
            names_another = with_value(template, value) in own or alike(identifier) in others
            if names_another or MasterKeyReference(identifier) in found.values():
                message = f"the value {value!r} of {placeholder} would name another key: {identifier!r}."
                mistakes.append(Mistake(("tables", table_name, *path), message))
            found[template] = MasterKeyReference(identifier)
    if mistakes:
        raise configuration.error_for(list(dict.fromkeys(mistakes)))
    return found


def configured_master_key_ids(configuration: Configuration) -> frozenset[str]:
    """Return the identifiers of all master keys that a configuration names; templates name none by themselves."""
    used = {name for table in configuration.tables.values() for _, name in table.key_names()}
    used.update(name for table in configuration.tables.values() for name in table.labels.iceberg_keys)
    used = {name for name in used if not placeholders(name)}
    named = (name for name in configuration.master_keys if not placeholders(name))
    references = [_lookup(configuration, name) for name in used]
    in_tables = {found.master_key_id for found in references if isinstance(found, MasterKeyReference)}
    of_digests = {hash_key_reference(configuration, name).master_key_id for name in configuration.hash_keys}
    moved = {new for pair in moved_master_key_ids(configuration) for new in pair}
    return frozenset(in_tables | of_digests | moved | set(map(configuration.master_key_id, named)))


def hash_key_reference(configuration: Configuration, name: str) -> MasterKeyReference:
    """Return the master key that wraps a secret under `hash_keys`. It is never a data key."""
    master_key = configuration.hash_keys[name].master_key
    return MasterKeyReference(configuration.master_key_id(master_key))


def moved_master_key_ids(configuration: Configuration) -> list[tuple[str, str]]:
    """Return the identifiers of the old and new master key of each move under `rotation`."""
    identifier = configuration.master_key_id
    return [(identifier(old), identifier(new)) for old, new in configuration.rotation.moves.items()]


def check_key_names(configuration: Configuration, known_master_key_ids: frozenset[str] | None = None) -> None:
    """Check that every key that a table or digest uses exists; report all mistakes.

    Without `known_master_key_ids`, the master keys in the KMS, any name may be a master key.
    """
    known = known_master_key_ids
    mistakes: list[Mistake] = []
    for name in sorted(configuration.data_keys.keys() & (known or ())):
        mistakes.append(Mistake(("data_keys", name), "a master key in the KMS has this name too."))
    for name, hash_key in configuration.hash_keys.items():
        mistakes += _checked_use(configuration, known, ("hash_keys", name, "master_key"), hash_key.master_key)
    for class_name, found in configuration.classes.items():
        if found.key is not None:
            mistakes += _checked_use(configuration, known, ("classes", class_name, "key"), found.key)
    for table_name, table in configuration.tables.items():
        for path, name in table.key_names():
            if path[0] == "labels_from":
                continue  # Its class has it.
            mistakes += _checked_use(configuration, known, ("tables", table_name, *path), name)
        for name in table.labels.iceberg_keys:
            mistakes += _checked_use(configuration, known, ("tables", table_name, "labels_from"), name)
        mistakes += _without_effect(configuration, table_name, table)
    if mistakes:
        raise configuration.error_for(mistakes)


def check_moves(configuration: Configuration, known_master_key_ids: frozenset[str] | None) -> None:
    """Check that the master keys under `rotation.moves` exist, if the KMS lists its keys.

    Only a rotation checks this: afterwards the old master key may be deleted, and readers no longer need it.
    """
    known = known_master_key_ids
    if known is None:
        return
    mistakes = [
        Mistake(("rotation", "moves", old), *_unknown(configuration, name, known))
        for old, new in configuration.rotation.moves.items()
        for name in (old, new)
        if configuration.master_key_id(name) not in known
    ]
    if mistakes:
        raise configuration.error_for(mistakes)


def _lookup(configuration: Configuration, name: str) -> KeyReference | None:
    if name in configuration.data_keys and name not in configuration.master_keys:
        return DataKeyReference(name)
    return None if configuration.kms is None else MasterKeyReference(configuration.master_key_id(name))


def _checked_use(
    configuration: Configuration, known: frozenset[str] | None, path: YamlPath, name: str
) -> Iterator[Mistake]:
    reference = _lookup(configuration, name)
    if placeholders(name) and reference is not None:
        return  # The KMS has the keys of its values.
    if reference is None:
        yield Mistake(path, *_unknown(configuration, name, frozenset()))
    elif isinstance(reference, MasterKeyReference) and known is not None:
        if reference.master_key_id in known:
            return
        if name in configuration.master_keys:
            identifier = reference.master_key_id
            message = f"the KMS has no master key {identifier!r}."
            yield Mistake(("master_keys", name), message, did_you_mean(identifier, known) or one_of(known))
        else:
            yield Mistake(path, *_unknown(configuration, name, known))


def _unknown(configuration: Configuration, name: str, known: frozenset[str]) -> tuple[str, str]:
    """Return message and hint for a name that refers to no key."""
    places = "master_keys, data_keys, or the KMS" if configuration.kms else "data_keys, and there is no kms"
    names = {*configuration.master_keys, *configuration.data_keys, *known}
    return f"there is no key {name!r} in {places}.", did_you_mean(name, names) or one_of(names)


def _without_effect(configuration: Configuration, table_name: str, table: TableSettings) -> Iterator[Mistake]:
    """Yield a mistake for each setting of the table that has no effect with data keys."""
    references = [_lookup(configuration, name) for _, name in table.key_uses()]
    data_keys = [reference.name for reference in references if isinstance(reference, DataKeyReference)]
    path: YamlPath = ("tables", table_name)
    if len(data_keys) == len(references) and table.key_material == "external":
        yield Mistake((*path, "key_material"), "data keys have no key material.")
    if "data_key_length_bits" in table.model_fields_set:
        for name in data_keys:
            length_bits = configuration.data_keys[name].length_bits
            if length_bits != table.data_key_length_bits:
                message = f"the data key {name!r} has {length_bits} bits."
                yield Mistake((*path, "data_key_length_bits"), message)


# --- the keys of columns ---


ColumnPath = tuple[str, ...]
"""Names from the top of the schema to a leaf column."""

WILDCARD = re.compile(r"[*?]")
"""The characters that make a pattern of `column_keys` a glob."""

HOW_TO_LABEL = (
    "Label each where the data is modelled, or list it under a key in column_keys, or in plaintext_columns."
)

HOW_TO_DECIDE = (
    "List each under a key in column_keys, or in plaintext_columns; or set `unlisted_columns: footer_key` or "
    "`unlisted_columns: plaintext`, for these and all later columns."
)


@dataclass(frozen=True)
class ChosenKey:
    """The key of a column.

    The DEK of the footer (`footer_key`) encrypts unlisted columns and columns listed under the footer's data key;
    these have no key metadata (spec 5.4). A column listed under the footer's master key has its own DEK
    (`column_key`). `is_listed` says whether `column_keys` or a label covers the column.
    """

    kind: Literal["plaintext", "footer_key", "column_key"]
    key_name: str | None
    is_listed: bool = field(default=False, compare=False)
    label: Label | None = field(default=None, compare=False)


def resolve_columns(
    configuration: Configuration,
    table_name: str,
    leaf_paths: Sequence[ColumnPath],
    *,
    for_reading: bool = False,
    ignores_case: bool = False,
    may_be_undecided: bool = False,
    field_labels: FieldLabels = no_field_labels,
    is_iceberg: bool = False,
) -> dict[ColumnPath, ChosenKey]:
    """Return the key of every leaf column of a schema, in the order of `leaf_paths`; report all mistakes.

    A pattern covers a leaf column if it equals the dotted path of the column or of a parent. A pattern that equals
    no path is a glob, and covers a leaf column if it matches one of these paths: `*` matches any text, including
    dots, and `?` matches one character.

    With `for_reading`, the schema comes from an existing file. Schemas change over time, so a pattern may then
    cover nothing. A glob also stays a glob if a column has the same name: an attacker may have chosen the name to
    take the key away from other columns. With `ignores_case`, patterns also cover columns without another key in
    any case, for readers that ignore case. With `may_be_undecided`, columns that the table does not decide about
    are plaintext, and no error.
    """
    _, table = configuration.select_table(table_name)
    at: YamlPath = ("tables", table_name)
    shared = table.footer_key if table.footer_key in configuration.data_keys else None
    unlisted = ChosenKey("plaintext", None)
    if table.unlisted_columns == "footer_key":
        unlisted = ChosenKey("footer_key", table.footer_key)
    keys = dict.fromkeys(leaf_paths, unlisted)
    dotted_paths = _DottedPaths(leaf_paths)
    mistakes: list[Mistake] = []

    def chosen(key_name: str, label: Label | None = None) -> ChosenKey:
        kind: Literal["footer_key", "column_key"] = "footer_key" if key_name == shared else "column_key"
        return ChosenKey(kind, key_name, is_listed=True, label=label)

    covered: dict[ColumnPath, tuple[str, str]] = {}
    ways: list[Callable[[str], list[ColumnPath]]] = [dotted_paths.covered_by]
    if for_reading:
        ways.append(partial(dotted_paths.also_covered_by, ignores_case=ignores_case))
    for covered_by in ways:
        spared = set(covered)
        for key_name, patterns in table.column_keys.items():
            for position, pattern in enumerate(patterns):
                path: YamlPath = (*at, "column_keys", key_name, position)
                leaves = covered_by(pattern)
                if not leaves and not for_reading:
                    # Finding a hint searches every column, so skip it for mistakes that the error does not list.
                    hint = did_you_mean(pattern, dotted_paths) if len(mistakes) < MOST_REPORTED else ""
                    mistakes.append(Mistake(path, f"{pattern!r} matches no column.", hint))
                for leaf in leaves:
                    if leaf in spared:
                        continue
                    other_key, other_pattern = covered.setdefault(leaf, (key_name, pattern))
                    if other_key != key_name:
                        message = (
                            f"column {'.'.join(leaf)!r} has two keys: {key_name!r} by {pattern!r}, "
                            f"and {other_key!r} by {other_pattern!r}."
                        )
                        mistakes.append(Mistake(path, message))
                    keys[leaf] = chosen(key_name)
    if table.labels_from:
        labels = table.labels
        plaintext = {leaf for pattern in table.plaintext_columns for leaf in dotted_paths.covered_by(pattern)}
        of_fields = labels.of_fields(leaf_paths, field_labels, at, mistakes, is_iceberg=is_iceberg)
        for leaf in leaf_paths:
            if leaf in covered:
                continue
            label, other = labels.of(leaf), of_fields.get(leaf)
            if label is not None and other is not None and label.key != other.key:
                message = f"column {'.'.join(leaf)!r} has contradicting labels: {label.text}, and {other.text}."
                mistakes.append(Mistake((*at, "labels_from"), message, HOW_TO_LABEL))
            # The data may strengthen a label, and never weaken it.
            if label is None or label.key is None:
                label = other or label
            default = None if labels.unlabelled is None or leaf in plaintext else labels.unlabelled.key
            found = default if label is None else label.key
            if found is not None:
                keys[leaf] = chosen(found, label)
            elif label is not None:
                keys[leaf] = ChosenKey("plaintext", None, label=label)
        for label in () if for_reading else labels.unmatched(leaf_paths):
            message = f"no column is named {label.column!r}, which has the label {label.text}."
            hint = did_you_mean(label.column, dotted_paths) or "Columns without a label would be plaintext."
            mistakes.append(Mistake((*at, "labels_from"), message, hint))
    if not for_reading:
        undecided = [] if may_be_undecided else undecided_columns(table, leaf_paths)
        names = [".".join(leaf) for leaf in undecided if keys[leaf].label is None]
        if names:
            path = (*at, "unlabelled" if table.labels_from else "unlisted_columns")
            message = (
                f"the table does not say how to protect these columns, so nothing is written: {listed(names)}."
            )
            mistakes.append(Mistake(path, message, HOW_TO_LABEL if table.labels_from else HOW_TO_DECIDE))
        for position, pattern in enumerate(table.plaintext_columns):
            for leaf in dotted_paths.covered_by(pattern):
                if (key := keys[leaf]).is_listed:
                    why = f"the label {key.label.text}" if key.label else "a key under column_keys"
                    message = f"column {'.'.join(leaf)!r} has {why} and is also listed as plaintext."
                    mistakes.append(Mistake((*at, "plaintext_columns", position), message))
    if mistakes:
        raise configuration.error_for(mistakes)
    return keys


def denied_keys(configuration: Configuration, table: TableSettings) -> set[KeyReference]:
    """Return the keys of classes with `denied: hash`, and the keys that files of a table may have instead."""
    names = [found.key for found in configuration.classes.values() if found.denied and found.key]
    keys = {resolve_key(configuration, name) for name in (*names, *table.also_trusted)}
    for pair in moved_master_key_ids(configuration):
        moved = set(map(MasterKeyReference, pair))
        keys |= moved if moved & keys else set()
    return keys


def digest_columns(
    table: TableSettings, leaf_paths: Sequence[ColumnPath], keyed: Collection[ColumnPath], *, by_class: bool
) -> frozenset[ColumnPath]:
    """Return the leaf columns of a file that are shown as digests, except `shown_columns`.

    With `denied_columns: hash`, these are all columns under `column_keys`, and `keyed`: columns that have a key in
    the file. With `by_class`, they are the columns of classes with `denied: hash`, and `keyed` those under their
    keys.
    """
    dotted_paths = _DottedPaths(leaf_paths)
    covered = set(keyed)
    for pattern in () if by_class else chain.from_iterable(table.column_keys.values()):
        covered.update(dotted_paths.covered_by(pattern))
        covered.update(dotted_paths.also_covered_by(pattern, ignores_case=False))
    for leaf in leaf_paths:
        label = table.labels.of(leaf)
        found = table.labels.unlabelled if label is None else table.labels.classes[label.class_name]
        if found is not None and (found.denied if by_class else label is not None and found.key is not None):
            covered.add(leaf)
    for pattern in table.shown_columns:
        covered.difference_update(dotted_paths.covered_by(pattern))
    return frozenset(covered)


def undecided_columns(table: TableSettings, leaf_paths: Sequence[ColumnPath]) -> list[ColumnPath]:
    """Return the leaf columns that a table with `unlisted_columns: error` lists nowhere."""
    if table.treats_unlisted != "error":
        return []
    dotted_paths = _DottedPaths(leaf_paths)
    patterns = [*table.plaintext_columns, *chain.from_iterable(table.column_keys.values())]
    listed = {leaf for pattern in patterns for leaf in dotted_paths.covered_by(pattern)}
    return [leaf for leaf in leaf_paths if leaf not in listed and table.labels.of(leaf) is None]


def covers(column_keys: Mapping[str, Sequence[str]], column: str) -> bool:
    """Return whether a pattern of `column_keys` covers a column that a dotted path names."""
    dotted_paths = _DottedPaths([tuple(column.split("."))])
    return any(dotted_paths.covered_by(pattern) for patterns in column_keys.values() for pattern in patterns)


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
        if pattern in self._leaves or not WILDCARD.search(pattern):
            return list(self._leaves.get(pattern, ()))
        return self._matching(pattern)

    def also_covered_by(self, pattern: str, *, ignores_case: bool) -> list[ColumnPath]:
        """Return the columns that a pattern covers as a glob despite a column of its name, or in another case."""
        is_glob = WILDCARD.search(pattern) is not None
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
        # Brackets are ordinary characters in column names.
        glob = re.compile(fnmatch.translate(pattern.replace("[", "[[]")), flags)
        matching = (leaves for dotted_path, leaves in self._leaves.items() if glob.match(dotted_path))
        return list({leaf: None for leaves in matching for leaf in leaves})
