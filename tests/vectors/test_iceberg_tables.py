"""Encrypted tables from Iceberg's reference implementation, read by unmodified PyIceberg with our FileIO."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_tables import ExpectedTable, assert_is_snapshot, file_io_properties, write_configuration
from pyiceberg.table import StaticTable
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from parquet_keytools.errors import DecryptionError, NotEncryptedError
from parquet_keytools.iceberg import EncryptedFileIO
from parquet_keytools.kms.in_memory import InMemoryKms

READABLE = ["evolved", "kek_rotated", "people_128"]
ALL = [*READABLE, "avro_data", "plain_leak", "plain_levels", "with_deletes"]


@pytest.fixture
def properties(tmp_path: Path, iceberg_test_data: Path) -> dict[str, str]:
    return file_io_properties(write_configuration(tmp_path), iceberg_test_data / "warehouse")


def load(folder: Path, name: str, properties: dict[str, str]) -> tuple[StaticTable, ExpectedTable]:
    expected = ExpectedTable.read(folder, name)
    return StaticTable.from_metadata(expected.metadata, properties), expected


@pytest.mark.parametrize("name", READABLE)
def test_each_snapshot_has_its_rows(iceberg_test_data: Path, properties: dict[str, str], name: str) -> None:
    table, expected = load(iceberg_test_data, name, properties)
    for snapshot in expected.snapshots:
        assert_is_snapshot(table.scan(snapshot_id=snapshot["snapshot_id"]).to_arrow(), snapshot)
    assert_is_snapshot(table.scan().to_arrow(), expected.snapshots[-1])


def test_snapshots_with_deletion_vectors_have_their_rows(
    iceberg_test_data: Path, properties: dict[str, str]
) -> None:
    table, expected = load(iceberg_test_data, "with_deletes", properties)
    readable = expected.snapshots[:2]
    assert [any("deletion vector" in f["content"] for f in s["files"]) for s in readable] == [False, True]
    for snapshot in readable:
        assert_is_snapshot(table.scan(snapshot_id=snapshot["snapshot_id"]).to_arrow(), snapshot)


def test_filters_and_projections_read_what_they_ask_for(
    iceberg_test_data: Path, properties: dict[str, str]
) -> None:
    table, _ = load(iceberg_test_data, "people_128", properties)
    rows = table.scan(row_filter="id < 100", selected_fields=("id", "email")).to_arrow()
    everything = table.scan().to_arrow()
    assert rows.column_names == ["id", "email"] and 0 < rows.num_rows < everything.num_rows
    assert rows.sort_by("id")["email"].to_pylist() == [
        row["email"] for row in everything.sort_by("id").to_pylist() if row["id"] < 100
    ]
    assert len(table.scan(limit=7).to_pandas()) == 7
    assert table.scan(selected_fields=("id",)).to_duckdb("people").sql(
        "select count(*) from people"
    ).fetchall() == [(everything.num_rows,)]
    assert table.scan().to_polars().height == everything.num_rows


@pytest.mark.parametrize("name", ALL)
def test_each_live_file_decrypts_to_its_records(
    iceberg_test_data: Path, properties: dict[str, str], name: str
) -> None:
    """At the level of files, which covers what PyIceberg cannot read: equality deletes, and data files in Avro."""
    table, expected = load(iceberg_test_data, name, properties)
    file_io = table.io
    assert isinstance(file_io, EncryptedFileIO)
    seen: Counter[str] = Counter()
    for snapshot in expected.snapshots:
        current = table.snapshot_by_id(snapshot["snapshot_id"])
        assert current is not None
        live = [
            entry.data_file
            for manifest in current.manifests(file_io)
            for entry in manifest.fetch_manifest_entry(file_io)
        ]
        assert sorted((f.file_path, f.record_count) for f in live) == sorted(
            (f["path"], f["records"]) for f in snapshot["files"]
        )
        for file in snapshot["files"]:
            if not file["encrypted"] or name == "plain_levels":
                with pytest.raises((NotEncryptedError, DecryptionError)):
                    file_io.read_all(file["path"])
                continue
            content = file_io.read_all(file["path"])
            seen[file["format"]] += 1
            if file["format"] == "parquet":
                assert pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows == file["records"]
            elif file["format"] == "avro":
                assert sum(1 for _ in fastavro.reader(io.BytesIO(content))) == file["records"]
            else:
                assert content[:4] == content[-4:] == b"PFA1"
    assert seen or name == "plain_levels"


def test_rows_in_avro_are_those_that_were_written(iceberg_test_data: Path, properties: dict[str, str]) -> None:
    table, expected = load(iceberg_test_data, "avro_data", properties)
    assert isinstance(table.io, EncryptedFileIO)
    table.snapshots()[-1].manifests(table.io)
    snapshot = expected.snapshots[-1]
    rows = [
        row for file in snapshot["files"] for row in fastavro.reader(io.BytesIO(table.io.read_all(file["path"])))
    ]
    assert_is_snapshot(pa.Table.from_pylist(rows), snapshot)


def test_rows_with_equality_deletes_are_those_that_were_written(
    iceberg_test_data: Path, properties: dict[str, str]
) -> None:
    """PyIceberg refuses these snapshots; so the deletes are applied here, to what our FileIO decrypts."""
    table, expected = load(iceberg_test_data, "with_deletes", properties)
    file_io = table.io
    assert isinstance(file_io, EncryptedFileIO)
    for snapshot in expected.snapshots[2:]:
        current = table.snapshot_by_id(snapshot["snapshot_id"])
        assert current is not None
        with pytest.raises(ValueError, match="equality deletes"):
            table.scan(snapshot_id=current.snapshot_id).to_arrow()
        entries = [
            entry for manifest in current.manifests(file_io) for entry in manifest.fetch_manifest_entry(file_io)
        ]
        # A Puffin file keeps vectors that were replaced.
        current_vectors = {(f["path"], f.get("referenced_data_file")) for f in snapshot["files"]}
        vectors = {
            vector.referenced_data_file: set(vector.to_vector().to_pylist())
            for path in {f["path"] for f in snapshot["files"] if f["format"] == "puffin"}
            for vector in deletion_vectors_from_puffin_file(PuffinFile(file_io.read_all(path)))
            if (path, vector.referenced_data_file) in current_vectors
        }
        rows: list[dict[str, Any]] = []
        for entry in entries:
            if entry.data_file.content != 0:
                continue
            path = entry.data_file.file_path
            data = pq.read_table(pa.BufferReader(file_io.read_all(path))).to_pylist()
            data = [row for place, row in enumerate(data) if place not in vectors.get(path, ())]
            for delete in entries:
                if delete.data_file.content != 2 or (delete.sequence_number or 0) <= (entry.sequence_number or 0):
                    continue
                deleted = pq.read_table(pa.BufferReader(file_io.read_all(delete.data_file.file_path)))
                keys = {tuple(row.values()) for row in deleted.to_pylist()}
                data = [row for row in data if tuple(row[name] for name in deleted.column_names) not in keys]
            rows += data
        assert_is_snapshot(pa.Table.from_pylist(rows), snapshot)


def test_a_plaintext_file_is_refused_where_it_is_read(iceberg_test_data: Path, properties: dict[str, str]) -> None:
    table, expected = load(iceberg_test_data, "plain_leak", properties)
    first, second, _ = expected.snapshots
    assert_is_snapshot(table.scan(snapshot_id=first["snapshot_id"]).to_arrow(), first)
    (leak,) = expected.document["plaintext_files"]
    with pytest.raises(NotEncryptedError, match="plaintext file in an encrypted table") as caught:
        table.scan(snapshot_id=second["snapshot_id"]).to_arrow()
    assert leak in str(caught.value)


def test_a_plaintext_file_is_read_where_that_is_allowed(iceberg_test_data: Path, tmp_path: Path) -> None:
    configuration = write_configuration(tmp_path, plaintext_files="allow")
    properties = file_io_properties(configuration, iceberg_test_data / "warehouse")
    table, expected = load(iceberg_test_data, "plain_leak", properties)
    for snapshot in expected.snapshots:
        assert_is_snapshot(table.scan(snapshot_id=snapshot["snapshot_id"]).to_arrow(), snapshot)


def test_levels_in_plaintext_are_refused(iceberg_test_data: Path, properties: dict[str, str]) -> None:
    table, _ = load(iceberg_test_data, "plain_levels", properties)
    with pytest.raises(DecryptionError, match="leaves their levels in plaintext"):
        table.scan().to_arrow()


@pytest.mark.parametrize(("name", "keks"), [("people_128", 1), ("kek_rotated", 2)])
def test_the_kms_is_asked_once_for_each_kek(
    iceberg_test_data: Path, properties: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, keks: int
) -> None:
    asked: list[str] = []
    unwrap = InMemoryKms.unwrap_raw

    def counted(self: InMemoryKms, wrapped_key: bytes, master_key_id: str) -> Any:
        asked.append(master_key_id)
        return unwrap(self, wrapped_key, master_key_id)

    monkeypatch.setattr(InMemoryKms, "unwrap_raw", counted)
    for _ in range(2):
        table, expected = load(iceberg_test_data, name, properties)
        for snapshot in expected.snapshots:
            table.scan(snapshot_id=snapshot["snapshot_id"]).to_arrow()
    assert asked == ["keyA"] * keks


def test_a_worker_process_finds_the_keys_again(iceberg_test_data: Path, properties: dict[str, str]) -> None:
    table, expected = load(iceberg_test_data, "kek_rotated", properties)
    pickled = pickle.dumps(table.io)
    for snapshot in expected.snapshots:
        for file in snapshot["files"]:
            # A changed configuration simulates another process, which has nothing cached.
            configuration = Path(properties["keytools.config"])
            configuration.write_text(configuration.read_text() + "\n")
            worker = pickle.loads(pickled)
            assert pq.read_metadata(pa.BufferReader(worker.read_all(file["path"]))).num_rows == file["records"]
    table.scan().to_arrow()
    assert b"0123456789012345" not in pickle.dumps(table.io)


def test_nothing_is_written_in_plaintext(iceberg_test_data: Path, properties: dict[str, str]) -> None:
    table, _ = load(iceberg_test_data, "kek_rotated", properties)
    for location in (f"{table.location()}/data/new.parquet", f"{table.location()}/metadata/00004-x.metadata.json"):
        with pytest.raises(NotEncryptedError, match="load_table"):
            table.io.new_output(location)
    # Another FileIO of the same process knows the folder, too.
    without = copy.copy(properties)
    with pytest.raises(NotEncryptedError, match="load_table"):
        EncryptedFileIO(without).new_output(f"{table.location()}/data/new.parquet")


def test_the_vector_of_iceberg_rust(iceberg_test_data: Path, tmp_path: Path) -> None:
    properties = file_io_properties(write_configuration(tmp_path), iceberg_test_data)
    folder = (iceberg_test_data / "iceberg-rust").as_uri()
    properties["keytools.location-mapping"] = (
        f"memory:///table/metadata/manifest-list-enc.avro={folder}/manifest-list-v3-encrypted.avro"
    )
    file_io = EncryptedFileIO(properties)
    file_io.read_metadata(f"{folder}/TableMetadataV3ValidEncryption.json")
    content = file_io.read_all("memory:///table/metadata/manifest-list-enc.avro")
    assert len(content) == 1532
    assert (
        hashlib.sha256(content).hexdigest() == "0e5275412c60ba163e9510f2c3faad8411f9472bfe429de9827255ae7539cfab"
    )
