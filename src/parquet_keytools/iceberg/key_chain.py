"""From a master key to the key of a manifest list: the entries of `encryption-keys`, read, made and changed.

Iceberg Java unwraps every KEK with the master key in the table property `encryption.key-id`, whatever the
`encrypted-by-id` of the KEK says. iceberg-rust and this package use `encrypted-by-id`. So if this property was
changed, Java reads only what is under the new master key; Rust and this package read everything.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parquet_keytools import strict_base64
from parquet_keytools.config.settings import placeholders, with_value
from parquet_keytools.encryption.module_cipher import InvalidTag
from parquet_keytools.errors import (
    ConfigurationError,
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    KmsAccessDeniedError,
    KmsError,
    KmsResponseInvalidError,
    NotEncryptedError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.files.denied_columns import refuse_digests
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.metadata import (
    KEY_LENGTH_PROPERTY,
    TIMESTAMP_PROPERTY,
    EncryptionKey,
    SnapshotKey,
    StandardKeyMetadata,
    TableEncryption,
)
from parquet_keytools.keys.key_wrapping import KekCache
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.secret_bytes import SecretBytes

KEK_LIFETIME_MS = 730 * 24 * 60 * 60 * 1000
"""How long a KEK encrypts keys of new snapshots: 2 years, as in Iceberg's own writers."""

CLOCK_SKEW_MS = 24 * 60 * 60 * 1000
"""How far the clock of another writer may be ahead of ours."""

_KEY_ID_BYTES = 16
_KEYS, _KEY_ID = "encryption-keys", "key-id"
_KEY_LENGTHS = {"16": 128, "24": 192, "32": 256}


class IcebergKeys:
    """Wraps and unwraps KEKs of tables with the KMS of a configuration, and caches unwrapped KEKs."""

    def __init__(self, service: KeyService) -> None:
        refuse_digests(
            service.configuration,
            "columns of Iceberg tables cannot be shown as digests, and have no keys of their own.",
            "Use another configuration for these tables.",
        )
        self.service = service
        self._keks: KekCache[tuple[str, bytes], SecretBytes] = KekCache(time.monotonic, "iceberg")

    def kek(self, wrapped_kek: bytes, master_key_id: str) -> SecretBytes:
        """Return a KEK, by the identifier of its master key in the KMS or its name in the configuration."""
        kms, identifier = self._kms_for(master_key_id), self.master_key_id(master_key_id)

        def load(_: object) -> list[SecretBytes | KmsError]:
            try:
                return [kms.unwrap_raw(wrapped_kek, identifier)]
            except KmsError as error:
                return [error]

        lifetime = self.service.configuration.reading.cache_lifetime_seconds
        try:
            return value_or_raise(self._keks.get_many([(identifier, wrapped_kek)], load, lifetime)[0])
        except KmsAccessDeniedError as error:
            # The advice to read other columns is of no use.
            error.hint = "Ask for the permission: all columns of the table need this master key."
            raise

    def wrap_kek(self, kek: SecretBytes, master_key_id: str) -> bytes:
        """Wrap a KEK under the current version of a master key, and check that the result unwraps to it.

        A wrapped KEK that does not unwrap would lose all data under it. The check also refuses a master key that
        someone else put into the metadata file, before the KEK encrypts anything.
        """
        kms, identifier = self._kms_for(master_key_id), self.master_key_id(master_key_id)
        if placeholders(identifier):
            raise ConfigurationError(
                f"an Iceberg table has one master key, and {identifier!r} names one for each value.",
                hint=f"Create one table for each value, under a key such as {with_value(identifier, 'VALUE')!r}.",
            )
        wrapped = kms.wrap_raw(kek, identifier)
        if self.kek(wrapped, master_key_id) != kek:
            raise KmsResponseInvalidError(
                "the wrapped KEK does not unwrap to the KEK",
                backend=kms.backend,
                operation="wrap",
                master_key_id=master_key_id,
            )
        return wrapped

    def master_key_id(self, name: str) -> str:
        """Return the identifier of a master key by its name; see `Configuration.master_key_id`."""
        return self.service.configuration.master_key_id(name)

    def id_in_table(self, name: str) -> str:
        """Return the identifier for the table's metadata; in the default KMS, as other clients know it."""
        identifier = self.master_key_id(name)
        return identifier if self.service.kms is None else self.service.kms.id_in_file(identifier, None)

    def _kms_for(self, master_key_id: str) -> KmsClient:
        if self.service.kms is None:
            raise KeyNotAvailableError(
                f"the table is under the master key {master_key_id!r}, and the configuration has no kms.",
                hint="Describe the KMS under `kms:`.",
            )
        return self.service.kms


