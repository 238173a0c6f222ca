"""Which files depend on which master key, as far as that shows without a KMS."""

from __future__ import annotations

from parquet_keytools.errors import KeyNotAvailableError, KmsError
from parquet_keytools.rotation.file_keys import FileKeys
from parquet_keytools.rotation.inventory import Inventory
from parquet_keytools.rotation.rewrap_task import WrappedKey
from parquet_keytools.secret_bytes import SecretBytes


class InventoryWithoutKms(Inventory):
    """Lists the keys of files that nobody can unwrap here.

    All show in key material files and in plaintext footers; in an encrypted footer only its own does.
    """

    def _open(self, keys: FileKeys, unwrapped: dict[WrappedKey, SecretBytes | KmsError]) -> None:
        if keys.footer_key is None:
            super()._open(keys, unwrapped)
        elif keys.hides_columns:
            raise KeyNotAvailableError(
                f"{keys.location}: the keys of columns are inside of its encrypted footer, and there is no KMS.",
                hint="Name a configuration whose KMS unwraps the footer's key.",
            )
