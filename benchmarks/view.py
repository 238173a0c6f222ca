"""The costs of a view, against the plaintext file: full scans, one column of a large file, opening, in one run.

    python benchmarks/view.py [--megabytes 700]

Prints the CPU and wall seconds of each, the best of several runs, and the ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools

RUNS = 5
DOCUMENT = {
    "version": 1,
    "kms": {"type": "in_memory", "keys": ["footer", "secret"]},
    "tables": {"t": {"footer_key": "footer", "column_keys": {"secret": ["c1"]}, "unlisted_columns": "footer_key"}},
}


def write_plain(path: Path, megabytes: int, columns: int = 10) -> None:
    """Write random numbers and texts, of about this many megabytes, in row groups of 64 MB."""
    random = np.random.default_rng(1)
    rows = 500_000
    with pq.ParquetWriter(path, make_batch(random, columns, 1).schema, compression="snappy") as writer:
        while not path.exists() or path.stat().st_size < megabytes * 1_000_000:
            writer.write_table(make_batch(random, columns, rows))


def make_batch(random: np.random.Generator, columns: int, rows: int) -> pa.Table:
    """Return rows of numbers, and of a text."""
    data: dict[str, Any] = {f"c{n}": random.standard_normal(rows) for n in range(columns - 2)}
    data["id"] = random.integers(0, 1 << 40, rows)
    data["text"] = random.choice(np.array([f"text {n}" for n in range(1_000)]), rows)
    return pa.table(data)


def best(action: Callable[[], object]) -> tuple[float, float]:
    """Return the minimum CPU and wall seconds of several runs."""
    times = []
    for _ in range(RUNS):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(cpu for cpu, _ in times), min(wall for _, wall in times)


def report(title: str, plain: Callable[[], object], view: Callable[[], object]) -> None:
    """Print both, and the ratio."""
    (plain_cpu, plain_wall), (cpu, wall) = best(plain), best(view)
    print(
        f"{title:44} CPU {plain_cpu:6.3f} -> {cpu:6.3f} s ({cpu / plain_cpu:4.2f})   "
        f"wall {plain_wall:6.3f} -> {wall:6.3f} s ({wall / plain_wall:4.2f}, +{(wall - plain_wall) * 1000:.0f} ms)"
    )


def in_threads(action: Callable[[], object]) -> None:
    """Do it in 64 threads at the same time."""
    with ThreadPoolExecutor(64) as pool:
        for done in [pool.submit(action) for _ in range(64)]:
            done.result()


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    megabytes = parser.parse_args().megabytes
    keytools = Keytools.from_mapping(DOCUMENT)
    with tempfile.TemporaryDirectory() as name, duckdb.connect() as connection:
        plain, encrypted = Path(name) / "plain.parquet", Path(name) / "encrypted.parquet"
        write_plain(plain, megabytes)
        keytools.encrypt_file(plain, encrypted)
        view = keytools.view(name)
        connection.register_filesystem(view)
        local = fsspec.filesystem("file")
        every = ", ".join(f"sum(c{n})" for n in range(8)) + ", sum(id), max(text)"

        def duck(columns: str, file: object) -> Callable[[], object]:
            return lambda: connection.sql(f"select {columns} from '{file}'").fetchall()

        print(f"{plain.stat().st_size / 1e6:.0f} MB, {pq.read_metadata(plain).num_row_groups} row groups")
        report("DuckDB, all columns", duck(every, plain), duck(every, "keytools://encrypted.parquet"))
        report("DuckDB, one column", duck("sum(c1)", plain), duck("sum(c1)", "keytools://encrypted.parquet"))
        report(
            "Polars, all columns",
            lambda: pl.scan_parquet(plain).select(pl.all().max()).collect(),
            lambda: keytools.scan_polars(encrypted).select(pl.all().max()).collect(),
        )
        report(
            "Polars, one column",
            lambda: pl.scan_parquet(plain).select(pl.col("c1").max()).collect(),
            lambda: keytools.scan_polars(encrypted).select(pl.col("c1").max()).collect(),
        )
        report(
            "pyarrow, all columns",
            lambda: pq.read_table(str(plain), filesystem=local),
            lambda: pq.read_table("encrypted.parquet", filesystem=view),
        )
        report(
            "pyarrow, one column",
            lambda: pq.read_table(str(plain), filesystem=local, columns=["c1"]),
            lambda: pq.read_table("encrypted.parquet", filesystem=view, columns=["c1"]),
        )
        report(
            "pyarrow, one column, 64 threads",
            lambda: in_threads(lambda: pq.read_table(str(plain), filesystem=local, columns=["c1"])),
            lambda: in_threads(lambda: pq.read_table("encrypted.parquet", filesystem=view, columns=["c1"])),
        )
        report("open", lambda: pq.ParquetFile(plain), lambda: pq.ParquetFile(keytools.open(encrypted)))


if __name__ == "__main__":
    main()