class KeyChain:
    """The keys of one state of a table."""

    def __init__(self, table: TableEncryption, keys: IcebergKeys) -> None:
        self.table = table
        self._keys = keys

    def kek(self, key_id: str) -> SecretBytes:
        """Return the KEK of an entry."""
        entry = self._entry(key_id, f"the KEK {key_id!r}")
        if entry.encrypted_by_id in self.table.keys:
            raise self._error(f"the KEK {key_id!r} is encrypted by another entry, and not by a master key")
        try:
            return self._keys.kek(entry.encrypted, entry.encrypted_by_id)
        except WrappedKeyInvalidError as error:
            error.hint = (
                f"It is the KEK {key_id!r} of {self.table.metadata_location}: it was altered, or another master "
                "key wrapped it."
            )
            raise

    def rewrapped(self, kek: EncryptionKey) -> EncryptionKey:
        """Return the entry of the same KEK, wrapped under the current version of its master key."""
        return replace(kek, encrypted=self._keys.wrap_kek(self.kek(kek.key_id), kek.encrypted_by_id))

    def manifest_list_key(self, snapshot: SnapshotKey) -> StandardKeyMetadata | None:
        """Return the key metadata of the manifest list of a snapshot, or None if the list is plaintext."""
        if snapshot.key_id is None:
            return None
        what = f"the manifest list key {snapshot.key_id!r} of snapshot {snapshot.snapshot_id}"
        entry = self._entry(snapshot.key_id, what)
        kek_entry = self._entry(
            entry.encrypted_by_id, f"the KEK {entry.encrypted_by_id!r}, which has encrypted {what}"
        )
        if kek_entry.timestamp is None:
            raise self._error(f"the KEK {kek_entry.key_id!r} has no KEY_TIMESTAMP, and {what} is bound to it")
        kek = self.kek(kek_entry.key_id)
        with contextlib.suppress(InvalidTag):
            data = unwrap_key(kek, strict_base64.encode(entry.encrypted), kek_entry.timestamp.encode())
            return StandardKeyMetadata.decode(data, what)
        error = DecryptionError(
            f"{what} is not authentic: it or the KEY_TIMESTAMP of its KEK {kek_entry.key_id!r} was changed, "
            "or another KEK encrypted it.",
            hint="Do not trust this metadata file; restore it from a backup.",
        )
        error.path = self.table.metadata_location
        raise error

    def _entry(self, key_id: str, what: str) -> EncryptionKey:
        entry = self.table.keys.get(key_id)
        if entry is None:
            raise self._error(f"{what} is not in encryption-keys")
        return entry

    def _error(self, reason: str) -> KeyMaterialError:
        return KeyMaterialError(
            f"{reason}.",
            path=self.table.metadata_location,
            hint="A writer that does not know encryption may have made this metadata file; use the one before it.",
        )


def key_length_bits(table: TableEncryption) -> int:
    """Return the length of new KEKs and DEKs of a table in bits."""
    text = table.properties.get(KEY_LENGTH_PROPERTY, "16")
    if text not in _KEY_LENGTHS:
        raise ConfigurationError(
            f"{table.metadata_location}: the table property {KEY_LENGTH_PROPERTY} is {text[:20]!r}, and not the "
            "length of an AES key: 16, 24 or 32 bytes."
        )
    return _KEY_LENGTHS[text]


