"""Malicious metadata files and plaintext manifests: they end in errors, within bounds."""

from __future__ import annotations

import bz2
import json
import os
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from iceberg_case import Lake, put_back, rows, storage_that
from pyiceberg.types import StringType
from soak import SOAK

from parquet_keytools.errors import ConfigurationError, KeytoolsError, NotEncryptedError, ParquetFormatError
from parquet_keytools.iceberg import EncryptedTable, create_table
from parquet_keytools.iceberg.table_audit import TableAudit, TableReport, located_table

BOMB = 64 << 20


@pytest.fixture(scope="module")
def saved(folder_in_memory: Path) -> Path:
    """A copy of the folder `lake` beside it, with a table."""
    folder = folder_in_memory / "hostile" / "lake"
    folder.mkdir(parents=True)
    lake = Lake(folder)
    lake.create().append(rows(0, 5))
    assert audit(lake, lake.load().metadata_location).findings == []
    return Path(shutil.copytree(folder, folder.with_name("saved")))


@pytest.fixture
def lake(saved: Path) -> Lake:
    folder = saved.with_name("lake")
    put_back(saved, folder)
    return Lake(folder)


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def claim(lake: Lake, change: Callable[[dict[str, Any]], None]) -> str:
    """Change the current metadata file, and return its location."""
    location = lake.load().metadata_location
    document = json.loads(path_of(location).read_text())
    change(document)
    path_of(location).write_text(json.dumps(document))
    return location


def audit(lake: Lake, location: str) -> TableReport:
    return TableAudit(located_table(location, lake.folder / "keytools.yaml"), with_data=True).run()


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:1/latest/meta-data",
        "HTTPS://127.0.0.1:1/x",
        "s3://bucket/list.avro",
        "hdfs://127.0.0.1:1/x",
        "ftp://127.0.0.1/x",
        "unknown://x",
        "http://[::1",
    ],
)
def test_no_request_goes_where_a_changed_metadata_file_says(lake: Lake, location: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["snapshots"][0]["manifest-list"] = location

    metadata = claim(lake, change)
    with pytest.raises(ParquetFormatError, match=r"it names .*, which is in") as caught:
        lake.catalog().load_table("db.people").scan().to_arrow()
    assert location in str(caught.value)
    # A user who has files there declares it.
    with pytest.raises((KeytoolsError, OSError)) as after:
        lake.load(**{"keytools.location-mapping": f"{location}=file:///nowhere"}).scan().to_arrow()
    assert "which is in" not in str(after.value)
    claim(lake, lambda document: document.update({"statistics": [{"statistics-path": location}]}))
    problems = [problem for link, problem in audit(lake, metadata).findings if location in link]
    assert sum("which is in" in problem for problem in problems) == 2


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "null byte", "traversal"])
def test_what_is_no_file_is_not_read(lake: Lake, kind: str) -> None:
    place = lake.folder / "odd"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    secret = lake.folder / "secret"
    secret.write_text("top secret text")
    location = {
        "device": "file:///dev/zero",
        "null byte": "file:///tmp/a\0b",
        "traversal": f"file://{lake.warehouse}/db/people/metadata/../../../../secret",
    }.get(kind, f"file://{place}")

    def change(document: dict[str, Any]) -> None:
        document["snapshots"][0]["manifest-list"] = location
        # Without a key, it would be read as plaintext.
        del document["snapshots"][0]["key-id"]

    metadata = claim(lake, change)
    report = audit(lake, metadata)
    problems = [problem for link, problem in report.findings if "manifest list" in link]
    assert problems == ["it is a plaintext file in an encrypted table"]
    with pytest.raises(KeytoolsError) as caught:
        lake.load().scan().to_arrow()
    assert "secret text" not in str(caught.value)


def number(value: int) -> bytes:
    """Return a positive number in Avro's encoding."""
    out = bytearray()
    value <<= 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def string(text: str) -> bytes:
    return number(len(text)) + text.encode("ascii")


LIST = {"type": "record", "name": "manifest_file", "fields": [
    {"name": "manifest_path", "type": "string", "field-id": 500},
    {"name": "manifest_length", "type": "long", "field-id": 501},
]}  # fmt: skip


