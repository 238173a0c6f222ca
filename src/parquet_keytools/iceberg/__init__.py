"""Encrypted tables of Apache Iceberg: key metadata, AGS1 streams, and PyIceberg with keys from any KMS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parquet_keytools.iceberg.encrypted_table import EncryptedTable
    from parquet_keytools.iceberg.file_io import EncryptedFileIO
    from parquet_keytools.iceberg.loading import create_table, load_table

_HOMES = {
    "create_table": "parquet_keytools.iceberg.loading",
    "EncryptedFileIO": "parquet_keytools.iceberg.file_io",
    "EncryptedTable": "parquet_keytools.iceberg.encrypted_table",
    "load_table": "parquet_keytools.iceberg.loading",
}

__all__ = ["EncryptedFileIO", "EncryptedTable", "create_table", "load_table"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: key metadata and streams need no PyIceberg."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
