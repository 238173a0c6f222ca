"""New entries of `encryption-keys`: KEKs that the KMS wraps, and keys of manifest lists that a KEK encrypts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KeyNotAvailableError,
    KmsResponseInvalidError,
    NotEncryptedError,
)
from parquet_keytools.iceberg.key_chain import IcebergKeys, KeyChain
from parquet_keytools.iceberg.key_metadata import StandardKeyMetadata
from parquet_keytools.iceberg.table_metadata import (
    KEY_LENGTH_PROPERTY,
    TIMESTAMP_PROPERTY,
    EncryptionKey,
    TableEncryption,
)
from parquet_keytools.kms.aes_key_wrap import wrap_key
from parquet_keytools.secret_bytes import SecretBytes

KEK_LIFETIME_MS = 730 * 24 * 60 * 60 * 1000
"""A KEK encrypts keys of new snapshots for so long (2 years, as in Iceberg's own writers)."""

CLOCK_SKEW_MS = 24 * 60 * 60 * 1000
"""So far may the clock of another writer be ahead of ours."""

_KEY_ID_BYTES = 16
_KEY_LENGTHS = {"16": 128, "24": 192, "32": 256}


def key_length_bits(table: TableEncryption) -> int:
    """Return the length of new KEKs and DEKs of a table: its property `encryption.data-key-length`, in bits.

    Raises:
        ConfigurationError: The property is no length of an AES key.
    """
    text = table.properties.get(KEY_LENGTH_PROPERTY, "16")
    if text not in _KEY_LENGTHS:
        raise ConfigurationError(
            f"{table.metadata_location}: the table property {KEY_LENGTH_PROPERTY} is {text[:20]!r}, and not the "
            "length of an AES key: 16, 24 or 32 bytes."
        )
    return _KEY_LENGTHS[text]


def master_key_of(table: TableEncryption) -> str:
    """Return the master key of a table that is to be written.

    Raises:
        NotEncryptedError: The table has none.
        KeyMaterialError: Its KEKs are under another one than its property names.
    """
    master_key_id = table.master_key_id
    if master_key_id is None:
        raise NotEncryptedError(
            f"{table.metadata_location}: the table has no property encryption.key-id, so it would be written in "
            "plaintext.",
            hint="If it was encrypted, restore its metadata file; else write it with PyIceberg itself.",
        )
    others = sorted({entry.encrypted_by_id for entry in table.keks} - {master_key_id})
    if others:
        raise KeyMaterialError(
            f"the property encryption.key-id is {master_key_id!r}, and KEKs of the table are under {others[0]!r}.",
            path=table.metadata_location,
            hint="This property never changes in the life of a table: set it to what it was.",
        )
    return master_key_id


class NewKeys:
    """Makes entries for new snapshots of one table, under a KEK that the table has, or else a new one.

    A new KEK costs two calls of the KMS, to wrap and to unwrap it, however often a commit is repeated.
    """

    def __init__(self, keys: IcebergKeys, now: Callable[[], float] = lambda: time.time()) -> None:
        self._keys = keys
        self._now = now
        self._fresh: tuple[EncryptionKey, SecretBytes] | None = None

    def entries_for(
        self, table: TableEncryption, chain: KeyChain, metadata: StandardKeyMetadata
    ) -> tuple[EncryptionKey, ...]:
        """Return what `encryption-keys` needs for a manifest list: the last entry is that of the list.

        Args:
            table: The current state of the table.
            chain: Its keys.
            metadata: The key metadata of the manifest list.

        Raises:
            NotEncryptedError: The table has no master key.
            KeyMaterialError: Its KEKs are under another master key.
            KmsError: The KMS does not wrap or unwrap a KEK.
        """
        entry, kek = self._kek(table, chain)
        assert entry.timestamp is not None
        encrypted = wrap_key(kek, metadata.encode(), entry.timestamp.encode())
        for_list = EncryptionKey(_new_id(), strict_base64.decode(encrypted), entry.key_id, None)
        return (for_list,) if entry.key_id in table.keys else (entry, for_list)

    def _kek(self, table: TableEncryption, chain: KeyChain) -> tuple[EncryptionKey, SecretBytes]:
        master_key_id = master_key_of(table)
        now_ms = int(self._now() * 1000)
        young = [entry for entry in table.keks if is_young(entry, now_ms)]
        if young:
            entry = max(young, key=lambda entry: entry.timestamp_ms or 0)
            return entry, chain.kek(entry.key_id)
        if self._fresh is None:
            kek = SecretBytes.random(key_length_bits(table))
            wrapped = wrap_kek(self._keys, kek, master_key_id)
            self._fresh = EncryptionKey(_new_id(), wrapped, master_key_id, str(now_ms)), kek
        return self._fresh


def is_young(kek: EncryptionKey, now_ms: float) -> bool:
    """Return whether new snapshots are encrypted under a KEK.

    One from the future is not young: a clock that was wrong, or whoever changed the metadata file, would keep it
    in use for as long as they like.
    """
    made = kek.timestamp_ms
    return made is not None and -CLOCK_SKEW_MS <= now_ms - made < KEK_LIFETIME_MS


def wrap_kek(keys: IcebergKeys, kek: SecretBytes, master_key_id: str) -> bytes:
    """Return a KEK as the KMS wraps it, under the current version of the master key.

    It is unwrapped again: all that depends on it would be lost with a wrapped KEK that does not open. This also
    refuses a master key of anybody's in the metadata file, before the KEK encrypts anything.

    Raises:
        KeyNotAvailableError: The configuration has no KMS.
        MasterKeyNotTrustedError: The configuration does not name this master key, and it could be anybody's.
        KmsResponseInvalidError: What the KMS returned does not unwrap to the KEK.
        KmsError: The KMS does not wrap or unwrap it.
    """
    kms = keys.service.kms
    if kms is None:
        raise KeyNotAvailableError("the configuration has no kms.", hint="Describe the KMS under `kms:`.")
    configuration = keys.service.configuration
    wrapped = kms.wrap_raw(kek, configuration.master_keys.get(master_key_id, master_key_id))
    if keys.kek(wrapped, master_key_id) != kek:
        raise KmsResponseInvalidError(
            "the wrapped KEK does not unwrap to the KEK",
            backend=kms.backend,
            operation="wrap",
            master_key_id=master_key_id,
        )
    return wrapped


def rewrapped(keys: IcebergKeys, chain: KeyChain, entry: EncryptionKey) -> EncryptionKey:
    """Return the entry of a KEK, wrapped under the current version of its master key; the KEK stays the same.

    Errors are those of `wrap_kek`, and of unwrapping the entry.
    """
    return replace(entry, encrypted=wrap_kek(keys, chain.kek(entry.key_id), entry.encrypted_by_id))


def as_json(entries: Iterable[EncryptionKey]) -> list[dict[str, Any]]:
    """Return entries as the metadata file has them."""
    return [
        {
            "key-id": entry.key_id,
            "encrypted-key-metadata": strict_base64.encode(entry.encrypted),
            "encrypted-by-id": entry.encrypted_by_id,
            **({"properties": {TIMESTAMP_PROPERTY: entry.timestamp}} if entry.timestamp is not None else {}),
        }
        for entry in entries
    ]


def _new_id() -> str:
    return strict_base64.encode(os.urandom(_KEY_ID_BYTES))
