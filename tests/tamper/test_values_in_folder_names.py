"""No way to partition a data set leaves values of protected columns in folder names."""

from __future__ import annotations

import base64
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import ConfigurationError, KeytoolsError
from parquet_keytools.kms.in_memory import InMemoryKms

CANARY = "CANARY"
TABLE = pa.table({"id": [1, 2], "ssn": [f"{CANARY}-1", f"{CANARY}-2"], "salary": [7, 8], "month": ["a", "b"]})
DATA_KEYS = {"kf": base64.b64encode(bytes(16)).decode(), "ka": base64.b64encode(bytes(range(16))).decode()}


def keytools(table: dict[str, Any], kms: InMemoryKms | None = None) -> Keytools:
    made = kms or InMemoryKms(dict.fromkeys(("footer", "pii")))
    document = {"version": 1, "data_keys": DATA_KEYS, "tables": {"t": table}}
    return Keytools.from_mapping(document, kms=made)


TABLES: dict[str, dict[str, Any]] = {
    "a key of its own": {"footer_key": "footer", "column_keys": {"pii": ["ssn"]}, "unlisted_columns": "plaintext"},
    "the footer's master key": {
        "footer_key": "footer",
        "column_keys": {"footer": ["ssn"]},
        "unlisted_columns": "plaintext",
    },
    "the footer's data key": {"footer_key": "kf", "column_keys": {"kf": ["ssn"]}, "unlisted_columns": "plaintext"},
    "the footer's data key by a glob": {
        "footer_key": "kf",
        "column_keys": {"kf": ["s*"]},
        "unlisted_columns": "plaintext",
    },
    "the footer's data key, all others too": {
        "footer_key": "kf",
        "column_keys": {"kf": ["ssn"]},
        "unlisted_columns": "footer_key",
    },
    "another data key": {"footer_key": "kf", "column_keys": {"ka": ["ssn"]}, "unlisted_columns": "plaintext"},
    "a part under the footer's data key": {
        "footer_key": "kf",
        "column_keys": {"kf": ["ssn.part"]},
        "unlisted_columns": "plaintext",
    },
}

Write = Callable[[Keytools, Path, str], object]


def _with_engine(write: Callable[[pa.Table, str, Any, str], object]) -> Write:
    def through_filesystem(tools: Keytools, folder: Path, name: str) -> object:
        return write(TABLE.rename_columns({"ssn": name}), str(folder), tools.filesystem(), name)

    return through_filesystem


def _dask(table: pa.Table, folder: str, filesystem: Any, name: str) -> object:
    import dask
    import dask.dataframe as dd

    with dask.config.set(scheduler="synchronous"):
        frame = dd.from_pandas(table.to_pandas(), npartitions=1)
        return frame.to_parquet(folder, filesystem=filesystem, partition_on=[name])


def _duckdb(table: pa.Table, folder: str, filesystem: Any, name: str, more: str = "") -> object:
    with duckdb.connect() as connection:
        connection.register_filesystem(filesystem)
        connection.register("source", table)
        target = f"'keytools://{folder}' (format parquet, partition_by ({name}){more})"
        return connection.execute(f"copy (from source) to {target}")


def _by_hand(table: pa.Table, folder: str, filesystem: Any, name: str) -> object:
    filesystem.makedirs(f"{folder}/{name}={CANARY}")
    with filesystem.open(f"{folder}/{name}={CANARY}/x.parquet", "wb") as file:
        return pq.write_table(table.drop_columns([name]), file)


