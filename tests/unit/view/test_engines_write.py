"""Other libraries write through the file system: every policy, keys for each file, and values that round-trip."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.storage.locations import FileLocation, open_source

CANARY = "canary-of-a-secret-value"
FRAME = pd.DataFrame(
    {"a": range(90), "b": [f"{CANARY}-{i}" for i in range(90)], "part": [i % 3 for i in range(90)]}
)
YAML = """
version: 1
kms: {{type: in_memory, keys: {{kf: "${{TEST_KF}}", kb: "${{TEST_KB}}"}}}}
tables:
  t: {{footer_key: kf, column_keys: {{kb: [b]}}, unlisted_columns: footer_key{settings}}}
"""
POLICIES = {
    "columns and footer key": "",
    "plaintext footer": ", plaintext_footer: true",
    "external": ", key_material: external",
    "prefix": ", aad_prefix: '{table_name}/{file_name}', store_aad_prefix: false",
    "uniform": None,
}


def _pandas(frame: pd.DataFrame, folder: Path, filesystem: Any) -> None:
    frame.to_parquet(folder, partition_cols=["part"], filesystem=filesystem)


def _polars(frame: pd.DataFrame, folder: Path, filesystem: Any) -> None:
    options = {"filesystem": filesystem, "partition_cols": ["part"]}
    pl.from_pandas(frame).write_parquet(folder, use_pyarrow=True, pyarrow_options=options)


def _pyarrow(frame: pd.DataFrame, folder: Path, filesystem: Any) -> None:
    table = pa.Table.from_pandas(frame)
    pq.write_to_dataset(table, str(folder), partition_cols=["part"], filesystem=filesystem.arrow)


def _dask(frame: pd.DataFrame, folder: Path, filesystem: Any) -> None:
    # Imported here because it takes a second in each process that collects the tests.
    import dask
    import dask.dataframe as dd

    with dask.config.set(scheduler="synchronous"):
        dd.from_pandas(frame, npartitions=3).to_parquet(str(folder), filesystem=filesystem)


def _duckdb(frame: pd.DataFrame, folder: Path, filesystem: Any) -> None:
    with duckdb.connect() as connection:
        connection.register_filesystem(filesystem)
        connection.register("frame", frame)
        connection.execute(f"copy (from frame) to 'keytools://{folder}' (format parquet, partition_by (part))")


ENGINES: dict[str, Callable[[pd.DataFrame, Path, Any], None]] = {
    "pandas": _pandas,
    "polars": _polars,
    "pyarrow": _pyarrow,
    "dask": _dask,
    "duckdb": _duckdb,
}


@pytest.fixture
def keytools_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Keytools]:
    monkeypatch.setenv("TEST_KF", "MDEyMzQ1Njc4OWFiY2RlZg==")
    monkeypatch.setenv("TEST_KB", "ZmVkY2JhOTg3NjU0MzIxMA==")

    def make(policy: str) -> Keytools:
        settings = POLICIES[policy]
        text = YAML.format(settings=settings or "")
        if settings is None:
            text = text.replace("column_keys: {kb: [b]}, ", "")
        (tmp_path / "keytools.yaml").write_text(text)
        return Keytools.from_yaml(tmp_path / "keytools.yaml")

    return make


@pytest.mark.filterwarnings("ignore:the values of column 'part':UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_writes_a_folder(
    tmp_path: Path, keytools_of: Callable[[str], Keytools], policy: str, engine: str
) -> None:
    keytools = keytools_of(policy)
    folder = tmp_path / "data"
    ENGINES[engine](FRAME, folder, keytools.filesystem())
    files = sorted(folder.rglob("*.parquet"))
    assert len(files) == 3
    uniques = set()
    for path in files:
        assert CANARY.encode() not in path.read_bytes()
        report = keytools.verify_file(path)
        assert report.conforms, report.findings
        with open_source(FileLocation.resolve(path)) as source:
            uniques.add(read_envelope(source).aad_file_unique)
    assert len(uniques) == 3
    material = list(folder.rglob("_KEY_MATERIAL_FOR_*"))
    assert len(material) == (3 if policy == "external" else 0)
    found = keytools.read_table(folder).to_pandas().astype({"part": "int64"}).sort_values("a")
    assert found[["a", "b", "part"]].to_dict("list") == FRAME.to_dict("list")


def test_tasks_of_a_worker_share_what_was_pickled(
    tmp_path: Path, keytools_of: Callable[[str], Keytools], monkeypatch: pytest.MonkeyPatch
) -> None:
    keytools = keytools_of("columns and footer key")
    pickled = pickle.dumps(keytools.filesystem())
    assert os.environ["TEST_KF"].encode() not in pickled
    first, second = pickle.loads(pickled), pickle.loads(pickled)
    assert first is second
    FRAME.to_parquet(tmp_path / "x.parquet", filesystem=first)
    assert keytools.read_table(tmp_path / "x.parquet").num_rows == 90


def test_a_failing_copy_of_duckdb_leaves_nothing(tmp_path: Path, keytools_of: Callable[[str], Keytools]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with duckdb.connect() as connection:
        connection.register_filesystem(keytools_of("uniform").filesystem())
        query = "select case when i > 500000 then error('stop') else i end as a from range(1000000) r(i)"
        with pytest.raises(duckdb.Error):
            connection.execute(f"copy ({query}) to 'keytools://{target}/x.parquet' (format parquet)")
    assert list(target.iterdir()) == []
