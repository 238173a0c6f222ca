"""Engines read encrypted files through a view as they read plain ones."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from view_case import ViewCase, parquet_bytes

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError, KeytoolsError
from parquet_keytools.format.file_layout import RangedFile
from parquet_keytools.fsspec_chain import KeytoolsUrls

ROWS = 20_000
MONTHS = range(1, 4)
CONFIGURATION = """
version: 1
kms: {type: in_memory, keys: {kf: YmFzZTY0IGtleSBvZiAxNg==, kb: YW5vdGhlciBrZXkgb2YgMQ==}}
tables:
  t: {footer_key: kf, column_keys: {kb: [carrier, legs]}, unlisted_columns: footer_key}
"""


def month_table(month: int) -> pa.Table:
    return pa.table(
        {
            "id": range(ROWS * (month - 1), ROWS * month),
            "carrier": [f"C{n % 17}" for n in range(ROWS)],
            "price": [n / 7 for n in range(ROWS)],
            "legs": [[{"to": f"T{n % 5}", "km": n}] * (n % 3) for n in range(ROWS)],
        }
    )


@cache
def all_months() -> pa.Table:
    return pa.concat_tables([month_table(month) for month in MONTHS])


class Lake:
    """A folder with months, encrypted and in plaintext."""

    def __init__(self, folder: Path) -> None:
        self.configuration = folder / "keytools.yaml"
        self.configuration.write_text(CONFIGURATION)
        self.configuration.chmod(0o600)
        self.keytools = Keytools.from_yaml(self.configuration)
        self.encrypted, self.plain = folder / "encrypted", folder / "plain"
        for month in MONTHS:
            name = f"month={month}/part.parquet"
            for root in (self.encrypted, self.plain):
                (root / name).parent.mkdir(parents=True)
            options: dict[str, Any] = {"row_group_size": 8_000, "write_page_index": True, "data_page_size": 20_000}
            pq.write_table(month_table(month), self.plain / name, **options)
            self.keytools.encrypt_file(self.plain / name, self.encrypted / name)
        self.view = self.keytools.view(self.encrypted)
        self.options = {"config": str(self.configuration), "table": "t"}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    fsspec.register_implementation("keytools", KeytoolsUrls, clobber=True)
    yield Lake(tmp_path_factory.mktemp("lake"))
    KeytoolsUrls.clear_instance_cache()


def test_pandas(lake: Lake) -> None:
    one = pd.read_parquet("month=2/part.parquet", filesystem=lake.view, columns=["carrier", "id"])
    assert one["carrier"].tolist() == month_table(2)["carrier"].to_pylist()
    assert pd.read_parquet("", filesystem=lake.view)["id"].sum() == pc.sum(all_months()["id"]).as_py()
    filtered = pd.read_parquet("", filesystem=lake.view, filters=[("month", "=", 3), ("id", "<", 40_005)])
    assert filtered["id"].tolist() == list(range(40_000, 40_005))


def test_duckdb(lake: Lake) -> None:
    with duckdb.connect() as connection:
        connection.register_filesystem(lake.view)
        found = connection.sql("select carrier, count(*) n from 'keytools://*/*.parquet' group by 1 order by 1")
        expected = connection.sql(
            f"select carrier, count(*) n from '{lake.plain}/*/*.parquet' group by 1 order by 1"
        )
        assert found.fetchall() == expected.fetchall()
        nested = "select sum(leg.km) from (select unnest(legs) leg from '{}') where leg.to = 'T2'"
        roots = ("keytools:/", lake.plain)
        sums = [connection.sql(nested.format(f"{root}/*/*.parquet")).fetchall() for root in roots]
        assert sums[0] == sums[1]
        months = connection.sql("select month, count(*) from 'keytools://*/*.parquet' where month = 2 group by 1")
        assert months.fetchall() == [(2, ROWS)]


def test_polars(lake: Lake) -> None:
    frame = lake.keytools.scan_polars(lake.encrypted)
    assert frame.collect_schema().names() == ["id", "carrier", "price", "legs", "month"]
    found = frame.filter(pl.col("month") == 2, pl.col("id") < ROWS + 5).select("carrier", "legs").collect()
    assert found.to_arrow().to_pylist() == month_table(2).slice(0, 5).select(["carrier", "legs"]).to_pylist()
    assert frame.select(pl.len()).collect().item() == 3 * ROWS
    assert frame.head(3).select("id").collect()["id"].to_list() == [0, 1, 2]
    assert frame.filter(pl.col("carrier").str.ends_with("6")).select(pl.len()).collect().item() == (
        sum(name.endswith("6") for name in all_months()["carrier"].to_pylist())
    )
    with lake.keytools.open(lake.encrypted / "month=1/part.parquet") as file:
        assert pl.read_parquet(file).to_arrow().to_pylist() == month_table(1).to_pylist()
    with lake.view.open("month=1/part.parquet") as file:
        assert pl.scan_parquet(file).select(pl.col("id").sum()).collect().item() == sum(range(ROWS))


def test_polars_fetches_only_the_keys_of_its_query(lake: Lake) -> None:
    keytools = Keytools.from_yaml(lake.configuration)
    keytools.kms.deny("kb")
    frame = keytools.scan_polars(lake.encrypted)
    assert frame.collect_schema().names() == ["id", "price", "month", "carrier", "legs"]
    assert frame.select(pl.col("id").sum()).collect().item() == pc.sum(all_months()["id"]).as_py()
    with pytest.raises(Exception, match="carrier"):
        frame.filter(pl.col("carrier") == "C1").select("id").collect()


def test_datafusion(lake: Lake) -> None:
    context = datafusion.SessionContext()
    context.register_dataset("flights", ds.dataset("", filesystem=lake.view.arrow, partitioning="hive"))
    rows = context.sql(
        "select month, count(*) n, max(id) m from flights where id >= 20010 group by month order by 1"
    )
    assert rows.to_pydict() == {"month": [2, 3], "n": [ROWS - 10, ROWS], "m": [2 * ROWS - 1, 3 * ROWS - 1]}


def test_dask(lake: Lake) -> None:
    import dask.dataframe as dd  # takes a second, which each process that collects the tests would spend

    frame = dd.read_parquet("month=*/part.parquet", filesystem=lake.view, columns=["id", "carrier"])
    assert frame["id"].sum().compute(scheduler="threads") == pc.sum(all_months()["id"]).as_py()
    url = f"keytools://{lake.encrypted}/month=*/part.parquet"
    by_url = dd.read_parquet(url, columns=["price"], storage_options=lake.options)
    assert len(by_url.compute(scheduler="synchronous")) == 3 * ROWS


def test_urls(lake: Lake) -> None:
    import dask.dataframe as dd

    file = f"keytools::file://{lake.encrypted}/month=1/part.parquet"
    assert pd.read_parquet(file, storage_options=lake.options)["id"].tolist() == list(range(ROWS))
    folder = pd.read_parquet(f"keytools::file://{lake.encrypted}", storage_options=lake.options)
    assert len(folder) == 3 * ROWS
    direct = f"keytools://{lake.encrypted}/month=1/part.parquet"
    assert len(pd.read_parquet(direct, storage_options=lake.options)) == ROWS
    pattern = f"keytools://month=*/part.parquet::file://{lake.encrypted}"
    assert len(dd.read_parquet(pattern, storage_options=lake.options)) == 3 * ROWS
    # A pattern stands before the folder.
    with pytest.raises(FileNotFoundError):
        pd.read_parquet(f"keytools::file://{lake.encrypted}/month=*/part.parquet", storage_options=lake.options)
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*/nothing"):
        fsspec.open(f"keytools::file://{lake.encrypted}/nothing", **lake.options).fs.ls("")
    with pytest.raises(ConfigurationError, match="'confg'"):
        pd.read_parquet(direct, storage_options={"confg": "x"})
    with pytest.raises(ConfigurationError, match="needs a configuration"):
        pd.read_parquet(direct)


def test_what_a_url_writes_is_encrypted(lake: Lake, tmp_path: Path) -> None:
    frame = pd.DataFrame({"carrier": ["a value"], "legs": [["x"]]})
    frame.to_parquet(f"keytools::file://{tmp_path}/x.parquet", storage_options=lake.options)
    assert b"a value" not in (tmp_path / "x.parquet").read_bytes()
    assert lake.keytools.read_table(tmp_path / "x.parquet")["carrier"].to_pylist() == ["a value"]


def test_fsspec_finds_the_protocol() -> None:
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="fsspec.specs") if point.name == "keytools"]
    # An installation from before this entry point has none until it is reinstalled.
    assert all(point.load() is KeytoolsUrls for point in found)


def test_views_and_their_files_are_pickled(lake: Lake) -> None:
    view = pickle.loads(pickle.dumps(lake.view))
    assert view.glob("*/*.parquet") == lake.view.glob("*/*.parquet")
    with lake.view.open("month=1/part.parquet") as file, pickle.loads(pickle.dumps(file)) as other:
        assert other.read() == file.read()
    data = pickle.dumps(lake.view)
    assert b"YmFzZTY0" not in data and b"base64 key" not in data


OUTSIDE = ["../plain/month=1/part.parquet", "month=1/../../plain/x", "a\0b", "link/month=1/part.parquet"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_of_a_view_is_read(lake: Lake, path: str) -> None:
    link = lake.encrypted / "link"
    if not link.exists():
        link.symlink_to(lake.plain)
    try:
        with pytest.raises(PermissionError, match="outside"):
            lake.view.open(path)
        with pytest.raises(PermissionError, match="outside"):
            lake.view.info(path)
    finally:
        link.unlink()


# --- Bytes read ----------------------------------------------------------------------------------------------


class Meter:
    """Counts the bytes read from local files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_bytes = 0
        import parquet_keytools.storage.locations as sources

        read_at = sources.FileSource.read_at

        def counted(source: Any, offset: int, length: int) -> bytes:
            self.read_bytes += length
            return read_at(source, offset, length)

        monkeypatch.setattr(sources.FileSource, "read_at", counted)


