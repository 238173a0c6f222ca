"""Writers of new files, for processes that are killed meanwhile: every way to write, from the same sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow_versions import WRITES_IN_ORDER

from parquet_keytools import Keytools
from parquet_keytools.errors import OutputError

IN_ORDER: dict[str, Any] = {"preserve_order": True} if WRITES_IN_ORDER else {}

SECRET = b"this value is secret"
"""In every encrypted row, so that it shows in each file that is not encrypted."""


def _table(number: int) -> pa.Table:
    return pa.table(
        {"a": range(number, number + 300), "b": [SECRET.decode()] * 300, "part": ["p", "q"] * 150},
    )


OLD, NEW = _table(0), _table(1000)

SETTINGS: dict[str, Any] = {"column_keys": {"ka": ["a"], "kb": ["b"]}, "unlisted_columns": "footer_key"}
TARGET = "x.parquet"

Write = Callable[[Keytools, Path, Path, Any, Mapping[str, Any]], object]
"""Takes the source's folder, the folder to write to, its file system and options."""


def _write_table(tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any]) -> None:
    tools.write_table(NEW, folder / TARGET, filesystem=filesystem, row_group_size=150)


def write_dataset(
    tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any], table: pa.Table = NEW
) -> None:
    """Write a partitioned data set, one file after the other."""
    tools.write_dataset(
        table,
        folder,
        partitioning=["part"],
        filesystem=filesystem,
        use_threads=False,
        **IN_ORDER,
        **options,
    )


def _encrypt(tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any]) -> None:
    tools.encrypt_file(source / "plain.parquet", folder / TARGET, target_filesystem=filesystem)


def _decrypt(tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any]) -> None:
    tools.decrypt_file(source / "encrypted.parquet", folder / TARGET, target_filesystem=filesystem)


def _rekey(tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any]) -> None:
    tools.rekey_file(source / "encrypted.parquet", folder / TARGET, target_filesystem=filesystem)


def _erase_rows(tools: Keytools, source: Path, folder: Path, filesystem: Any, options: Mapping[str, Any]) -> None:
    report = tools.erase_rows(folder, filesystem=filesystem, where=options["where"])
    if not report.succeeded:
        raise report.failures[0].error or OutputError("failed")


WRITERS: dict[str, Write] = {
    "erase_rows": _erase_rows,
    "write_table": _write_table,
    "write_dataset": write_dataset,
    "encrypt_file": _encrypt,
    "decrypt_file": _decrypt,
    "rekey_file": _rekey,
}
"""By the method of `Keytools`, or by a name defined here."""
