"""Commits to a REST catalog: keys are sent as updates, and a catalog that drops them is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from iceberg_case import Lake, rows
from iceberg_reader import Warehouse, current_metadata
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.table import StaticTable
from rest_catalog import RestServer, rest_server

from parquet_keytools.errors import KeyMaterialError, NotEncryptedError
from parquet_keytools.iceberg import create_table, load_table
from parquet_keytools.iceberg.encrypted_table import EncryptedTable


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.fixture
def server(lake: Lake) -> Iterator[tuple[RestServer, RestCatalog]]:
    with rest_server(lake.folder / "rest") as (server, uri):
        properties = {name: value for name, value in lake.catalog().properties.items() if name != "uri"}
        yield server, RestCatalog("rest", uri=uri, **properties)


def create(catalog: RestCatalog) -> EncryptedTable:
    return create_table(catalog, "db.people", rows(0, 1).schema, encryption_key="pii")


def ids(server: RestServer, catalog: RestCatalog) -> list[int]:
    """What we and a reader that shares no code with ours read, which is the same."""
    found = sorted(load_table(catalog, "db.people").scan().to_arrow()["id"].to_pylist())
    outsider = Warehouse(server.folder, f"file://{server.folder}")
    metadata = current_metadata(server.folder / "people")
    assert sorted(outsider.table(metadata, metadata["current-snapshot-id"])["id"].to_pylist()) == found
    return found


def test_tables_are_made_written_and_rotated(server: tuple[RestServer, RestCatalog], lake: Lake) -> None:
    rest, catalog = server
    table = create(catalog)
    table.append(rows(0, 10))
    table.overwrite(rows(20, 22), "id >= 5")
    assert ids(rest, catalog) == [0, 1, 2, 3, 4, 20, 21]
    assert [update["action"] for update in rest.requests[0]["updates"]] == [
        "add-encryption-key",
        "add-encryption-key",
        "add-snapshot",
        "set-snapshot-ref",
    ]
    before = current_metadata(rest.folder / "people")
    assert len(table.rotate()) == 1
    after = current_metadata(rest.folder / "people")
    old = {entry["key-id"]: entry for entry in before["encryption-keys"]}
    new = {entry["key-id"]: entry for entry in after["encryption-keys"]}
    assert old.keys() == new.keys()
    assert sum(old[key_id] != new[key_id] for key_id in old) == 1
    assert len(ids(rest, catalog)) == 7
    lake.assert_no_plaintext()


def test_the_past_is_read_and_a_static_table(server: tuple[RestServer, RestCatalog], lake: Lake) -> None:
    rest, catalog = server
    table = create(catalog)
    table.append(rows(0, 5))
    table.overwrite(rows(7, 9), "id >= 3")
    table.rotate()
    # A changed configuration simulates a process that has nothing cached.
    configuration = lake.folder / "keytools.yaml"
    configuration.write_text(configuration.read_text() + "\n")
    loaded = load_table(catalog, "db.people")
    static = StaticTable.from_metadata(loaded.metadata_location, lake.catalog().properties)
    for each in (loaded, static):
        past = each.scan(snapshot_id=each.metadata.snapshots[0].snapshot_id).to_arrow()
        assert sorted(past["id"].to_pylist()) == list(range(5))
        assert sorted(each.scan().to_arrow()["id"].to_pylist()) == ids(rest, catalog) == [0, 1, 2, 7, 8]
    assert lake.findings(loaded.metadata_location) == []


def test_what_a_plain_client_appends_is_refused_and_reported(
    server: tuple[RestServer, RestCatalog], lake: Lake
) -> None:
    """It knows no `encryption.key-id`: its files are plaintext, and its snapshot has no `key-id`."""
    rest, catalog = server
    create(catalog).append(rows(0, 5))
    client = lake.catalog(**{"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"})
    plain = client.create_table("db.plain", rows(0, 1).schema, location=f"file://{rest.folder}/people")
    plain.append(rows(5, 9))
    written = json.loads(Path(plain.metadata_location.removeprefix("file://")).read_text())["snapshots"][0]
    snapshot = {**written, "sequence-number": 2, "first-row-id": 5, "added-rows": 4}
    assert "key-id" not in snapshot
    branch = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch"}
    status, _ = rest.commit(
        "people",
        {
            "requirements": [],
            "updates": [
                {"action": "add-snapshot", "snapshot": snapshot},
                {**branch, "snapshot-id": snapshot["snapshot-id"]},
            ],
        },
    )
    assert status == 200
    loaded = load_table(catalog, "db.people")
    with pytest.raises(NotEncryptedError, match="plaintext"):
        loaded.scan().to_arrow()
    with pytest.raises(NotEncryptedError, match="plaintext"):
        loaded.append(rows(9, 10))
    past = loaded.scan(snapshot_id=loaded.metadata.snapshots[0].snapshot_id).to_arrow()
    assert sorted(past["id"].to_pylist()) == list(range(5))
    places = [place for place, text in lake.findings(loaded.metadata_location) if "plaintext" in text]
    assert any(snapshot["manifest-list"] in place for place in places), places
    assert len(places) >= 3, "the list, the manifest and the data file"


def test_a_conflict_is_repeated_and_a_lost_answer_loses_nothing(server: tuple[RestServer, RestCatalog]) -> None:
    rest, catalog = server
    create(catalog).append(rows(0, 1))
    first, second = load_table(catalog, "db.people"), load_table(catalog, "db.people")
    first.append(rows(1, 2))
    second.append(rows(2, 3))
    rest.failing = [500]
    with pytest.raises(CommitStateUnknownException):
        first.append(rows(3, 4))
    assert ids(rest, catalog) == [0, 1, 2, 3]
    metadata = current_metadata(rest.folder / "people")
    # The key of the failed attempt is not there.
    assert len(metadata["encryption-keys"]) == 1 + len(metadata["snapshots"]) == 5


def test_a_catalog_that_drops_keys_is_reported(server: tuple[RestServer, RestCatalog]) -> None:
    rest, catalog = server
    table = create(catalog)
    rest.drops_keys = True
    with pytest.raises(KeyMaterialError, match="dropped its key"):
        table.append(rows(0, 1))
