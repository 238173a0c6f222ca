"""Rows removed from files in S3, on moto's server over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rotation_case import TABLE, Case
from s3_store import BUCKET, S3Store

from parquet_keytools.erasure import rewrite
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.rotation.report import Outcome

FOLDER = f"{BUCKET}/d"
KEPT = TABLE.filter(pc.greater_equal(TABLE["a"], 130))


def put(store: S3Store, tmp_path: Path, names: tuple[str, ...] = ("x.parquet",), **settings: Any) -> Case:
    """Put files into the store; rows of all but `z.parquet` match."""
    case = Case.make(tmp_path, "in_memory", **settings)
    for name in names:
        case.write(name, table=TABLE.slice(200) if name == "z.parquet" else TABLE)
    for path in case.folder.rglob("*"):
        if path.is_file():
            store.put(f"d/{path.relative_to(case.folder)}", path.read_bytes())
    return case


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_rows_of_objects(store: S3Store, tmp_path: Path, key_material: str) -> None:
    case = put(store, tmp_path, ("x.parquet", "p=1/y.parquet", "z.parquet"), key_material=key_material)
    objects, untouched = store.names(), store.get("d/z.parquet")
    filesystem = store.filesystem()
    report = case.tools().erase_rows(FOLDER, where="a < 130", filesystem=filesystem)
    assert report.counts == {Outcome.ROWS_REMOVED: 2, Outcome.NO_MATCHING_ROWS: 1}
    assert store.names() == objects and store.get("d/z.parquet") == untouched and store.uploads() == []
    tools = case.tools()
    for name in ("x.parquet", "p=1/y.parquet"):
        assert tools.read_table(f"{FOLDER}/{name}", filesystem=filesystem).equals(KEPT)
    report = tools.erase_rows(FOLDER, where="a < 130", filesystem=filesystem)
    assert report.counts == {Outcome.NO_MATCHING_ROWS: 3}


def test_an_object_that_changes_meanwhile_is_not_replaced(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = put(store, tmp_path)
    other = tmp_path / "other.parquet"
    case.tools().write_table(TABLE.slice(0, 300), other)
    write, attempts = rewrite.Rewriting.write_rows, []

    def change(self: Any, *arguments: Any) -> Any:
        rows = write(self, *arguments)
        attempts.append(rows)
        if len(attempts) == 1:
            store.put("d/x.parquet", other.read_bytes())
        return rows

    monkeypatch.setattr(rewrite.Rewriting, "write_rows", change)
    filesystem = store.filesystem()
    report = case.tools().erase_rows(f"{FOLDER}/x.parquet", where="a < 130", filesystem=filesystem)
    assert report.counts == {Outcome.ROWS_REMOVED: 1} and len(attempts) == 2
    assert case.tools().read_table(f"{FOLDER}/x.parquet", filesystem=filesystem).equals(KEPT.slice(0, 170))


def test_a_killed_run_is_repeated(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        """Simulates the end of the process."""

    case, filesystem = put(store, tmp_path, ("x.parquet", "y.parquet")), store.filesystem()
    check = rewrite.Rewriting.check_output
    checked = []

    def killed(self: Any, *arguments: Any) -> Any:
        checked.append(1)
        if len(checked) == 2:
            raise KilledError
        return check(self, *arguments)

    monkeypatch.setattr(rewrite.Rewriting, "check_output", killed)
    with pytest.raises(KilledError):
        case.tools().erase_rows(FOLDER, where="a < 130", filesystem=filesystem)
    monkeypatch.undo()
    report = case.tools().erase_rows(FOLDER, where="a < 130", filesystem=filesystem)
    assert report.counts == {Outcome.ROWS_REMOVED: 1, Outcome.NO_MATCHING_ROWS: 1}


@pytest.mark.parametrize("marker", ["d/metadata/v1.metadata.json", "metadata/v1.metadata.json"])
def test_tables_of_iceberg_are_refused(store: S3Store, tmp_path: Path, marker: str) -> None:
    case = put(store, tmp_path)
    store.put(marker, b"{}")
    before = {name: store.get(name) for name in store.names()}
    with pytest.raises(ConfigurationError, match="belongs to a table of Iceberg"):
        case.tools().erase_rows(FOLDER, where="a < 130", filesystem=store.filesystem())
    assert {name: store.get(name) for name in store.names()} == before


def test_a_plaintext_object_fails(store: S3Store, tmp_path: Path) -> None:
    case = put(store, tmp_path)
    pq.write_table(TABLE, tmp_path / "plain.parquet")
    store.put("d/plain.parquet", (tmp_path / "plain.parquet").read_bytes())
    report = case.tools().erase_rows(FOLDER, where="a < 130", filesystem=store.filesystem())
    assert [file.error_class for file in report.failures] == ["NotEncryptedError"]
    assert report.counts[Outcome.ROWS_REMOVED] == 1
