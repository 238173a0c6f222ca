"""What a change of a configuration or of labels means for columns: which lose protection, and which change key."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parquet_keytools.config.document import UnreadableYamlError, read_yaml
from parquet_keytools.config.key_policy import (
    WILDCARD,
    ChosenKey,
    ColumnPath,
    MasterKeyReference,
    resolve_columns,
    resolve_key,
    undecided_columns,
)
from parquet_keytools.config.labels import FieldLabels, no_field_labels
from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration, TableSettings
from parquet_keytools.errors import ConfigurationError

_SECONDS = 60


@dataclass(frozen=True)
class PolicyChange:
    """A column, or a setting of a table (`what`), that is protected in another way than before.

    `before` and `after` are names of keys, `plaintext`, or `undecided`, which refuses to write. `place` is where
    the label was found that decides now.
    """

    table: str
    what: str
    before: str
    after: str
    place: str | None
    is_weaker: bool


def policy_changes(
    old: Configuration,
    new: Configuration,
    leaf_paths: Sequence[ColumnPath] | None = None,
    table_name: str | None = None,
    field_labels: FieldLabels = no_field_labels,
) -> list[PolicyChange]:
    """Compare two configurations, column by column.

    Args:
        old: The configuration before the change.
        new: The configuration after it.
        leaf_paths: The columns of the table; None for the columns that either configuration names. Patterns with
            wildcards then count only for columns that something else names.
        table_name: Compare only this table.
        field_labels: The labels that come with the data.

    Raises:
        ConfigurationError: A table has two keys for a column, or contradicting labels.
    """
    names = [name for name in dict.fromkeys([*old.tables, *new.tables]) if table_name in (None, name)]
    return [change for name in names for change in _of_table(old, new, name, leaf_paths, field_labels)]


def _of_table(
    old: Configuration,
    new: Configuration,
    name: str,
    leaf_paths: Sequence[ColumnPath] | None,
    field_labels: FieldLabels,
) -> Iterator[PolicyChange]:
    if name not in old.tables or name not in new.tables:
        is_new = name in new.tables
        yield PolicyChange(name, "table", *(("none", "new") if is_new else ("there", "removed")), None, False)
        return
    before, after = old.tables[name], new.tables[name]
    if before.plaintext_footer != after.plaintext_footer:
        texts = ["plaintext" if table.plaintext_footer else "encrypted" for table in (before, after)]
        yield PolicyChange(name, "footer", texts[0], texts[1], None, after.plaintext_footer)
    if before.algorithm != after.algorithm:
        is_weaker = after.algorithm == "AES_GCM_CTR_V1"
        yield PolicyChange(name, "algorithm", before.algorithm, after.algorithm, None, is_weaker)
    if leaf_paths is None:
        yield from _of_defaults(old, new, name)
    columns = leaf_paths or sorted({*_named(old, name), *_named(new, name)})
    were, are = _decisions(old, name, columns, field_labels), _decisions(new, name, columns, field_labels)
    for column in columns:
        (was, _), (now, place) = were[column], are[column]
        if was != now:
            is_weaker = now == _PLAINTEXT and was not in (_PLAINTEXT, _UNDECIDED)
            yield PolicyChange(name, ".".join(column), was, now, place, is_weaker)


def _of_defaults(old: Configuration, new: Configuration, name: str) -> Iterator[PolicyChange]:
    """Yield what changed for columns that no configuration names, and master keys behind the same names."""
    before, after = old.tables[name], new.tables[name]
    was, now = _default(before), _default(after)
    if was != now:
        is_weaker = now == _PLAINTEXT and was != _UNDECIDED
        yield PolicyChange(name, "columns that nothing names", was, now, None, is_weaker)
    for pattern, key in _globs(before).items():
        if _globs(after).get(pattern) != key:
            text = _globs(after).get(pattern, now)
            yield PolicyChange(name, pattern, key, text, None, text == _PLAINTEXT)
    if before.labels.field != after.labels.field:
        fields = [table.labels.field or "none" for table in (before, after)]
        is_weaker = before.labels.field is not None and now == _PLAINTEXT
        yield PolicyChange(name, "labels of the data", fields[0], fields[1], None, is_weaker)
    of_iceberg = [table.labels.iceberg.iceberg if table.labels.iceberg else None for table in (before, after)]
    if of_iceberg[0] != of_iceberg[1]:
        texts = ["none" if one is None else ", ".join([one.field, *one.keys]) for one in of_iceberg]
        yield PolicyChange(name, "labels of the Iceberg table", texts[0], texts[1], None, texts[0] != "none")
    # Which columns have labels of the data is not known here: any may have any class.
    for label in old.classes if before.labels.field or before.labels.iceberg else ():
        texts = [
            "none" if one is None else one.key or _PLAINTEXT
            for one in (old.classes[label], new.classes.get(label))
        ]
        if texts[0] != texts[1]:
            yield PolicyChange(name, f"class {label}", texts[0], texts[1], None, texts[1] == _PLAINTEXT)
    for key in dict.fromkeys(key for _, key in before.key_uses()):
        ids = [_identifier(configuration, key) for configuration in (old, new)]
        if None not in ids and ids[0] != ids[1]:
            yield PolicyChange(name, f"master key {key}", str(ids[0]), str(ids[1]), None, False)


def _default(table: TableSettings) -> str:
    how = table.treats_unlisted
    if how == "key" and table.labels.unlabelled is not None:
        return table.labels.unlabelled.key or _PLAINTEXT
    return {"error": _UNDECIDED, "plaintext": _PLAINTEXT}.get(how, table.footer_key)


def _globs(table: TableSettings) -> dict[str, str]:
    return {
        pattern: key
        for key, patterns in table.column_keys.items()
        for pattern in patterns
        if WILDCARD.search(pattern)
    }


def _identifier(configuration: Configuration, key: str) -> str | None:
    try:
        reference = resolve_key(configuration, key)
    except ConfigurationError:
        return None
    return reference.master_key_id if isinstance(reference, MasterKeyReference) else None


_PLAINTEXT = "plaintext"
_UNDECIDED = "undecided"


def _named(configuration: Configuration, name: str) -> set[ColumnPath]:
    table = configuration.tables[name]
    names = {label.column for label in table.labels.labels}
    patterns = [*table.plaintext_columns, *(pattern for keys in table.column_keys.values() for pattern in keys)]
    names |= {pattern for pattern in patterns if not WILDCARD.search(pattern)}
    return {tuple(column.split(".")) for column in names}


def _decisions(
    configuration: Configuration, name: str, columns: Sequence[ColumnPath], field_labels: FieldLabels
) -> dict[ColumnPath, tuple[str, str | None]]:
    """Return how each column is protected, and the place of the label that decides."""
    table = configuration.tables[name]
    keys = resolve_columns(configuration, name, columns, for_reading=True, field_labels=field_labels)
    undecided = set(undecided_columns(table, columns))
    return {
        column: (_UNDECIDED if column in undecided and key.label is None else _text(key), _place(key))
        for column, key in keys.items()
    }


def _text(key: ChosenKey) -> str:
    return key.key_name or _PLAINTEXT


def _place(key: ChosenKey) -> str | None:
    return None if key.label is None else f"{key.label.class_name} by {key.label.place}"


def refuse_weaker(changes: Sequence[PolicyChange], allowed: Collection[str]) -> list[PolicyChange]:
    """Return the changes that lose protection, and are not allowed as `column` or `table.column`."""
    return [
        change
        for change in changes
        if change.is_weaker and change.what not in allowed and f"{change.table}.{change.what}" not in allowed
    ]


# --- earlier versions in git ---


def configuration_at(config: Path, revision: str) -> Configuration:
    """Return a configuration as it was at a revision of git, with the label files as they were.

    Raises:
        ConfigurationError: git is missing, or it does not have the revision or one of the files; or the
            configuration had mistakes.
    """
    folder = config.absolute().parent
    top = Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
    with tempfile.TemporaryDirectory() as copy:

        def restore(file: Path) -> Path:
            within = file.resolve().relative_to(top.resolve())
            target = Path(copy) / within
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch(mode=0o600)
            target.write_bytes(_git(folder, "show", "--end-of-options", f"{revision}:{within.as_posix()}"))
            return target

        try:
            restored = restore(config)
            for name in _label_files(restored):
                restore(folder / name)
        except ValueError:
            raise ConfigurationError(
                f"{config} refers to label files outside of its git repository.",
                hint="Compare with a copy of the old configuration: --against OLD.yaml.",
            ) from None
        return load_configuration(restored)


def _label_files(config: Path) -> Iterator[str]:
    """Yield the paths of the label files that a configuration refers to; mistakes are found when it is loaded."""
    try:
        document: Any = read_yaml(config.read_bytes()).value
    except UnreadableYamlError:
        return
    tables = document.get("tables") if isinstance(document, dict) else None
    for table in tables.values() if isinstance(tables, dict) else ():
        sources = table.get("labels_from") if isinstance(table, dict) else None
        for source in sources if isinstance(sources, list) else ():
            if isinstance(source, dict):
                yield from (
                    source[kind] for kind in ("dbt", "contract", "csv") if isinstance(source.get(kind), str)
                )


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - a list of arguments, and no option
            ["git", "-C", str(folder), *arguments],  # noqa: S607
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"git cannot be run: {type(error).__name__}.", hint="Install git.") from None
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigurationError(
            f"git {arguments[0]} failed: {reason[-1] if reason else done.returncode}.",
            hint="A file that git does not keep, such as dbt's manifest, cannot be compared with --since. Keep a "
            "copy of the old configuration and its label files, and use --against OLD.yaml.",
        )
    return done.stdout
