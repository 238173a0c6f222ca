"""The transit engine of HashiCorp Vault and OpenBao."""

from parquet_keytools.kms.vault.client import VaultKms

__all__ = ["VaultKms"]
