"""The encrypted tables of Iceberg's own writer: how to open them, and their expected contents."""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

EPOCH = datetime.datetime(1970, 1, 1)
MASTER_KEYS = {"keyA": b"0123456789012345", "keyB": b"1123456789012345", "master-1": bytes(range(16))}


def write_configuration(folder: Path, **reading: str) -> Path:
    """Write a configuration with the master keys of the tables."""
    lines = ["version: 1", "kms:", "  type: in_memory", "  keys:"]
    lines += [f"    {name}: {base64.b64encode(key).decode()}" for name, key in MASTER_KEYS.items()]
    if reading:
        lines += ["reading:", *(f"  {name}: {value}" for name, value in reading.items())]
    file = folder / "keytools.yaml"
    file.touch(0o600)
    file.write_text("\n".join(lines) + "\n")
    return file


def file_io_properties(configuration: Path, warehouse: Path) -> dict[str, str]:
    """Return the properties of a catalog with the tables' warehouse in a folder."""
    return {
        "py-io-impl": "parquet_keytools.iceberg.EncryptedFileIO",
        "keytools.config": str(configuration),
        "keytools.location-mapping": f"file:/warehouse=file:{warehouse}",
    }


@dataclass(frozen=True)
class ExpectedTable:
    """What `expected/<table>.json` says."""

    document: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> ExpectedTable:
        return cls(json.loads((folder / "expected" / f"{name}.json").read_text()))

    @property
    def metadata(self) -> str:
        return str(self.document["metadata"])

    @property
    def snapshots(self) -> list[dict[str, Any]]:
        return list(self.document["snapshots"])


def plain_value(value: Any) -> Any:
    """Return a value in the form of the expected files."""
    match value:
        case decimal.Decimal():
            return format(value, "f")
        case datetime.datetime():
            return round((value.replace(tzinfo=None) - EPOCH) / datetime.timedelta(microseconds=1))
        case datetime.date():
            return value.isoformat()
        case datetime.time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
        case uuid.UUID():
            return value.hex
        case bytes():
            return value.hex()
        case dict():
            return {name: plain_value(item) for name, item in value.items()}
        case list() if value and isinstance(value[0], tuple):
            return sorted([key, plain_value(item)] for key, item in value)
        case list():
            return [plain_value(item) for item in value]
        case _:
            return value


def column_sha256(rows: pa.Table, name: str, sort_by: str) -> str:
    """Return the digest of a column, as the README of the tables defines it."""
    order = sorted(
        zip(rows[sort_by].to_pylist(), map(plain_value, rows[name].to_pylist()), strict=True), key=_first
    )
    texts = [json.dumps(v, ensure_ascii=True, separators=(",", ":"), sort_keys=True) for _, v in order]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def assert_is_snapshot(rows: pa.Table, snapshot: dict[str, Any]) -> None:
    """Compare rows with a snapshot, column by column."""
    assert rows.num_rows == snapshot["rows"]
    assert rows.column_names == [column["name"] for column in snapshot["columns"]]
    digests = {name: column_sha256(rows, name, snapshot["sort_by"]) for name in rows.column_names}
    assert digests == snapshot["column_sha256"]
