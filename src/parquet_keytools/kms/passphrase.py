"""The public name of what reads a keystore's passphrase."""

from parquet_keytools.kms.keystore.file import passphrase_from_file

__all__ = ["passphrase_from_file"]
