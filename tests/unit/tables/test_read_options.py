"""pyarrow's options, lists of files and globs: the same for files, folders and data sets."""

from __future__ import annotations

import base64
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import IncompleteDataSetError, NoParquetFilesError

TABLE = pa.table({"a": range(10), "b": [str(number % 2) for number in range(10)], "c": [0, 1] * 5})


def document() -> dict[str, Any]:
    keys = {name: base64.b64encode(name.encode() * 16).decode() for name in "fp"}
    table = {"footer_key": "f", "column_keys": {"p": ["a"]}, "unlisted_columns": "plaintext"}
    return {"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(document()))
    path.chmod(0o600)
    return path


@pytest.fixture
def tools(config: Path) -> Keytools:
    return Keytools.from_yaml(config)


@pytest.fixture
def data(tmp_path: Path, tools: Keytools) -> Path:
    folder = tmp_path / "data"
    tools.write_dataset(TABLE, folder, partitioning=["c"])
    (folder / "notes.txt").write_text("for people")
    return folder


OPTIONS: dict[str, Any] = {
    "use_threads": False,
    "use_pandas_metadata": True,
    "schema": pa.schema([("a", pa.int32()), ("b", pa.string())]),
    "partitioning": None,
    "read_dictionary": ["b"],
    "binary_type": pa.large_binary(),
    "list_type": pa.LargeListType,
    "memory_map": True,
    "buffer_size": 4096,
    "pre_buffer": False,
    "coerce_int96_timestamp_unit": "ms",
    "thrift_string_size_limit": 10_000_000,
    "thrift_container_size_limit": 1_000_000,
    "schema_depth_limit": 50,
    "page_checksum_verification": True,
    "arrow_extensions_enabled": False,
}


def test_every_option_of_pyarrow_is_known() -> None:
    ours = {"source", "columns", "filters", "filesystem", "decryption_properties", "ignore_prefixes"}
    assert inspect.signature(pq.read_table).parameters.keys() - ours == OPTIONS.keys()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_and_a_list_of_it_are_read_alike(tmp_path: Path, tools: Keytools, option: str) -> None:
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path)
    options = {option: OPTIONS[option]}
    expected = pq.read_table(path, decryption_properties=tools.decryption_properties(path), **options)
    assert tools.read_table(path, **options).equals(expected)
    assert tools.read_table([path], **options).equals(expected)


OF_TABLES = {"use_threads", "use_pandas_metadata", "schema", "partitioning"}


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in OF_TABLES])
def test_data_sets_take_options_of_files(data: Path, tools: Keytools, option: str) -> None:
    dataset = tools.dataset(data, **{option: OPTIONS[option]})
    assert dataset.count_rows() == dataset.to_table().num_rows == 10
    assert pickle.loads(pickle.dumps(dataset)).count_rows() == 10


def test_options_reach_arrow(tmp_path: Path, data: Path, tools: Keytools) -> None:
    path = tmp_path / "x.parquet"
    tools.write_table(TABLE, path, store_schema=False)
    for there in (path, [path]):
        assert pa.types.is_dictionary(tools.read_table(there, read_dictionary=["b"]).schema.field("b").type)
    assert pa.types.is_dictionary(tools.dataset(data, read_dictionary=["b"]).schema.field("b").type)
    for there in (path, data):
        with pytest.raises(OSError):
            tools.read_table(there, thrift_string_size_limit=1)


def test_the_index_of_pandas_is_read_from_folders_too(tmp_path: Path, tools: Keytools) -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}, index=pd.Index([7, 8], name="i"))
    (tmp_path / "frames").mkdir()
    for name in ("1", "2"):
        tools.write_table(frame, tmp_path / "frames" / f"{name}.parquet")
    table = tools.read_table(tmp_path / "frames", columns=["b"], use_pandas_metadata=True)
    assert table.to_pandas().index.tolist() == [7, 8, 7, 8]
    assert tools.read_table(tmp_path / "frames", columns=["b"]).column_names == ["b"]


@pytest.mark.parametrize("method", ["read_table", "dataset"])
def test_one_clear_error_for_what_is_no_option(data: Path, tools: Keytools, method: str) -> None:
    call = getattr(tools, method)
    for there in (data, next(data.rglob("*.parquet"))):
        with pytest.raises(TypeError, match=f"{method} has no option 'prebuffer'.*pre_buffer"):
            call(there, prebuffer=False)
        for name in ("decryption_properties", "ignore_prefixes"):
            with pytest.raises(TypeError, match=f"{method} does not take '{name}'"):
                call(there, **{name: ["x"]})


@pytest.mark.parametrize("names", ["ab", b"ab", "a", ["a", 1], [b"a"], 5, {"a": 1}])
def test_one_name_is_not_several(data: Path, tools: Keytools, names: Any) -> None:
    (file, *_) = data.rglob("*.parquet")
    for read in (tools.read_table, tools.dataset):
        for path in (file, data, [file]):
            for argument in {"columns", "read_dictionary"} if isinstance(names, str | bytes) else {"columns"}:
                with pytest.raises(TypeError, match=argument):
                    read(path, **{argument: names})
    with pytest.raises(TypeError, match="columns"):
        tools.decryption_properties(file, columns=names)
    with pytest.raises(TypeError, match="only_master_keys"):
        tools.rotate(data, only_master_keys=names)


def test_names_may_come_from_any_iterable(data: Path, tools: Keytools) -> None:
    (file, *_) = data.rglob("*.parquet")
    for path in (file, data):
        assert tools.read_table(path, columns=iter(["b"])).column_names == ["b"]  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["decryption_properties", "ignore_prefixes"])
