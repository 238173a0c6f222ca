import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.erasure import rewrite

WHERE = ("--rewrite", "--where", "id IN (3, 77)")


def test_rows_of_a_folder(run, keystore_case, tmp_path: Path) -> None:
    case, record = keystore_case(), tmp_path / "record.json"
    done = run("erase", case.data, "--config", case.config, *WHERE, "--record", record)
    assert done.exit_code == 0, done.stderr
    assert "2 files: 2 rewritten without rows" in done.stdout and "Removed: 4 rows." in done.stdout
    assert "Not covered: backups, snapshots and older versions of objects" in done.stdout
    with Keytools.from_yaml(case.config) as keytools:
        assert all(keytools.read_table(path).num_rows == 98 for path in case.files)
    document = json.loads(record.read_text())
    facts = {
        name: document[name] for name in ("format", "version", "path", "table", "where", "dry_run", "complete")
    }
    assert facts == {
        "format": "parquet-keytools record of removed rows",
        "version": 1,
        "path": str(case.data),
        "table": "people",
        "where": "id IN (3, 77)",
        "dry_run": False,
        "complete": True,
    }
    assert {name: document[name] for name in facts} == facts
    assert len(document["not_covered"]) == 4
    assert [file["path"] for file in document["files"]] == list(map(str, case.files))
    for file in document["files"]:
        assert (file["outcome"], file["rows"], file["rows_removed"]) == ("rewritten without rows", 100, 2)
        assert file["after"]["size_bytes"] == Path(file["path"]).stat().st_size
        assert all(re.fullmatch("[0-9a-f]{64}", file[end]["footer_sha256"]) for end in ("before", "after"))
        assert file["before"] != file["after"] and file["error"] is None
    assert run("verify", case.data, "--config", case.config).exit_code == 0


def test_a_dry_run_and_json(run, keystore_case, tmp_path: Path) -> None:
    case, record = keystore_case(), tmp_path / "record.json"
    before = case.digest()
    done = run("erase", case.data, "--config", case.config, *WHERE, "--dry-run", "--json", "--record", record)
    assert done.exit_code == 0 and case.digest() == before
    document = json.loads(done.stdout)
    assert document["dry_run"] and document["complete"] and document["counts"] == {"with matching rows": 2}
    assert [file["rows_removed"] for file in document["files"]] == [2, 2]
    assert "To remove: 4 rows." in done.stderr
    recorded = json.loads(record.read_text())
    assert recorded["dry_run"] and [file["after"] for file in recorded["files"]] == [None, None]


def test_files_that_fail_are_named(run, keystore_case, table) -> None:
    case = keystore_case()
    pq.write_table(table, case.files[1])
    done = run("erase", case.data, "--config", case.config, *WHERE)
    assert done.exit_code == 1
    assert "1 rewritten without rows, 1 failed" in done.stdout and "b.parquet is not encrypted" in done.stderr


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("id = 1 OR id = 2", "not valid at 'id = 1 OR"),
        ("nobody = 1", "no column 'nobody'"),
        ("idd = 1", "Did you mean 'id'"),
        ("id = '1'", "without single"),
    ],
)
def test_wrong_filters(run, keystore_case, tmp_path: Path, where: str, text: str) -> None:
    case, record = keystore_case(), tmp_path / "record.json"
    before = case.digest()
    done = run(
        "erase", case.data, "--config", case.config, "--rewrite", "--where", where, "--record", record, "--json"
    )
    assert done.exit_code == 2 and text in done.stderr and not done.stdout
    assert case.digest() == before and not record.exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--rewrite", "--yes", "1"),
        ("--rewrite", "--status"),
        ("--rewrite", "--certificate", "x.json"),
        ("--record", "x.json"),
        ("--processes", "2"),
    ],
)
def test_options_of_the_two_erasures_do_not_mix(run, keystore_case, options: tuple[str, ...]) -> None:
    case = keystore_case()
    done = run("erase", case.data, "--config", case.config, "--where", "id = 1", *options)
    assert done.exit_code == 2 and "--rewrite" in done.stderr


def test_rewrite_is_asked_for(run, keystore_case) -> None:
    case = keystore_case()
    done = run("erase", case.data, "--config", case.config, "--where", "id = 1")
    assert done.exit_code == 2 and "erase --rewrite" in done.stderr


class KilledError(BaseException):
    """Simulates the end of the process."""


def test_the_record_of_a_killed_run_shows_what_it_found(run, keystore_case, tmp_path: Path, monkeypatch) -> None:
    case, record = keystore_case(), tmp_path / "record.json"
    arguments = ("erase", case.data, "--config", case.config, *WHERE, "--processes", 1, "--record")
    original, planned, done_files = rewrite.Rewriting.rewrite, [], []

    def killed_before_the_second(self, location):
        if done_files:
            planned.append(record.read_bytes())
            raise KilledError
        done_files.append(location)
        return original(self, location)

    monkeypatch.setattr(rewrite.Rewriting, "rewrite", killed_before_the_second)
    with pytest.raises(KilledError):
        run(*arguments, record)
    monkeypatch.setattr(rewrite.Rewriting, "rewrite", original)
    # The state that SIGKILL leaves: the matches, and no record of the work.
    record.write_bytes(planned[0])
    plan = json.loads(planned[0])
    assert not plan["complete"]
    assert {(file["outcome"], file["rows_removed"]) for file in plan["files"]} == {("with matching rows", 2)}
    # No other run replaces it, not even a dry run.
    for more in ((), ("--dry-run",)):
        done = run(*arguments, record, *more)
        assert done.exit_code == 2 and "exists already" in done.stderr and record.read_bytes() == planned[0]
    assert run(*arguments, tmp_path / "second.json").exit_code == 0
    document = json.loads((tmp_path / "second.json").read_text())
    removed = {file["path"]: file["rows_removed"] for file in document["files"]}
    assert document["complete"] and removed.pop(done_files[0].path) == 0 and set(removed.values()) == {2}


@pytest.mark.usefixtures("warm_workers")
def test_many_small_files_in_processes(run, keystore_case, table) -> None:
    case = keystore_case()
    with Keytools.from_yaml(case.config) as keytools:
        for number in range(10):
            keytools.write_table(table.slice(number), case.data / f"{number:02}.parquet")
    done = run("erase", case.data, "--config", case.config, *WHERE, "--processes", 2, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["counts"] == {"rewritten without rows": 12}
    assert sum(file["rows_removed"] for file in document["files"]) == 2 * 12 - 6
    with Keytools.from_yaml(case.config) as keytools:
        found = keytools.read_table(case.data, filters=[("id", "in", [3, 77])])
    assert found.num_rows == 0
