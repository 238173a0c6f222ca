"""`parquet-keytools iceberg inspect|verify|keys`, over the tables of Iceberg's own writer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from iceberg_tables import ExpectedTable, write_configuration
from typer.testing import CliRunner

from parquet_keytools.cli import app

TABLES = ["avro_data", "evolved", "kek_rotated", "people_128", "with_deletes"]


class Command:
    """Runs a command on a table whose warehouse is in a folder."""

    def __init__(self, warehouse: Path, configuration: Path | None, expected: Path) -> None:
        self.warehouse = warehouse
        self.configuration = configuration
        self.expected = expected

    def metadata(self, name: str) -> Path:
        location = ExpectedTable.read(self.expected, name).metadata
        return self.warehouse / location.removeprefix("file:/warehouse/")

    def run(self, command: str, name: str, *options: str) -> tuple[int, str]:
        arguments = ["iceberg", command, str(self.metadata(name))]
        arguments += ["--property", f"keytools.location-mapping=file:/warehouse=file:{self.warehouse}", *options]
        if self.configuration is not None:
            arguments += ["--config", str(self.configuration)]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.stdout

    def document(self, command: str, name: str) -> tuple[int, dict[str, Any]]:
        status, text = self.run(command, name, "--json")
        return status, json.loads(text)


@pytest.fixture
def command(tmp_path: Path, iceberg_test_data: Path) -> Command:
    return Command(iceberg_test_data / "warehouse", write_configuration(tmp_path), iceberg_test_data)


@pytest.fixture
def changed(command: Command, tmp_path: Path) -> Command:
    """The same, over a copy that a test may change."""
    warehouse = tmp_path / "warehouse"
    for name in ("kek_rotated", "with_deletes"):
        shutil.copytree(command.warehouse / name, warehouse / name)
    return Command(warehouse, command.configuration, command.expected)


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_wrong_with_a_good_table(command: Command, name: str) -> None:
    for subcommand in ("inspect", "verify"):
        status, document = command.document(subcommand, name)
        assert (status, document["findings"], document["plaintext_files"]) == (0, [], [])
    expected = ExpectedTable.read(command.expected, name)
    assert [s["snapshot_id"] for s in document["snapshots"]] == [s["snapshot_id"] for s in expected.snapshots]
    files = {file["location"]: file for file in document["files"]}
    for snapshot in expected.snapshots:
        for file in snapshot["files"]:
            assert snapshot["snapshot_id"] in files[file["path"]]["snapshot_ids"]
            assert files[file["path"]]["length"] == file["file_size_in_bytes"]
    status, text = command.run("verify", name)
    assert status == 0 and "Nothing is wrong." in text


def test_the_plaintext_file_is_reported(command: Command) -> None:
    (leak,) = ExpectedTable.read(command.expected, "plain_leak").document["plaintext_files"]
    for subcommand in ("inspect", "verify"):
        status, document = command.document(subcommand, "plain_leak")
        assert (status, document["plaintext_files"]) == (1, [leak])
        assert document["findings"] == [
            {"link": f"data file {leak}", "problem": "it is a plaintext file in an encrypted table"}
        ]


def test_levels_in_plaintext_are_reported(command: Command) -> None:
    status, document = command.document("verify", "plain_levels")
    (finding,) = document["findings"]
    assert status == 1 and "leaves their levels in plaintext" in finding["problem"]


def test_the_tree_has_all_links(command: Command) -> None:
    status, text = command.run("inspect", "kek_rotated")
    lines = text.splitlines()
    keks = [line for line in lines if "─ KEK" in line]
    assert status == 0
    assert max(map(len, lines)) > 100, "as narrow as a terminal that is not there"
    assert "master key keyA (for new KEKs)" in text
    assert len(keks) == 2 and "due" in keks[0] and "due" not in keks[1]
    assert sum("─ snapshot" in line for line in lines) == 3
    assert text.count("as above") == 3
    assert "3 snapshots, 9 files, 4 of them shared by snapshots; master keys: keyA." in text


def test_keys_calls_no_kms(command: Command) -> None:
    without = Command(command.warehouse, None, command.expected)
    status, document = without.document("keys", "kek_rotated")
    assert status == 0
    assert (document["master_key_id"], document["master_key_ids"], document["unneeded_keys"]) == (
        "keyA",
        ["keyA"],
        [],
    )
    assert [len(kek["snapshot_ids"]) for kek in document["keks"]] == [1, 2]
    status, text = without.run("keys", "kek_rotated")
    assert status == 0 and "2024-11-21" in text


def test_without_a_kms_the_chain_ends_at_the_keks(command: Command) -> None:
    status, document = Command(command.warehouse, None, command.expected).document("inspect", "people_128")
    assert status == 1
    assert "has no kms" in document["findings"][0]["problem"]


def test_a_kms_that_refuses_is_status_3(command: Command, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    configuration = write_configuration(other)
    configuration.write_text(configuration.read_text().replace("keyA:", "keyC:"))
    status, text = Command(command.warehouse, configuration, command.expected).run("verify", "people_128")
    assert status == 3 and "no such master key" in text


def test_what_is_wrong_is_reported_by_its_link(changed: Command) -> None:
    expected = ExpectedTable.read(changed.expected, "with_deletes")
    paths = {
        file["format"]: changed.warehouse / file["path"].removeprefix("file:/warehouse/")
        for file in expected.snapshots[-1]["files"]
    }
    for path in paths.values():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    manifests = sorted((changed.warehouse / "with_deletes" / "metadata").glob("*-m0.avro"))
    manifests[0].write_bytes(manifests[0].read_bytes()[:-100])
    manifests[1].unlink()
    status, document = changed.document("verify", "with_deletes")
    assert status == 1
    found = {finding["link"].rpartition("/")[2]: finding["problem"] for finding in document["findings"]}
    assert found.keys() >= {path.name for path in (*paths.values(), *manifests[:2])}
    assert "bytes, and" in found[manifests[0].name]
    assert "cannot be read" in found[manifests[1].name]


def test_keys_that_nothing_needs_are_shown(changed: Command) -> None:
    metadata = changed.metadata("kek_rotated")
    document = json.loads(metadata.read_text())
    expired = document["snapshots"].pop(0)
    old_kek = next(e["encrypted-by-id"] for e in document["encryption-keys"] if e["key-id"] == expired["key-id"])
    document["statistics"] = [
        {"snapshot-id": 1, "statistics-path": f"file:{changed.warehouse}/s.puffin", "file-size-in-bytes": 4}
    ]
    (changed.warehouse / "s.puffin").write_bytes(b"PFA1")
    metadata.write_text(json.dumps(document))
    _, keys = changed.document("keys", "kek_rotated")
    assert sorted(keys["unneeded_keys"]) == sorted([expired["key-id"], old_kek])
    status, report = changed.document("verify", "kek_rotated")
    assert sorted(report["unneeded_keys"]) == sorted([expired["key-id"], old_kek])
    assert status == 1 and report["plaintext_files"] == [f"file:{changed.warehouse}/s.puffin"]
    assert [finding["link"] for finding in report["findings"]] == [
        f"statistics file file:{changed.warehouse}/s.puffin"
    ]


def test_a_property_is_name_and_value(command: Command) -> None:
    status, _ = command.run("keys", "people_128", "--property", "nothing")
    assert status == 2


# --- metadata files of tables in a folder that `verify` checks ---


def verified(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["verify", str(folder), "--json", *options])
    document = json.loads(result.stdout)
    rules = {rule["id"]: rule for rule in document["rules"]}
    found = [finding["message"] for finding in rules["other-data"]["findings"]]
    return result.exit_code, {
        **document,
        "other-data": found,
        "not checked": rules["plaintext-skipped"]["reasons"],
    }


@pytest.mark.parametrize("name", ["evolved", "kek_rotated", "people_128", "with_deletes"])
def test_metadata_of_an_authentic_table_is_no_plaintext_data(command: Command, name: str) -> None:
    status, document = verified(command.warehouse / name, "--config", str(command.configuration))
    assert document["other-data"] == []
    assert {file["verdict"] for file in document["files"]} <= {"conforms", "conforms, with weaknesses"}
    assert status == 0


def test_without_a_configuration_the_message_says_how_to_accept_metadata(command: Command) -> None:
    folder = command.warehouse / "people_128"
    status, document = verified(folder)
    assert status == 1 and len(document["other-data"]) == len(list(folder.glob("metadata/*.metadata.json")))
    for text in ("--config", "iceberg verify", "--allow-plaintext"):
        assert text in document["other-data"][0]
    assert verified(folder, "--allow-plaintext", "metadata/*.metadata.json")[0] == 0


@pytest.mark.parametrize("name", ["plain_leak", "plain_levels"])
def test_metadata_of_a_table_with_plaintext_files_is_plaintext_data(command: Command, name: str) -> None:
    status, document = verified(command.warehouse / name, "--config", str(command.configuration))
    assert (status, document["verdict"]) == (1, "does not conform")


def test_rows_named_as_metadata_are_plaintext_data(changed: Command) -> None:
    folder = changed.warehouse / "kek_rotated"
    metadata = changed.metadata("kek_rotated")
    config = ("--config", str(changed.configuration))
    assert verified(folder, *config)[0] == 0
    (metadata.parent / "99999-rows.metadata.json").write_text('{"id": 1, "name": "Ada"}')
    stranger = {**json.loads(metadata.read_text()), "encryption-keys": [], "snapshots": [], "properties": {}}
    (metadata.parent / "99999-stranger.metadata.json").write_text(
        json.dumps({**stranger, "current-snapshot-id": -1})
    )
    (folder / "copy.metadata.json").write_bytes(metadata.read_bytes())
    status, document = verified(folder, *config)
    assert status == 1
    found = " ".join(document["other-data"])
    assert len(document["other-data"]) == 3
    for name in ("99999-rows", "99999-stranger", "copy"):
        assert f"{name}.metadata.json is JSON, in plaintext" in found


def test_a_table_that_names_files_elsewhere_is_not_followed(changed: Command, tmp_path: Path) -> None:
    metadata = changed.metadata("kek_rotated")
    document = json.loads(metadata.read_text())
    (tmp_path / "list.avro").write_bytes(b"AGS1")
    document["snapshots"][-1]["manifest-list"] = f"file:{tmp_path}/list.avro"
    metadata.write_text(json.dumps(document))
    status, found = verified(changed.warehouse / "kek_rotated", "--config", str(changed.configuration))
    assert status == 1
    (message,) = [text for text in found["other-data"] if metadata.name in text]
    assert "is not in the folder of the table" in message


def test_a_refused_key_leaves_metadata_unchecked(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("version: 1\nkms: {type: in_memory, keys: {other: AAECAwQFBgcICQoLDA0ODw==}}\n")
    status, document = verified(command.warehouse / "people_128", "--config", str(config))
    assert (status, document["verdict"], document["other-data"]) == (1, "incomplete", [])
    assert "metadata.json" in document["not checked"][0]
