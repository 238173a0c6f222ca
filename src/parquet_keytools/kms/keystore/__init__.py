"""A file of master keys on this machine, under a passphrase."""

from parquet_keytools.kms.keystore.client import KeystoreKms

__all__ = ["KeystoreKms"]
