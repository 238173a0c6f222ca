"""Data sets: which files are opened, when, and with which result."""

from __future__ import annotations

import base64
import gc
import inspect
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from faults import FaultyKms
from pyarrow_versions import WRITES_STREAMS

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    FileChangedError,
    TableMismatchError,
)
from parquet_keytools.files import opened_file
from parquet_keytools.keys.key_wrapping import Kek
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.tables import file_systems

MASTER_KEYS = {name: name.encode() * 4 for name in ("foot", "cola", "colb")}
TABLE = pa.table({"a": range(10), "b": range(10)})
FILES = 30


def document(**settings: Any) -> dict[str, Any]:
    reading = settings.pop("reading", {})
    table = {"footer_key": "foot", "column_keys": {"cola": ["a"]}, "unlisted_columns": "plaintext"} | settings
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    return {"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}, "reading": reading}


def keytools(kms: FaultyKms | None = None, **settings: Any) -> Keytools:
    return Keytools(parse_configuration(document(**settings)), kms=kms)


def file_of(folder: Path, number: int) -> Path:
    return folder / f"p={number:02}" / "x.parquet"


def write(folder: Path, tools: Keytools, count: int = FILES) -> Path:
    for number in range(count):
        path = file_of(folder, number)
        path.parent.mkdir(parents=True)
        tools.write_table(TABLE, path)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each folder's file is opened."""
    counts: Counter[str] = Counter()
    read = opened_file.envelope_at

    def counted(location: Any) -> Any:
        counts[Path(location.path).parent.name] += 1
        return read(location)

    monkeypatch.setattr(opened_file, "envelope_at", counted)
    return counts


IS_3 = pc.field("p") == 3


def counted_by_datafusion(dataset: Any) -> int:
    context = datafusion.SessionContext()
    context.register_dataset("lazy", dataset)
    (batch,) = context.sql("select count(a) from lazy where p = 3").collect()
    count: int = batch.column(0)[0].as_py()
    return count


WAYS: dict[str, Callable[[Any], object]] = {
    "to_table": lambda dataset: dataset.to_table(filter=IS_3).num_rows,
    "scanner": lambda dataset: dataset.scanner(filter=IS_3).to_reader().read_all().num_rows,
    "filter": lambda dataset: dataset.filter(IS_3).to_table().num_rows,
    "scanner of a filter": lambda dataset: dataset.filter(IS_3).scanner().to_reader().read_all().num_rows,
    "to_batches": lambda dataset: sum(batch.num_rows for batch in dataset.to_batches(filter=IS_3)),
    "count_rows": lambda dataset: dataset.count_rows(filter=IS_3),
    "head": lambda dataset: dataset.head(100, filter=IS_3).num_rows,
    "take": lambda dataset: dataset.take(list(range(10)), filter=IS_3).num_rows,
    "fragments": lambda dataset: sum(f.to_table().num_rows for f in dataset.get_fragments(IS_3)),
    "sort_by": lambda dataset: dataset.filter(IS_3).sort_by("a").to_table().num_rows,
    "replace_schema": lambda dataset: (
        dataset.filter(IS_3).replace_schema(pa.schema([("a", pa.int64()), ("p", pa.int32())])).to_table().num_rows
    ),
    "polars": lambda dataset: pl.scan_pyarrow_dataset(dataset).filter(pl.col("p") == 3).collect().height,
    "duckdb": lambda dataset: (
        duckdb.connect().execute("select count(a) from dataset where p = 3").fetchall()[0][0]
    ),
    "datafusion": counted_by_datafusion,
}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keytools, Path]:
    """A data set with one file that is not Parquet."""
    tools, folder = keytools(), tmp_path_factory.mktemp("lake")
    write(folder, tools)
    file_of(folder, 7).write_bytes(b"nobody looks at it")
    return tools, folder


