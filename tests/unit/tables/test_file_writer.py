"""The streaming writer: the same for every policy, and a complete file or none."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soak import SOAK

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ConfigurationError, VisibleMetadataError
from parquet_keytools.tables.writing import row_groups_of

ROWS = 300
DEEP = pa.list_(pa.field("element", pa.struct([("x", pa.float64()), ("tags", pa.map_(pa.string(), pa.int32()))])))
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("kind", pa.dictionary(pa.int8(), pa.string())),
        pa.field("deep", DEEP),
        pa.field("when", pa.timestamp("us", "UTC")),
    ],
    metadata={"origin": "a test"},
)


def rows(start: int = 0, count: int = ROWS) -> pa.Table:
    numbers = range(start, start + count)
    return pa.Table.from_pydict(
        {
            "id": numbers,
            "name": [None if n % 7 == 0 else f"name {n}" for n in numbers],
            "kind": [f"kind {n % 3}" for n in numbers],
            "deep": [[{"x": n / 2, "tags": [("a", n), ("b", None)]}] * (n % 4) for n in numbers],
            "when": [n * 1_000_000 for n in numbers],
        },
        schema=SCHEMA,
    )


EXPECTED = rows().to_pydict()


def tools(settings: dict[str, Any], **more: Any) -> Keytools:
    table = {"footer_key": "kf", "column_keys": {"kn": ["name"]}, "unlisted_columns": "footer_key", **settings}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["kf", "kn"]},
        "tables": {"t": {name: value for name, value in table.items() if value is not None}},
        **more,
    }
    return Keytools(parse_configuration(document))


POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "column keys": ({"unlisted_columns": "plaintext"}, "pyarrow"),
    "uniform": ({"column_keys": None}, "pyarrow"),
    "columns and footer key": ({}, "module encryptor"),
    "nested": ({"column_keys": {"kn": ["deep"]}}, "module encryptor"),
    "plaintext footer": ({"plaintext_footer": True, "plaintext_footer_keys": ["origin"]}, "module encryptor"),
    "CTR": ({"algorithm": "AES_GCM_CTR_V1"}, "module encryptor"),
    "prefix": ({"aad_prefix": "{table_name}/{file_name}"}, "module encryptor"),
    "prefix not stored": ({"aad_prefix": "{file_name}", "store_aad_prefix": False}, "module encryptor"),
    "external": ({"key_material": "external", "data_key_length_bits": 256}, "module encryptor"),
    "single wrapping": ({"double_wrapping": False}, "module encryptor"),
    "footer only": ({"column_keys": None, "unlisted_columns": "plaintext"}, "module encryptor"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "write_page_index": True,
        "write_page_checksum": True,
        "data_page_version": "2.0",
        "compression": "zstd",
        "data_page_size": 512,
        "bloom_filter_options": {"id": True, "name": {"ndv": 500, "fpp": 0.1}},
        "sorting_columns": [pq.SortingColumn(0)],
        "use_dictionary": ["name"],
    },
}


def test_plaintext_columns_are_in_the_result(tmp_path: Path) -> None:
    table = pa.table({"id": [1], "name": ["x"], "deep": [{"a": 1}]})
    for unlisted, expected in {"plaintext": ("id", "deep.a"), "footer_key": ()}.items():
        keytools = tools({"unlisted_columns": unlisted})
        assert keytools.write_table(table, tmp_path / "x.parquet").plaintext_columns == expected
        assert keytools.write_dataset(table, tmp_path / unlisted).plaintext_columns == expected


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (policy, options)
        for number, policy in enumerate(POLICIES)
        for options in OPTIONS
        if SOAK or options == "all" or number % 4 == 0
    ],
)
def test_what_is_written_piece_by_piece_is_one_file(tmp_path: Path, policy: str, options: str) -> None:
    settings, engine = POLICIES[policy]
    keytools = tools(settings, reading={"ctr_files": "allow"} if policy == "CTR" else {})
    path = tmp_path / "x.parquet"
    with keytools.writer(path, SCHEMA, **OPTIONS[options]) as writer:
        writer.write_table(rows(0, 130), row_group_size=50)
        writer.write_batch(rows(130, 20).combine_chunks().to_batches()[0])
        writer.write(rows(150, 0))
        assert not path.exists()
        writer.write(rows(150, 150))
        writer.add_key_value_metadata({"added": "later"})
    result = writer.close()
    assert result is writer.result is not None
    assert result.engine == (engine if options == "plain" else "module encryptor")
    assert (result.files, result.rows, result.size_bytes) == (1, ROWS, path.stat().st_size)
    assert keytools.read_table(path).to_pydict() == EXPECTED
    report = keytools.verify_file(path)
    assert report.conforms, report.findings
    plain = tmp_path / "plain.parquet"
    keytools.decrypt_file(path, plain)
    metadata = pq.read_metadata(plain)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [50, 50, 30, 20, 0, 150]
    if policy != "plaintext footer":
        assert {b"origin", b"added"} <= metadata.metadata.keys()
    assert pq.read_table(plain).to_pydict() == EXPECTED
    if options == "all":
        found, excluded = _found_by_indexes(plain)
        assert (found, excluded[0], sum(excluded) > 2) == (ROWS, False, True)
        column = metadata.row_group(0).column(1)
        assert (column.has_column_index, column.has_offset_index, column.compression) == (True, True, "ZSTD")
        shown = () if policy == "plaintext footer" else (pq.SortingColumn(0),)
        assert metadata.row_group(3).sorting_columns == shown
        assert metadata.row_group(3).column(0).statistics.min == 130


def _found_by_indexes(path: Path) -> tuple[int, list[bool]]:
    """Return how many rows DuckDB finds by statistics, and which row groups Bloom filters exclude for row 5."""
    with duckdb.connect() as connection:
        rows = connection.sql(f"select count(*) from '{path}' where id in {tuple(range(ROWS))}").fetchall()
        probe = f"select bloom_filter_excludes from parquet_bloom_probe('{path}', 'id', 5) order by row_group_id"
        return rows[0][0], [excludes for (excludes,) in connection.sql(probe).fetchall()]


@pytest.mark.parametrize("policy", ["column keys", "columns and footer key", "plaintext footer"])
def test_a_file_without_rows(tmp_path: Path, policy: str) -> None:
    keytools = tools(POLICIES[policy][0])
    with keytools.writer(tmp_path / "none.parquet", SCHEMA):
        pass
    with keytools.writer(tmp_path / "empty.parquet", SCHEMA) as writer:
        writer.write(rows(0, 0))
    for name in ("none.parquet", "empty.parquet"):
        assert keytools.read_table(tmp_path / name).to_pydict() == rows(0, 0).to_pydict()
        assert keytools.verify_file(tmp_path / name).conforms


@pytest.mark.parametrize("policy", ["column keys", "columns and footer key"])
def test_an_exception_leaves_what_was_there(tmp_path: Path, policy: str) -> None:
    keytools = tools(POLICIES[policy][0])
    path = tmp_path / "x.parquet"
    with pytest.raises(ZeroDivisionError), keytools.writer(path, SCHEMA) as writer:
        writer.write(rows())
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    keytools.write_table(rows(), path)
    before = path.read_bytes()
    writer = keytools.writer(path, SCHEMA)
    writer.write(rows())
    with pytest.raises(ValueError):
        writer.write(pa.table({"other": [1]}))
    assert not writer.is_open
    with pytest.raises(ValueError, match="closed"):
        writer.write(rows())
    assert writer.close() is None
    forgotten = keytools.writer(path, SCHEMA)
    forgotten.write(rows())
    del forgotten, writer
    gc.collect()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_plaintext_footer_must_not_show_leaves_nothing(tmp_path: Path) -> None:
    keytools = tools({"plaintext_footer": True, "plaintext_footer_key_values": "refuse"})
    writer = keytools.writer(tmp_path / "x.parquet", SCHEMA)
    writer.write(rows())
    with pytest.raises(VisibleMetadataError, match="origin"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_options_that_would_give_something_away_are_refused(tmp_path: Path) -> None:
    for name in ("metadata_collector", "encryption_properties"):
        with pytest.raises(TypeError, match=name):
            tools({}).writer(tmp_path / "x.parquet", SCHEMA, **{name: []})
    with pytest.raises(ConfigurationError, match="'nothing' matches no column"):
        tools({"column_keys": {"kn": ["nothing"]}}).writer(tmp_path / "x.parquet", SCHEMA)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_of_small_batches_makes_large_row_groups() -> None:
    reader = pa.RecordBatchReader.from_batches(SCHEMA, rows().to_batches(max_chunksize=7))
    parts = list(row_groups_of(reader, 100))
    assert [part.num_rows for part in parts] == [105 // 100 * 100, 100, 100]
    assert pa.concat_tables(parts).equals(rows())


@pytest.mark.parametrize("policy", ["column keys", "columns and footer key"])
def test_files_of_a_data_set_have_the_rows_that_were_asked_for(tmp_path: Path, policy: str) -> None:
    keytools = tools(POLICIES[policy][0])
    options = {"max_rows_per_file": 110, "max_rows_per_group": 50, "min_rows_per_group": 10}
    for name, data in (
        ("table", rows()),
        ("stream", pa.RecordBatchReader.from_batches(SCHEMA, rows().to_batches(max_chunksize=7))),
    ):
        result = keytools.write_dataset(data, tmp_path / name, basename_template="x{i}.parquet", **options)
        assert (result.files, result.rows) == (3, ROWS)
        paths = sorted((tmp_path / name).iterdir())
        assert [path.name for path in paths] == ["x0.parquet", "x1.parquet", "x2.parquet"]
        found = pa.concat_tables([keytools.read_table(path) for path in paths])
        assert found.sort_by("id").to_pydict() == EXPECTED
        for path in paths:
            assert keytools.verify_file(path).conforms
            metadata = pq.read_metadata(path, decryption_properties=keytools.decryption_properties(path))
            assert max(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)) <= 50
        with pytest.raises(pa.ArrowInvalid):
            keytools.write_dataset(rows(), tmp_path / name)
    assert keytools.write_dataset(rows(0, 0), tmp_path / "empty").files == 0
    result = keytools.write_dataset(
        pa.RecordBatchReader.from_batches(SCHEMA, rows().to_batches(max_chunksize=7)), tmp_path / "one"
    )
    (path,) = (tmp_path / "one").iterdir()
    metadata = pq.read_metadata(path, decryption_properties=keytools.decryption_properties(path))
    assert metadata.num_row_groups == 1


@pytest.mark.parametrize("policy", ["column keys", "columns and footer key"])
@pytest.mark.parametrize("partitioning", [None, ["kind"]])
def test_a_stream_that_breaks_leaves_no_data_set(
    tmp_path: Path, policy: str, partitioning: list[str] | None
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows().to_batches(max_chunksize=100)
        raise OSError("the source is gone")

    keytools = tools({**POLICIES[policy][0], "column_keys": {"kn": ["name"]}})
    plain = pa.schema([SCHEMA.field("id"), SCHEMA.field("name"), pa.field("kind", pa.string())])
    reader = pa.RecordBatchReader.from_batches(
        plain, (batch.select(plain.names).cast(plain) for batch in batches())
    )
    with pytest.raises(OSError, match="the source is gone"):
        keytools.write_dataset(
            reader, tmp_path / "data", partitioning=partitioning, max_rows_per_file=120, max_rows_per_group=100
        )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


_MEMORY = """
import resource, sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
sys.path.insert(0, {tests!r})
from unit.tables.test_file_writer import tools

schema = pa.schema([("name", pa.float64()), ("part", pa.int64())])
numbers = np.random.default_rng(1).random(1_000_000)
keytools = tools({{}})
filesystem = keytools.filesystem()
# To compress them takes most of the time.
options = dict(compression="none", use_dictionary=False)

def batches(count):
    for n in range(count):
        yield pa.record_batch([numbers[n % 100 :][:250_000], np.arange(250_000)], schema=schema)

def write(count):
    with keytools.writer({path!r}, schema, **options) as writer:
        for batch in batches(count):
            writer.write_batch(batch)
    with pq.ParquetWriter({path!r}, schema, filesystem=filesystem, **options) as writer:
        for batch in batches(count):
            writer.write_batch(batch)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

write(8)
before = peak()
write(50)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Two ways, each 200 MB; the file system holds 64 MiB of its collected data."""
    path = str(tmp_path / "x.parquet")
    program = _MEMORY.format(tests=str(Path(__file__).parents[2]), path=path)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 130
    assert Path(path).stat().st_size > 100_000_000
