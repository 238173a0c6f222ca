"""What unmodified PyIceberg reads with our FileIO, by catalog, and that it cannot write to encrypted tables."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from iceberg_case import Lake, rows
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable, Table
from pyiceberg.types import StringType
from rest_catalog import rest_server

from parquet_keytools.errors import (
    ConfigurationError,
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    NotEncryptedError,
)
from parquet_keytools.iceberg import EncryptedFileIO, EncryptedTable, create_table, load_table
from parquet_keytools.iceberg.claims import mapped_location
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.iceberg.table_audit import TableAudit, located_table
from parquet_keytools.secret_bytes import SecretBytes


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def ids(table: Table, **scan: Any) -> list[int]:
    return sorted(table.scan(**scan).to_arrow()["id"].to_pylist())


def test_a_sql_catalog_reads_every_snapshot(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 5))
    table.append(rows(5, 9))
    plain = lake.catalog().load_table("db.people")
    assert type(plain) is Table
    assert ids(plain) == list(range(9))
    assert ids(plain, snapshot_id=plain.metadata.snapshots[0].snapshot_id) == list(range(5))
    assert ids(plain, row_filter="id > 6", selected_fields=("id",)) == [7, 8]
    static = StaticTable.from_metadata(plain.metadata_location, lake.catalog().properties)
    assert ids(static) == list(range(9))
    table.append(rows(9, 10))
    assert ids(plain.refresh()) == list(range(10))


WRITES: list[Callable[[Table], object]] = [
    lambda table: table.append(rows(5, 9)),
    lambda table: table.overwrite(rows(5, 9)),
    lambda table: table.delete("id = 1"),
    lambda table: table.transaction().set_properties({"a": "b"}).commit_transaction(),
    lambda table: table.update_schema().add_column("city", StringType()).commit(),
]


@pytest.mark.parametrize("write", WRITES)
def test_pyiceberg_itself_writes_nothing_to_an_encrypted_table(
    lake: Lake, write: Callable[[Table], object]
) -> None:
    lake.create().append(rows(0, 5))
    before = lake.files()
    with pytest.raises(NotEncryptedError, match="load_table"):
        write(lake.catalog().load_table("db.people"))
    assert lake.files() == before
    assert lake.ids() == list(range(5))
    lake.assert_no_plaintext()


def test_a_plaintext_table_beside_it_is_read_and_written(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    other = lake.catalog().create_table("db.others", rows(0, 1).schema)
    other.append(rows(0, 3))
    assert lake.ids() == list(range(5))
    assert ids(lake.catalog().load_table("db.others")) == ids(load_table(lake.catalog(), "db.others")) == [0, 1, 2]


def test_a_rest_catalog_needs_our_load_table(lake: Lake) -> None:
    with rest_server(lake.folder / "rest") as (_, uri):
        properties = {name: value for name, value in lake.catalog().properties.items() if name != "uri"}
        catalog = RestCatalog("rest", uri=uri, **properties)
        create_table(catalog, "db.people", rows(0, 1).schema, encryption_key="pii").append(rows(0, 5))
        # A changed configuration simulates another process, which has nothing cached.
        configuration = lake.folder / "keytools.yaml"
        configuration.write_text(configuration.read_text() + "\n")
        plain = catalog.load_table("db.people")
        with pytest.raises(KeyNotAvailableError, match="load_table"):
            ids(plain)
        with pytest.raises(NotEncryptedError, match="load_table"):
            plain.append(rows(5, 9))
        assert ids(load_table(catalog, "db.people")) == list(range(5))
        lake.assert_no_plaintext()


def test_a_worker_process_reads_what_it_is_sent(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 5))
    task = next(iter(lake.catalog().load_table("db.people").scan().plan_files()))
    file_io = lake.catalog().load_table("db.people").io
    sent = pickle.dumps((file_io, task.file.file_path))
    done = subprocess.run([sys.executable, "-c", WORKER], input=sent, capture_output=True, check=True, timeout=120)
    assert int(done.stdout) == 5


WORKER = """
import pickle, sys
from pyarrow import parquet
file_io, location = pickle.load(sys.stdin.buffer)
with file_io.new_input(location).open() as file:
    print(parquet.read_table(file).num_rows)
