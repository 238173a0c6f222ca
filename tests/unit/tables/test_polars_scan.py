"""What a lazy frame of Polars requests from the data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import DecryptionError, NotEncryptedError
from parquet_keytools.tables.reading import PolarsSource

TABLE = pa.table({"id": range(10), "name": [f"n{row}" for row in range(10)]})


class Asked:
    """An in-memory data set, and the options of its scans."""

    schema = TABLE.schema

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def open(self, *, columns: Sequence[str] | None) -> Asked:
        return self

    def to_batches(self, **options: Any) -> list[pa.RecordBatch]:
        self.options = options
        return ds.dataset(TABLE).to_batches(**options)  # type: ignore[no-any-return]


@pytest.fixture
def cpu_count() -> Iterator[None]:
    count = pa.cpu_count()
    yield
    pa.set_cpu_count(count)


@pytest.mark.usefixtures("cpu_count")
@pytest.mark.parametrize(("threads", "batches"), [(1, 2), (2, 4), (8, 16), (64, 16)])
def test_what_is_read_ahead_depends_on_the_threads(threads: int, batches: int) -> None:
    pa.set_cpu_count(threads)
    asked = Asked()
    frame = pl.scan_pyarrow_dataset(PolarsSource(TABLE.schema, asked.open))  # type: ignore[arg-type]
    found = frame.filter(pl.col("id") > 7).select("name").collect()
    assert found.to_dict(as_series=False) == {"name": ["n8", "n9"]}
    assert asked.options["batch_readahead"] == batches


def test_a_caller_may_say_how_much_is_read_ahead() -> None:
    asked = Asked()
    source = PolarsSource(TABLE.schema, asked.open)  # type: ignore[arg-type]
    assert sum(batch.num_rows for batch in source.to_batches(batch_size=3, batch_readahead=1)) == 10
    assert asked.options["batch_size"] == 3
    assert asked.options["batch_readahead"] == 1


FILES = 3


@pytest.fixture
def keytools() -> Keytools:
    return Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": ["foot", "name"]},
            "tables": {
                "t": {
                    "footer_key": "foot",
                    "column_keys": {"name": ["name"]},
                    "unlisted_columns": "footer_key",
                }
            },
        }
    )


@pytest.fixture
def folder(keytools: Keytools, tmp_path: Path) -> Path:
    for number in range(FILES):
        path = tmp_path / f"n={number}" / "part.parquet"
        path.parent.mkdir()
        keytools.write_table(TABLE, path, compression="none", use_dictionary=False)
    return tmp_path


def alter(keytools: Keytools, path: Path, column: int) -> None:
    """Change a byte in the middle of the chunk of a column."""
    chunk = keytools.metadata(path).row_group(0).column(column)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
@pytest.mark.parametrize("is_filtered", [True, False])
def test_an_altered_page_is_named(keytools: Keytools, folder: Path, engine: Any, is_filtered: bool) -> None:
    altered = folder / "n=1" / "part.parquet"
    alter(keytools, altered, 1)
    frame = keytools.scan_polars(folder)
    if is_filtered:
        frame = frame.filter(pl.col("id") > 3)
    with pytest.raises(DecryptionError, match=r"data page.*'name'.*does not authenticate") as caught:
        frame.select("name").collect(engine=engine)
    assert caught.value.path == str(altered)
    # No byte of that column is read for other columns, and none of that file for other folders.
    assert frame.select("id", "n").collect(engine=engine).height == FILES * (6 if is_filtered else len(TABLE))
    assert frame.filter(pl.col("n") != 1).collect(engine=engine).height == 2 * (6 if is_filtered else len(TABLE))


def test_a_plaintext_file_in_place_of_one_is_refused(keytools: Keytools, folder: Path) -> None:
    frame = keytools.scan_polars(folder)
    pq.write_table(TABLE, folder / "n=1" / "part.parquet")
    with pytest.raises(NotEncryptedError, match="n=1"):
        frame.collect()