def avro(schema: dict[str, Any] | str, codec: str, records: int, data: bytes) -> bytes:
    """Return an Avro file with one block of any content; its schema may be given as JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    header = number(2) + string("avro.schema") + string(text) + string("avro.codec") + string(codec) + number(0)
    sync = b"s" * 16
    return b"Obj\x01" + header + sync + number(records) + number(len(data)) + data + sync


def deflated() -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


def bunzipped() -> bytes:
    compressor = bz2.BZ2Compressor(9)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


def zstandarded() -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()])


EMPTY = {"type": "record", "name": "r1", "fields": []}


def with_list(items: Any) -> dict[str, Any]:
    extra = {"name": "x", "type": {"type": "array", "items": items, "element-id": 9}, "field-id": 8}
    return {**LIST, "fields": [*LIST["fields"], extra]}  # type: ignore[misc]


def nested(depth: int) -> str:
    """Return a schema as JSON, built as text: a JSON encoder would not take any depth."""
    marked = json.dumps(with_list("nested"))
    records = (
        f'{{"type": "record", "name": "r{n}", "fields": [{{"name": "f", "field-id": {n + 1000}, "type": '
        for n in range(depth)
    )
    return marked.replace('"nested"', "".join(records) + '"string"' + "}]}" * depth)


HUGE = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
"""2^62 - 1 in Avro's encoding."""