@pytest.mark.parametrize("way", WAYS)
def test_only_the_partition_that_is_asked_for_is_opened(
    lake: tuple[Keytools, Path], way: str, opened: Counter[str]
) -> None:
    tools, folder = lake
    dataset = tools.dataset(folder)
    assert opened == {"p=00": 1}, "for the schema"
    assert WAYS[way](dataset) == 10
    assert opened == {"p=00": 1, "p=03": 1}


@pytest.mark.parametrize("arguments", [{"columns": ["b"]}, {"filters": IS_3}, {"columns": ["b"], "filters": IS_3}])
def test_what_is_opened_at_once(tmp_path: Path, arguments: dict[str, Any], opened: Counter[str]) -> None:
    """The columns in the schema depend on all files that remain after filtering."""
    tools = keytools()
    write(tmp_path, tools, 6)
    dataset = tools.dataset(tmp_path, **arguments)
    expected = {"p=00"}
    if "columns" in arguments:
        expected |= {"p=03"} if "filters" in arguments else {f"p={number:02}" for number in range(6)}
    assert opened == dict.fromkeys(expected, 1)
    assert dataset.to_table(columns=["b"]).num_rows == 60, "the filters are the caller's"
    assert set(opened.values()) == {1}


@pytest.mark.parametrize("columns", [None, ["b"]])
def test_a_folder_is_read_without_what_its_filters_leave_out(
    tmp_path: Path, columns: list[str] | None, opened: Counter[str]
) -> None:
    tools = keytools()
    write(tmp_path, tools)
    assert tools.read_table(tmp_path, columns=columns, filters=[("p", "in", [3, 5])]).num_rows == 20
    assert opened == {"p=00": 1, "p=03": 1, "p=05": 1}


def test_a_scan_opens_each_file_once(tmp_path: Path, opened: Counter[str]) -> None:
    tools = keytools()
    write(tmp_path, tools, 60)
    assert tools.dataset(tmp_path).to_table().num_rows == 600
    assert set(opened.values()) == {1}
    assert len(opened) == 60


def test_only_some_files_are_opened_ahead(tmp_path: Path, opened: Counter[str]) -> None:
    tools = keytools()
    write(tmp_path, tools, 10)
    for number in range(10, 400):
        file_of(tmp_path, number).parent.mkdir()
        os.link(file_of(tmp_path, number % 10), file_of(tmp_path, number))
    dataset = tools.dataset(tmp_path)
    next(iter(dataset.to_batches(fragment_readahead=1, batch_readahead=1)))
    assert len(opened) < 200


def test_rows_before_a_bad_file_are_read(tmp_path: Path) -> None:
    tools = keytools()
    write(tmp_path, tools)
    dataset = tools.dataset(tmp_path)
    file_of(tmp_path, 20).unlink()
    batches = dataset.to_batches(use_threads=False, fragment_readahead=1)
    assert sum(next(batches).num_rows for _ in range(15)) == 150
    with pytest.raises(FileNotFoundError, match="p=20"):
        list(batches)
    assert dataset.head(100).num_rows == 100


def test_a_file_of_another_table_is_refused_where_the_scan_meets_it(tmp_path: Path) -> None:
    tools = keytools()
    write(tmp_path, tools)
    keytools(footer_key="colb").write_table(TABLE, file_of(tmp_path, 9))
    dataset = tools.dataset(tmp_path)
    with pytest.raises(TableMismatchError, match="p=09"):
        dataset.to_table()
    assert dataset.to_table(filter=pc.field("p") > 9).num_rows == 200


def test_folders_that_give_values_to_a_column_that_only_a_later_file_encrypts(tmp_path: Path) -> None:
    tools = keytools(unlisted_columns="footer_key")
    for number in range(2):
        path = tmp_path / f"c={number}" / "x.parquet"
        path.parent.mkdir()
        tools.write_table(TABLE, path)
    tools.write_table(TABLE.append_column("c", pa.array(range(10), pa.int32())), tmp_path / "c=1" / "x.parquet")
    dataset = tools.dataset(tmp_path)
    assert dataset.to_table(filter=pc.field("c") == 0).num_rows == 10
    with pytest.raises(DecryptionError, match="the name of a folder gives values to 'c'"):
        dataset.to_table()


