"""`Keytools.scan` in S3: its findings, and how little it reads. benchmarks/scan.py measures 10,000 files."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_store import BUCKET, S3Store

from parquet_keytools import Keytools

FILES = 16
HEADERS = 8 * 1024
"""Upper bound for the requests and headers of a file."""


@pytest.fixture(scope="module")
def store() -> Iterator[S3Store]:
    running = S3Store()
    sink = io.BytesIO()
    rows = 30_000
    table = pa.table(
        {"n": [row * 0.5 for row in range(rows)], "email": [f"u{row}@example.org" for row in range(rows)]}
    )
    pq.write_table(table, sink, use_dictionary=False, compression="none", row_group_size=rows, data_page_size=8192)
    assert len(sink.getvalue()) > 600_000
    for number in range(FILES):
        running.put(f"lake/day={number}/part-0.parquet", sink.getvalue())
    yield running
    running.close()


@pytest.mark.parametrize(("sample", "most_bytes"), [(0, 64 * 1024), (500, 450 * 1024)])
def test_only_a_part_of_each_file_is_read(store: S3Store, sample: int, most_bytes: int) -> None:
    keytools = Keytools.from_mapping({"version": 1, "data_keys": {"k": "AAAAAAAAAAAAAAAAAAAAAA=="}})
    before = store.proxy.bytes_moved
    report = keytools.scan(f"{BUCKET}/lake", filesystem=store.filesystem(), sample=sample)
    assert report.is_complete and report.files == FILES
    (finding,) = report.findings
    assert (finding.column, finding.kind, finding.files) == ("email", "email", FILES)
    assert finding.data_set == f"s3:{BUCKET}/lake"
    assert finding.share == 1.0
    assert (store.proxy.bytes_moved - before) / FILES < most_bytes + HEADERS
