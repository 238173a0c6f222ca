"""`parquet-keytools iceberg rotate` and `keys --remove-unneeded`, over a catalog in SQLite."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from iceberg_case import Lake, rows
from typer.testing import CliRunner

from parquet_keytools.cli import app
from parquet_keytools.errors import KmsAccessDeniedError
from parquet_keytools.kms.in_memory import InMemoryKms


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def run(lake: Lake, *arguments: str, command: str = "rotate") -> tuple[int, str, str]:
    properties = {name: value for name, value in lake.catalog().properties.items() if name != "keytools.config"}
    options = [text for name, value in properties.items() for text in ("--property", f"{name}={value}")]
    config = ["--config", str(lake.folder / "keytools.yaml"), "--property", "type=sql"]
    result = CliRunner().invoke(app, ["iceberg", command, *arguments, "--catalog", "lake", *options, *config])
    return result.exit_code, result.stdout, result.stderr


def test_keks_are_rewrapped_under_the_new_version(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    lake.keys["keyA"].append("ISEhISEhISEhISEhISEhIQ==")
    lake.configure()
    before = lake.metadata()
    status, text, _ = run(lake, "db.people")
    assert (status, text) == (0, "db.people: 1 KEK re-wrapped under the current version of keyA.\n")
    after = lake.metadata()
    assert before["encryption-keys"][0] != after["encryption-keys"][0]
    assert before["encryption-keys"][1:] == after["encryption-keys"][1:]
    lake.keys["keyA"].pop(0)
    lake.configure()
    assert lake.ids() == [0, 1, 2]
    status, text, _ = run(lake, "db.people", "--json")
    assert (status, json.loads(text)) == (
        0,
        {"table": "db.people", "master_key_id": "keyA", "rotated_keks": [before["encryption-keys"][0]["key-id"]]},
    )


def test_what_cannot_be_rotated_is_said(lake: Lake) -> None:
    status, _, text = run(lake, "db.nothing")
    assert status == 2 and "the catalog 'lake' has no table 'db.nothing'" in text
    lake.catalog().create_table("db.plain", rows(0, 1).schema)
    status, _, text = run(lake, "db.plain")
    assert status == 2 and "the table db.plain is not encrypted" in text
    lake.create().append(rows(0, 3))
    lake.keys["keyA"] = ["ISEhISEhISEhISEhISEhIQ=="]
    lake.configure()
    files = lake.files()
    status, _, text = run(lake, "db.people")
    assert status != 0 and "another master key wrapped it" in text.replace("\n", " ")
    assert lake.files() == files


def test_keys_that_nothing_needs_are_removed(lake: Lake) -> None:
    table = lake.create()
    for n in range(3):
        table.append(rows(n, n + 1))
    table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()
    status, text, _ = run(lake, "db.people", "--json", command="keys")
    assert status == 0 and len(json.loads(text)["unneeded_keys"]) == 1
    status, text, _ = run(lake, "db.people", "--remove-unneeded", "--json", command="keys")
    assert status == 0 and json.loads(text)["unneeded_keys"] == []
    assert len(lake.metadata()["encryption-keys"]) == 3 and lake.ids() == [0, 1, 2]
    metadata_file = lake.load().metadata_location
    result = CliRunner().invoke(app, ["iceberg", "keys", metadata_file, "--remove-unneeded"])
    assert result.exit_code == 2 and "--catalog" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "keys", "rotate"])
@pytest.mark.parametrize("name", ["db.nothing", "nothing.people", "people"])
def test_a_table_that_the_catalog_does_not_have(lake: Lake, command: str, name: str) -> None:
    status, _, text = run(lake, name, command=command)
    assert status == 2 and "the catalog 'lake'" in text and repr(name) in text


def test_a_table_without_keys_is_not_verified(lake: Lake) -> None:
    lake.catalog().create_table("db.plain", rows(0, 1).schema)
    lake.create().append(rows(0, 3))
    stripped = lake.load().metadata_location.removeprefix("file://")
    for command, expected in [("inspect", 0), ("keys", 0), ("verify", 1)]:
        status, text, _ = run(lake, "db.plain", command=command)
        assert status == expected and "the table is not encrypted" in text.lower()
    document = {**lake.metadata(), "encryption-keys": [], "properties": {}}
    for snapshot in document["snapshots"]:
        del snapshot["key-id"]
    Path(stripped).write_text(json.dumps(document))
    status, text, _ = run(lake, "db.people", command="verify")
    assert status == 1 and "the table is not encrypted, and nothing of it was verified" in text


@pytest.mark.parametrize("command", ["inspect", "verify", "keys", "rotate"])
def test_a_catalog_that_cannot_be_opened(lake: Lake, command: str) -> None:
    for uri in ("", "sqlite:////nowhere/x.db"):
        given = ["--property", "type=sql", "--property", f"uri={uri}"] if uri else []
        config = ["--config", str(lake.folder / "keytools.yaml")]
        result = CliRunner().invoke(app, ["iceberg", command, "db.people", "--catalog", "other", *given, *config])
        assert result.exit_code == 2 and "the catalog 'other' cannot be used" in " ".join(result.stderr.split())


def test_the_configuration_of_the_catalog_is_taken(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    options = [
        text for name, value in lake.catalog().properties.items() for text in ("--property", f"{name}={value}")
    ]
    options += ["--property", "type=sql", "--catalog", "lake"]
    result = CliRunner().invoke(app, ["iceberg", "verify", "db.people", *options])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "Nothing is wrong.")


def test_files_of_expired_snapshots_are_no_problem(lake: Lake) -> None:
    table = lake.create()
    table.append(rows(0, 3))
    table.overwrite(rows(3, 6))
    oldest = lake.load()
    oldest.maintenance.expire_snapshots().by_id(oldest.metadata.snapshots[0].snapshot_id).commit()
    status, text, _ = run(lake, "db.people", command="verify")
    assert status == 0 and "Expired snapshots leave such files" in text and "Nothing is wrong." in text
    status, text, _ = run(lake, "db.people", "--json", command="verify")
    document = json.loads(text)
    assert document["orphan_files"] and document["findings"] == []


def test_a_refused_master_key_comes_with_no_advice_about_columns(lake: Lake) -> None:
    lake.create().append(rows(0, 3))
    denied = KmsAccessDeniedError("no", backend="in_memory", operation="unwrap", master_key_id="keyA")
    with mock.patch.object(InMemoryKms, "unwrap_raw", side_effect=denied):
        status, text, _ = run(lake, "db.people", command="verify")
    assert status == 3 and "all columns of the table need this master key" in text.replace("\n", " ")
    assert "without the columns" not in text
