"""Write options have pyarrow's meaning, or are refused, whichever engine encrypts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.kms.in_memory import InMemoryKms

TABLE = pa.table({"a": range(100), "b": ["x"] * 100})
DEFAULT = [100]
GROUPS_OF_30 = [30, 30, 30, 10]


@pytest.fixture(params=["pyarrow", "module encryptor"])
def keytools(request: pytest.FixtureRequest) -> Keytools:
    table = {
        "footer_key": "k",
        "column_keys": {"k": ["a", "b"]},
        "unlisted_columns": "plaintext",
        "data_key_length_bits": 128,
    }
    if request.param == "module encryptor":
        table["plaintext_footer"] = True
    return Keytools.from_mapping({"version": 1, "tables": {"t": table}}, kms=InMemoryKms({"k": None}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.parquet"


def row_groups(keytools: Keytools, path: Path) -> list[int]:
    metadata = keytools.metadata(path)
    return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]


def as_table() -> pa.Table:
    return TABLE


def as_stream() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches(40))


@pytest.mark.parametrize("make", [as_table, as_stream])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"row_group_size": 30}, GROUPS_OF_30),
        ({"row_group_size": 30.0}, GROUPS_OF_30),
        ({"chunk_size": 30}, GROUPS_OF_30),
        ({"chunk_size": 30, "row_group_size": 7}, GROUPS_OF_30),
        ({"row_group_size": None}, DEFAULT),
        ({"row_group_size": -1}, DEFAULT),
        ({"row_group_size": 10**9}, DEFAULT),
        ({"row_group_size": 2**70}, DEFAULT),
        ({"row_group_size": True}, [1] * 100),
        *(
            ({name: None}, DEFAULT)
            for name in ("chunk_size", "encryption_properties", "metadata_collector", "compression", "version")
        ),
    ],
)
def test_an_option_means_what_it_means_to_pyarrow(
    keytools: Keytools, path: Path, make: Any, options: dict[str, Any], expected: list[int]
) -> None:
    keytools.write_table(make(), path, **options)
    assert row_groups(keytools, path) == expected
    if options.get("row_group_size") != 2**70:  # This is too much for pyarrow.
        plain = path.with_name("plain.parquet")
        pq.write_table(TABLE, plain, **options)
        metadata = pq.read_metadata(plain)
        assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == expected


@pytest.mark.parametrize("make", [as_table, as_stream])
@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"row_group_size": 0}, ValueError, "row_group_size"),
        ({"row_group_size": False}, ValueError, "row_group_size"),
        ({"row_group_size": -5}, ValueError, "row_group_size"),
        ({"row_group_size": 5.5}, TypeError, "row_group_size"),
        ({"row_group_size": "5"}, TypeError, "row_group_size"),
        ({"chunk_size": 0}, ValueError, "row_group_size"),
        ({"nonsense": None}, TypeError, "nonsense"),
        ({"use_dictionary": "ab"}, TypeError, "use_dictionary"),
        ({"write_statistics": b"ab"}, TypeError, "write_statistics"),
        ({"encryption_properties": object()}, TypeError, "encryption_properties"),
        ({"encryption_config": object()}, TypeError, "encryption_config"),
        ({"metadata_collector": []}, TypeError, "metadata_collector"),
        ({"version": "9"}, ValueError, ""),
        ({"compression": "no codec"}, pa.ArrowException, ""),
        ({"data_page_version": "9"}, ValueError, ""),
    ],
)
def test_what_has_no_meaning_is_refused_and_nothing_is_written(
    keytools: Keytools, path: Path, make: Any, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named or None):
        keytools.write_table(make(), path, **options)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("size", [0, -5, 5.5, "5"])
def test_a_writer_goes_on_after_a_size_that_it_refuses(keytools: Keytools, path: Path, size: Any) -> None:
    with keytools.writer(path, TABLE.schema, encryption_properties=None) as writer:
        with pytest.raises((TypeError, ValueError), match="row_group_size"):
            writer.write_table(TABLE, row_group_size=size)
        writer.write_table(TABLE, row_group_size=30.0)
        writer.write(TABLE, -1)
        writer.write_batch(TABLE.to_batches()[0], 60)
    assert row_groups(keytools, path) == [*GROUPS_OF_30, 100, 60, 40]


@pytest.mark.parametrize("name", ["row_group_size", "chunk_size", "nonsense"])
def test_a_writer_refuses_options_that_pyarrow_refuses(keytools: Keytools, path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        keytools.writer(path, TABLE.schema, **{name: 5})
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("options", "files", "most_rows"),
    [
        ({"max_rows_per_group": 30}, 1, 30),
        ({"max_rows_per_group": 30.0}, 1, 30),
        ({"max_rows_per_file": 30}, 4, 30),
        ({"max_rows_per_file": 30, "max_rows_per_group": 20, "min_rows_per_group": 20}, 4, 20),
        ({"max_rows_per_file": 0}, 1, 100),
        ({"format": "parquet"}, 1, 100),
        *(
            ({name: None}, 1, 100)
            for name in (
                "basename_template",
                "file_options",
                "file_visitor",
                "max_open_files",
                "max_partitions",
                "max_rows_per_file",
                "max_rows_per_group",
                "min_rows_per_group",
                "schema",
            )
        ),
        ({"write_options": {"encryption_properties": None, "compression": None}}, 1, 100),
    ],
)
def test_a_data_set_takes_what_pyarrow_takes(
    keytools: Keytools, tmp_path: Path, options: dict[str, Any], files: int, most_rows: int
) -> None:
    assert keytools.write_dataset(TABLE, tmp_path / "d", **options).files == files
    sizes = [rows for file in (tmp_path / "d").iterdir() for rows in row_groups(keytools, file)]
    assert (sum(sizes), max(sizes)) == (100, most_rows)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_rows_per_group": 0}, ValueError),
        ({"max_rows_per_group": -1}, ValueError),
        ({"max_rows_per_group": "5"}, TypeError),
        ({"min_rows_per_group": -1}, ValueError),
        ({"min_rows_per_group": 5.5}, TypeError),
        ({"max_rows_per_file": -1}, ValueError),
        ({"max_rows_per_file": "5"}, TypeError),
        ({"max_rows_per_group": 40, "max_rows_per_file": 30}, ValueError),
        ({"min_rows_per_group": 40, "max_rows_per_group": 30}, ValueError),
        ({"file_visitor": print}, TypeError),
        ({"file_options": 5}, TypeError),
        ({"format": "csv"}, TypeError),
        ({"basename_template": 5}, TypeError),
        ({"basename_template": "5"}, ValueError),
        ({"partitioning": "ab"}, TypeError),
        ({"partitioning": ["a", 5]}, TypeError),
        ({"nonsense": 5}, TypeError),
        ({"write_options": {"encryption_config": object()}}, TypeError),
        ({"write_options": {"row_group_size": 5}}, TypeError),
        ({"write_options": {"use_dictionary": "ab"}}, TypeError),
    ],
)
def test_a_data_set_refuses_what_has_no_meaning(
    keytools: Keytools, tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        keytools.write_dataset(TABLE, tmp_path / "d", **options)
    assert not list(tmp_path.rglob("*.parquet"))