ENGINES: dict[str, Write] = {
    "pandas": _with_engine(
        lambda table, folder, filesystem, name: table.to_pandas().to_parquet(
            folder, partition_cols=[name], filesystem=filesystem
        )
    ),
    "write_to_dataset": _with_engine(
        lambda table, folder, filesystem, name: pq.write_to_dataset(
            table, folder, partition_cols=[name], filesystem=filesystem.arrow
        )
    ),
    "ds.write_dataset": _with_engine(
        lambda table, folder, filesystem, name: ds.write_dataset(
            table,
            folder,
            format="parquet",
            filesystem=filesystem.arrow,
            partitioning=[name],
            partitioning_flavor="hive",
        )
    ),
    "Polars": _with_engine(
        lambda table, folder, filesystem, name: pl.from_arrow(table).write_parquet(
            folder, use_pyarrow=True, pyarrow_options={"filesystem": filesystem, "partition_cols": [name]}
        )
    ),
    "Dask": _with_engine(_dask),
    "DuckDB": _with_engine(_duckdb),
    "DuckDB with the column": _with_engine(lambda *args: _duckdb(*args, more=", write_partition_columns true")),
    "by hand": _with_engine(_by_hand),
}

OWN: dict[str, Callable[[pa.Schema], dict[str, Any]]] = {
    "names": lambda schema: {"partitioning": ["ssn"]},
    "a tuple": lambda schema: {"partitioning": ("month", "ssn")},
    "hive": lambda schema: {"partitioning": ds.partitioning(pa.schema([schema.field("ssn")]), flavor="hive")},
    "folders": lambda schema: {"partitioning": ds.partitioning(pa.schema([schema.field("ssn")]))},
    "names of files": lambda schema: {
        "partitioning": ds.partitioning(pa.schema([schema.field("ssn")]), flavor="filename")
    },
    "a flavor": lambda schema: {"partitioning": ["ssn"], "partitioning_flavor": "filename"},
}


def nothing_named(folder: Path) -> bool:
    """Return whether a folder is empty: no file, and no folder named after a value."""
    # A thread of Arrow may still remove its folder after another thread's error was raised, even during this
    # walk: `Path.rglob` would then fail.
    deadline = time.monotonic() + 20
    while _names_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _names_in(folder)


def _names_in(folder: Path) -> list[str]:
    return [name for _, folders, files in os.walk(folder) for name in (*folders, *files)]


@pytest.mark.parametrize("table", list(TABLES.values())[:-1], ids=list(TABLES)[:-1])
@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_write_dataset_refuses(
    tmp_path: Path, table: dict[str, Any], options: Callable[[pa.Schema], dict[str, Any]]
) -> None:
    data = TABLE
    with pytest.raises(ConfigurationError, match="in the names of folders"):
        keytools(table).write_dataset(data, tmp_path / "d", **options(data.schema))
    assert nothing_named(tmp_path / "d")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("write", ENGINES.values(), ids=ENGINES)
def test_engines_are_refused(tmp_path: Path, table: dict[str, Any], write: Write) -> None:
    with pytest.raises(Exception):  # noqa: B017 - engines have errors of their own
        write(keytools(table), tmp_path / "d", "ssn")
    assert nothing_named(tmp_path / "d")


@pytest.mark.parametrize("name", ["SSN", "Ssn"])
@pytest.mark.parametrize("write", ENGINES.values(), ids=ENGINES)
def test_so_they_are_in_another_case(tmp_path: Path, name: str, write: Write) -> None:
    table = {"footer_key": "kf", "column_keys": {"kf": ["ssn", "i?"]}, "unlisted_columns": "footer_key"}
    with pytest.raises(Exception):  # noqa: B017 - engines have errors of their own
        write(keytools(table), tmp_path / "d", name)
    assert nothing_named(tmp_path / "d")


def test_a_column_of_another_case_beside_a_protected_one(tmp_path: Path) -> None:
    data = TABLE.append_column("SSN", pa.array([CANARY, CANARY]))
    for unlisted in ("footer_key", "plaintext"):
        table = {"footer_key": "kf", "column_keys": {"kf": ["ssn"]}, "unlisted_columns": unlisted}
        with warnings.catch_warnings(), pytest.raises(ConfigurationError, match="'SSN'"):
            warnings.simplefilter("ignore")  # `SSN` is encrypted only if it is not listed.
            keytools(table).write_dataset(data, tmp_path / "d", partitioning=["SSN"])
        assert nothing_named(tmp_path / "d")


