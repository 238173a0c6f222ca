"""Objects that can be written: anything with rows, from any library."""

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
from soak import SOAK

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.tables.writing import as_stream

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
            r"Series is one column, not a table: give a .*such as `data.to_frame\(\)`",
        ),
        (
            lambda: pl.Series([1]),
            r"Series is one column, not a table: give a .*such as `data.to_frame\(\)`",
        ),
        (lambda: pl.LazyFrame({"a": [1]}), r"LazyFrame is a query that has not run: give `data.collect\(\)`"),
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
        with pytest.raises(TypeError, match=r"is not tabular data: .*pandas or Polars DataFrame"):
            write(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_strings_of_polars_within_lists_and_structs_are_no_views() -> None:
    frame = pl.DataFrame({"tags": [["x"], ["y"]], "place": [{"town": "a"}, {"town": "b"}], "name": ["n", "m"]})
    assert "string_view" in str(pa.RecordBatchReader.from_stream(frame).schema)
    table = as_stream(frame).read_all()
    assert "string_view" not in str(table.schema)
    # Arrow has no such filter for views.
    assert table.filter(pa.array([False, True])).to_pylist() == frame.to_dicts()[1:]


def _extension_arrays() -> dict[str, pa.Array]:
    def of(kind: Any, values: list[Any]) -> pa.Array:
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))

    kinds = {
        "uuid": of(pa.uuid(), [b"0123456789abcdef", b"fedcba9876543210"]),
        "json": of(pa.json_(), ['{"a": 1}', "2"]),
        "bool8": of(pa.bool8(), [1, 0]),
        "tensor": of(pa.fixed_shape_tensor(pa.int32(), [2]), [[1, 2], [3, 4]]),
        "opaque": of(pa.opaque(pa.binary(), "type", "vendor"), [b"a", b"b"]),
    }
    arrays: dict[str, pa.Array] = {}
    for name, values in kinds.items():
        struct = pa.StructArray.from_arrays([values], ["field"])
        arrays |= {
            name: values,
            f"list of {name}": pa.ListArray.from_arrays([0, 1, 2], values),
            f"large list of {name}": pa.LargeListArray.from_arrays([0, 1, 2], values),
            f"fixed list of {name}": pa.FixedSizeListArray.from_arrays(values, 1),
            f"struct of {name}": struct,
            f"list of structs of {name}": pa.ListArray.from_arrays([0, 1, 2], struct),
            f"map to {name}": pa.MapArray.from_arrays([0, 1, 2], ["a", "b"], values),
        }
    return arrays


ENGINES: dict[str, dict[str, Any]] = {"pyarrow": {}, "module encryptor": {"aad_prefix": "{file_name}"}}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for turn, name in enumerate(_extension_arrays())
        for number, engine in enumerate(ENGINES)
        if SOAK or turn % 2 == number
    ],
)
def test_extension_types_at_any_depth_are_read_from_folders(tmp_path: Path, name: str, engine: str) -> None:
    keytools = tools(**ENGINES[engine])
    table = pa.table({"a": _extension_arrays()[name], "n": [1, 2]})
    keytools.write_table(table, tmp_path / "one.parquet")
    expected = keytools.read_table(tmp_path / "one.parquet")
    assert expected.num_rows == 2
    dataset = keytools.dataset(tmp_path)
    assert dataset.schema == keytools.schema(tmp_path) == expected.schema
    assert dataset.to_table().equals(expected)
    assert keytools.read_table(tmp_path).equals(expected)
    assert keytools.read_table(tmp_path, columns=["a"]).equals(expected.select(["a"]))
    assert keytools.read_table(tmp_path, filters=[("n", "=", 2)]).equals(expected.slice(1))
    keytools.write_dataset(table, tmp_path / "set", partitioning=["n"])
    found = keytools.dataset(tmp_path / "set").to_table().sort_by("n")
    assert found["a"].combine_chunks() == expected["a"].combine_chunks()
    assert keytools.read_table(tmp_path / "set").num_rows == 2


@pytest.mark.parametrize("denied_columns", ["hide", "null"])
@pytest.mark.parametrize("name", ["list of uuid", "struct of json", "map to bool8"])
def test_refused_extension_types(tmp_path: Path, name: str, denied_columns: str) -> None:
    kms = InMemoryKms(dict.fromkeys(("kf", "ka")))
    table = {"footer_key": "kf", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext"}
    document = {"version": 1, "tables": {"t": table}, "reading": {"denied_columns": denied_columns}}
    keytools = Keytools.from_mapping(document, kms=kms)
    written = pa.table({"a": _extension_arrays()[name], "n": [1, 2]})
    keytools.write_table(written, tmp_path / "one.parquet")
    kms.deny("ka")
    keytools = Keytools.from_mapping(document, kms=kms)
    for found in (keytools.read_table(tmp_path), keytools.read_table(tmp_path / "one.parquet")):
        assert found["n"].to_pylist() == [1, 2]
        assert found.column_names == (["n"] if denied_columns == "hide" else ["a", "n"])
        assert denied_columns == "hide" or found["a"].null_count == 2
    assert keytools.schema(tmp_path).names == found.column_names