def master_key_of(table: TableEncryption) -> str:
    """Return the master key of a table to be written; refuse one other than the master key of its KEKs."""
    master_key_id = table.master_key_id
    if master_key_id is None:
        raise NotEncryptedError(
            f"{table.metadata_location}: the table has no property encryption.key-id, so it would be written in "
            "plaintext.",
            hint="If it was encrypted, restore its metadata file; otherwise write it with PyIceberg itself.",
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
    """Makes the entries for new snapshots of one table, under a KEK of the table or, without one, a new KEK.

    A new KEK costs two KMS calls, to wrap and to unwrap it, however often a commit is repeated.
    """

    def __init__(self, keys: IcebergKeys, now: Callable[[], float] = lambda: time.time()) -> None:
        self._keys = keys
        self._now = now
        self._fresh: tuple[EncryptionKey, SecretBytes] | None = None

    def entries_for(self, chain: KeyChain, metadata: StandardKeyMetadata) -> tuple[EncryptionKey, ...]:
        """Return the entries that `encryption-keys` needs for a manifest list, its own entry last."""
        entry, kek = self._kek(chain)
        assert entry.timestamp is not None
        encrypted = wrap_key(kek, metadata.encode(), entry.timestamp.encode())
        for_list = EncryptionKey(_new_id(), strict_base64.decode(encrypted), entry.key_id, None)
        return (for_list,) if entry.key_id in chain.table.keys else (entry, for_list)

    def _kek(self, chain: KeyChain) -> tuple[EncryptionKey, SecretBytes]:
        master_key_id = master_key_of(chain.table)
        now_ms = int(self._now() * 1000)
        young = [entry for entry in chain.table.keks if is_young(entry, now_ms)]
        if young:
            entry = max(young, key=lambda entry: entry.timestamp_ms or 0)
            return entry, chain.kek(entry.key_id)
        if self._fresh is None:
            kek = SecretBytes.random(key_length_bits(chain.table))
            wrapped = self._keys.wrap_kek(kek, master_key_id)
            self._fresh = EncryptionKey(_new_id(), wrapped, master_key_id, str(now_ms)), kek
        return self._fresh


def is_young(kek: EncryptionKey, now_ms: float) -> bool:
    """Return whether new snapshots are encrypted under a KEK.

    A KEK from the future is not young: a wrong clock, or a changed metadata file, would keep it in use forever.
    """
    made = kek.timestamp_ms
    return made is not None and -CLOCK_SKEW_MS <= now_ms - made < KEK_LIFETIME_MS


def as_json(entry: EncryptionKey) -> dict[str, Any]:
    """Return an entry as it is in the metadata file."""
    return {
        "key-id": entry.key_id,
        "encrypted-key-metadata": strict_base64.encode(entry.encrypted),
        "encrypted-by-id": entry.encrypted_by_id,
        **({"properties": {TIMESTAMP_PROPERTY: entry.timestamp}} if entry.timestamp is not None else {}),
    }


def _new_id() -> str:
    return strict_base64.encode(os.urandom(_KEY_ID_BYTES))


# --- changes of `encryption-keys` ---


@dataclass(frozen=True)
class KeyChanges:
    """What a commit changes about the `encryption-keys` of a table.

    Attributes:
        added: New entries; entries that the table already has are not added again.
        snapshot_keys: Snapshot id -> `key-id` of its manifest list key.
        replaced: Expected entries, and their replacements with the same `key-id`.
        removed: The `key-id` of each entry that is no longer needed.
    """

    added: Sequence[EncryptionKey] = ()
    snapshot_keys: dict[int, str] = field(default_factory=dict)
    replaced: Sequence[tuple[EncryptionKey, EncryptionKey]] = ()
    removed: Sequence[str] = ()

    def apply(self, document: dict[str, Any]) -> None:
        """Change a metadata file; `CommitFailedException` if an entry to replace, or a needed KEK, is gone."""
        # Spark's worker, which wraps KEKs, needs no PyIceberg.
        from pyiceberg.exceptions import CommitFailedException

        entries = list(document.get(_KEYS) or [])
        for old, new in self.replaced:
            found = (entry for entry in entries if as_json(old).items() <= entry.items())
            if (entry := next(found, None)) is None:
                raise CommitFailedException(f"the KEK {old.key_id!r} was changed by another commit")
            entries[entries.index(entry)] = {**entry, **as_json(new)}
        known = {entry.get(_KEY_ID) for entry in entries}
        entries += [as_json(entry) for entry in self.added if entry.key_id not in known]
        entries = [entry for entry in entries if entry.get(_KEY_ID) not in self.removed]
        left = {entry.get(_KEY_ID) for entry in entries}
        lost = (known - left) | {entry.encrypted_by_id for entry in self.added if entry.timestamp is None} - left
        if lost & {entry.get("encrypted-by-id") for entry in entries}:
            raise CommitFailedException("another commit changed which KEKs there are")
        if entries or self.removed:
            document[_KEYS] = entries
        for snapshot in document.get("snapshots") or []:
            key_id = self.snapshot_keys.get(snapshot["snapshot-id"])
            if key_id is not None:
                snapshot[_KEY_ID] = key_id

    def apply_to_request(self, request: dict[str, Any]) -> None:
        """Change the request of a commit to a REST catalog."""
        updates: list[dict[str, Any]] = []
        for old, new in self.replaced:
            updates.append({"action": "remove-encryption-key", _KEY_ID: old.key_id})
            updates.append({"action": "add-encryption-key", "encryption-key": as_json(new)})
        updates += [{"action": "add-encryption-key", "encryption-key": as_json(entry)} for entry in self.added]
        updates += [{"action": "remove-encryption-key", _KEY_ID: key_id} for key_id in self.removed]
        for update in request["updates"]:
            if update.get("action") == "add-snapshot":
                key_id = self.snapshot_keys.get(update["snapshot"]["snapshot-id"])
                if key_id is not None:
                    update["snapshot"][_KEY_ID] = key_id
        # Keys first: the snapshots name them.
        request["updates"] = updates + request["updates"]


def rotation(chain: KeyChain) -> KeyChanges:
    """Return the re-wrapping of all KEKs under the current version of their master key; errors of the KMS."""
    return KeyChanges(replaced=[(kek, chain.rewrapped(kek)) for kek in chain.table.keks])


def removal(chain: KeyChain) -> KeyChanges:
    """Return the removal of the entries that no snapshot needs, except KEKs that new snapshots may use."""
    now_ms = time.time() * 1000
    young = {kek.key_id for kek in chain.table.keks if is_young(kek, now_ms)}
    return KeyChanges(removed=[key_id for key_id in chain.table.unneeded_keys if key_id not in young])