HOSTILE = {
    "deflate bomb": lambda: avro(LIST, "deflate", 1, deflated()),
    "bzip2 bomb": lambda: avro(LIST, "bzip2", 1, bunzipped()),
    "zstandard bomb": lambda: avro(LIST, "zstandard", 1, zstandarded()),
    "records without bytes": lambda: avro({**LIST, "fields": []}, "null", 1 << 60, b""),
    "more records than bytes": lambda: avro(LIST, "null", 1 << 40, b"\x02a\x02"),
    "elements without bytes": lambda: avro(with_list(EMPTY), "null", 1, b"\x02a\x02" + HUGE + b"\0"),
    "a string beyond the end": lambda: avro(LIST, "null", 1, b"\x80\x80\x80\x04abc"),
    "a list that goes back": lambda: avro(with_list("string"), "null", 1, b"\x02a\x02\x01\x05\0"),
    "a block beyond the end": lambda: avro(LIST, "null", 1, b"")[:-18] + b"\x02" + HUGE,
    "a cut block": lambda: avro(LIST, "deflate", 1, zlib.compress(b"\x02a\x02")[2:-6]),
    "no Avro at all": lambda: b"Obj\x01" + bytes(1000),
    "nulls without bytes": lambda: avro(with_list("null"), "null", 1, b"\x02a\x02" + HUGE + b"\0"),
    "a record of a million numbers": lambda: avro(
        with_list("long"), "null", 1, b"\x02a\x02" + number(1 << 20) + bytes((1 << 20) + 1)
    ),
    "deep nesting": lambda: avro(nested(3_000), "null", 1, b"\x02a\x02\0"),
    "deepest nesting": lambda: avro(nested(30_000), "null", 1, b"\x02a\x02\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plaintext_manifest_list_that_does_harm_is_reported_and_never_decoded(lake: Lake, name: str) -> None:
    configuration = lake.folder / "keytools.yaml"
    configuration.write_text(configuration.read_text() + "reading: {plaintext_files: allow}\n")
    (snapshot,) = json.loads(path_of(lake.load().metadata_location).read_text())["snapshots"]
    path_of(snapshot["manifest-list"]).write_bytes(HOSTILE[name]())
    metadata = claim(lake, lambda document: document["snapshots"][0].pop("key-id"))
    tracemalloc.start()
    try:
        report = audit(lake, metadata)
        with pytest.raises(NotEncryptedError, match="no key metadata"):
            lake.load().scan().to_arrow()
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()
    problems = [problem for link, problem in report.findings if "manifest list" in link]
    assert problems == ["it is a plaintext file in an encrypted table"]


# --- a changed metadata file before an honest commit ---


def change_and_find(lake: Lake, change: Callable[[dict[str, Any]], None], text: str) -> EncryptedTable:
    """Change the metadata file; `verify` reports it, and the table still loads."""
    location = claim(lake, change)
    findings = audit(lake, location).findings
    assert any(text in problem for link, problem in findings if link.startswith("metadata file")), findings
    return lake.load()


def bystander(lake: Lake, name: str) -> Path:
    """Create another table, and return its metadata file."""
    other = create_table(lake.catalog(), f"db.{name}", rows(0, 1).schema, encryption_key="pii")
    other.append(rows(0, 1))
    return path_of(other.metadata_location)


DELETING = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "1",
}


def put_into_log(*locations: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["properties"] |= DELETING
        document["metadata-log"] = [{"metadata-file": location, "timestamp-ms": 1} for location in locations]

    return change


@pytest.mark.parametrize(
    "kind", ["table", "data", "text", "traversal", "encoded", "link", "copy", "folder", "host"]
)
def test_a_commit_deletes_no_file_that_is_no_metadata_file_of_the_table(lake: Lake, kind: str) -> None:
    metadata_folder = lake.table_folder / "metadata"
    other = bystander(lake, "other")
    beside = metadata_folder / "0-beside.metadata.json"
    victim = {
        "data": next(lake.table_folder.rglob("*.parquet")),
        "text": lake.folder / "keytools.yaml",
        "copy": beside,
        "link": beside,
        "folder": beside,
    }.get(kind, other)
    if kind == "copy":
        # A metadata file of another table, in the folder of this one.
        beside.write_bytes(other.read_bytes())
    elif kind == "link":
        beside.symlink_to(other)
    elif kind == "folder":
        beside.mkdir()
    location = f"file://{victim}"
    if kind == "traversal":
        location = f"file://{metadata_folder}/../../other/metadata/{other.name}"
    elif kind == "encoded":
        location = f"file://{metadata_folder}/%2e%2e/%2e%2e/other/metadata/{other.name}"
    elif kind == "host":
        location = f"file://localhost{victim}"
    before = {path for path in lake.warehouse.rglob("*") if not path.is_dir()}
    claim(lake, put_into_log(location, location))
    lake.load().append(rows(5, 7))
    assert victim.exists() and other.exists()
    assert before <= {path for path in lake.warehouse.rglob("*") if not path.is_dir()}
    assert lake.ids() == list(range(7))


def test_a_log_that_names_files_of_others_is_reported(lake: Lake) -> None:
    other = bystander(lake, "other")
    change_and_find(lake, put_into_log(f"file://{other}"), "its metadata log names")


def test_a_log_that_names_the_current_metadata_file_otherwise_does_not_delete_it(lake: Lake) -> None:
    current = path_of(lake.load().metadata_location)
    aliases = [f"file:{current}", f"file://{current.parent}//{current.name}", str(current)]
    claim(lake, put_into_log(*aliases, *aliases))
    lake.load().append(rows(5, 7))
    assert current.exists() and lake.ids() == list(range(7))


def test_old_metadata_files_of_the_table_are_deleted_where_it_asks_for_it(lake: Lake) -> None:
    with lake.load().transaction() as transaction:
        transaction.set_properties(DELETING)
    for n in range(3):
        lake.load().append(rows(5 + n, 6 + n))
    assert len(list((lake.table_folder / "metadata").glob("*.metadata.json"))) == 2
    assert lake.ids() == list(range(8))
    assert [problem for link, problem in audit(lake, lake.load().metadata_location).findings] == []


def test_purging_a_table_deletes_no_file_outside_of_its_folder(lake: Lake) -> None:
    other = bystander(lake, "other")
    claim(lake, put_into_log(f"file://{other}", f"file://{lake.folder}/keytools.yaml"))
    lake.catalog().purge_table("db.people")
    assert other.exists() and (lake.folder / "keytools.yaml").exists()
    # The log no longer names the first metadata file.
    assert {path.suffix for path in lake.files()} == {".json"}


def outside(lake: Lake, kind: str) -> str:
    """Return a place outside the table's folder, as a metadata file may name it."""
    elsewhere = lake.folder / "elsewhere"
    elsewhere.mkdir()
    (lake.table_folder / "link").symlink_to(elsewhere)
    return {
        "absolute": f"file://{elsewhere}",
        "path": str(elsewhere),
        "short": f"file:{elsewhere}",
        "traversal": f"file://{lake.table_folder}/../../../elsewhere",
        "encoded": f"file://{lake.table_folder}/%2e%2e/elsewhere",
        "link": f"file://{lake.table_folder}/link",
        "host": f"file://localhost{elsewhere}",
        "prefix": f"file://{lake.table_folder}-of-others",
        "other store": "s3://bucket/people",
        "unknown": "unknown://x",
        "relative": "elsewhere",
    }[kind]


PLACES = ["absolute", "path", "short", "traversal", "encoded", "link", "host", "prefix", "other store", "unknown"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for row, name in enumerate(["location", "write.data.path", "write.metadata.path"])
        # Each kind under two of the names.
        for column, kind in enumerate([*PLACES, "relative"])
        if SOAK or (row + column) % 3
    ],
)
def test_a_commit_writes_nowhere_that_the_metadata_file_alone_names(lake: Lake, name: str, kind: str) -> None:
    place = outside(lake, kind)

    def change(document: dict[str, Any]) -> None:
        (document if name == "location" else document["properties"])[name] = place

    table = change_and_find(lake, change, "outside of the folder of the table")
    files = {path for path in lake.folder.rglob("*") if path.name != "catalog.db"}
    for commit in (
        lambda: table.append(rows(5, 7)),
        lambda: table.delete("id = 1"),
        lambda: lake.load().rotate(),
        lambda: lake.load().update_schema().add_column("x", StringType()).commit(),
        lambda: lake.load().transaction().set_properties(x="y").commit_transaction(),
    ):
        with pytest.raises(ParquetFormatError, match="outside of the folder of the table"):
            commit()
    assert {path for path in lake.folder.rglob("*") if path.name != "catalog.db"} == files
    assert lake.ids() == list(range(5))


@pytest.mark.parametrize("name", ["write.object-storage.path", "write.folder-storage.path"])
def test_places_that_other_writers_take_are_reported(lake: Lake, name: str) -> None:
    change_and_find(lake, lambda d: d["properties"].update({name: "file:///elsewhere"}), name)


def test_a_metadata_file_that_changes_during_a_commit_leads_it_nowhere(lake: Lake) -> None:
    table, elsewhere = lake.load(), lake.folder / "elsewhere"

    def act(_: int, step: str) -> None:
        if step == "create .parquet":
            claim(lake, lambda document: document.update({"location": f"file://{elsewhere}"}))

    with storage_that(act), pytest.raises(ParquetFormatError, match="outside of the folder of the table"):
        table.append(rows(5, 7))
    assert not elsewhere.exists() and lake.ids() == list(range(5))


def test_the_catalog_names_other_places(lake: Lake) -> None:
    elsewhere = lake.folder / "elsewhere"
    places = {"keytools.write-locations": f"file:///nowhere, file://{elsewhere}"}
    claim(lake, lambda d: d["properties"].update({"write.data.path": f"file://{elsewhere}/people"}))
    lake.load(**places).append(rows(5, 7))
    assert lake.ids() == list(range(7)) and list(elsewhere.rglob("*.parquet"))
    with pytest.raises(ParquetFormatError, match="outside of the folder"):
        lake.load().append(rows(7, 9))
    # A new table or property whose place the catalog does not list is refused at once.
    data_path = {"write.data.path": f"file://{elsewhere}/more"}
    schema = rows(0, 1).schema
    with pytest.raises(ConfigurationError, match="does not list"):
        create_table(lake.catalog(), "db.more", schema, encryption_key="pii", properties=data_path)
    table = create_table(lake.catalog(**places), "db.more", schema, encryption_key="pii", properties=data_path)
    table.append(rows(0, 3))
    assert table.scan().to_arrow().num_rows == 3
    with pytest.raises(ParquetFormatError, match="outside of the folder"):
        table.transaction().set_properties({"write.data.path": "file:///elsewhere"})


@pytest.mark.parametrize("by", ["file", "create", "set"])
def test_no_table_names_a_class_that_is_imported(lake: Lake, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "write.py-location-provider.impl"
    (lake.folder / "iceberg_spy.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('seen').touch()\n"
    )
    monkeypatch.syspath_prepend(str(lake.folder))
    with pytest.raises(ConfigurationError, match=name):
        if by == "file":
            claim(lake, lambda document: document["properties"].update({name: "iceberg_spy.Provider"}))
            lake.load().append(rows(5, 7))
        elif by == "set":
            lake.load().transaction().set_properties({name: "iceberg_spy.Provider"})
        else:
            schema = rows(0, 1).schema
            create_table(
                lake.catalog(), "db.t", schema, encryption_key="pii", properties={name: "iceberg_spy.Provider"}
            )
    assert not (lake.folder / "seen").exists()


# --- counters ---


def test_a_new_column_never_has_the_id_of_a_deleted_one(lake: Lake) -> None:
    with lake.load().update_schema() as update:
        update.delete_column("name")

    def lower(document: dict[str, Any]) -> None:
        document["last-column-id"] = 1
        # Without the schemas that had the column, only the files show it.
        document["schemas"] = [s for s in document["schemas"] if s["schema-id"] == document["current-schema-id"]]
        for snapshot in document["snapshots"]:
            snapshot.pop("schema-id", None)

    table = change_and_find(lake, lower, "its last-column-id is 1, and the table has given 2")
    files = lake.files()
    with pytest.raises(ParquetFormatError, match="last-column-id"):
        table.update_schema().add_column("fresh", StringType()).commit()
    with pytest.raises(ParquetFormatError, match="last-column-id"), lake.load().transaction() as transaction:
        with transaction.update_schema() as update:
            update.union_by_name(pa.schema([("id", pa.int64()), ("fresh", pa.string())]))
        transaction.append(pa.table({"id": [9], "fresh": ["x"]}))
    assert lake.files() == files and "fresh" not in lake.load().schema().column_names


def test_a_column_that_no_schema_of_a_manifest_has_is_found_in_its_files(lake: Lake) -> None:
    table = lake.load()
    with table.update_schema() as update:
        update.delete_column("name")
    merging = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "1"}
    with table.transaction() as transaction:
        transaction.set_properties(merging)
    # The manifest is rewritten with the current schema.
    table.append(pa.table({"id": [9]}))
    table.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in table.metadata.snapshots[:-1]]).commit()

    def lower(document: dict[str, Any]) -> None:
        document["last-column-id"] = 1
        document["schemas"] = document["schemas"][-1:]

    table = change_and_find(lake, lower, "last-column-id")
    with pytest.raises(ParquetFormatError, match="last-column-id"):
        table.update_schema().add_column("fresh", StringType()).commit()


COUNTERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "last-column-id": lambda d: d.update({"last-column-id": 1}),
    "last-column-id of none": lambda d: d.update({"last-column-id": 0}),
    "last-column-id too high": lambda d: d.update({"last-column-id": 2**31 - 5}),
    "last-partition-id": lambda d: d.update({"last-partition-id": 999}),
    "last-sequence-number": lambda d: d.update({"last-sequence-number": 0}),
    "last-sequence-number too high": lambda d: d.update({"last-sequence-number": 2**63 - 1}),
    "next-row-id": lambda d: d.update({"next-row-id": 2}),
    "next-row-id missing": lambda d: d.pop("next-row-id"),
    "next-row-id too high": lambda d: d.update({"next-row-id": 2**63 - 1}),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_no_counter_is_below_what_the_metadata_file_has_itself(lake: Lake, name: str) -> None:
    with lake.load().update_spec() as spec:
        spec.add_identity("name")
    table = change_and_find(lake, COUNTERS[name], f"its {name.split()[0]} is")
    for commit in (
        lambda: table.append(rows(5, 7)),
        lambda: lake.load().update_spec().add_identity("id").commit(),
    ):
        with pytest.raises(ParquetFormatError, match=name.split()[0]):
            commit()
    assert lake.ids() == list(range(5))


