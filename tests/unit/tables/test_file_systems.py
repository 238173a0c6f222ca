"""The file systems that Arrow calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import OutputError
from parquet_keytools.storage.locations import BufferSource
from parquet_keytools.tables import file_systems
from parquet_keytools.tables.file_systems import SourceInParts

CONTENT = bytes(range(100))


class Waiting(BufferSource):
    """A store that answers a request only once a second request has arrived."""

    both = threading.Barrier(2, timeout=60)

    def read_at(self, offset: int, length: int) -> memoryview:
        self.both.wait()
        return super().read_at(offset, length)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "PART_BYTES", 7)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 14, 15, 90])
def test_parts_make_the_range(length: int) -> None:
    source = SourceInParts(BufferSource("x", CONTENT))
    assert (source.path, source.size_bytes) == ("x", 100)
    assert bytes(source.read_at(10, length)) == CONTENT[10 : 10 + length]


def test_parts_are_read_at_the_same_time() -> None:
    assert SourceInParts(Waiting("x", CONTENT)).read_at(0, 14) == CONTENT[:14]


def test_a_stream_is_not_read_to_its_end_after_a_failure(tmp_path: Path) -> None:
    table = {"footer_key": "k", "column_keys": {"k": ["a"]}, "unlisted_columns": "plaintext"}
    keytools = Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": ["k"]}, "tables": {"t": table}}
    )
    # Arrow holds at most 8 million unwritten rows: far fewer than these.
    batch, most, read = pa.record_batch({"a": range(1_000), "part": ["_hidden"] * 1_000}), 100_000, 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal read
        while read < most:
            read += 1
            yield batch

    source = pa.RecordBatchReader.from_batches(batch.schema, batches())
    by_folder = ds.partitioning(pa.schema([("part", pa.string())]))
    with pytest.raises(OutputError, match="_hidden"):
        keytools.write_dataset(source, tmp_path / "data", partitioning=by_folder)
    assert 0 < read < most
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
