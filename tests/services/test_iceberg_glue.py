"""Encrypted tables of Iceberg in a Glue catalog, which moto stands for."""

from __future__ import annotations

from pathlib import Path

import moto
import pytest
from iceberg_case import Lake, rows
from pyiceberg.catalog.glue import GlueCatalog

from parquet_keytools.iceberg import create_table, load_table


def test_a_table_is_made_written_by_two_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path)
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    properties = {name: value for name, value in lake.catalog().properties.items() if name != "uri"}
    with moto.mock_aws():
        catalog = GlueCatalog("glue", **properties)
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
    lake.assert_no_plaintext()
    assert lake.outside_ids() == sorted(found)
