"""`rekey --in-place --table --to-table`, from one key for all to a key for each tenant: killed, and repeated."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from crash_points import RENAMES, Crasher, Job
from rotation_case import new_keystore
from soak import sample
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app

TENANTS = ("acme", "bolt")
MASTER_KEYS = ("kf", "ka", *(f"prod/{tenant}" for tenant in TENANTS))
SOURCES = ("partition", "column")


def place(source: str, tenant: str) -> str:
    return f"tenant={tenant}" if source == "partition" else f"files of {tenant}"


class Move:
    """A data set under one key for all tenants, and the command that moves it."""

    def __init__(self, folder: Path, source: str, **table: Any) -> None:
        self.folder = folder
        self.config = folder / "keytools.yaml"
        self.keystore = folder / "keystore.json"
        self.keystore.touch(mode=0o600)
        self.keystore.write_bytes(new_keystore(MASTER_KEYS))
        (folder / "passphrase").touch(mode=0o600)
        (folder / "passphrase").write_text("canary horse battery")
        both = {"footer_key": "kf", "unlisted_columns": "plaintext", **table}
        values = {"tenant": {"from": source, "pattern": "[a-z]+"}}
        new = {"column_keys": {"prod/{tenant}": ["email"]}, "key_values": values, "also_trusted": ["ka"]}
        document = {
            "version": 1,
            "kms": {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"},
            "tables": {"before": {**both, "column_keys": {"ka": ["email"]}}, "events": {**both, **new}},
        }
        self.config.write_text(yaml.safe_dump(document))
        self.tools = Keytools.from_yaml(self.config)
        for tenant in TENANTS:
            data = pa.table({"tenant": [tenant] * 3, "email": [f"{n}@{tenant}" for n in range(3)]})
            for part in range(2):
                path = folder / "data" / place(source, tenant) / f"{part}.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                data = data if source == "column" else data.select(["email"])
                self.tools.write_table(data, path, table_name="before")

    def copy(self, number: int) -> Path:
        return Path(shutil.copytree(self.folder / "data", self.folder / f"copy{number}"))

    def arguments(self, data: Path) -> list[str]:
        tables = ["--table", "before", "--to-table", "events"]
        return ["rekey", str(data), "--in-place", *tables, "--config", str(self.config)]

    def job(self, data: Path) -> Job:
        return Job("command", str(data), str(self.keystore), {}, {"arguments": self.arguments(data)})

    def run(self, data: Path, *more: str) -> Result:
        return CliRunner().invoke(app, [*self.arguments(data), *more])

    def check_readable(self, data: Path) -> None:
        table = self.tools.read_table(data, table_name="events")
        assert table.num_rows == 12

    def master_keys(self, data: Path) -> dict[str, set[str | None]]:
        return {
            str(Path(file.path).relative_to(data)): {use.master_key_id for use in file.uses if not use.is_footer}
            for file in self.tools.key_inventory(data)
            if not file.is_skipped
        }


@pytest.mark.parametrize("key_material", ["internal", "external"])
@pytest.mark.parametrize("source", SOURCES)
def test_killed_and_repeated(tmp_path: Path, crasher: Crasher, source: str, key_material: str) -> None:
    move = Move(tmp_path, source, key_material=key_material)
    whole = crasher.run(move.job(move.copy(0)))
    assert (whole.status, whole.error) == (0, None), whole
    moved = {
        f"{place(source, tenant)}/{part}.parquet": {f"prod/{tenant}"} for tenant in TENANTS for part in range(2)
    }
    assert move.master_keys(tmp_path / "copy0") == moved
    renames = [number for number, (name, _) in enumerate(whole.calls, 1) if name in RENAMES]
    points = sorted({*sample(range(1, len(whole.calls) + 1), 30, SOURCES.index(source)), *renames[1:3]})
    done_before = set()
    for number, point in enumerate(points, 1):
        data = move.copy(number)
        job = move.job(data)
        for mode in ("kill", "after") if point in renames else ("kill",):
            shutil.rmtree(data)
            move.copy(number)
            ended = crasher.run(Job(**{**vars(job), "point": point, "mode": mode}))
            assert ended.killed
            move.check_readable(data)
            before = {path: path.read_bytes() for path in data.rglob("*.parquet")}
            done = {name for name, keys in move.master_keys(data).items() if keys == moved[name]}
            result = move.run(data, "--json")
            assert result.exit_code == 0, result.output
            assert move.master_keys(data) == moved
            # Finished files stay, byte for byte; `done` excludes files whose old key material was left.
            assert all((data / name).read_bytes() == before[data / name] for name in done)
            counts = json.loads(result.stdout)["counts"]
            assert counts.get("already current", 0) == len(done) and counts.get("rekeyed", 0) == 4 - len(done)
            move.check_readable(data)
            assert not [path for path in data.rglob("*") if path.name.endswith(".tmp")]
            done_before.add(len(done))
    assert {0, 1} <= done_before


def test_what_is_no_file_of_either_table_is_not_taken_for_done(tmp_path: Path) -> None:
    move = Move(tmp_path, "partition")
    data = tmp_path / "data"
    assert move.run(data).exit_code == 0
    # From another tenant, moved here; and from an interrupted run with another key.
    shutil.move(data / "tenant=acme" / "0.parquet", data / "tenant=bolt" / "moved.parquet")
    result = move.run(data, "--json")
    assert result.exit_code == 1
    assert "moved.parquet" in result.stderr
    assert json.loads(result.stdout)["counts"] == {"already current": 3, "failed": 1}


def test_files_of_both_tables_get_new_keys(tmp_path: Path) -> None:
    """Where both tables name the same keys, a file that leaked must not count as done."""
    move = Move(tmp_path, "partition")
    document = yaml.safe_load(move.config.read_text())
    document["tables"]["copy"] = document["tables"]["before"]
    move.config.write_text(yaml.safe_dump(document))
    data = tmp_path / "data"
    before = {path: path.read_bytes() for path in data.rglob("*.parquet")}
    command = ["rekey", str(data), "--in-place", "--table", "before", "--to-table", "copy"]
    result = CliRunner().invoke(app, [*command, "--config", str(move.config)])
    assert result.exit_code == 0, result.output
    assert all(path.read_bytes() != content for path, content in before.items())


def test_a_move_to_another_kms_goes_on(tmp_path: Path) -> None:
    """The old configuration has no tables; its KMS does not unwrap the keys of the new one."""
    move = Move(tmp_path, "partition")
    document = yaml.safe_load(move.config.read_text())
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({"version": 1, "kms": document["kms"]}))
    new = tmp_path / "new.json"
    new.touch(mode=0o600)
    new.write_bytes(new_keystore(("kf", "prod/acme", "prod/bolt")))
    document["kms"]["path"] = "new.json"
    del document["tables"]["before"], document["tables"]["events"]["also_trusted"]
    move.config.write_text(yaml.safe_dump(document))
    data = tmp_path / "data"
    command = ["rekey", str(data), "--in-place", "--config", str(tmp_path / "old.yaml"), "--json"]
    command += ["--to-config", str(move.config), "--to-table", "events"]
    for expected in ({"rekeyed": 4}, {"already current": 4}):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["counts"] == expected
    assert Keytools.from_yaml(move.config).read_table(data).num_rows == 12
