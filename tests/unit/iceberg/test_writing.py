"""Encrypted tables written by us: read by us, and by a reader that shares no code with ours."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import shutil
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy.orm
from iceberg_case import Lake, rows, storage_that
from iceberg_reader import Warehouse, key_metadata
from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Transaction
from pyiceberg.table.update import AddSnapshotUpdate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from soak import sample

from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KmsError,
    NotEncryptedError,
    OutputError,
)
from parquet_keytools.iceberg import create_table, load_table
from parquet_keytools.iceberg.key_chain import KeyChanges, as_json
from parquet_keytools.iceberg.manifests import row_ids_of_manifest
from parquet_keytools.iceberg.metadata import EncryptionKey
from parquet_keytools.iceberg.table_audit import TableAudit, located_table
from parquet_keytools.iceberg.written_files import merged


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


# --- what is written ---


def test_append_overwrite_and_delete_are_read_by_us_and_by_others(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 100))
    table.append(rows(100, 200))
    table.delete("id < 10")
    table.overwrite(rows(500, 505), "id >= 150")
    expected = [*range(10, 150), *range(500, 505)]
    assert lake.ids() == lake.outside_ids() == expected
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == expected
    metadata = lake.metadata()
    first = metadata["snapshots"][0]["snapshot-id"]
    assert len(lake.outsider.table(metadata, first)) == len(table.scan(snapshot_id=first).to_arrow()) == 100
    table.overwrite(rows(7, 9))
    assert lake.ids() == lake.outside_ids() == [7, 8]
    table.delete()
    assert lake.ids() == lake.outside_ids() == []
    lake.assert_no_plaintext()


def test_a_key_for_each_value_is_refused(lake: Lake) -> None:
    """The keys of data files are in manifests, which have one key for all partitions."""
    schema = Schema(NestedField(1, "tenant", StringType(), required=False))
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "tenant"))
    catalog = lake.catalog()
    with pytest.raises(ConfigurationError, match=r"one master key.*Create one table for each value.*'of-VALUE'"):
        create_table(catalog, "db.t", schema, encryption_key="of-{tenant}", partition_spec=spec)
    assert not catalog.table_exists("db.t")


@pytest.mark.parametrize("bits", [128, 192, 256])
def test_keys_have_the_length_of_the_table_and_each_file_has_its_own(lake: Lake, bits: int) -> None:
    table = lake.create(data_key_length_bits=bits)
    assert table.properties["encryption.data-key-length"] == str(bits // 8)
    table.append(rows(0, 5))
    table.append(rows(5, 9))
    assert lake.outside_ids() == list(range(9))
    metadata, found = lake.metadata(), []
    snapshot = metadata["current-snapshot-id"]
    for manifest in lake.outsider.manifests(metadata, snapshot):
        found.append(key_metadata(manifest["key_metadata"]))
    for entry in lake.outsider.entries(metadata, snapshot):
        found.append(key_metadata(entry["data_file"]["key_metadata"]))
    assert len(found) == 4
    assert all(len(key) * 8 == bits and len(prefix) == 16 and length for key, prefix, length in found)
    assert len({key for key, _, _ in found}) == len({prefix for _, prefix, _ in found}) == 4


def test_the_chain_in_the_metadata_file_is_that_of_icebergs_own_writers(lake: Lake) -> None:
    table = lake.create()
    for n in range(3):
        table.append(rows(n, n + 1))
    metadata = lake.metadata()
    assert metadata["format-version"] == 3
    kek, *lists = metadata["encryption-keys"]
    assert kek["encrypted-by-id"] == metadata["properties"]["encryption.key-id"] == "keyA"
    assert abs(int(kek["properties"]["KEY_TIMESTAMP"]) - time.time() * 1000) < 600_000
    assert [entry["encrypted-by-id"] for entry in lists] == [kek["key-id"]] * 3
    assert not any("properties" in entry for entry in lists)
    assert [s["key-id"] for s in metadata["snapshots"]] == [entry["key-id"] for entry in lists]
    # The table has the identifier of the master key in the KMS, not its name here.
    assert "pii" not in json.dumps(metadata["properties"])


def test_row_ids_are_assigned_and_kept(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 100))
    table.append(pa.concat_tables([rows(100, 150)]))
    table.append(rows(1000, 1010))

    def row_ids() -> dict[int, int]:
        """First row id of each live file, by its number of records."""
        metadata, found = lake.metadata(), {}
        for manifest in lake.outsider.manifests(metadata, metadata["current-snapshot-id"]):
            following = manifest["first_row_id"]
            for entry in lake.outsider.entries_of(manifest):
                file = entry["data_file"]
                first = file["first_row_id"]
                if first is None:
                    first, following = following, following + file["record_count"]
                if entry["status"] != 2:
                    found[file["record_count"]] = first
        return found

    assert row_ids() == {100: 0, 50: 100, 10: 150}
    assert lake.metadata()["next-row-id"] == 160
    with table.transaction() as transaction:
        transaction.set_properties(
            {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
        )
    table.append(rows(2000, 2003))
    # One manifest now: its files keep their row ids.
    kept = row_ids()
    assert {count: kept[count] for count in (100, 50, 10)} == {100: 0, 50: 100, 10: 150}
    assert kept[3] >= 160
    table.delete("id >= 1000 and id < 2000")
    assert {count: first for count, first in row_ids().items() if count != 3} == {100: 0, 50: 100}
    assert lake.metadata()["next-row-id"] == table.metadata.next_row_id
    assert lake.outside_ids() == [*range(150), 2000, 2001, 2002]


def test_a_commit_that_is_repeated_after_a_failed_read_keeps_row_ids(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake.create()
    merge = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    for start in (0, 10, 20):
        table.append(rows(start, start + 10))
        with table.transaction() as transaction:
            transaction.set_properties(merge)
    with table.transaction() as transaction:
        transaction.remove_properties(*merge)
    table.append(rows(30, 33))
    # Of the two manifests, the commit rewrites the one with three files.
    transaction = table.transaction()
    producer = transaction.update_snapshot().overwrite()
    producer.delete_data_file(next(task.file for task in table.scan("id = 5").plan_files()))
    read = 0

    def row_ids(*arguments: Any) -> Any:
        nonlocal read
        read += 1
        if read == 2:
            raise OSError("503 Slow Down")
        return row_ids_of_manifest(*arguments)

    monkeypatch.setattr("parquet_keytools.iceberg.pyiceberg_classes.row_ids_of_manifest", row_ids)
    with pytest.raises(OSError, match="Slow Down"):
        producer.commit()
    producer.commit()
    transaction.commit_transaction()
    found = [
        (entry["data_file"]["record_count"], entry["data_file"]["first_row_id"])
        for manifest in lake.outsider.manifests(lake.metadata(), lake.metadata()["current-snapshot-id"])
        for entry in lake.outsider.entries_of(manifest)
        if entry["status"] != 2
    ]
    # Each merged manifest took numbers for all of its rows, also for those that had theirs.
    assert sorted(found, key=repr) == [(10, 10), (10, 30), (3, None)]


def test_sizes_and_bounds_are_those_of_the_encrypted_file(lake: Lake) -> None:
    table = lake.create(properties={"write.parquet.row-group-limit": "40"})
    table.append(rows(0, 100))
    metadata = lake.metadata()
    (entry,) = lake.outsider.entries(metadata, metadata["current-snapshot-id"])
    file = entry["data_file"]
    data = lake.outsider.read(file["file_path"])
    _, prefix, _ = key_metadata(file["key_metadata"])
    # PyIceberg measured the plaintext file.
    assert file["split_offsets"] is None and file["column_sizes"] is None
    assert file["file_size_in_bytes"] == len(data)
    assert {item["key"]: item["value"] for item in file["lower_bounds"]}[1] == bytes(8)
    # The prefix is not stored, and no Parquet key metadata is.
    assert prefix not in data
    assert data[:4] == b"PARE"


def test_values_of_each_type_come_back(lake: Lake) -> None:
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "d": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
            "t": pa.array([datetime.datetime(2026, 1, 1), None], pa.timestamp("us")),
            "b": pa.array([b"x", None], pa.binary()),
            "l": pa.array([[1, None], None], pa.list_(pa.int32())),
            "s": pa.array([{"a": "x"}, None], pa.struct([("a", pa.string())])),
        }
    )
    lake.create(table.schema).append(table)
    assert lake.load().scan().to_arrow().to_pylist() == table.to_pylist()
    metadata = lake.metadata()
    assert lake.outsider.table(metadata, metadata["current-snapshot-id"]).to_pylist() == table.to_pylist()


def test_partitions_are_written_and_names_of_files_do_not_show_them(lake: Lake) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
    table = create_table(lake.catalog(), "db.people", schema, encryption_key="pii", partition_spec=spec)
    table.append(rows(0, 4))
    table.append(rows(0, 4))
    assert lake.outside_ids() == sorted([0, 1, 2, 3] * 2)
    name = rows(2, 3)["name"][0].as_py()
    assert lake.load().scan(row_filter=f"name == '{name}'").to_arrow()["id"].to_pylist() == [2, 2]
    table.dynamic_partition_overwrite(rows(2, 3))
    assert lake.ids() == lake.outside_ids() == [0, 0, 1, 1, 2, 3, 3]
    lake.assert_no_plaintext()


def test_partitions_that_a_table_gets_later_are_not_in_names_of_files_either(lake: Lake) -> None:
    table = lake.create()
    with table.update_spec() as spec:
        spec.add_identity("name")
    table.append(rows(0, 3))
    assert lake.ids() == lake.outside_ids() == [0, 1, 2]
    lake.assert_no_plaintext()


def test_a_transaction_with_several_changes_is_one_commit(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 10))
    before = len(list(lake.table_folder.glob("metadata/*.metadata.json")))
    with table.transaction() as transaction:
        transaction.append(rows(10, 20))
        transaction.delete("id < 5")
        with transaction.update_schema() as update:
            update.add_column("note", StringType())
    assert len(list(lake.table_folder.glob("metadata/*.metadata.json"))) == before + 1
    assert lake.ids() == lake.outside_ids() == list(range(5, 20))
    assert "note" in lake.load().scan().to_arrow().column_names


def test_a_reader_of_batches_is_appended(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 50).to_reader(max_chunksize=7))
    assert lake.ids() == lake.outside_ids() == list(range(50))


def test_a_new_kek_is_the_only_call_for_any_number_of_files(lake: Lake) -> None:
    table = lake.create()
    kms = table.reader.keys.service.kms
    assert kms is not None
    before = sum(kms.call_counts.values())
    table.append(rows(0, 3))
    table.append(rows(3, 6))
    table.append(rows(6, 9))
    after = sum(kms.call_counts.values())
    # One call wraps it; one unwraps it when it is first found in the metadata file.
    assert after - before <= 2


def test_upserts_branches_and_expired_snapshots(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 10))
    changed = pa.table({"id": pa.array([9, 10], pa.int64()), "name": ["canary-4711-x", "canary-4711-y"]})
    done = table.upsert(changed, join_cols=["id"])
    assert (done.rows_updated, done.rows_inserted) == (1, 1)
    assert lake.ids() == lake.outside_ids() == list(range(11))
    first = table.metadata.snapshots[0].snapshot_id
    with table.manage_snapshots() as manage:
        manage.create_branch(first, "audit").create_tag(first, "begin")
    table.append(rows(50, 52), branch="audit")
    assert lake.ids() == lake.outside_ids() == list(range(11))
    assert sorted(table.scan().use_ref("audit").to_arrow()["id"].to_pylist()) == [*range(10), 50, 51]
    before = lake.metadata()
    (expired,) = [s.snapshot_id for s in table.metadata.snapshots[1:2]]
    table.maintenance.expire_snapshots().by_id(expired).commit()
    after = lake.metadata()
    assert after["encryption-keys"] == before["encryption-keys"]
    # PyIceberg takes the parent from the next snapshot; everything else in each stays, above all its key.
    kept = [snapshot for snapshot in before["snapshots"] if snapshot["snapshot-id"] != expired]
    assert [{**s, "parent-snapshot-id": 0} for s in after["snapshots"]] == [
        {**s, "parent-snapshot-id": 0} for s in kept
    ]
    assert all("key-id" in snapshot for snapshot in after["snapshots"])
    assert lake.ids() == lake.outside_ids() == list(range(11))
    lake.assert_no_plaintext()


def test_keys_that_expired_snapshots_left_are_removed_and_no_others(lake: Lake) -> None:
    table = lake.create()
    for n in range(4):
        table.append(rows(n, n + 1))
    assert table.remove_unneeded_keys() == ()
    first, second = (snapshot.snapshot_id for snapshot in table.metadata.snapshots[:2])
    with table.manage_snapshots() as manage:
        manage.create_tag(first, "kept")
    table.maintenance.expire_snapshots().by_id(second).commit()
    before = lake.metadata()
    used = {snapshot["key-id"] for snapshot in before["snapshots"]}
    (unneeded,) = [
        e["key-id"] for e in before["encryption-keys"] if "properties" not in e and e["key-id"] not in used
    ]
    # An unused KEK that is no longer young is removed, too; a KEK that the next commit uses stays.
    kek = next(entry for entry in before["encryption-keys"] if "properties" in entry)
    old = {**kek, "key-id": "old", "properties": {"KEY_TIMESTAMP": "1000000000000"}}
    before["encryption-keys"] += [old, {**kek, "key-id": "spare"}]
    Path(table.metadata_location.removeprefix("file://")).write_text(json.dumps(before))
    table = lake.load()
    assert table.remove_unneeded_keys() == (unneeded, "old")
    after = lake.metadata()
    assert after["encryption-keys"] == [
        entry for entry in before["encryption-keys"] if entry["key-id"] not in (unneeded, "old")
    ]
    assert lake.ids() == lake.outside_ids() == [0, 1, 2, 3]
    assert lake.load().scan(snapshot_id=first).to_arrow()["id"].to_pylist() == [0]
    assert table.remove_unneeded_keys() == ()
    lake.load().append(rows(9, 10))
    assert lake.ids() == lake.outside_ids() == [0, 1, 2, 3, 9]


def test_no_commit_leaves_a_key_without_its_kek() -> None:
    kek = EncryptionKey("kek", b"k", "keyA", "1")
    used = EncryptionKey("list", b"l", "kek", None)
    document = {"encryption-keys": [as_json(kek), as_json(used)], "snapshots": []}
    with pytest.raises(CommitFailedException, match="which KEKs there are"):
        KeyChanges(removed=["kek"]).apply(dict(document))
    late = EncryptionKey("late", b"m", "gone", None)
    with pytest.raises(CommitFailedException, match="which KEKs there are"):
        KeyChanges(added=[late]).apply(dict(document))
    KeyChanges(added=[EncryptionKey("gone", b"n", "keyA", "2"), late]).apply(document)
    assert [entry["key-id"] for entry in document["encryption-keys"]] == ["kek", "list", "gone", "late"]
    KeyChanges(removed=["kek", "list"]).apply(document)
    assert [entry["key-id"] for entry in document["encryption-keys"]] == ["gone", "late"]


def test_a_compressed_metadata_file_is_continued(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    location = lake.load().metadata_location
    path = Path(location.removeprefix("file://"))
    compressed = path.with_name(path.name.replace(".metadata.json", ".gz.metadata.json"))
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    catalog = lake.catalog()
    catalog.drop_table("db.people")
    catalog.register_table("db.people", f"file://{compressed}")
    lake.load().append(rows(3, 5))
    assert lake.ids() == list(range(5))
    assert (
        len(json.loads(Path(lake.load().metadata_location.removeprefix("file://")).read_text())["snapshots"]) == 2
    )


# --- tables of other writers ---


@pytest.mark.parametrize("name", ["people_128", "kek_rotated", "evolved"])
def test_tables_of_iceberg_java_are_continued(iceberg_test_data: Path, lake: Lake, name: str) -> None:
    shutil.copytree(iceberg_test_data / "warehouse" / name, lake.warehouse / name)
    expected = json.loads((iceberg_test_data / "expected" / f"{name}.json").read_text())
    mapping = {"keytools.location-mapping": f"file:/warehouse=file://{lake.warehouse}"}
    catalog = lake.catalog(**mapping)
    catalog.register_table(f"db.{name}", expected["metadata"])
    table = lake.load(f"db.{name}", **mapping)
    before_rows = table.scan().to_arrow()
    before = json.loads(Warehouse(lake.warehouse).read(expected["metadata"]))
    table.append(before_rows.slice(0, 3))
    after = json.loads(Warehouse(lake.warehouse).read(table.metadata_location))
    # The file keeps all its fields, including those that PyIceberg does not know.
    assert after["encryption-keys"][:-1] == before["encryption-keys"]
    assert after["snapshots"][:-1] == before["snapshots"]
    assert set(before) <= set(after)
    keks = [entry for entry in before["encryption-keys"] if "properties" in entry]
    newest = max(keks, key=lambda entry: int(entry["properties"]["KEY_TIMESTAMP"]))
    assert after["encryption-keys"][-1]["encrypted-by-id"] == newest["key-id"]
    outsider = Warehouse(lake.warehouse)
    entries = list(outsider.entries(after, after["current-snapshot-id"]))
    assert sum(entry["data_file"]["record_count"] for entry in entries) == len(before_rows) + 3
    (added,) = [e["data_file"] for e in entries if e["snapshot_id"] == after["current-snapshot-id"]]
    key, prefix, _ = key_metadata(added["key_metadata"])
    properties = pq.encryption.create_decryption_properties(footer_key=key, aad_prefix=prefix)
    read = pq.read_table(pa.BufferReader(outsider.read(added["file_path"])), decryption_properties=properties)
    assert read["id"].to_pylist() == before_rows["id"].to_pylist()[:3]
    assert len(lake.load(f"db.{name}", **mapping).scan().to_arrow()) == len(before_rows) + 3
    assert after["next-row-id"] == before["next-row-id"] + 3


def test_a_table_with_deletion_vectors_and_equality_deletes_is_continued(
    iceberg_test_data: Path, lake: Lake
) -> None:
    shutil.copytree(iceberg_test_data / "warehouse" / "with_deletes", lake.warehouse / "with_deletes")
    expected = json.loads((iceberg_test_data / "expected" / "with_deletes.json").read_text())
    mapping = {"keytools.location-mapping": f"file:/warehouse=file://{lake.warehouse}"}
    lake.catalog(**mapping).register_table("db.with_deletes", expected["metadata"])
    table = lake.load("db.with_deletes", **mapping)
    with_vectors = expected["snapshots"][1]["snapshot_id"]
    with table.manage_snapshots() as manage:
        manage.create_branch(with_vectors, "audit")
    before = table.scan(snapshot_id=with_vectors).to_arrow().sort_by("id")
    table.append(before.slice(0, 2), branch="audit")
    deleted = before["id"][5].as_py()
    table.delete(f"id = {deleted}", branch="audit")
    # The file is copied without the row, and without rows that its deletion vector had deleted.
    ids = sorted(before["id"].to_pylist() + before["id"].to_pylist()[:2])
    ids.remove(deleted)
    assert sorted(table.scan().use_ref("audit").to_arrow()["id"].to_pylist()) == ids
    # The main branch has equality deletes: PyIceberg appends to it, and reports that it cannot read it.
    table.append(before.slice(0, 1))
    with pytest.raises(ValueError, match="equality deletes"):
        table.scan().to_arrow()
    located = located_table(table.metadata_location, lake.folder / "keytools.yaml", properties=mapping)
    report = TableAudit(located, with_data=True).run()
    assert report.findings == [] and report.orphans == []
    assert len(report.lists) == len(expected["snapshots"]) + 3


def test_a_metadata_file_keeps_what_pyiceberg_does_not_know(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    before = lake.metadata()
    before["from-the-future"] = {"a": 1}
    before["snapshots"][0]["more"] = "x"
    before["snapshots"][0]["summary"]["by"] = "another writer"
    before["schemas"][0]["more"] = {"x": [1]}
    (newest,) = lake.table_folder.glob("metadata/00001-*.json")
    newest.write_text(json.dumps(before))
    table = lake.load()
    table.append(rows(3, 5))
    after = lake.metadata()
    assert after["from-the-future"] == {"a": 1}
    assert after["snapshots"][0] == before["snapshots"][0]
    assert len(after["snapshots"]) == 2
    with table.update_schema() as update:
        update.add_column("note", StringType())
    assert lake.metadata()["schemas"][0] == before["schemas"][0]
    changed = json.loads(json.dumps(before))
    del changed["from-the-future"], changed["snapshots"][0]["more"], changed["snapshots"][0]["key-id"]
    changed["snapshots"][0]["timestamp-ms"] += 1
    assert merged(before, changed)["snapshots"][0] == {
        **before["snapshots"][0],
        "timestamp-ms": before["snapshots"][0]["timestamp-ms"] + 1,
    }
    assert merged(before, {**{k: v for k, v in before.items() if k != "refs"}}).keys() == before.keys() - {"refs"}


# --- what is refused ---


def test_nothing_is_written_where_the_format_version_was_lowered(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    (newest,) = lake.table_folder.glob("metadata/00001-*.json")
    newest.write_text(newest.read_text().replace('"format-version": 3', '"format-version": 2'))
    files = lake.files()
    with pytest.raises(KeyMaterialError, match="has format version 2"):
        lake.load().append(rows(3, 6))
    assert lake.files() == files


def test_nothing_is_written_into_a_table_that_lost_its_master_key(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    (newest,) = lake.table_folder.glob("metadata/00001-*.json")
    metadata = json.loads(newest.read_text())
    del metadata["properties"]["encryption.key-id"]
    newest.write_text(json.dumps(metadata))
    table = lake.load()
    files = lake.files()
    with pytest.raises(NotEncryptedError, match=r"no property encryption\.key-id"):
        table.append(rows(3, 6))
    metadata["properties"]["encryption.key-id"] = "keyB"
    newest.write_text(json.dumps(metadata))
    with pytest.raises(KeyMaterialError, match="is 'keyB', and KEKs of the table are under 'keyA'"):
        lake.load().append(rows(3, 6))
    metadata["properties"] |= {"encryption.key-id": "keyA", "encryption.data-key-length": "8"}
    newest.write_text(json.dumps(metadata))
    with pytest.raises(ConfigurationError, match="not the length of an AES key"):
        lake.load().append(rows(3, 6))
    assert lake.files() == files


def test_files_of_others_are_not_added(lake: Lake, tmp_path: Path) -> None:
    table = lake.create()
    pq.write_table(rows(0, 3), tmp_path / "x.parquet")
    with pytest.raises(NotEncryptedError, match="a plaintext file in an encrypted table"):
        table.add_files([f"file://{tmp_path}/x.parquet"])
    assert lake.load().scan().to_arrow().num_rows == 0


def test_properties_of_the_encryption_never_change(lake: Lake) -> None:
    table = lake.create()
    for change in (
        lambda t: t.set_properties({"encryption.key-id": "keyB"}),
        lambda t: t.remove_properties("encryption.key-id"),
        lambda t: t.set_properties(**{"encryption.data-key-length": "32"}),
    ):
        with pytest.raises(ConfigurationError, match="never changes"), table.transaction() as transaction:
            change(transaction)
    assert lake.load().properties["encryption.key-id"] == "keyA"
    with pytest.raises(ConfigurationError, match="never changes"):
        create_table(
            lake.catalog(),
            "db.x",
            rows(0, 1).schema,
            encryption_key="pii",
            properties={"encryption.key-id": "keyB"},
        )


def test_no_table_is_made_where_the_kms_does_not_have_the_key(lake: Lake) -> None:
    with pytest.raises(KmsError):
        create_table(lake.catalog(), "db.x", rows(0, 1).schema, encryption_key="nobody")
    with pytest.raises(ConfigurationError, match="100 bits"):
        create_table(lake.catalog(), "db.x", rows(0, 1).schema, encryption_key="pii", data_key_length_bits=100)
    assert lake.catalog().list_tables("db") == []
    lake.create()
    files = lake.files()
    with pytest.raises(TableAlreadyExistsError):
        lake.create()
    assert lake.files() == files


def test_a_plaintext_table_stays_one(lake: Lake) -> None:
    lake.catalog().create_table("db.plain", rows(0, 1).schema).append(rows(0, 3))
    table = load_table(lake.catalog(), "db.plain")
    table.append(rows(3, 6))
    assert len(table.scan().to_arrow()) == 6


# --- failures, kills, other writers ---


def _steps_of_an_append(lake: Lake) -> list[str]:
    with storage_that(lambda n, name: None) as steps:
        lake.load().append(rows(50, 60))
    return steps


def test_a_failure_at_each_step_leaves_the_table_as_it_was_and_no_file(lake: Lake) -> None:
    lake.create().append(rows(0, 10))
    steps = _steps_of_an_append(lake)
    assert {"create .parquet", "create .avro", "create .json", "write .json"} <= set(steps)
    ids, files = lake.ids(), lake.files()
    for point in sample(range(len(steps)), 2, 1):

        def fail(n: int, name: str, point: int = point) -> None:
            if n == point:
                raise OSError(28, "No space left on device")

        with storage_that(fail), pytest.raises((OSError, OutputError)):
            lake.load().append(rows(100, 110))
        assert lake.files() == files, steps[point]
        assert lake.ids() == ids
    table = lake.load()
    table.append(rows(100, 110))
    assert lake.ids() == lake.outside_ids() == ids + list(range(100, 110))


def test_a_database_that_fails_leaves_the_table_as_it_was_and_a_lost_answer_loses_nothing(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 3))
    commit = sqlalchemy.orm.Session.commit

    def refuse(self: Any) -> None:
        raise sqlalchemy.exc.OperationalError("update", {}, Exception("disk I/O error"))

    with (
        mock.patch.object(sqlalchemy.orm.Session, "commit", refuse),
        pytest.raises(sqlalchemy.exc.OperationalError),
    ):
        table.append(rows(3, 6))
    assert lake.ids() == lake.outside_ids_of(lake.load().metadata_location) == [0, 1, 2]
    # The commit might still arrive, so its files stay.
    lake.assert_no_plaintext()

    def commit_and_fail(self: Any) -> None:
        commit(self)
        raise sqlalchemy.exc.OperationalError("update", {}, Exception("connection reset"))

    table = lake.load()
    with (
        mock.patch.object(sqlalchemy.orm.Session, "commit", commit_and_fail),
        pytest.raises(sqlalchemy.exc.OperationalError),
    ):
        table.append(rows(3, 6))
    assert lake.ids() == list(range(6))
    table = lake.load()
    table.append(rows(6, 7))
    assert lake.ids() == lake.outside_ids_of(lake.load().metadata_location) == list(range(7))


def test_a_kms_that_fails_leaves_no_file(lake: Lake) -> None:
    table = lake.create()
    files = lake.files()
    lake.keys["keyA"] = lake.keys.pop("keyB")
    lake.keys.pop("keyA")
    lake.configure()
    table = lake.load()
    with pytest.raises(KmsError):
        table.append(rows(0, 3))
    assert lake.files() == files


def test_a_commit_that_always_comes_second_fails_and_leaves_no_file(lake: Lake) -> None:
    table = lake.create(properties={"commit.retry.num-retries": "1", "commit.retry.min-wait-ms": "0"})
    table.append(rows(0, 3))
    slow = lake.load()
    # The metadata file is written last: another writer is faster each time.
    quick = iter(range(10, 20))

    def act(n: int, name: str) -> None:
        if name == "create .json" and not busy:
            busy.append(True)
            lake.load().append(rows(number := next(quick), number + 1))
            busy.clear()

    busy: list[bool] = []
    with storage_that(act), pytest.raises(CommitFailedException):
        slow.append(rows(100, 103))
    assert lake.ids() == lake.outside_ids() == [0, 1, 2, 10, 11]
    metadata = lake.metadata()
    named = {lake.table_folder / "metadata" / Path(m["metadata-file"]).name for m in metadata["metadata-log"]}
    assert len(named) == 3
    # Four files for each of three appends, and the first metadata file.
    assert len(lake.files()) == 3 * 4 + 1


def test_a_conflicting_overwrite_fails_and_appends_do_not(lake: Lake) -> None:
    lake.create().append(rows(0, 10))
    slow = lake.load()
    lake.load().delete("id < 5")
    with pytest.raises(Exception, match=r"(?i)found|conflict|missing|deleted"):
        slow.overwrite(rows(100, 101), "id < 7")
    slow = lake.load()
    lake.load().append(rows(20, 22))
    slow.append(rows(30, 32))
    assert lake.ids() == lake.outside_ids() == [5, 6, 7, 8, 9, 20, 21, 30, 31]


def test_writers_and_a_reader_at_once_lose_nothing(lake: Lake) -> None:
    lake.create()
    written: list[int] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def write(number: int) -> None:
        table = lake.load()
        turn = 0
        while turn < 2:
            first = number * 1_000_000 + turn * 10
            table.append(rows(first, first + 2))
            written.extend((first, first + 1))
            turn += 1

    def read() -> None:
        seen: set[int] = set()
        while not stop.is_set():
            found = lake.load().scan().to_arrow()["id"].to_pylist()
            assert len(found) == len(set(found)) and seen <= set(found)
            seen = set(found)

    def kept(work: Any, *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=kept, args=(write, n)) for n in range(3)]
    reader = threading.Thread(target=kept, args=(read,))
    for thread in [*writers, reader]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert failures == []
    assert lake.ids() == lake.outside_ids() == sorted(written)
    # One metadata file, manifest list, manifest and data file for each append, and the first metadata file.
    assert len(lake.files()) == 4 * (len(written) // 2) + 1
    # Only commits that found no KEK made one.
    assert sum("properties" in entry for entry in lake.metadata()["encryption-keys"]) == 1
    lake.assert_no_plaintext()


# --- rotation ---


def test_rotation_wraps_keks_again_and_changes_nothing_else(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 5))
    before, files = lake.metadata(), lake.files()
    new_version = "ISEhISEhISEhISEhISEhIQ=="
    lake.keys["keyA"].append(new_version)
    lake.configure()
    table = lake.load()
    assert len(table.rotate()) == 1
    after = lake.metadata()
    assert len(lake.files() - files) == 1
    (old, *old_rest), (new, *new_rest) = before["encryption-keys"], after["encryption-keys"]
    assert old["encrypted-key-metadata"] != new["encrypted-key-metadata"]
    assert {**old, "encrypted-key-metadata": ""} == {**new, "encrypted-key-metadata": ""}
    assert old_rest == new_rest
    assert after["properties"] == before["properties"] and after["snapshots"] == before["snapshots"]
    # Without the old version of the master key, everything can be read and written.
    lake.keys["keyA"] = [new_version]
    lake.configure()
    lake.load().append(rows(5, 7))
    assert lake.ids() == list(range(7))
    outsider = Warehouse(lake.warehouse, f"file://{lake.warehouse}", {"keyA": base64.b64decode(new_version)})
    metadata = lake.metadata()
    assert len(outsider.table(metadata, metadata["current-snapshot-id"])) == 7


def test_rotation_and_appends_at_once_both_stay(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    lake.keys["keyA"].append("ISEhISEhISEhISEhISEhIQ==")
    lake.configure()
    rotating, appending = lake.load(), lake.load()
    rotating.rotate()
    appending.append(rows(5, 7))
    rotating.append(rows(7, 9))
    late = lake.load()
    appending.rotate()
    assert len(late.rotate()) == 1
    assert lake.ids() == list(range(9))
    assert len(lake.metadata()["encryption-keys"]) == 4


def test_rotation_of_a_kek_that_another_commit_changed_starts_again(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 5))
    (kek,) = table.known().encryption.keks
    stale = KeyChanges(replaced=[(kek, kek)])
    document = lake.metadata()
    stale.apply(document)
    document["encryption-keys"][0]["encrypted-key-metadata"] = "AAAA"
    with pytest.raises(CommitFailedException, match="changed by another commit"):
        stale.apply(document)


def test_a_rotation_that_fails_changes_nothing(lake: Lake) -> None:
    lake.create().append(rows(0, 5))
    files = lake.files()

    def fail(n: int, name: str) -> None:
        if name == "write .json":
            raise OSError(28, "No space left on device")

    with storage_that(fail), pytest.raises(OutputError, match="could not be written"):
        lake.load().rotate()
    assert lake.files() == files and lake.ids() == list(range(5))


def test_transactions_of_one_table_at_once_do_not_touch_each_others_files(lake: Lake) -> None:
    table = lake.create()
    first, second = table.transaction(), table.transaction()
    first.append(rows(0, 5))
    second.append(rows(5, 9))
    with pytest.raises(RuntimeError), second:
        raise RuntimeError
    with first:
        pass
    assert lake.ids() == lake.outside_ids() == list(range(5))
    # The first metadata file, and four files of the commit.
    assert len(lake.files()) == 5


def test_pyicebergs_own_transaction_writes_nothing(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 2))
    files = lake.files()
    with pytest.raises((NotEncryptedError, ValueError)):
        Transaction(table).append(rows(2, 4))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    with pytest.raises(NotEncryptedError, match="have no keys"):
        table._do_commit((AddSnapshotUpdate(snapshot=snapshot),), ())
    assert lake.files() == files
    # Entries that are not snapshots keep the keys.
    with table.update_schema() as update:
        update.add_column("note", StringType())
    with table.transaction() as transaction:
        transaction.set_properties(owner="us")
    assert lake.metadata()["properties"]["owner"] == "us"
    assert lake.ids() == lake.outside_ids() == [0, 1]


def test_a_table_without_rows_has_no_keks(lake: Lake) -> None:
    files = lake.create() and lake.files()
    assert len(lake.load().rotate()) == 0
    assert lake.files() == files