def test_a_struct_with_a_name_like_a_pattern(tmp_path: Path) -> None:
    """Its part is listed, and so its values may not name folders."""
    table = {"footer_key": "kf", "column_keys": {"kf": ["v?.b"]}, "unlisted_columns": "footer_key"}
    with pytest.raises(ConfigurationError, match=r"'v\?'"):
        keytools(table).filesystem().mkdir(str(tmp_path / "d" / "v?=a"))
    assert nothing_named(tmp_path / "d")


def test_what_could_not_be_opened_is_not_written(tmp_path: Path) -> None:
    """A column under the footer key may name folders, but not if it is in the files, too."""
    tools = keytools({"footer_key": "footer", "unlisted_columns": "footer_key"})
    with pytest.raises(Exception):  # noqa: B017 - DuckDB has errors of its own
        _duckdb(TABLE, str(tmp_path / "d"), tools.filesystem(), "month", ", write_partition_columns true")
    assert nothing_named(tmp_path / "d")
    with pytest.warns(UserWarning, match="'month'"):
        _duckdb(TABLE, str(tmp_path / "d"), tools.filesystem(), "month")
    assert tools.read_table(tmp_path / "d").num_rows == 2


# --- refusals that come late ---


def denied(table: dict[str, Any]) -> Keytools:
    kms = InMemoryKms(dict.fromkeys(("footer", "pii")))
    tools = keytools(table, kms)
    for key in ("footer", "pii"):
        kms.deny(key)
    return tools


BY_MONTH = {"footer_key": "footer", "column_keys": {"pii": ["ssn"]}, "unlisted_columns": "plaintext"}
LATE: dict[str, dict[str, Any]] = {
    "pyarrow encrypts": BY_MONTH,
    "the module encryptor does": {**BY_MONTH, "algorithm": "AES_GCM_V1", "double_wrapping": False},
    "unlisted columns": {**BY_MONTH, "unlisted_columns": "error"},
}


@pytest.mark.parametrize("table", LATE.values(), ids=LATE)
def test_what_the_kms_refuses_leaves_no_folders(tmp_path: Path, table: dict[str, Any]) -> None:
    with pytest.raises(KeytoolsError):
        denied(table).write_dataset(TABLE, tmp_path / "d", partitioning=["month"])
    assert not (tmp_path / "d").exists()


BY_MONTH_ONLY = TABLE.drop_columns(["id"])
LATE_ENGINES: dict[str, Callable[[str, Any], object]] = {
    "pandas": lambda folder, filesystem: BY_MONTH_ONLY.to_pandas().to_parquet(
        folder, partition_cols=["month"], filesystem=filesystem
    ),
    "write_to_dataset": lambda folder, filesystem: pq.write_to_dataset(
        BY_MONTH_ONLY, folder, partition_cols=["month"], filesystem=filesystem.arrow
    ),
    "DuckDB": lambda folder, filesystem: _duckdb(BY_MONTH_ONLY, folder, filesystem, "month"),
    "Dask": lambda folder, filesystem: _dask(BY_MONTH_ONLY, folder, filesystem, "month"),
    "by hand": lambda folder, filesystem: _by_hand(BY_MONTH_ONLY, folder, filesystem, "month"),
}


