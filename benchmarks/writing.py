"""How long does it take to write tables that pyarrow cannot encrypt, and how much memory?

    python benchmarks/writing.py [--batches 100] [--rounds 3] [--way dataset|partitioned|writer]

Prints the processor time of a table that the module encryptor writes, against the same data under a table that
pyarrow encrypts with its CryptoFactory, medians of ratios within a round; and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from parquet_keytools import Keytools

ROWS = 250_000


def keytools_with(unlisted_columns: str) -> Keytools:
    """Return a Keytools whose table pyarrow can encrypt, with `plaintext`, or cannot, with `footer_key`."""
    table = {"footer_key": "kf", "column_keys": {"kn": ["name"]}, "unlisted_columns": unlisted_columns}
    kms = {"type": "in_memory", "keys": ["kf", "kn"]}
    return Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"t": table}})


def some_batches() -> list[pa.RecordBatch]:
    """Return ten batches of names, numbers and measurements."""
    numbers = np.random.default_rng(1)
    batches = []
    for _ in range(10):
        keys = numbers.integers(0, 50_000, ROWS)
        names = pa.array(keys).cast(pa.string())
        columns = {"name": names, "id": np.arange(ROWS), "part": keys % 8, "value": numbers.random(ROWS)}
        batches.append(pa.record_batch(columns))
    return batches


def write(keytools: Keytools, way: str, reader: pa.RecordBatchReader, folder: Path) -> int:
    """Write a stream; returns its length in bytes."""
    if way == "writer":
        with keytools.writer(folder / "x.parquet", reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        assert writer.result is not None
        return writer.result.size_bytes
    partitioning = ["part"] if way == "partitioned" else None
    return keytools.write_dataset(reader, folder, partitioning=partitioning).size_bytes


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=["dataset", "partitioned", "writer"], default="dataset")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    batches = some_batches()
    ratios = []
    for _ in range(arguments.rounds):
        seconds = {}
        for unlisted in ("plaintext", "footer_key"):
            folder = Path(tempfile.mkdtemp())

            def stream() -> Iterator[pa.RecordBatch]:
                for number in range(arguments.batches):
                    yield batches[number % len(batches)]

            reader = pa.RecordBatchReader.from_batches(batches[0].schema, stream())
            start = time.process_time()
            size = write(keytools_with(unlisted), arguments.way, reader, folder)
            seconds[unlisted] = time.process_time() - start
            shutil.rmtree(folder)
        ratios.append(seconds["footer_key"] / seconds["plaintext"])
        print(f"{size / 1e6:.0f} MB: {seconds['footer_key']:.2f} s, pyarrow {seconds['plaintext']:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{arguments.way}: {statistics.median(ratios):.2f} times pyarrow's processor time; {peak} MiB at most")


if __name__ == "__main__":
    main()
