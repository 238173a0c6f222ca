"""The public name of a keystore file."""

from parquet_keytools.kms.keystore.file import Keystore

__all__ = ["Keystore"]
