"""What Arrow writes of a data set whose files cannot all be written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from parquet_keytools import Keytools
from parquet_keytools.arrow.output_filesystem import PendingHandler
from parquet_keytools.errors import OutputError
from parquet_keytools.storage.locations import FileLocation


def test_after_a_failure_nothing_more_is_written(tmp_path: Path) -> None:
    handler = PendingHandler(FileLocation.resolve(tmp_path), None, "t")
    # Arrow goes on, for an error in here could end the process.
    with handler.open_output_stream(f"{tmp_path}/_hidden.parquet", None) as stream:
        stream.write(b"x" * 100)
    with handler.open_output_stream(f"{tmp_path}/next.parquet", None) as stream:
        stream.write(b"x" * 100)
        assert stream.tell() == 100
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="_hidden"):
        handler.commit()
    handler.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_not_read_to_its_end_after_a_failure(tmp_path: Path) -> None:
    table = {"footer_key": "k", "column_keys": {"k": ["a"]}}
    keytools = Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": ["k"]}, "tables": {"t": table}}
    )
    # Arrow holds no more than 8 million rows that are not written: far fewer than these.
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


def test_a_link_that_would_be_followed_is_refused_when_arrow_is_done(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "x.parquet").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "c=1").symlink_to(kept)
    handler = PendingHandler(FileLocation.resolve(folder), None, "t")
    handler.delete_dir_contents(f"{folder}/c=1")
    with pytest.raises(OutputError, match="is a link"):
        handler.commit()
    assert (kept / "x.parquet").exists()
