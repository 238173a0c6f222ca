"""What may be given to be written: whatever has rows, by whichever library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.arrow.writing import as_stream

TABLE = pa.table({"a": range(50), "b": [f"text {number % 5}" for number in range(50)]})
SOURCES: dict[str, Callable[[], Any]] = {
    "table": lambda: TABLE,
    "batch": lambda: TABLE.to_batches()[0],
    "reader": TABLE.to_reader,
    "data set": lambda: ds.dataset(TABLE),
    "scanner": lambda: ds.dataset(TABLE).scanner(),
    "tables": lambda: [TABLE.slice(0, 20), TABLE.slice(20)],
    "batches": lambda: TABLE.to_batches(max_chunksize=7),
    "generator": lambda: (batch for batch in TABLE.to_batches(max_chunksize=7)),
    "pandas": TABLE.to_pandas,
    "polars": lambda: pl.from_arrow(TABLE),
    "duckdb": lambda: duckdb.from_arrow(TABLE),
}


def tools(**settings: Any) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext", **settings}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["kf", "ka"]}, "tables": {"t": table}}
    return Keytools(parse_configuration(document))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("settings", "engine"), [({}, "pyarrow"), ({"double_wrapping": False}, "module encryptor")]
)
def test_whatever_has_rows_is_written(tmp_path: Path, source: str, settings: dict[str, Any], engine: str) -> None:
    keytools = tools(**settings)
    one = keytools.write_table(SOURCES[source](), tmp_path / "file.parquet")
    assert (one.files, one.rows, one.size_bytes) == (1, 50, (tmp_path / "file.parquet").stat().st_size)
    result = keytools.write_dataset(
        SOURCES[source](), tmp_path / "data", max_rows_per_file=20, max_rows_per_group=20
    )
    assert (result.engine, result.files, result.rows) == (engine, 3, 50)
    assert result.size_bytes == sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    for found in (keytools.read_table(tmp_path / "file.parquet"), keytools.dataset(tmp_path / "data").to_table()):
        assert found.cast(TABLE.schema).sort_by("a").equals(TABLE)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            lambda: pd.Series([1]),
            r"Series is one column, and no table: give a .*such as `data.to_frame\(\)`",
        ),
        (
            lambda: pl.Series([1]),
            r"Series is one column, and no table: give a .*such as `data.to_frame\(\)`",
        ),
        (lambda: pl.LazyFrame({"a": [1]}), r"LazyFrame is a query that did not run: give `data.collect\(\)`"),
    ],
    ids=["series of pandas", "series of Polars", "lazy frame"],
)
def test_what_is_no_table_says_how_it_becomes_one(tmp_path: Path, data: Callable[[], Any], text: str) -> None:
    for write in (tools().write_table, tools().write_dataset):
        with pytest.raises(TypeError, match=text):
            write(data(), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_the_index_of_a_frame_comes_back(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2]}, index=pd.Index([5, 6], name="number"))
    keytools = tools()
    keytools.write_table(frame, tmp_path / "file.parquet")
    assert keytools.read_table(tmp_path / "file.parquet").to_pandas().equals(frame)


def test_batches_with_a_schema_stay_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    write = ds.write_dataset

    def recording(data: Any, *rest: Any, **more: Any) -> None:
        given.append(data)
        write(data, *rest, **more)

    monkeypatch.setattr(ds, "write_dataset", recording)
    result = tools().write_dataset(SOURCES["generator"](), tmp_path / "data", schema=TABLE.schema)
    assert result.rows == 50 and isinstance(given[0], pa.RecordBatchReader)


@pytest.mark.parametrize("wrong", [5, "text", {"a": [1]}, [], [1], None], ids=repr)
def test_what_has_no_rows_is_refused(tmp_path: Path, wrong: Any) -> None:
    for write in (tools().write_table, tools().write_dataset):
        with pytest.raises(TypeError, match=r"is no data to be written: .*DataFrame of pandas"):
            write(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_strings_of_polars_within_lists_and_structs_are_no_views() -> None:
    frame = pl.DataFrame({"tags": [["x"], ["y"]], "place": [{"town": "a"}, {"town": "b"}], "name": ["n", "m"]})
    assert "string_view" in str(pa.RecordBatchReader.from_stream(frame).schema)
    table = as_stream(frame).read_all()
    assert "string_view" not in str(table.schema)
    # Arrow has no such filter for views.
    assert table.filter(pa.array([False, True])).to_pylist() == frame.to_dicts()[1:]