def test_an_option_that_is_refused_may_be_none(data: Path, tools: Keytools, option: str) -> None:
    (file, *_) = data.rglob("*.parquet")
    for path in (file, data):
        assert (
            tools.read_table(path, **{option: None}).num_rows == tools.dataset(path, **{option: None}).count_rows()
        )
        with pytest.raises(TypeError, match=option):
            tools.read_table(path, **{option: ["x"]})


def test_strings_of_polars_are_partitioned(tmp_path: Path, tools: Keytools) -> None:
    frame = pl.DataFrame({"a": [1, 2], "b": ["x", "y"], "c": [0, 1]})
    tools.write_dataset(frame, tmp_path / "frames", partitioning=["c"])
    assert tools.read_table(tmp_path / "frames")["b"].to_pylist() == ["x", "y"]


def test_a_column_that_is_not_there(data: Path, tools: Keytools) -> None:
    with pytest.raises(ValueError, match=r"has no column 'bb'\. Did you mean 'b'"):
        tools.read_table(data, columns=["a", "bb"])


# --- globs and lists ---


@pytest.mark.parametrize(
    ("glob", "rows"),
    [
        ("data/c=*/*.parquet", 10),
        ("data/c=0/*", 5),
        ("data/*", 10),
        ("data/**/*.parquet", 10),
        ("**/part-?.parquet", 10),
        ("data/c=[1-9]/part-0.parquet", 5),
        ("d*a", 10),
    ],
)
def test_globs(
    tmp_path: Path, data: Path, tools: Keytools, monkeypatch: pytest.MonkeyPatch, glob: str, rows: int
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tools.read_table(glob)
    assert (table.num_rows, table.column_names) == (rows, ["a", "b", "c"])
    assert tools.dataset(str(tmp_path / glob)).count_rows() == rows


def test_lists_keep_their_order_and_hold_files_folders_and_globs(data: Path, tools: Keytools) -> None:
    one, zero = data / "c=1" / "part-0.parquet", data / "c=0" / "part-0.parquet"
    assert tools.read_table([one, zero])["c"].to_pylist() == [1] * 5 + [0] * 5
    assert tools.read_table([zero, one, zero])["c"].to_pylist() == [0] * 5 + [1] * 5
    assert tools.read_table([data / "c=1", str(data / "c=0*" / "*")]).num_rows == 10
    assert pickle.loads(pickle.dumps(tools.dataset([one]))).count_rows() == 5


def test_a_name_that_is_there_is_no_glob(tmp_path: Path, tools: Keytools) -> None:
    tools.write_table(TABLE, tmp_path / "x[1].parquet")
    tools.write_table(TABLE.slice(0, 3), tmp_path / "x1.parquet")
    assert tools.read_table(tmp_path / "x[1].parquet").num_rows == 10
    assert tools.read_table([tmp_path / "x[1].parquet", tmp_path / "x1.parquet"]).num_rows == 13


def test_what_names_nothing_is_an_error(tmp_path: Path, data: Path, tools: Keytools) -> None:
    for glob in ("data/*.txt", "data/d=*/x"):
        with pytest.raises(NoParquetFilesError, match="no Parquet file has such a name"):
            tools.read_table(str(tmp_path / glob))
    with pytest.raises(FileNotFoundError, match="nothing matches"):
        tools.read_table(str(tmp_path / "nowhere" / "*.parquet"))
    with pytest.raises(FileNotFoundError, match=r"nope\.parquet"):
        tools.read_table([data, data / "nope.parquet"])
    with pytest.raises(ValueError, match="list of files is empty"):
        tools.read_table([])
    with pytest.raises(ValueError, match="one file system"):
        tools.read_table([str(data), "memory://x/y.parquet"])


def test_what_a_glob_cannot_look_into_is_an_error(tmp_path: Path, data: Path, tools: Keytools) -> None:
    (data / "c=2").symlink_to(tmp_path / "nowhere")
    with pytest.raises(IncompleteDataSetError, match="dangling"):
        tools.read_table(str(data / "c=*" / "*.parquet"))
    assert tools.read_table(str(data / "c=1" / "*.parquet")).num_rows == 5


def test_commands_take_lists_and_globs(tmp_path: Path, tools: Keytools, config: Path) -> None:
    for name in "ab":
        tools.write_table(TABLE, tmp_path / f"{name}.parquet")
    both, glob = [tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "?.parquet"

    def run(*arguments: object, status: int = 0) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments), "--config", str(config)])
        assert done.exit_code == status, done.output
        return done.stdout

    for named in (both, [glob]):
        assert "files: 2 conforms" in run("verify", *named)
        assert "2 encrypted files" in run("keys", *named)
        assert "2 files: 2 rotated" in run("rotate", *named)
        plain, again = tmp_path / f"plain{len(named)}", tmp_path / f"again{len(named)}"
        assert "Decrypted 2 files" in run("decrypt", *named, plain)
        assert sorted(path.name for path in plain.iterdir()) == ["a.parquet", "b.parquet"]
        assert "Encrypted 2 files" in run("encrypt", *sorted(plain.iterdir()), again)
    assert "2 rekeyed" in run("rekey", glob, "--in-place")
    # Only the named files.
    run("decrypt", tmp_path / "[b].parquet", tmp_path / "only")
    assert [path.name for path in (tmp_path / "only").iterdir()] == ["b.parquet"]
    run("rotate", *both, "--undo", status=2)
    run("decrypt", *both, both[0], status=2)