@pytest.mark.parametrize("table", LATE.values(), ids=LATE)
@pytest.mark.parametrize("write", LATE_ENGINES.values(), ids=LATE_ENGINES)
def test_nor_does_an_engine(tmp_path: Path, table: dict[str, Any], write: Callable[[str, Any], object]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - engines have errors of their own
        write(str(tmp_path / "d"), denied(table).filesystem())
    assert nothing_named(tmp_path / "d")


def test_folders_of_partitions_come_with_their_first_file(tmp_path: Path) -> None:
    """After an error, a thread of Arrow may create the folder of another partition, and opens no file in it."""
    filesystem = keytools(BY_MONTH).filesystem()
    folder = f"{tmp_path}/d/month={CANARY}"
    filesystem.makedirs(folder)
    assert filesystem.isdir(folder)
    assert filesystem.isdir(f"{tmp_path}/d")
    assert filesystem.ls(folder) == []
    with pytest.raises(FileExistsError):
        filesystem.mkdir(folder)
    assert not list(tmp_path.rglob("*"))
    with filesystem.open(f"{folder}/x.parquet", "wb") as file:
        pq.write_table(TABLE.drop_columns(["month"]), file)
    assert filesystem.ls(folder, detail=False) == [f"{folder}/x.parquet"]


@pytest.mark.parametrize("remove", ["rmdir", "rm"])
def test_folders_without_a_file_are_removed(tmp_path: Path, remove: str) -> None:
    filesystem = keytools(BY_MONTH).filesystem()
    folder = f"{tmp_path}/month={CANARY}"
    filesystem.mkdir(folder)
    getattr(filesystem, remove)(folder, **({"recursive": True} if remove == "rm" else {}))
    assert not filesystem.exists(folder)
    assert not list(tmp_path.rglob("*"))


def test_another_file_system_writes_into_a_folder_that_was_made(tmp_path: Path) -> None:
    """A driver creates the folders of partitions, and other processes write the files."""
    folder = f"{tmp_path}/month={CANARY}"
    keytools(BY_MONTH).filesystem().mkdir(folder)
    with keytools(BY_MONTH).filesystem().open(f"{folder}/x.parquet", "wb") as file:
        pq.write_table(TABLE.drop_columns(["month"]), file)
    with pytest.raises(FileNotFoundError):
        keytools(BY_MONTH).filesystem().open(f"{tmp_path}/missing/month={CANARY}/x.parquet", "wb")
    assert [path.name for path in tmp_path.rglob("*")] == [f"month={CANARY}", "x.parquet"]


def _ending_badly() -> Iterator[pa.RecordBatch]:
    yield from TABLE.to_batches()
    raise ValueError("the source ends")


@pytest.mark.parametrize("double_wrapping", [True, False])
def test_a_source_that_ends_badly_leaves_no_folders(tmp_path: Path, double_wrapping: bool) -> None:
    tools = keytools({**BY_MONTH, "double_wrapping": double_wrapping})
    reader = pa.RecordBatchReader.from_batches(TABLE.schema, _ending_badly())
    with pytest.raises(ValueError, match="the source ends"):
        tools.write_dataset(reader, tmp_path / "d", partitioning=["month"])
    assert not (tmp_path / "d").exists()


def test_folders_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "d" / "month=a").mkdir(parents=True)
    (tmp_path / "d" / "month=a" / "kept").touch()
    with pytest.raises(KeytoolsError):
        denied(BY_MONTH).write_dataset(
            TABLE, tmp_path / "d", partitioning=["month"], existing_data_behavior="overwrite_or_ignore"
        )
    assert [path.name for path in sorted((tmp_path / "d").rglob("*"))] == ["month=a", "kept"]


def test_other_file_systems_keep_no_folders_either(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    root = f"/values_{tmp_path.name}"
    with pytest.raises(KeytoolsError):
        denied(BY_MONTH).write_dataset(TABLE, root, partitioning=["month"], filesystem=memory)
    assert not memory.exists(root)


def test_a_partitioning_without_a_schema_is_refused_by_name(tmp_path: Path) -> None:
    tools = keytools(BY_MONTH)
    for partitioning in ("month", "hive", ds.partitioning(flavor="hive")):
        with pytest.raises(TypeError, match="list of names"):
            tools.write_dataset(TABLE, tmp_path / "d", partitioning=partitioning)