@pytest.mark.parametrize("swap", [False, True])
def test_a_file_stays_what_it_was_when_it_was_read_first(
    tmp_path: Path, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow keeps the layout of a file; we keep nothing else of it for long."""
    monkeypatch.setattr(file_systems, "KEPT_FILES", 1)
    tools = keytools()
    write(tmp_path, tools, 4)
    dataset = tools.dataset(tmp_path)
    for _ in range(2):
        assert dataset.to_table(columns=["a"]).num_rows == 40
    if swap:
        tools.write_table(TABLE, file_of(tmp_path, 1))
        with pytest.raises(FileChangedError, match="p=01"):
            dataset.to_table()
    else:
        assert tools.rotate(tmp_path).succeeded
        for _ in range(2):
            assert dataset.to_table(columns=["a", "b"], filter=pc.field("a") > 4).num_rows == 20


def test_a_kms_that_comes_back(tmp_path: Path) -> None:
    kms = FaultyKms(MASTER_KEYS)
    tools = keytools(kms, double_wrapping=False)
    write(tmp_path, tools)
    dataset = tools.dataset(tmp_path)
    (fragment,) = dataset.get_fragments(pc.field("p") == 5)
    kms.fail("refused", "cola")
    for read in (dataset.to_table, fragment.to_table, dataset.count_rows):
        with pytest.raises(ColumnAccessDeniedError):
            read()
    kms.failure = None
    # Files that are being opened ahead of the last one may still fail.
    end = time.monotonic() + 60
    while True:
        try:
            assert fragment.to_table().num_rows == 10
            assert dataset.to_table().num_rows == 300
            break
        except ColumnAccessDeniedError:
            assert time.monotonic() < end, "the refusal was kept"


def test_keks_of_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow keeps KEKs by id: it would use one file's KEK for another file."""
    tools = keytools()
    monkeypatch.setattr(
        Kek, "generate", classmethod(lambda cls, bits: cls(b"the same for all", SecretBytes.random(bits)))
    )
    for number in range(8):
        tools.clear_caches()
        path = file_of(tmp_path, number)
        path.parent.mkdir()
        tools.write_table(TABLE, path)
    for use_threads in (False, True):
        assert tools.dataset(tmp_path).to_table(columns=["a"], use_threads=use_threads).num_rows == 80


@pytest.mark.parametrize("settings", [{"key_material": "external"}, {"aad_prefix": "{file_name}"}])
def test_one_file_of_another_kind_among_others(tmp_path: Path, settings: dict[str, Any]) -> None:
    tools, other = keytools(**settings), keytools()
    reader = keytools(reading={"file_unique_lengths": "any"})
    write(tmp_path, other, 4)
    expected = other.dataset(tmp_path).to_table()
    for number in (0, 2):
        if "aad_prefix" not in settings:
            tools.write_table(TABLE, file_of(tmp_path, number))
        assert reader.dataset(tmp_path).to_table() == expected


# --- workers ---


def rows(dataset: ds.Dataset) -> int:
    return int(dataset.to_table().num_rows)


def test_a_pickle_is_read_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keystore = document()
    for name in MASTER_KEYS:
        monkeypatch.setenv(name.upper(), keystore["kms"]["keys"][name])
        keystore["kms"]["keys"][name] = f"${{{name.upper()}}}"
    tools = Keytools.from_mapping(keystore)
    write(tmp_path, tools, 5)
    dataset = tools.dataset(tmp_path)
    dataset.to_table()
    content = pickle.dumps(dataset)
    for name, key in MASTER_KEYS.items():
        assert key not in content
        assert document()["kms"]["keys"][name].encode() not in content
    late = file_of(tmp_path, 90)
    late.parent.mkdir()
    late.write_bytes(b"it comes later")
    restored = pickle.loads(content)
    assert restored.schema == dataset.schema
    assert restored.to_table() == dataset.to_table()
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).to_table().num_rows)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=pickle.dumps(dataset), capture_output=True, check=True, timeout=120)
    assert int(done.stdout) == 50
    with pytest.raises(ValueError, match="filter"):
        pickle.dumps(dataset.filter(IS_3))
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        pickle.dumps(keytools(FaultyKms(MASTER_KEYS)).dataset(tmp_path / "p=00"))


