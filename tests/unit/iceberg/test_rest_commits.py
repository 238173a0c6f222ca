"""Commits to a REST catalog: keys travel as updates, and one that drops them is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from iceberg_case import Lake, rows
from iceberg_reader import Warehouse, current_metadata
from pyiceberg.catalog.rest import RestCatalog
from rest_catalog import RestServer, rest_server

from parquet_keytools.errors import KeyMaterialError
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
    """What we and a reader that shares no code with ours find, which is the same."""
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


def test_a_conflict_is_repeated_and_a_lost_answer_is_no_failure(server: tuple[RestServer, RestCatalog]) -> None:
    rest, catalog = server
    create(catalog).append(rows(0, 1))
    first, second = load_table(catalog, "db.people"), load_table(catalog, "db.people")
    first.append(rows(1, 2))
    second.append(rows(2, 3))
    rest.failing = [500]
    first.append(rows(3, 4))
    assert ids(rest, catalog) == [0, 1, 2, 3]
    metadata = current_metadata(rest.folder / "people")
    # The key of the attempt that failed is not there.
    assert len(metadata["encryption-keys"]) == 1 + len(metadata["snapshots"]) == 5


def test_a_catalog_that_drops_keys_is_reported(server: tuple[RestServer, RestCatalog]) -> None:
    rest, catalog = server
    table = create(catalog)
    rest.drops_keys = True
    with pytest.raises(KeyMaterialError, match="dropped its key"):
        table.append(rows(0, 1))