"""


def test_another_file_io_is_refused(monkeypatch: pytest.MonkeyPatch, lake: Lake) -> None:
    lake.create()
    catalog = SqlCatalog("plain", uri=f"sqlite:///{lake.folder}/catalog.db")
    catalog.create_namespace("db")
    catalog.create_table("db.t", pa.schema([("id", pa.int64())]), location=f"file://{lake.folder}/t")
    with pytest.raises(ConfigurationError, match="py-io-impl"):
        load_table(catalog, "db.t")
    monkeypatch.setenv("PARQUET_KEYTOOLS_CONFIG", str(lake.folder / "keytools.yaml"))
    with pytest.raises(ConfigurationError, match="py-io-impl"):
        create_table(
            catalog,
            "db.new",
            pa.schema([("id", pa.int64())]),
            encryption_key="keyA",
            location=f"file://{lake.folder}/new",
        )
    assert not catalog.table_exists("db.new")


def test_a_file_io_needs_a_configuration(monkeypatch: pytest.MonkeyPatch, lake: Lake) -> None:
    monkeypatch.delenv("PARQUET_KEYTOOLS_CONFIG", raising=False)
    with pytest.raises(ConfigurationError, match=r"keytools\.config"):
        EncryptedFileIO({})
    monkeypatch.setenv("PARQUET_KEYTOOLS_CONFIG", str(lake.folder / "keytools.yaml"))
    assert EncryptedFileIO({}).keys.service.kms is not None


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ("", "file:/warehouse/t%2F/x"),
        ("file:/warehouse=file:/data", "file:/data/t%2F/x"),
        ("file:/=s3://bucket/,file:/warehouse/t=s3://other/t", "s3://other/t%2F/x"),
        ("s3://bucket=file:/data", "file:/warehouse/t%2F/x"),
    ],
)
def test_the_longest_beginning_of_a_location_decides(mapping: str, expected: str) -> None:
    assert mapped_location("file:/warehouse/t%2F/x", mapping) == expected


@pytest.mark.parametrize("mapping", ["file:/warehouse", "=x", "x=", "a=b,,c=d"])
def test_a_mapping_that_is_none_is_refused(mapping: str) -> None:
    with pytest.raises(ConfigurationError, match="from=to"):
        mapped_location("file:/warehouse/x", mapping)


# --- tables that lost their keys, and properties that a table must not set ---


def strip(lake: Lake) -> None:
    """Remove all traces of encryption from a table's metadata file, and put plaintext into the table."""
    table = lake.load()
    plain = lake.catalog().create_table("db.forged", rows(0, 1).schema)
    plain.append(rows(900, 903))
    forged = json.loads(path_of(plain.metadata_location).read_text())
    document = json.loads(path_of(table.metadata_location).read_text())
    document["properties"].pop("encryption.key-id")
    document.pop("encryption-keys")
    document["format-version"] = 2
    document["snapshots"] = forged["snapshots"]
    document["current-snapshot-id"] = forged["current-snapshot-id"]
    document["refs"] = forged["refs"]
    document["snapshot-log"] = forged["snapshot-log"]
    path_of(table.metadata_location).write_text(json.dumps(document))


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def test_a_table_that_lost_its_keys_is_refused_where_it_is_known_to_be_encrypted(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    assert isinstance(load_table(lake.catalog(), "db.people", encryption_key="pii"), EncryptedTable)
    assert isinstance(load_table(lake.catalog(), "db.people", encryption_key="keyA"), EncryptedTable)
    with pytest.raises(KeyMaterialError, match="'keyA', and should be under 'keyB'"):
        load_table(lake.catalog(), "db.people", encryption_key="keyB")
    strip(lake)
    with pytest.raises(NotEncryptedError, match="should be under 'pii'"):
        load_table(lake.catalog(), "db.people", encryption_key="pii")
    strict = {"keytools.plaintext-tables": "reject"}
    for load in (lake.catalog(**strict).load_table, lambda name: load_table(lake.catalog(**strict), name)):
        with pytest.raises(NotEncryptedError, match="encrypted ones alone"):
            load("db.people")
    # Otherwise it is a plaintext table, like others in the catalog.
    assert not isinstance(load_table(lake.catalog(), "db.people"), EncryptedTable)


def test_a_catalog_of_encrypted_tables_reads_and_writes_them_alone(lake: Lake) -> None:
    strict = lake.catalog(**{"keytools.plaintext-tables": "reject"})
    table = create_table(strict, "db.people", rows(0, 1).schema, encryption_key="pii")
    table.append(rows(0, 3))
    assert len(strict.load_table("db.people").scan().to_arrow()) == 3
    with pytest.raises(NotEncryptedError):
        strict.create_table("db.plain", rows(0, 1).schema)
    (lake.warehouse / "plain.parquet").write_bytes(b"PAR1")
    with pytest.raises(NotEncryptedError, match="plaintext file"):
        EncryptedFileIO(dict(strict.properties)).read_all(f"file://{lake.warehouse}/plain.parquet")
    with pytest.raises(ConfigurationError, match="not allow or reject"):
        EncryptedFileIO({**strict.properties, "keytools.plaintext-tables": "perhaps"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keytools.config", "/tmp/theirs.yaml"),
        ("keytools.io-impl", "their.code.FileIO"),
        ("keytools.plaintext-tables", "allow"),
        ("py-io-impl", "pyiceberg.io.pyarrow.PyArrowFileIO"),
        ("s3.endpoint", "http://127.0.0.1:1"),
        ("gcs.service.host", "http://127.0.0.1:1"),
        ("adls.account-host", "127.0.0.1:1"),
        ("client.role-arn", "theirs"),
    ],
)
def test_a_table_does_not_choose_our_properties(lake: Lake, name: str, value: str) -> None:
    lake.create().append(rows(0, 3))
    location = lake.load().metadata_location
    document = json.loads(path_of(location).read_text())
    document["properties"][name] = value
    path_of(location).write_text(json.dumps(document))
    for load in (lake.catalog().load_table, lambda name: load_table(lake.catalog(), name)):
        with pytest.raises(ConfigurationError, match=f"the table has the property {name}"):
            load("db.people")
    located = located_table(location, lake.folder / "keytools.yaml")
    findings = TableAudit(located, with_data=False).run().findings
    assert [problem for _, problem in findings if name in problem and "catalogs alone have" in problem]


def test_a_table_may_say_that_we_read_it(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    location = lake.load().metadata_location
    document = json.loads(path_of(location).read_text())
    document["properties"]["py-io-impl"] = "parquet_keytools.iceberg.EncryptedFileIO"
    path_of(location).write_text(json.dumps(document))
    assert lake.ids() == [0, 1, 2]


@pytest.mark.parametrize("name", ["keytools.config", "py-io-impl", "s3.endpoint"])
def test_nobody_gives_a_table_what_would_be_refused_in_it(lake: Lake, name: str) -> None:
    with pytest.raises(ConfigurationError, match="catalogs alone have"):
        lake.create(properties={name: "theirs"})
    table = lake.create()
    with pytest.raises(ConfigurationError, match="catalogs alone have"):
        table.transaction().set_properties({name: "theirs"})


def test_a_scan_decrypts_no_column_that_it_does_not_ask_for(lake: Lake) -> None:
    """This includes a small file, whose pages are all among the last bytes, which Arrow reads for the footer."""
    lake.create().append(rows(0, 500))
    (file,) = lake.table_folder.rglob("*.parquet")
    content = bytearray(file.read_bytes())
    assert len(content) < 64 * 1024
    column = 1
    (task,) = lake.load().scan().plan_files()
    key = StandardKeyMetadata.decode(SecretBytes(task.file.key_metadata), "the file")
    properties = pe.create_decryption_properties(footer_key=key.encryption_key.reveal(), aad_prefix=key.aad_prefix)
    chunk = pq.read_metadata(file, decryption_properties=properties).row_group(0).column(column)
    start = chunk.dictionary_page_offset
    content[start + 60] ^= 1
    file.write_bytes(content)
    table = lake.load()
    assert ids(table, selected_fields=("id",)) == list(range(500))
    with pytest.raises(DecryptionError, match="name"):
        table.scan().to_arrow()