class CountedFiles(fsspec.AbstractFileSystem):
    """The plaintext files, by the protocol `counted`, as the view shows the encrypted ones."""

    protocol = "counted"
    cachable = False

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.read_bytes = root, 0
        self.below = Keytools.from_mapping({"version": 1, "reading": {"plaintext_files": "allow"}}).view(root)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.below.ls(self._strip_protocol(path).strip("/"), detail)

    def info(self, path: str, **options: Any) -> Any:
        return self.below.info(self._strip_protocol(path).strip("/"))

    def modified(self, path: str) -> Any:
        return self.info(path)["modified"]

    created = modified

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        files = self

        class Counted(RangedFile):
            """DuckDB's threads share it."""

            def __init__(self) -> None:
                super().__init__()
                self.data = (files.root / files._strip_protocol(path).strip("/")).read_bytes()
                self.size_bytes = len(self.data)

            def read_at(self, offset: int, length: int) -> bytes:
                files.read_bytes += length
                return self.data[offset : offset + length]

        return Counted()


QUERIES = [
    "select sum(id) from '{}://month=2/part.parquet'",
    "select sum(price) from '{}://month=2/part.parquet' where id < 21000",
    "select max(carrier), avg(price) from '{}://*/*.parquet'",
]


@pytest.mark.parametrize("query", QUERIES)
def test_little_more_is_read_than_of_the_plaintext_file(
    lake: Lake, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CountedFiles(lake.plain)
    with duckdb.connect() as connection:
        connection.execute("set enable_external_file_cache = false; set threads = 1")
        connection.register_filesystem(plain)
        expected = connection.sql(query.format("counted")).fetchall()
        view = lake.keytools.view(lake.encrypted)
        connection.register_filesystem(view)
        meter = Meter(monkeypatch)
        assert connection.sql(query.format("keytools")).fetchall() == expected
    # The files are so small that the last 64 KiB, in which a footer is searched, are a large part of them.
    files = len(MONTHS) if "*/*" in query else 1
    assert plain.read_bytes > 100_000
    assert meter.read_bytes <= 1.3 * plain.read_bytes + files * 32 * 1024


LARGER = [
    "select sum(a) from '{}://x.parquet' where id < 1000",
    "select sum(id) from '{}://x.parquet'",
    "select max(text), avg(a) from '{}://x.parquet' where id between 125000 and 125100",
]


@pytest.mark.parametrize("write_page_index", [False, True])
def test_of_a_larger_file_no_more_is_read_than_thirty_percent(
    tmp_path: Path, write_page_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200_000
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {name: random.standard_normal(count) for name in "abc"}
    table = pa.table({"id": range(count), "text": [f"T{n % 900}" for n in range(count)], **columns})
    case = ViewCase(tmp_path / "encrypted", {"column_keys": {"secret": ["a"]}, "unlisted_columns": "footer_key"})
    for folder in ("encrypted", "plain"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "plain" / "x.parquet"
    pq.write_table(table, source, row_group_size=50_000, write_page_index=write_page_index)
    case.encrypt(source)
    for query in LARGER:
        plain = CountedFiles(tmp_path / "plain")
        with duckdb.connect() as connection, monkeypatch.context() as patch:
            connection.execute("set enable_external_file_cache = false; set threads = 1")
            connection.register_filesystem(plain)
            expected = connection.sql(query.format("counted")).fetchall()
            connection.register_filesystem(case.keytools().view(tmp_path / "encrypted"))
            meter = Meter(patch)
            assert connection.sql(query.format("keytools")).fetchall() == expected
        assert plain.read_bytes > 500_000
        assert meter.read_bytes <= 1.3 * plain.read_bytes, query


def test_an_altered_page_fails_the_query(lake: Lake, tmp_path: Path) -> None:
    data = bytearray((lake.encrypted / "month=1/part.parquet").read_bytes())
    chunk = (
        pq.ParquetFile(lake.keytools.open(lake.encrypted / "month=1/part.parquet")).metadata.row_group(1).column(2)
    )
    data[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
    (tmp_path / "x.parquet").write_bytes(data)
    view = lake.keytools.view(tmp_path)
    with duckdb.connect() as connection:
        connection.register_filesystem(view)
        assert connection.sql("select sum(id) from 'keytools://x.parquet'").fetchall() == [(sum(range(ROWS)),)]
        with pytest.raises(Exception, match="authentic"):
            connection.sql("select sum(price) from 'keytools://x.parquet'").fetchall()
    with pytest.raises(KeytoolsError, match="price"):
        pd.read_parquet("x.parquet", filesystem=view)


POLICIES = ["error", "hide", "null"]


@pytest.mark.parametrize("denied_columns", POLICIES)
def test_refused_columns(lake: Lake, denied_columns: str, tmp_path: Path) -> None:
    path = tmp_path / "keytools.yaml"
    path.write_text(f"{CONFIGURATION}reading: {{denied_columns: {denied_columns}}}\n")
    path.chmod(0o600)
    keytools = Keytools.from_yaml(path)
    keytools.kms.deny("kb")
    view = keytools.view(lake.encrypted)
    with duckdb.connect() as connection:
        connection.register_filesystem(view)
        source = "'keytools://*/*.parquet'"
        assert connection.sql(f"select count(id), sum(price) > 0 from {source}").fetchall() == [(3 * ROWS, True)]
        if denied_columns == "null":
            found = connection.sql(f"select count(*), count(carrier), count(legs) from {source}").fetchall()
            assert found == [(3 * ROWS, 0, 0)]
        else:
            with pytest.raises((duckdb.Error, KeytoolsError)):
                connection.sql(f"select max(carrier) from {source}").fetchall()
    frames = pd.read_parquet("", filesystem=view, columns=["id", "price"])
    assert len(frames) == 3 * ROWS
    whole = keytools.open(lake.encrypted / "month=1/part.parquet")
    if denied_columns == "error":
        with pytest.raises(ColumnAccessDeniedError, match="carrier"):
            pq.read_table(whole)
    else:
        names = pl.read_parquet(whole).columns
        assert names == (["id", "price"] if denied_columns == "hide" else ["id", "carrier", "price", "legs"])
        frame = keytools.scan_polars(lake.encrypted)
        assert frame.select(pl.all().null_count()).collect().row(0, named=True) == (
            {"id": 0, "price": 0, "month": 0}
            if denied_columns == "hide"
            else {"id": 0, "carrier": 3 * ROWS, "price": 0, "legs": 3 * ROWS, "month": 0}
        )


@pytest.mark.parametrize("position", [0, 20, 40])
@pytest.mark.parametrize("rows_of_group", [1_000, 300])
def test_a_query_for_all_other_columns_works(
    tmp_path: Path, position: int, rows_of_group: int, caplog: pytest.LogCaptureFixture
) -> None:
    """DuckDB reads whole row groups, with refused columns, if nearly all columns are requested."""
    names = [f"c{n}" for n in range(40)]
    names.insert(position, "secret")
    table = pa.table({name: range(1_000) for name in names})
    case = ViewCase(tmp_path, {"column_keys": {"secret": ["secret"]}, "unlisted_columns": "footer_key"})
    case.encrypt(parquet_bytes(table, row_group_size=rows_of_group))
    case.kms.deny("secret")
    view = case.keytools(denied_columns="error").view(tmp_path)
    others = ", ".join(f"sum({name})" for name in names if name != "secret")
    with duckdb.connect() as connection:
        connection.register_filesystem(view)
        found = connection.sql(f"select {others} from 'keytools://x.parquet'").fetchall()
        assert found == [(sum(range(1_000)),) * 40]
        assert "a query that asks for secret will fail" in caplog.text
        for query in ("sum(secret)", "c0, secret", "*", f"{others}, sum(secret)"):
            with pytest.raises(duckdb.Error):
                connection.sql(f"select {query} from 'keytools://x.parquet'").fetchall()
    for filesystem, error in ((view, (OSError, KeytoolsError)), (view.arrow, ColumnAccessDeniedError)):
        with pytest.raises(error):
            pq.read_table("x.parquet", filesystem=filesystem)
        assert pq.read_table("x.parquet", filesystem=filesystem, columns=["c0", "c39"]).num_columns == 2
    with view.open("x.parquet") as file, pytest.raises((pl.exceptions.PolarsError, KeytoolsError)):
        pl.read_parquet(file, columns=["c0", "secret"])


def test_a_read_of_round_lengths_passes_over_refused_columns(tmp_path: Path) -> None:
    """As kernels and HTTP clients read: only a read that begins or ends with the column is a request for it."""
    case = ViewCase(tmp_path, {"column_keys": {"secret": ["secret"]}, "unlisted_columns": "footer_key"})
    path = case.encrypt(parquet_bytes(pa.table({"id": range(50_000), "secret": range(50_000)})))
    case.kms.deny("secret")
    file = case.view(path, denied_columns="error")
    whole = b"".join(
        file.read_at(start, min(4_093, file.size_bytes - start)) for start in range(0, file.size_bytes, 4_093)
    )
    assert pq.read_table(pa.BufferReader(whole), columns=["id"])["id"].to_pylist() == list(range(50_000))
    with pytest.raises(OSError):
        pq.read_table(pa.BufferReader(whole))
