"""Encrypted tables of Apache Iceberg: key metadata, AGS1 streams, and PyIceberg with keys from any KMS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parquet_keytools.iceberg.encrypted_table import EncryptedTable, create_table, load_table
    from parquet_keytools.iceberg.file_io import EncryptedFileIO
    from parquet_keytools.iceberg.kms_client import IcebergKeyManagementClient

__all__ = ["EncryptedFileIO", "EncryptedTable", "IcebergKeyManagementClient", "create_table", "load_table"]

_HOMES = {"EncryptedFileIO": "file_io", "IcebergKeyManagementClient": "kms_client"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: key metadata and streams need no PyIceberg."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = _HOMES.get(name, "encrypted_table")
    return getattr(importlib.import_module(f"parquet_keytools.iceberg.{home}"), name)
