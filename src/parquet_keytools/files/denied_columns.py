"""What readers see of columns that they cannot read: digests of values, and nothing in key-value metadata.

The DEKs of columns that are shown as digests are kept apart from other DEKs. Writers store bounding boxes of
geometries, categories of columns and ends of an index in key-value metadata: all of these are values.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from parquet_keytools.config.document import Mistake
from parquet_keytools.config.key_policy import (
    ColumnPath,
    KeyReference,
    MasterKeyReference,
    denied_keys,
    digest_columns,
    hash_key_reference,
    resolve_key,
)
from parquet_keytools.config.settings import Configuration, HashKeySettings, TableSettings
from parquet_keytools.encryption.protection import ColumnEncryption, FooterColumn
from parquet_keytools.errors import (
    ConfigurationError,
    KeyNotAvailableError,
    KeytoolsError,
    KmsResponseInvalidError,
    value_or_raise,
)
from parquet_keytools.files.opened_file import ColumnDigests, OpenedFile
from parquet_keytools.files.table_check import seen_key
from parquet_keytools.format.partial_footers import (
    ARROW_SCHEMA_KEY,
    SPARK_SCHEMA_KEY,
    VisibleKeyValues,
    schema_alone,
    short_word,
)
from parquet_keytools.format.structs import KeyValue
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.kms.client import KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.secret_bytes import SecretBytes

SECRET_LENGTH_BITS = 256

NEEDS_KEY = "Digests are made of values: they need the key of the column."
"""Hint for a column that cannot be read. `hide` or `null` would show the values of digest columns."""


def with_digests(
    configuration: Configuration,
    new_kms_keys: Callable[[], KmsKeys],
    table_name: str | None,
    files: Sequence[OpenedFile],
) -> list[OpenedFile]:
    """Return opened files whose columns are shown as digests, if the configuration or a class says so."""
    # These columns are in `OpenedFile.denied`, and their DEKs only in `OpenedFile.digests`, so code that ignores
    # digests cannot read their values. If the secret is unavailable, they are only denied.
    if configuration.denied_columns != "hash":
        return list(files)
    _, table = configuration.select_table(table_name)
    assert table.hash_key is not None
    columns = [_columns(opened, table, configuration) for opened in files]
    secret: SecretBytes | KeytoolsError | None = None
    if any(paths - opened.denied.keys() for opened, paths in zip(files, columns, strict=True)):
        secret = _secret(configuration, table.hash_key, new_kms_keys())
    return [_with_digests(opened, paths, secret) for opened, paths in zip(files, columns, strict=True)]


def _columns(opened: OpenedFile, table: TableSettings, configuration: Configuration) -> frozenset[ColumnPath]:
    columns = opened.footer.columns
    keyed = [column for column in columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    by_class = configuration.reading.denied_columns != "hash"
    if by_class:
        # Labels that came with the data are known by the key alone.
        keys = denied_keys(configuration, table)
        keyed = [
            column
            for column in columns
            if column.encryption is not ColumnEncryption.PLAINTEXT and _key(opened, column) in keys
        ]
    paths = [column.path for column in columns]
    return digest_columns(table, paths, [column.path for column in keyed], by_class=by_class)


def _key(opened: OpenedFile, column: FooterColumn) -> KeyReference | None:
    """Return the key of a column of a file; None if it is unknown, so that the column cannot be read."""
    is_footers = column.encryption is ColumnEncryption.FOOTER_KEY
    metadata = opened.footer.key_metadata if is_footers else column.key_metadata
    try:
        return seen_key(opened.retriever, metadata, None if is_footers else column.path)
    except KeytoolsError:
        return None


def refuse_digests(configuration: Configuration, message: str, hint: str) -> None:
    """Raise `ConfigurationError` if columns are shown as digests, for a caller that would show values."""
    if configuration.denied_columns == "hash":
        of_class = next(
            (("classes", name, "denied") for name, one in configuration.classes.items() if one.denied), None
        )
        raise configuration.error_for([Mistake(of_class or ("reading", "denied_columns"), message, hint)])


def unwrapped_secret(configuration: Configuration, name: str, kms_keys: KmsKeys) -> SecretBytes:
    """Return a secret under `hash_keys`; raise `KeytoolsError` if it is unavailable or not valid."""
    return value_or_raise(_secret(configuration, name, kms_keys))


def _secret(configuration: Configuration, name: str, kms_keys: KmsKeys) -> SecretBytes | KeytoolsError:
    """Return a secret under `hash_keys`, or why it is unavailable."""
    master_key_id = hash_key_reference(configuration, name).master_key_id
    material = KeyMaterial(
        is_footer_key=False,
        master_key_id=master_key_id,
        wrapped_dek=configuration.hash_keys[name].wrapped_key,
    )
    (secret,) = kms_keys.deks([material])
    if isinstance(secret, SecretBytes) and secret.length_bits != SECRET_LENGTH_BITS:
        message = f"this is a wrapped key of {secret.length_bits} bits, and secrets of digests have 256."
        hint = "`parquet-keytools hash-key` makes one."
        raise configuration.error_for([Mistake(("hash_keys", name, "wrapped_key"), message, hint)])
    return secret


def wrapped_secret(
    configuration: Configuration, kms_keys: KmsKeys, kms: KmsClient | None, name: str, master_key: str | None
) -> HashKeySettings:
    """Return a new secret, or one under `hash_keys`, wrapped; see `Keytools.wrap_hash_key`."""
    known = configuration.hash_keys.get(name)
    if master_key is not None:
        reference = resolve_key(configuration, master_key)
    elif known is not None:
        reference = hash_key_reference(configuration, name)
    else:
        raise ConfigurationError(
            f"the configuration has no secret {name!r} under hash_keys.",
            hint="Name the master key that should wrap a new secret: --master-key on the command line.",
        )
    if not isinstance(reference, MasterKeyReference):
        raise ConfigurationError(f"{master_key!r} is a data key: master keys wrap secrets of digests.")
    secret = SecretBytes.random(SECRET_LENGTH_BITS)
    if known is not None:
        secret = unwrapped_secret(configuration, name, kms_keys)
        master_key = master_key or known.master_key
    assert kms is not None
    wrapped = value_or_raise(kms.wrap_many([WrapRequest(secret, reference.master_key_id)])[0])
    # All digests would be lost with a wrapped secret that does not unwrap.
    if value_or_raise(kms.unwrap_many([UnwrapRequest(wrapped, reference.master_key_id)])[0]) != secret:
        wrong = KmsResponseInvalidError("the wrapped secret does not unwrap to the secret")
        raise wrong.about(kms.parts(reference.master_key_id)[0].backend, "wrap", reference.master_key_id)
    return HashKeySettings(master_key=str(master_key), wrapped_key=wrapped)


def _with_digests(
    opened: OpenedFile, columns: frozenset[ColumnPath], secret: SecretBytes | KeytoolsError | None
) -> OpenedFile:
    readable = columns - opened.denied.keys()
    deks = {path: opened.deks.pop(path, None) for path in readable}
    if not columns:
        return replace(opened, refused=frozenset())
    if not isinstance(secret, SecretBytes):
        opened.denied.update((path, secret) for path in readable if secret is not None)
        return replace(opened, refused=frozenset(), digests=ColumnDigests(columns))
    reason = KeyNotAvailableError(
        "the configuration shows it as digests only.", hint="This is `denied_columns: hash` under `reading`."
    )
    opened.denied.update(dict.fromkeys(readable, reason))
    return replace(opened, refused=readable, digests=ColumnDigests(columns, secret, deks))


_PANDAS_COLUMN = ("name", "field_name", "pandas_type", "numpy_type", "metadata")


def shown_key_values(
    opened: OpenedFile, shown: Collection[str], nullable: Collection[str] = frozenset()
) -> dict[str, str | None]:
    """Return changes of a file's key-value metadata: key -> the new value, or None to leave the entry out."""
    # If columns cannot be read, only entries that surely contain none of their values stay: the schema, and the
    # entries of pandas and GeoParquet about other columns. `nullable` are shown columns that may be null.
    entries = opened.footer.metadata.key_value_metadata or []
    if not opened.denied:
        return {
            entry.key: _arrow_schema(entry.value or "", shown, nullable, frozenset())
            for entry in entries
            if entry.key == ARROW_SCHEMA_KEY
        }
    denied = opened.denied_top_level
    return {
        entry.key: None if entry.value is None else _shown(entry.key, entry.value, shown, nullable, denied)
        for entry in entries
    }


