"""The maximum number of row groups, columns and pages, set by the ordinals, in each engine (spec 4.4.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow_versions import rows_per_page
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import FormatLimitError

COUNT = 32_768

ENGINES = {"pyarrow": {}, "module encryptor": {"aad_prefix": "{file_name}"}}

PAGES_OF_ONE_ROW = {"use_dictionary": False, "compression": "none", **rows_per_page(1)}


def keytools(engine: str) -> Keytools:
    table = {"footer_key": "footer", "unlisted_columns": "footer_key", **ENGINES[engine]}
    return Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": ["footer"]}, "tables": {"t": table}}
    )


def pages(tools: Keytools, count: int, target: Path) -> Any:
    return tools.write_table(pa.table({"x": pa.array(range(count))}), target, **PAGES_OF_ONE_ROW)


def columns(tools: Keytools, count: int, target: Path) -> Any:
    return tools.write_table(pa.table({f"c{number}": pa.array([1]) for number in range(count)}), target)


def row_groups(tools: Keytools, count: int, target: Path) -> Any:
    return tools.write_table(pa.table({"x": pa.array(range(count))}), target, row_group_size=1)


def row_groups_of_batches(tools: Keytools, count: int, target: Path) -> Any:
    batch = pa.record_batch({"x": pa.array([1])})
    with tools.writer(target, batch.schema) as writer:
        writer.write_table(pa.table({"x": pa.array(range(count - 1))}), row_group_size=1)
        writer.write_batch(batch)
    return writer.result


def row_groups_of_a_data_set(tools: Keytools, count: int, target: Path) -> Any:
    data = pa.table({"x": pa.array(range(count))})
    return tools.write_dataset(data, target, max_rows_per_group=1, min_rows_per_group=1)


def pages_of_a_data_set(tools: Keytools, count: int, target: Path) -> Any:
    data = pa.table({"x": pa.array(range(count))})
    return tools.write_dataset(data, target, write_options=PAGES_OF_ONE_ROW)


def columns_of_a_data_set(tools: Keytools, count: int, target: Path) -> Any:
    return tools.write_dataset(pa.table({f"c{number}": pa.array([1]) for number in range(count)}), target)


WAYS = [
    *(pages, columns, row_groups, row_groups_of_batches),
    *(row_groups_of_a_data_set, columns_of_a_data_set, pages_of_a_data_set),
]

ALL = [(way, engine) for way in WAYS for engine in ENGINES]

# Each takes seconds, and some a minute.
FITTING = ALL if SOAK else [(pages, "pyarrow"), (pages, "module encryptor")]
REFUSED = (
    ALL
    if SOAK
    else [
        (pages, "pyarrow"),
        (pages, "module encryptor"),
        (columns, "module encryptor"),
        (row_groups_of_batches, "pyarrow"),
        (pages_of_a_data_set, "pyarrow"),
        (columns_of_a_data_set, "pyarrow"),
    ]
)


@pytest.mark.parametrize(("way", "engine"), FITTING)
def test_as_many_as_there_are_ordinals_fit(
    engine: str, way: Callable[[Keytools, int, Path], Any], tmp_path: Path
) -> None:
    tools = keytools(engine)
    written = way(tools, COUNT, tmp_path / "x.parquet")
    assert written.engine == engine
    assert tools.read_table(tmp_path / "x.parquet").num_rows == written.rows
    # Outside of a soak, the module encryptor has written as many pages.
    if SOAK:
        tools.rekey_file(tmp_path / "x.parquet", tmp_path / "other.parquet")


@pytest.mark.parametrize(("way", "engine"), REFUSED)
def test_one_more_is_refused_and_nothing_is_written(
    engine: str, way: Callable[[Keytools, int, Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(FormatLimitError, match=f"x.parquet.*{COUNT}"):
        way(keytools(engine), COUNT + 1, tmp_path / "x.parquet")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
