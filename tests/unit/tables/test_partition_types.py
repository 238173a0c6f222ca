"""Columns from folder and file names have the types that pyarrow gives them for plaintext files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools

YAML = """
version: 1
kms: {type: in_memory, keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==}}
tables: {t: {footer_key: kf, column_keys: {kf: [v]}, unlisted_columns: plaintext}}
"""
TYPED = pa.schema([("y", pa.int16()), ("s", pa.string())])
NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass
class Case:
    """The location of files, and how pyarrow reads them."""

    names: list[str]
    partitioning: Any = "hive"
    schema: pa.Schema | None = None


CASES = {
    "ints": Case(["y=1/x", "y=2/x"]),
    "large ints": Case(["y=3000000000/x", "y=2/x"]),
    "strings": Case(["s=a/x", "s=b/x"]),
    "ints and strings": Case(["s=1/x", "s=b/x"]),
    "dates": Case(["d=2024-01-02/x", "d=2024-02-02/x"]),
    "null string": Case([f"s={NULL}/x", "s=b/x"]),
    "null int": Case([f"y={NULL}/x", "y=5/x"]),
    "percent-encoded": Case(["s=a%2Fb%20c/x", "s=d%3De/x"]),
    "two levels": Case(["y=1/s=a/x", "y=2/s=b/x"]),
    "none": Case(["y=1/x", "y=2/x"], None),
    "hive with types": Case(["y=1/x", "y=2/x"], ds.partitioning(TYPED, flavor="hive")),
    "hive discovered": Case(["y=1/x", "y=2/x"], ds.HivePartitioning.discover()),
    "hive with dictionary": Case(["y=1/x", "y=2/x"], ds.HivePartitioning.discover(infer_dictionary=True)),
    "names of folders": Case(["2024/a/x", "2025/b/x"], ["y", "s"]),
    "folders with types": Case(["2024/a/x", "2025/b/x"], ds.partitioning(TYPED)),
    "file names": Case(["2024_a_x", "2025_b_x"], ds.FilenamePartitioning(TYPED)),
    "given schema": Case(["y=1/x", "y=2/x"], schema=pa.schema([("v", pa.int64()), ("y", pa.int64())])),
}


@pytest.fixture
def keytools(tmp_path: Path) -> Keytools:
    (tmp_path / "keytools.yaml").write_text(YAML)
    (tmp_path / "keytools.yaml").chmod(0o600)
    return Keytools.from_yaml(tmp_path / "keytools.yaml")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, keytools: Keytools, tmp_path: Path) -> Case:
    case = CASES[request.param]
    for number, name in enumerate(case.names):
        table = pa.table({"v": [number, number + 10]})
        for folder, write in (("plain", pq.write_table), ("encrypted", keytools.write_table)):
            path = tmp_path / folder / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(table, path)
    return case


def same(ours: pa.Table, plain: pa.Table) -> bool:
    return bool(ours.schema.equals(plain.schema)) and ours.to_pylist() == plain.to_pylist()


def test_tables_have_the_types_of_pyarrow(
    case: Case, keytools: Keytools, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    given = {} if case.partitioning == "hive" else {"partitioning": case.partitioning}
    if case.schema is not None:
        given["schema"] = case.schema
    plain = pq.read_table(tmp_path / "plain", **given)
    assert same(keytools.read_table(tmp_path / "encrypted", **given), plain)
    names = plain.column_names
    for more in ({"columns": ["v"]}, {"columns": names[::-1]}, {"filters": pc.field("v") > 1}):
        expected = pq.read_table(tmp_path / "plain", **given, **more)
        assert same(keytools.read_table(tmp_path / "encrypted", **given, **more), expected)
    if "large ints" not in request.node.name and "y" in names:
        filters = [("y", ">", 1)]
        expected = pq.read_table(tmp_path / "plain", **given, filters=filters)
        assert same(keytools.read_table(tmp_path / "encrypted", **given, filters=filters), expected)


def test_a_list_of_files_has_them_too(keytools: Keytools, tmp_path: Path) -> None:
    for name in ("y=1", "y=2"):
        for folder, write in (("plain", pq.write_table), ("encrypted", keytools.write_table)):
            (tmp_path / folder / name).mkdir(parents=True)
            write(pa.table({"v": [1]}), tmp_path / folder / name / "x.parquet")
    plain, ours = (
        [tmp_path / folder / name / "x.parquet" for name in ("y=1", "y=2")] for folder in ("plain", "encrypted")
    )
    assert same(keytools.read_table(ours), pq.read_table(plain))  # type: ignore[arg-type]
    assert same(keytools.read_table(ours[0]), pq.read_table(plain[0]))


def test_data_sets_know_their_partitioning(case: Case, keytools: Keytools, tmp_path: Path) -> None:
    plain = ds.dataset(tmp_path / "plain", partitioning=case.partitioning, schema=case.schema)
    dataset = keytools.dataset(tmp_path / "encrypted", partitioning=case.partitioning, schema=case.schema)
    assert same(dataset.to_table(), plain.to_table())
    others = [
        dataset.filter(pc.field("v") > 1),
        dataset.replace_schema(dataset.schema),
        pickle.loads(pickle.dumps(dataset)),
    ]
    for other in [dataset, *others]:
        assert isinstance(other, ds.FileSystemDataset)
        assert type(other.partitioning) is type(plain.partitioning)
        if case.schema is None:  # Otherwise pyarrow treats all of it as columns of folders.
            assert other.partitioning.schema == plain.partitioning.schema
            assert list(map(str, other.partitioning.dictionaries)) == list(
                map(str, plain.partitioning.dictionaries)
            )
