"""Encrypted Iceberg tables in a Glue catalog, for which moto stands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import moto
import pytest
from iceberg_case import Lake, rows
from pyiceberg.catalog.glue import GlueCatalog

from parquet_keytools.errors import OutputError
from parquet_keytools.iceberg import create_table, load_table


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with moto.mock_aws():
        yield Lake(tmp_path)


def glue_of(lake: Lake) -> GlueCatalog:
    properties = {name: value for name, value in lake.catalog().properties.items() if name != "uri"}
    return GlueCatalog("glue", **properties)


def test_a_table_is_made_written_by_two_and_rotated(lake: Lake) -> None:
    catalog = glue_of(lake)
    catalog.create_namespace("db", {"location": f"file://{lake.warehouse}/db"})
    first = create_table(catalog, "db.people", rows(0, 1).schema, encryption_key="pii")
    first.append(rows(0, 5))
    second = load_table(catalog, "db.people")
    first.append(rows(5, 10))
    second.append(rows(10, 15))
    second.delete("id < 2")
    assert len(second.rotate()) == 1
    found = load_table(catalog, "db.people").scan().to_arrow()["id"].to_pylist()
    assert sorted(found) == list(range(2, 15))
    # Unmodified PyIceberg reads old snapshots, too; and no file has a finding.
    plain = glue_of(lake).load_table("db.people")
    past = plain.scan(snapshot_id=plain.metadata.snapshots[1].snapshot_id).to_arrow()["id"].to_pylist()
    assert sorted(past) == list(range(10))
    assert lake.findings(plain.metadata_location) == []
    lake.assert_no_plaintext()
    assert lake.outside_ids() == sorted(found)


def test_a_table_whose_metadata_java_has_hashed_is_left_to_java(lake: Lake) -> None:
    catalog = glue_of(lake)
    catalog.create_namespace("db", {"location": f"file://{lake.warehouse}/db"})
    table = create_table(catalog, "db.people", rows(0, 1).schema, encryption_key="pii")
    table.append(rows(0, 5))
    client = boto3.client("glue")
    entry = client.get_table(DatabaseName="db", Name="people")["Table"]
    given = {name: entry[name] for name in ("Name", "TableType", "Parameters", "StorageDescriptor")}
    given["Parameters"]["metadata_hash"] = "aGFzaA=="
    client.update_table(DatabaseName="db", TableInput=given)
    before = lake.files()
    for write in (lambda: table.append(rows(5, 6)), table.rotate, lambda: table.delete("id = 1")):
        with pytest.raises(OutputError, match="only Iceberg's Java library renews"):
            write()
    assert lake.files() == before
    assert load_table(catalog, "db.people").scan().to_arrow().num_rows == 5