@pytest.mark.parametrize("name", ["last-sequence-number", "next-row-id"])
def test_no_counter_of_snapshots_is_below_what_the_manifest_list_has(lake: Lake, name: str) -> None:
    lake.load().append(rows(5, 7))

    def lower(document: dict[str, Any]) -> None:
        document[name] = 1
        for snapshot in document["snapshots"]:
            snapshot["sequence-number"] = 1
            snapshot["first-row-id"] = snapshot["added-rows"] = 0

    table = change_and_find(lake, lower, f"its {name} is 1")
    files = lake.files()
    with pytest.raises(ParquetFormatError, match=name):
        table.append(rows(7, 9))
    assert lake.files() == files and lake.ids() == list(range(7))


def test_no_partition_field_or_spec_has_a_number_that_manifests_have(lake: Lake) -> None:
    table = lake.load()
    with table.update_spec() as spec:
        spec.add_identity("name")
    table.append(rows(5, 7))
    with table.update_spec() as spec:
        spec.remove_field("name")

    def forget(document: dict[str, Any]) -> None:
        document["partition-specs"] = [{"spec-id": 0, "fields": []}]
        document["default-spec-id"] = 0
        document["last-partition-id"] = 999

    location = claim(lake, forget)
    problems = [problem for _, problem in audit(lake, location).findings]
    assert any("last-partition-id is 999" in problem for problem in problems)
    assert any("highest spec-id is 0" in problem for problem in problems)
    with pytest.raises(ParquetFormatError, match="last-partition-id"):
        lake.load().update_spec().add_identity("id").commit()