def _shown(
    key: str, value: str, shown: Collection[str], nullable: Collection[str], denied: frozenset[str]
) -> str | None:
    try:
        if key == ARROW_SCHEMA_KEY:
            return _arrow_schema(value, shown, nullable, denied)
        if key in ("pandas", "geo"):
            of_others = (_pandas if key == "pandas" else _geo)(json.loads(value), shown, denied)
            return None if of_others is None else json.dumps(of_others)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if key == SPARK_SCHEMA_KEY:
        return None  # It lists all columns of the file.
    entry = KeyValue()
    entry.key, entry.value = key, value
    alone = VisibleKeyValues().shown(entry)
    return None if alone is None else alone.value


def _arrow_schema(
    value: str, shown: Collection[str], nullable: Collection[str], denied: frozenset[str]
) -> str | None:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except (pa.ArrowException, ValueError):
        return None
    fields = []
    for field in schema:
        if field.name in shown:
            alone = _without_metadata(field) if field.name in denied else field
            if alone is None:
                return None
            fields.append(alone.with_nullable(alone.nullable or alone.name in nullable))
    metadata = schema.metadata
    if denied and metadata:
        # It has the same entries as the file.
        schema_key = ARROW_SCHEMA_KEY.encode()
        entries = {key.decode(): value.decode() for key, value in metadata.items() if key != schema_key}
        found = {key: _shown(key, value, shown, frozenset(), denied) for key, value in entries.items()}
        metadata = {key: value for key, value in found.items() if value is not None}
    return base64.b64encode(pa.schema(fields, metadata).serialize()).decode()