def test_a_forked_child_reads_on(tmp_path: Path) -> None:
    """It has none of the threads that opened files."""
    tools = keytools()
    write(tmp_path, tools)
    dataset = tools.dataset(tmp_path)
    assert rows(dataset) == FILES * 10
    # While Arrow's threads enter and leave Python, a fork can hang, in CPython itself and in Arrow.
    time.sleep(0.5)
    with multiprocessing.get_context("fork").Pool(1, globals().update, [{"_of_parent": dataset}]) as pool:
        assert pool.apply_async(_rows_of_parent).get(120) == FILES * 10


_of_parent: Any = None


def _rows_of_parent() -> int:
    return rows(_of_parent)


def test_nothing_is_left_of_a_data_set(tmp_path: Path) -> None:
    tools = keytools()
    write(tmp_path, tools)
    dataset = tools.dataset(tmp_path)
    assert rows(dataset) == FILES * 10
    handler = weakref.ref(dataset.filesystem.handler)
    del dataset
    # Threads of Arrow may be about to release it.
    end = time.monotonic() + 60
    while handler() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert handler() is None


DAMAGED_SCANS: dict[str, Callable[[ds.Dataset], object]] = {
    "to_table": lambda scanned: scanned.to_table(),
    "to_table of expressions": lambda scanned: scanned.to_table(columns={"c": pc.field("a") + 1}),
    "to_table of a filter": lambda scanned: scanned.to_table(columns=["b"], filter=pc.field("a") >= 0),
    "to_batches": lambda scanned: list(scanned.to_batches(columns=["a"])),
    "head": lambda scanned: scanned.head(50, columns=["a"]),
    "take": lambda scanned: scanned.take([25], columns=["a"]),
    "count_rows": lambda scanned: scanned.count_rows(filter=pc.field("a") > 3),
    "filter": lambda scanned: scanned.filter(pc.field("a") >= 0).to_table(columns=["b"]),
}


