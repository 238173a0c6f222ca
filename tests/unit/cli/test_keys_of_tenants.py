"""The output of commands for keys by template: one line for many tenants, and lines for exceptions."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from rotation_case import new_keystore
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app

TENANTS = tuple(f"t{number}" for number in range(6))


class Place:
    def __init__(self, folder: Path) -> None:
        self.config, self.data = folder / "c.yaml", folder / "events"
        for name, content in {
            "keystore.json": new_keystore(("kf", "other", *(f"prod/{tenant}" for tenant in TENANTS))),
            "passphrase": b"canary horse battery",
        }.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
        document: dict[str, Any] = {
            "version": 1,
            "kms": {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"},
            "tables": {
                "events": {
                    "footer_key": "kf",
                    "column_keys": {"prod/{tenant}": ["email"]},
                    "key_values": {"tenant": {"from": "partition", "pattern": "t[0-9]"}},
                    "aad_prefix": "events/{file_name}",
                }
            },
        }
        self.config.write_text(yaml.safe_dump(document))
        with Keytools.from_yaml(self.config) as keytools:
            for tenant in TENANTS:
                for part in range(2):
                    path = self.data / f"tenant={tenant}" / f"{tenant}-{part}.parquet"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    keytools.write_table(pa.table({"email": [f"a@{tenant}"]}), path)

    def run(self, *arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--config", str(self.config)], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.stdout

    def rows(self, *arguments: str, of: str = "prod/") -> list[list[str]]:
        """Return the words of the lines about tenants' keys."""
        lines = self.run(*arguments, "--wide").splitlines()
        return [line.split() for line in lines if line.strip().startswith(of)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def rotate_key_of(place: Place, tenant: str) -> None:
    place.run("keystore", "rotate-key", f"prod/{tenant}")
    place.run("rotate", str(place.data), "--only-master-key", f"prod/{tenant}")


def test_keys_of_one_template_are_one_line(place: Place) -> None:
    group = ["prod/{tenant}", "(6", "values)", "1", "12", "0", "email"]
    assert place.rows("keys", str(place.data)) == [group]
    rotate_key_of(place, "t3")
    assert place.rows("keys", str(place.data)) == [
        ["prod/{tenant}", "(5", "values)", "1", "10", "0", "email"],
        ["prod/t3", "2", "2", "0", "email"],
    ]
    document = json.loads(place.run("keys", str(place.data), "--json"))
    found = {(key["key"], key["version"], key["files"]) for key in document["master_keys"]}
    assert found == {("kf", "1", 12)} | {(f"prod/{name}", "2" if name == "t3" else "1", 2) for name in TENANTS}


def test_rotations_show_one_line(place: Place) -> None:
    rows = place.rows("rotate", str(place.data), "--new-keks")
    assert rows == [["prod/{tenant}", "(6", "values)", "1", "1", "12", "12"]]
    for tenant in TENANTS[:2]:
        place.run("keystore", "rotate-key", f"prod/{tenant}")
    # A few keys are named.
    rows = place.rows("rotate", str(place.data), "--dry-run")
    assert rows == [["prod/t0", "1", "2", "2", "2"], ["prod/t1", "1", "2", "2", "2"]]
    document = json.loads(place.run("rotate", str(place.data), "--json", "--new-keks"))
    assert {key["master_key_id"] for key in document["keys"]} == {"kf", *(f"prod/{name}" for name in TENANTS)}


def test_reports_show_one_key(place: Place, tmp_path: Path) -> None:
    rotate_key_of(place, "t3")
    page = tmp_path / "r.html"
    text = place.run("report", str(place.data), "--html", str(page), "--wide")
    assert "prod/{tenant} (5 values)@1 (10), prod/t3@2 (2)" in text
    assert "prod/t1" not in text
    # Different tenants have different keys: that is no exception.
    assert "under different keys" not in text
    html = page.read_text()
    assert "K2: prod/{tenant} (5 values), version 1" in html and "K3: prod/t3, version 2" in html
    assert "prod/t1" not in html and "K4" not in html
    document = json.loads(place.run("report", str(place.data), "--json"))
    assert [key["key"] for key in document["keys"]] == ["kf", *(f"prod/{name}" for name in TENANTS)]
    assert {tuple(file["keys"]) for file in document["files"]} == {(0, number) for number in range(1, 7)}


def test_verify_needs_few_lines(place: Place) -> None:
    assert len(place.run("verify", str(place.data)).splitlines()) < 12


def test_other_keys_than_those_of_the_template_are_not_grouped(place: Place) -> None:
    document = yaml.safe_load(place.config.read_text())
    document["tables"]["events"]["key_values"]["tenant"]["pattern"] = "t[0-4]"
    place.config.write_text(yaml.safe_dump(document))
    rows = place.rows("keys", str(place.data))
    assert rows[0][:3] == ["prod/{tenant}", "(5", "values)"] and rows[1][0] == "prod/t5"
