"""Encrypted Iceberg tables against plaintext ones: scans, and the planning of 10,000 files.

    python benchmarks/iceberg.py

Prints the best CPU seconds of several runs, plaintext and encrypted in turn, and their ratio.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import StaticTable
from pyiceberg.typedef import Record
from pyiceberg.types import LongType

from parquet_keytools import strict_base64
from parquet_keytools.iceberg import ags1, create_table
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.kms.aes_key_wrap import wrap_key
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.secret_bytes import SecretBytes

MASTER_KEY = b"0123456789012345"
ROWS, FILES, COLUMNS = 2_000_000, 10_000, 8
RUNS = 7


def flights(rows: int) -> pa.Table:
    """Return rows like those of real tables: some columns repeat, some do not."""
    random = np.random.default_rng(1)
    return pa.table(
        {
            "id": np.arange(rows),
            "delay": random.integers(-30, 300, rows),
            "distance": random.random(rows) * 5000,
            "carrier": pa.array([f"C{n}" for n in random.integers(0, 20, rows)]),
            "tail": pa.array([f"N{n:05}" for n in random.integers(0, 50_000, rows)]),
            "flown_at": pa.array(
                random.integers(1_500_000_000, 1_700_000_000, rows) * 1_000_000, pa.timestamp("us")
            ),
        }
    )


def properties(folder: Path) -> dict[str, str]:
    """Return the properties of a catalog with our FileIO."""
    configuration = folder / "keytools.yaml"
    configuration.touch(0o600)
    configuration.write_text(
        f"version: 1\nkms:\n  type: in_memory\n  keys:\n    pii: {strict_base64.encode(MASTER_KEY)}\n"
    )
    return {
        "py-io-impl": "parquet_keytools.iceberg.EncryptedFileIO",
        "keytools.config": str(configuration),
    }


def compare(what: str, plain: Callable[[], Any], encrypted: Callable[[], Any]) -> None:
    """Print the best CPU seconds of two ways, run in turn."""
    best = [float("inf")] * 2
    for run in range(RUNS + 1):
        for position, function in enumerate((plain, encrypted)):
            started = time.process_time()
            function()
            if run:
                best[position] = min(best[position], time.process_time() - started)
    print(f"{what:40} plaintext {best[0]:7.3f} s   encrypted {best[1]:7.3f} s   ratio {best[1] / best[0]:5.2f}")


def scans(folder: Path) -> None:
    """Compare scans of the same rows."""
    rows = flights(ROWS)
    plain = SqlCatalog("plain", uri=f"sqlite:///{folder}/plain.db", warehouse=f"file://{folder}/plain")
    encrypted = SqlCatalog(
        "encrypted",
        uri=f"sqlite:///{folder}/encrypted.db",
        warehouse=f"file://{folder}/encrypted",
        **properties(folder),
    )
    for catalog in (plain, encrypted):
        catalog.create_namespace("db")
    plain.create_table("db.flights", rows.schema).append(rows)
    create_table(encrypted, "db.flights", rows.schema, encryption_key="pii").append(rows)
    cases: dict[str, dict[str, Any]] = {
        "scan of all columns": {},
        "scan of two columns": {"selected_fields": ("id", "delay")},
        "scan with a filter": {"row_filter": "delay > 290"},
    }
    # Opening a file costs its footer, which is decrypted and rewritten: small files show it.
    small = {"write.target-file-size-bytes": "1000000"}
    few = rows.slice(0, ROWS // 5)
    plain.create_table("db.small", rows.schema, properties=small).append(few)
    create_table(encrypted, "db.small", rows.schema, encryption_key="pii", properties=small).append(few)
    cases["one column of small files"] = {"selected_fields": ("delay",)}
    for what, arguments in cases.items():
        name = "db.small" if "small" in what else "db.flights"
        compare(
            what,
            lambda a=arguments, n=name: plain.load_table(n).scan(**a).to_arrow(),
            lambda a=arguments, n=name: encrypted.load_table(n).scan(**a).to_arrow(),
        )


def plain_table_of_many_files(folder: Path) -> Path:
    """Create a table of 10,000 files, which do not exist, and return its metadata file."""
    catalog = SqlCatalog("many", uri=f"sqlite:///{folder}/many.db", warehouse=f"file://{folder}/many")
    catalog.create_namespace("db")
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(COLUMNS)])
    table = catalog.create_table("db.many", schema)
    ids = range(1, COLUMNS + 1)
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for number in range(FILES):
            bound = {id_: to_bytes(LongType(), number) for id_ in ids}
            file = DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=f"{table.location()}/data/{number:08}-00000000-0000-0000-0000-000000000000.parquet",
                file_format=FileFormat.PARQUET,
                partition=Record(),
                record_count=1000,
                file_size_in_bytes=100_000,
                column_sizes=dict.fromkeys(ids, 10_000),
                value_counts=dict.fromkeys(ids, 1000),
                null_value_counts=dict.fromkeys(ids, 0),
                nan_value_counts={},
                lower_bounds=bound,
                upper_bounds=bound,
                key_metadata=None,
                split_offsets=[4],
                equality_ids=None,
                sort_order_id=None,
            )
            file.spec_id = 0
            append.append_data_file(file)
    return Path(table.metadata_location.removeprefix("file://"))


def encrypt_table(metadata_file: Path) -> Path:
    """Encrypt the manifests of a table, and return a metadata file that refers to them."""
    document = json.loads(metadata_file.read_text())
    folder = metadata_file.parent
    (snapshot,) = document["snapshots"]

    def encrypted(path: str, change: Callable[[dict[str, Any]], None]) -> tuple[str, StandardKeyMetadata]:
        reader = fastavro.reader(io.BytesIO(Path(path.removeprefix("file://")).read_bytes()))
        records = list(reader)
        for record in records:
            change(record)
        plaintext = io.BytesIO()
        header = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
        fastavro.writer(plaintext, reader.writer_schema, records, codec="deflate", metadata=header)
        target = folder / f"encrypted-{Path(path).name}"
        key = StandardKeyMetadata.fresh(128)
        target.write_bytes(b"".join(ags1.encrypted(plaintext.getvalue(), key)))
        length = target.stat().st_size
        return f"file://{target}", StandardKeyMetadata(key.encryption_key, key.aad_prefix, length)

    def with_key(entry: dict[str, Any]) -> None:
        key = StandardKeyMetadata.fresh(128)
        full = StandardKeyMetadata(key.encryption_key, key.aad_prefix, 100_000)
        entry["data_file"]["key_metadata"] = full.encode().reveal()

    def with_manifest(manifest: dict[str, Any]) -> None:
        path, key = encrypted(manifest["manifest_path"], with_key)
        manifest.update(manifest_path=path, manifest_length=key.file_length, key_metadata=key.encode().reveal())

    path, key = encrypted(snapshot["manifest-list"], with_manifest)
    snapshot.update({"manifest-list": path, "key-id": "list"})
    kek = SecretBytes.random(128)
    wrapped = strict_base64.encode(InMemoryKms({"pii": MASTER_KEY}).wrap_raw(kek, "pii"))
    document["properties"]["encryption.key-id"] = "pii"
    document["encryption-keys"] = [
        {
            "key-id": "kek",
            "encrypted-key-metadata": wrapped,
            "encrypted-by-id": "pii",
            "properties": {"KEY_TIMESTAMP": "1795308001006"},
        },
        {
            "key-id": "list",
            "encrypted-key-metadata": wrap_key(kek, key.encode(), b"1795308001006"),
            "encrypted-by-id": "kek",
        },
    ]
    target = folder / "00009-encrypted.metadata.json"
    target.write_text(json.dumps(document))
    return target


def planning(folder: Path) -> None:
    """Compare the planning of 10,000 files."""
    plain = plain_table_of_many_files(folder)
    encrypted = encrypt_table(plain)
    given = properties(folder)

    def plan(metadata_file: Path, properties: dict[str, str]) -> None:
        files = StaticTable.from_metadata(f"file://{metadata_file}", properties).scan().plan_files()
        assert len(list(files)) == FILES

    compare(f"planning of {FILES:,} files", lambda: plan(plain, {}), lambda: plan(encrypted, given))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        planning(Path(name))
        scans(Path(name))
