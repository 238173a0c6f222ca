"""Columns that are shown as digests of their values: those who open a file for reading do not get their DEKs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from parquet_keytools.config.document import Mistake
from parquet_keytools.config.key_policy import ColumnPath, digest_columns, hash_key_reference
from parquet_keytools.config.settings import Configuration, TableSettings
from parquet_keytools.encryption.protection import ColumnEncryption
from parquet_keytools.errors import KeyNotAvailableError, KeytoolsError, value_or_raise
from parquet_keytools.files.opened_file import ColumnDigests, OpenedFile
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_wrapping import KmsKeys
from parquet_keytools.secret_bytes import SecretBytes

SECRET_LENGTH_BITS = 256

NEEDS_KEY = "Digests are made of values: they need the key of the column."
"""Hint where a column cannot be read. `hide` or `null` is none here: it would show the values of other columns."""


def with_digests(
    configuration: Configuration,
    new_kms_keys: Callable[[], KmsKeys],
    table_name: str | None,
    files: Sequence[OpenedFile],
) -> list[OpenedFile]:
    """Return opened files whose columns are shown as digests, where the configuration says `denied_columns: hash`.

    These columns are then among `OpenedFile.denied`, and their DEKs are in `OpenedFile.digests` only: whoever does
    not know of digests can read none of their values. If the secret is unavailable, they are just denied.

    Args:
        configuration: Whose tables the files are of.
        new_kms_keys: Returns what asks the KMS for the secret.
        table_name: Their table; None where the configuration has only one.
        files: Opened with the columns that will be read.

    Raises:
        ConfigurationError: What the KMS unwrapped is no secret of digests.
    """
    if configuration.reading.denied_columns != "hash":
        return list(files)
    _, table = configuration.select_table(table_name)
    assert table.hash_key is not None
    columns = [_columns(opened, table) for opened in files]
    secret: SecretBytes | KeytoolsError | None = None
    if any(paths - opened.denied.keys() for opened, paths in zip(files, columns, strict=True)):
        secret = _secret(configuration, table.hash_key, new_kms_keys())
    return [_with_digests(opened, paths, secret) for opened, paths in zip(files, columns, strict=True)]


def _columns(opened: OpenedFile, table: TableSettings) -> frozenset[ColumnPath]:
    columns = opened.footer.columns
    keyed = [column.path for column in columns if column.encryption is ColumnEncryption.COLUMN_KEY]
    return digest_columns(table, [column.path for column in columns], keyed)


def refuse_digests(configuration: Configuration, message: str, hint: str) -> None:
    """Raise `ConfigurationError` where columns are shown as digests, for a caller that would give out values."""
    if configuration.reading.denied_columns == "hash":
        raise configuration.error_for([Mistake(("reading", "denied_columns"), message, hint)])


def unwrapped_secret(configuration: Configuration, name: str, kms_keys: KmsKeys) -> SecretBytes:
    """Return the secret under `hash_keys`.

    Raises:
        ConfigurationError: What the KMS unwrapped is no secret of digests.
        KeytoolsError: It is unavailable.
    """
    return value_or_raise(_secret(configuration, name, kms_keys))


def _secret(configuration: Configuration, name: str, kms_keys: KmsKeys) -> SecretBytes | KeytoolsError:
    """Return the secret under `hash_keys`, or why it is unavailable."""
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
