"""Checks a configuration: its master keys against the KMS, its columns, and what a change means for them."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from parquet_keytools.config.document import UnreadableYamlError, read_yaml
from parquet_keytools.config.key_policy import (
    WILDCARD,
    ColumnPath,
    MasterKeyReference,
    resolve_columns,
    resolve_key,
    undecided_columns,
)
from parquet_keytools.config.labels import FieldLabels, Label, no_field_labels
from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration, TableSettings, placeholders
from parquet_keytools.encryption.aad import expected_aad_prefix
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.errors import (
    ConfigurationError,
    KeyNotAvailableError,
    KmsAccessDeniedError,
    KmsError,
    KmsResponseInvalidError,
    WrappedKeyInvalidError,
)
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.keys.key_wrapping import DataKeys, FileKeyRetriever, KeyUnwrapper, KmsKeys
from parquet_keytools.kms.client import KmsClient, KmsSettings, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.kms.named import each_kms
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings
from parquet_keytools.runtime.threads_and_forks import in_threads
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source

_THROW_AWAY_KEY_LENGTH_BITS = 128
_KEYS_AT_A_TIME = 32
CHECK_SECONDS = 4.0
"""How long `check` may take, with any number of master keys."""


@dataclass(frozen=True)
class MasterKeyCheck:
    """The result of wrapping and unwrapping a throw-away key; `version` is None if the wrapped key names none."""

    name: str
    master_key_id: str
    backend: str
    version: str | None
    error: KmsError | None

    @property
    def outcome(self) -> str:
        """`ok`, `failed`, or `not tried` if the time was over before."""
        if self.error is None:
            return "ok"
        return "failed" if self.error.tries else "not tried"

    @property
    def missing_permission(self) -> str | None:
        """The operation that the KMS does not permit: `wrap`, `unwrap` or `rewrap`; None if nothing is missing."""
        return self.error.operation if isinstance(self.error, KmsAccessDeniedError) else None


@dataclass(frozen=True)
class ColumnCheck:
    """The key of a leaf column, and the label that decides.

    `kind` is `plaintext`, `footer_key` or `column_key`; `master_key_id` is None for plaintext and data keys.
    """

    dotted_path: str
    kind: str
    key_name: str | None
    master_key_id: str | None
    class_name: str | None = None
    label_place: str | None = None


def named_master_keys(configuration: Configuration) -> dict[str, str]:
    """Return name -> identifier of all master keys that a configuration names, in order of appearance."""
    names = [name for table in configuration.tables.values() for _, name in table.key_uses()]
    names += [hash_key.master_key for hash_key in configuration.hash_keys.values()]
    known = [name for name in [*names, *configuration.master_keys] if not placeholders(name)]
    return _identifiers(configuration, known)


def _identifiers(configuration: Configuration, names: Sequence[str]) -> dict[str, str]:
    references = {name: resolve_key(configuration, name) for name in names}
    return {
        name: reference.master_key_id
        for name, reference in references.items()
        if isinstance(reference, MasterKeyReference)
    }


def with_short_timeout(configuration: Configuration, seconds: float = CHECK_SECONDS) -> Configuration:
    """Return a configuration with a KMS timeout of at most `seconds`, for interactive use."""
    limited = (
        None if configuration.kms is None else each_kms(configuration.kms, partial(_limited, seconds=seconds))
    )
    # Copied only if necessary: a copy cannot be pickled for worker processes.
    if limited is configuration.kms:
        return configuration
    return configuration.model_copy(update={"kms": limited})


def _limited(kms: KmsSettings, seconds: float) -> KmsSettings:
    if not isinstance(kms, RemoteKmsSettings) or kms.timeout_seconds <= seconds:
        return kms
    return kms.model_copy(
        update={"timeout_seconds": seconds, "call_timeout_seconds": min(kms.call_timeout_seconds, seconds)}
    )


Role = Literal["writer", "reader", "rotator"]
"""What a user of the KMS does: wraps, unwraps, or re-wraps keys."""


def check_master_keys(
    configuration: Configuration, kms: KmsClient, role: Role | None = None
) -> list[MasterKeyCheck]:
    """Wrap a random key with each master key that the configuration names, and unwrap it.

    With a role, only its permissions are tried: for a reader and a rotator by a dry run, or with a wrapped key
    that the KMS never made, which it refuses as invalid if the permission is there. A KMS that re-wraps no keys by
    itself unwraps and wraps for a rotator. A rotator is checked for `rotation.moves`, or without them for new
    versions of each master key.

    Keys are checked in small groups, so that results remain if the time of `RemoteKmsClient.end_within` runs out.
    """
    names = named_master_keys(configuration)
    moves: dict[str, str] = {}
    if role == "rotator" and configuration.rotation.moves:
        names = _identifiers(configuration, [n for move in configuration.rotation.moves.items() for n in move])
        moves = {names[old]: names[new] for old, new in configuration.rotation.moves.items()}
    identifiers = list(dict.fromkeys(names.values()))
    outcomes: dict[str, tuple[str | None, KmsError | None]] = {}
    by_kms: dict[str, list[str]] = {}
    for identifier in identifiers:
        by_kms.setdefault(kms.instance_of(identifier), []).append(identifier)

    def check(of_one: list[str]) -> None:
        pairs = [(old, moves.get(old, old)) for old in of_one]
        pairs += [(old, new) for old, new in moves.items() if new in of_one]
        rewraps = all(kms.rewraps_by_itself(old, new) for old, new in pairs)
        for start in range(0, len(of_one), _KEYS_AT_A_TIME):
            outcomes.update(_outcomes(kms, of_one[start : start + _KEYS_AT_A_TIME], role, moves, rewraps=rewraps))

    # At the same time: a KMS that does not answer must not use up the time of the others.
    in_threads(check, list(by_kms.values()), len(by_kms))
    return [
        MasterKeyCheck(name, identifier, kms.parts(identifier)[0].backend, *outcomes[identifier])
        for name, identifier in names.items()
    ]


_Outcomes = dict[str, tuple[str | None, KmsError | None]]
"""Master key -> the version that wrapped, and the failure."""


def _outcomes(
    kms: KmsClient, identifiers: list[str], role: Role | None, moves: Mapping[str, str], *, rewraps: bool
) -> _Outcomes:
    """Return what came of the master keys of one KMS."""
    # A local KMS has no permissions: it wraps and unwraps.
    is_remote = isinstance(kms.parts(identifiers[0])[0], RemoteKmsClient)
    if is_remote and (role == "reader" or (role == "rotator" and rewraps)):
        if role == "rotator":
            # The targets of moves are tried with their sources.
            return _probed(kms, [(old, moves.get(old, old)) for old in identifiers if old in moves or not moves])
        return _probed(kms, [(identifier, None) for identifier in identifiers])
    keys = {identifier: SecretBytes.random(_THROW_AWAY_KEY_LENGTH_BITS) for identifier in identifiers}
    wraps = [WrapRequest(key, identifier) for identifier, key in keys.items()]
    wrapped = dict(zip(identifiers, kms.wrap_many(wraps), strict=True))
    requests = [UnwrapRequest(key, identifier) for identifier, key in wrapped.items() if isinstance(key, str)]
    # A writer unwraps nothing.
    answers = [keys[each.master_key_id] for each in requests] if role == "writer" else kms.unwrap_many(requests)
    unwrapped = dict(zip((request.master_key_id for request in requests), answers, strict=True))
    outcomes: _Outcomes = {}
    for identifier, wrapped_key in wrapped.items():
        if isinstance(wrapped_key, KmsError):
            outcomes[identifier] = None, wrapped_key
            continue
        answer = unwrapped[identifier]
        failure = answer if isinstance(answer, KmsError) else None
        if failure is None and answer != keys[identifier]:
            wrong = KmsResponseInvalidError("the KMS unwrapped a different key than it wrapped")
            failure = wrong.about(kms.parts(identifier)[0].backend, "unwrap", identifier)
        outcomes[identifier] = kms.wrapped_key_version(wrapped_key, identifier), failure
    return outcomes


def _probed(kms: KmsClient, moves: list[tuple[str, str | None]]) -> _Outcomes:
    """Return for each master key whether the caller may unwrap with it, or re-wrap from it to another one.

    Without dry runs, a wrapped key that the KMS never made is refused as invalid.
    """
    if not moves:
        return {}
    client = kms.parts(moves[0][0])[0]
    within = {name: kms.parts(name)[1] for move in moves for name in move if name is not None}
    answers: Sequence[object] | None = client.dry_run(
        [(within[old], None if new is None else within[new]) for old, new in moves]
    )
    if answers is None:
        probes = {old: kms.probe(old) for old, _ in moves}
        known = {old: probe for old, probe in probes.items() if probe is not None}
        tried = [(old, new) for old, new in moves if old in known]
        if any(new for _, new in moves):
            results: Sequence[object] = kms.rewrap_many([RewrapRequest(known[o], o, n or o) for o, n in tried])
        else:
            results = kms.unwrap_many([UnwrapRequest(known[old], old) for old, _ in tried])
        found = dict(zip(known, results, strict=True))
        cannot = KmsError("permissions can be tried only with keys that it wrapped", tries=0)
        answers = [
            found.get(old, cannot.about(client.backend, "unwrap" if new is None else "rewrap", old))
            for old, new in moves
        ]
    outcomes: _Outcomes = {}
    for (old, new), answer in zip(moves, answers, strict=True):
        if not isinstance(answer, KmsError) or isinstance(answer, WrappedKeyInvalidError):
            for identifier in (old, new or old):
                outcomes.setdefault(identifier, (None, None))
            continue
        is_new = new is not None and answer.master_key_id in (new, within[new])
        concerned, other = (new, old) if new is not None and is_new else (old, new or old)
        together = KmsError(f"it is tried together with {concerned}, which failed", tries=0)
        outcomes[other] = None, together.about(client.backend, "rewrap", other)
        outcomes[concerned] = None, answer
    return outcomes


def check_columns(
    configuration: Configuration,
    file: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    kms: KmsClient | None,
) -> list[ColumnCheck]:
    """Return the key that each leaf column of a Parquet file gets. The file may be plaintext or encrypted.

    Without `aad_prefix`, the file has the stored prefix, or else the prefix of the table. Without `kms`, no KMS
    call is made, and encrypted footers are refused.
    """
    name, _ = configuration.select_table(table_name)
    leaf_paths, field_labels = schema_of(configuration, file, name, aad_prefix, kms)
    columns = resolve_columns(configuration, name, leaf_paths, field_labels=field_labels)
    master_keys = named_master_keys(configuration)
    return [
        ColumnCheck(
            ".".join(path),
            key.kind,
            key.key_name,
            master_keys.get(key.key_name or ""),
            None if key.label is None else key.label.class_name,
            None if key.label is None else key.label.place,
        )
        for path, key in columns.items()
    ]


def schema_of(
    configuration: Configuration,
    file: FileLocation,
    table_name: str,
    aad_prefix: str | bytes | None,
    kms: KmsClient | None,
) -> tuple[list[ColumnPath], FieldLabels]:
    """Return the leaf columns of a Parquet file, and the labels of its fields; see `check_columns`."""
    with open_source(file) as source:
        envelope = read_envelope(source)
        footer = envelope.unverified_footer()
        if footer is None and kms is None and configuration.kms is not None:
            raise KeyNotAvailableError(
                f"the footer of {file} is encrypted, and its key was not fetched.", hint="Leave out --offline."
            )
        if footer is None:
            without_metadata = configuration.reading.keys_without_metadata
            data_keys = DataKeys(configuration.data_keys, without_metadata.footer, without_metadata.columns)
            retriever = FileKeyRetriever(KmsKeys(KeyUnwrapper(kms, time.monotonic), 0), data_keys, file)
            prefix = None
            # The file may belong to another table.
            if aad_prefix is not None or envelope.supply_aad_prefix:
                table = configuration.tables[table_name]
                rendered = table.rendered_aad_prefix(table_name=table_name, file_name=file.name)
                prefix = expected_aad_prefix(
                    aad_prefix,
                    [] if rendered is None else [rendered],
                    any_file_unique=configuration.reading.file_unique_lengths == "any",
                )
            footer = read_footer(source, retriever, prefix)
    return [leaf.path for leaf in footer.leaves], labels_of_footer(footer)


# --- what a change means for columns ---


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

    `leaf_paths` are the columns of the table; without them, the columns that either configuration names: patterns
    with wildcards then count only for columns that something else names. `field_labels` come with the data.
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
        column: (_UNDECIDED, None)
        if column in undecided and key.label is None
        else (key.key_name or _PLAINTEXT, _place(key.label))
        for column, key in keys.items()
    }


def _place(label: Label | None) -> str | None:
    return None if label is None else f"{label.class_name} by {label.place}"


def refuse_weaker(changes: Sequence[PolicyChange], allowed: Collection[str]) -> list[PolicyChange]:
    """Return the changes that lose protection, and are not allowed as `column` or `table.column`."""
    return [
        change
        for change in changes
        if change.is_weaker and change.what not in allowed and f"{change.table}.{change.what}" not in allowed
    ]


# --- earlier versions in git ---


def configuration_at(config: Path, revision: str) -> Configuration:
    """Return a configuration as it was at a revision of git, with the label files as they were."""
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
