"""Checks a configuration: its master keys against the KMS, and its columns against a Parquet file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from parquet_keytools.config.key_policy import ColumnPath, MasterKeyReference, resolve_columns, resolve_key
from parquet_keytools.config.labels import FieldLabels
from parquet_keytools.config.settings import Configuration, placeholders
from parquet_keytools.encryption.aad import ExpectedAadPrefix, expected_aad_prefix
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope, read_footer
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    KeyNotAvailableError,
    KmsAccessDeniedError,
    KmsError,
    KmsResponseInvalidError,
    WrappedKeyInvalidError,
)
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.format.file_layout import ByteSource
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
    """The result of wrapping and unwrapping a throw-away key; `version` wrapped, if the wrapped key names it."""

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

    Some keys at a time, so that a client whose time is over (see `RemoteKmsClient.end_within`) has checked these.
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
    keys = [SecretBytes.random(_THROW_AWAY_KEY_LENGTH_BITS) for _ in identifiers]
    wrapped = dict(zip(identifiers, kms.wrap_many(list(map(WrapRequest, keys, identifiers))), strict=True))
    if role == "writer":
        return {
            identifier: (None, key)
            if isinstance(key, KmsError)
            else (kms.wrapped_key_version(key, identifier), None)
            for identifier, key in wrapped.items()
        }
    requests = [UnwrapRequest(key, identifier) for identifier, key in wrapped.items() if isinstance(key, str)]
    unwrapped = dict(zip((r.master_key_id for r in requests), kms.unwrap_many(requests), strict=True))
    return {
        identifier: _outcome(kms, identifier, key, wrapped[identifier], unwrapped.get(identifier))
        for identifier, key in zip(identifiers, keys, strict=True)
    }


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


def _outcome(
    kms: KmsClient,
    master_key_id: str,
    key: SecretBytes,
    wrapped: str | KmsError,
    unwrapped: SecretBytes | KmsError | None,
) -> tuple[str | None, KmsError | None]:
    """Return the version that wrapped, and the failure."""
    if isinstance(wrapped, KmsError):
        return None, wrapped
    version = kms.wrapped_key_version(wrapped, master_key_id)
    if isinstance(unwrapped, KmsError):
        return version, unwrapped
    if unwrapped != key:
        wrong = KmsResponseInvalidError("the KMS unwrapped a different key than it wrapped")
        return version, wrong.about(kms.parts(master_key_id)[0].backend, "unwrap", master_key_id)
    return version, None


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

    Raises:
        ConfigurationError: There is no such table, or its patterns do not match the columns.
        KeytoolsError: The footer cannot be read.
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
        footer = _footer(configuration, file, source, table_name, aad_prefix, kms)
    return [leaf.path for leaf in footer.leaves], labels_of_footer(footer)


def _footer(
    configuration: Configuration,
    file: FileLocation,
    source: ByteSource,
    table_name: str,
    aad_prefix: str | bytes | None,
    kms: KmsClient | None,
) -> Footer:
    envelope = read_envelope(source)
    visible = envelope.unverified_footer()
    if visible is not None:
        return visible
    assert envelope.mode is FooterMode.ENCRYPTED_FOOTER
    if kms is None and configuration.kms is not None:
        raise KeyNotAvailableError(
            f"the footer of {file} is encrypted, and its key was not fetched.",
            hint="Leave out --offline.",
        )
    without_metadata = configuration.reading.keys_without_metadata
    data_keys = DataKeys(configuration.data_keys, without_metadata.footer, without_metadata.columns)
    retriever = FileKeyRetriever(KmsKeys(KeyUnwrapper(kms, time.monotonic), 0), data_keys, file)
    return read_footer(source, retriever, _prefix(configuration, envelope, file, table_name, aad_prefix))


def _prefix(
    configuration: Configuration,
    envelope: FooterEnvelope,
    file: FileLocation,
    table_name: str,
    aad_prefix: str | bytes | None,
) -> ExpectedAadPrefix | None:
    """Return the expected AAD prefix; the file may belong to another table."""
    rendered = configuration.tables[table_name].rendered_aad_prefix(table_name=table_name, file_name=file.name)
    if aad_prefix is None and not envelope.supply_aad_prefix:
        return None
    return expected_aad_prefix(
        aad_prefix,
        [] if rendered is None else [rendered],
        any_file_unique=configuration.reading.file_unique_lengths == "any",
    )