def _without_metadata(field: pa.Field) -> pa.Field | None:
    """Return a field without metadata, including nested fields; None if that fails."""
    if field.metadata is None and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
        return field  # Fast: wide tables have thousands of such fields.
    message = schema_alone(pa.schema([field]).serialize().to_pybytes())
    return None if message is None else pa.ipc.read_schema(pa.py_buffer(message)).field(0)


def _pandas(known: Any, shown: Collection[str], denied: frozenset[str]) -> Any:
    """Keep index columns and types; the ends of a range index are values."""
    kept: dict[str, Any] = {
        "index_columns": [index for index in known["index_columns"] if isinstance(index, str) and index in shown],
        "column_indexes": [_labels(level) for level in known.get("column_indexes") or ()],
        "columns": [],
    }
    for column in known["columns"]:
        if column["field_name"] in shown:
            alone = {name: column.get(name) for name in _PANDAS_COLUMN}
            if {column["name"], column["field_name"]} & denied:
                alone["metadata"] = None
            kept["columns"].append(alone)
    if isinstance(creator := known.get("creator"), dict):
        kept["creator"] = _short(creator, ("library", "version"))
    return kept | _short(known, ("pandas_version",))


def _labels(level: Any) -> dict[str, Any]:
    """Keep the types of column labels, which pandas needs to restore them."""
    metadata = _short(level.get("metadata") or {}, ("encoding", "timezone"))
    types = _short(level, ("pandas_type", "numpy_type"))
    return {"name": None, "field_name": None, **types, "metadata": metadata or None}


def _short(known: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Keep entries whose values are short words."""
    return {name: known[name] for name in names if isinstance(known.get(name), str) and short_word(known[name])}


def _geo(known: Any, shown: Collection[str], denied: frozenset[str]) -> Any:
    """Keep the entries of other geometries; None if there are none."""
    columns = {name: dict(column) for name, column in known["columns"].items() if name in set(shown) - denied}
    if not columns:
        return None
    for column in columns.values():
        if _names_denied(column.get("covering"), denied):
            del column["covering"]
    primary = known["primary_column"]
    return {
        "version": known["version"],
        "primary_column": primary if primary in columns else next(iter(columns)),
        "columns": columns,
    }


def _names_denied(value: Any, denied: frozenset[str]) -> bool:
    if isinstance(value, dict):
        return any(_names_denied(item, denied) for item in value.values())
    if isinstance(value, list):
        return any(_names_denied(item, denied) for item in value)
    return isinstance(value, str) and value in denied