@pytest.mark.parametrize("scan", DAMAGED_SCANS.values(), ids=DAMAGED_SCANS.keys())
def test_an_altered_page_is_named_by_each_way_to_scan(
    tmp_path: Path, scan: Callable[[ds.Dataset], object]
) -> None:
    tools = keytools(unlisted_columns="footer_key")
    folder = write(tmp_path / "d", tools, 3)
    damaged = file_of(folder, 1)
    chunk = tools.metadata(damaged).row_group(0).column(0)
    data = bytearray(damaged.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    damaged.write_bytes(data)
    scanned = tools.dataset(folder)
    with pytest.raises(DecryptionError, match="'a'") as caught:
        scan(scanned)
    assert caught.value.path == str(damaged)
    # Neither the other column nor the other files are affected.
    assert scanned.to_table(columns=["b"]).num_rows == 30
    assert scanned.filter(pc.field("p") != 1).count_rows(filter=pc.field("a") >= 0) == 20


def test_an_altered_page_between_two_columns_does_not_break_their_scan(tmp_path: Path) -> None:
    """Arrow also reads the bytes in a small gap between the requested columns."""
    tools = keytools(unlisted_columns="footer_key")
    table = TABLE.append_column("c", TABLE["a"])
    damaged = tmp_path / "x.parquet"
    tools.write_table(table, damaged)
    chunk = tools.metadata(damaged).row_group(0).column(1)
    data = bytearray(damaged.read_bytes())
    data[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
    damaged.write_bytes(data)
    scanned = tools.dataset(tmp_path)
    assert scanned.to_table(columns=["a", "c"]).equals(table.select(["a", "c"]))
    with pytest.raises(DecryptionError, match="'b'"):
        scanned.to_table(columns=["b"])


SCAN = (["b", "p"], pc.field("a") > 3, 2, 1, 1, None, False, True, None)
"""All arguments that scans take by position, from `columns` on."""

POSITIONAL: dict[str, tuple[Any, ...]] = {
    "to_table": SCAN,
    "to_batches": SCAN,
    "scanner": SCAN,
    "head": (5, *SCAN),
    "take": ([3, 1], *SCAN),
    "count_rows": SCAN[1:],
    "filter": (pc.field("a") > 3,),
    "get_fragments": (pc.field("p") == 0,),
    "sort_by": ([("a", "descending"), ("p", "ascending")],),
    "replace_schema": (pa.schema([("b", pa.int64()), ("p", pa.int32())]),),
    "join": (ds.dataset(TABLE.append_column("c", TABLE["a"])), ["a"], ["c"], "inner", "_l", "_r", True, False),
    "join_asof": (ds.dataset(TABLE), "a", ["b"], 0, "a", ["b"]),
}


def test_no_method_of_pyarrow_is_forgotten() -> None:
    public = {name for name in dir(ds.FileSystemDataset) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(ds.FileSystemDataset, name))}
    assert methods - {"from_paths"} == POSITIONAL.keys()


@pytest.mark.parametrize("method", POSITIONAL)
def test_methods_take_what_those_of_pyarrow_take_by_position(tmp_path: Path, method: str) -> None:
    """Scans with positional arguments raised a TypeError."""
    given = POSITIONAL[method]
    parameters = list(inspect.signature(getattr(ds.FileSystemDataset, method)).parameters.values())[1:]
    by_position = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert len(given) == len(by_position), "pyarrow takes other arguments"
    tools = keytools()
    write(tmp_path / "encrypted", tools, 1)
    plain = file_of(tmp_path / "plain", 0)
    plain.parent.mkdir(parents=True)
    pq.write_table(TABLE, plain)
    results = []
    for dataset in (
        tools.dataset(tmp_path / "encrypted"),
        ds.dataset(tmp_path / "plain", partitioning="hive"),
    ):
        result = getattr(dataset, method)(*given)
        if method in ("scanner", "filter", "sort_by", "replace_schema", "join", "join_asof"):
            # A join keeps no order.
            result = sorted(result.to_table().to_pylist(), key=str)
        elif method == "to_batches":
            result = [batch.to_pydict() for batch in result]
        elif method == "get_fragments":
            result = [fragment.path.rpartition("p=")[2] for fragment in result]
        results.append(result)
    assert results[0] == results[1]


def test_a_scanner_is_taken_for_data(tmp_path: Path) -> None:
    """Its reader is ours: pyarrow's own would hang when a thread of Arrow opens the next file."""
    tools = keytools()
    dataset = tools.dataset(write(tmp_path / "d", tools, 3))
    tools.write_table(dataset.scanner(columns=["a"]), tmp_path / "x.parquet")
    assert tools.read_table(tmp_path / "x.parquet").num_rows == 30
    reader = pa.RecordBatchReader.from_stream(dataset.filter(pc.field("a") > 4).scanner())
    assert reader.read_all().num_rows == 15
    tools.write_dataset(dataset, tmp_path / "encrypted", partitioning=["p"])
    assert tools.dataset(tmp_path / "encrypted").count_rows() == 30
    ds.write_dataset(dataset.scanner().to_reader(), tmp_path / "plain", format="parquet")
    assert ds.dataset(tmp_path / "plain").count_rows() == 30


@pytest.mark.skipif(not WRITES_STREAMS, reason="this pyarrow writes its own data sets only")
def test_pyarrow_writes_a_data_set_of_ours(tmp_path: Path) -> None:
    dataset = keytools().dataset(write(tmp_path / "d", keytools(), 3))
    ds.write_dataset(dataset, tmp_path / "plain", format="parquet")
    assert ds.dataset(tmp_path / "plain").count_rows() == 30
