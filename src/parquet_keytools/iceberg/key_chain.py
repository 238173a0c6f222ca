"""From a master key to the key of a manifest list: the links of the key chain that the metadata file has.

Iceberg Java unwraps every KEK with the master key in the table property `encryption.key-id`, whatever the KEK's
own `encrypted-by-id` says; iceberg-rust, and this package, take `encrypted-by-id`. So a table whose property was
changed is read here and by Rust, and by Java only as far as its KEKs are under the new master key.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from parquet_keytools import strict_base64
from parquet_keytools.encryption.aes import InvalidTag
from parquet_keytools.errors import (
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    KmsError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.files.digested_columns import refuse_digests
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.key_metadata import StandardKeyMetadata
from parquet_keytools.iceberg.table_metadata import EncryptionKey, TableEncryption
from parquet_keytools.keys.kek import KekCache
from parquet_keytools.kms.aes_key_wrap import unwrap_key
from parquet_keytools.secret_bytes import SecretBytes


class IcebergKeys:
    """Unwraps KEKs of tables with the KMS of a configuration; each is asked for once, and kept for a time.

    Attributes:
        service: The configuration and its KMS.
    """

    def __init__(self, service: KeyService) -> None:
        """Make one; the KMS is called later.

        Raises:
            ConfigurationError: Columns are to be shown as digests, which nothing here does.
        """
        refuse_digests(
            service.configuration,
            "columns of Iceberg's tables cannot be shown as digests, and have no keys of their own.",
            "Use another configuration for these tables.",
        )
        self.service = service
        self._keks: KekCache[tuple[str, bytes], SecretBytes] = KekCache(time.monotonic, "iceberg")

    def kek(self, wrapped_kek: bytes, master_key_id: str) -> SecretBytes:
        """Return a KEK.

        Args:
            wrapped_kek: The raw ciphertext of the KMS.
            master_key_id: The master key, by its identifier in the KMS or its name in the configuration.

        Raises:
            KeyNotAvailableError: The configuration has no KMS.
            KmsError: The KMS does not unwrap it.
        """
        kms = self.service.kms
        if kms is None:
            raise KeyNotAvailableError(
                f"the table is under the master key {master_key_id!r}, and the configuration has no kms.",
                hint="Describe the KMS under `kms:`.",
            )
        configuration = self.service.configuration
        master_key_id = configuration.master_keys.get(master_key_id, master_key_id)

        def load(wanted: list[tuple[str, bytes]]) -> Sequence[SecretBytes | KmsError]:
            return [_outcome(kms.unwrap_raw, wrapped, by) for by, wrapped in wanted]

        lifetime = configuration.reading.cache_lifetime_seconds
        return value_or_raise(self._keks.get_many([(master_key_id, wrapped_kek)], load, lifetime)[0])


def _outcome(unwrap: object, wrapped: bytes, master_key_id: str) -> SecretBytes | KmsError:
    try:
        key = unwrap(wrapped, master_key_id)  # type: ignore[operator]
    except KmsError as error:
        return error
    assert isinstance(key, SecretBytes)
    return key


class KeyChain:
    """The keys of one state of a table. It keeps none: how long KEKs are kept, the configuration says.

    Attributes:
        table: What the metadata file says.
    """

    def __init__(self, table: TableEncryption, keys: IcebergKeys) -> None:
        self.table = table
        self._keys = keys

    def kek(self, key_id: str) -> SecretBytes:
        """Return the KEK of an entry.

        Raises:
            KeyMaterialError: There is no such entry, or it is no KEK.
            KmsError: The KMS does not unwrap it.
        """
        entry = self._entry(key_id, f"the KEK {key_id!r}")
        if entry.encrypted_by_id in self.table.keys:
            raise self._error(f"the KEK {key_id!r} is encrypted by another entry, and not by a master key")
        failure: KmsError | None = None
        try:
            kek = self._keys.kek(entry.encrypted, entry.encrypted_by_id)
        except WrappedKeyInvalidError as error:
            failure = error
        if failure is not None:
            failure.hint = (
                f"It is the KEK {key_id!r} of {self.table.metadata_location}: it was altered, or another master "
                "key wrapped it."
            )
            raise failure
        return kek

    def manifest_list_key(self, key_id: str, snapshot_id: int) -> StandardKeyMetadata:
        """Return the key metadata of the manifest list of a snapshot.

        Raises:
            KeyMaterialError: An entry is missing, or is no such key metadata.
            DecryptionError: The entry is not authentic.
            KmsError: The KMS does not unwrap its KEK.
        """
        what = f"the manifest list key {key_id!r} of snapshot {snapshot_id}"
        entry = self._entry(key_id, what)
        kek_entry = self._entry(
            entry.encrypted_by_id, f"the KEK {entry.encrypted_by_id!r}, which has encrypted {what}"
        )
        if kek_entry.timestamp is None:
            raise self._error(f"the KEK {kek_entry.key_id!r} has no KEY_TIMESTAMP, and {what} is bound to it")
        kek = self.kek(kek_entry.key_id)
        data: SecretBytes | None = None
        with contextlib.suppress(InvalidTag):
            data = unwrap_key(kek, strict_base64.encode(entry.encrypted), kek_entry.timestamp.encode())
        if data is None:
            error = DecryptionError(
                f"{what} is not authentic: it or the KEY_TIMESTAMP of its KEK {kek_entry.key_id!r} was changed, "
                "or another KEK encrypted it.",
                hint="Do not trust this metadata file; restore it from a backup.",
            )
            error.path = self.table.metadata_location
            raise error
        return StandardKeyMetadata.decode(data, what)

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
