"""Does a plan for a million files fit into the driver? Lists and cuts it, and reads results, without Spark.

    python benchmarks/spark_plan.py [--files 1000000] [--folders 1000] [--slots 400]

The files are real and empty: the listing is the one that `parquet-keytools spark` does. What is measured is this
process: seconds, and the peak of its memory beyond what it had after its imports.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from parquet_keytools.spark.pipelines.file_tables import (
    cut,
    cut_by_group,
    file_row,
    number_of_pieces,
    plan_data_set,
    rows_of,
    task_result,
)
from parquet_keytools.spark.pipelines.file_tables import unpacked as unpacked_table
from parquet_keytools.spark.pipelines.job import MOST_PIECES_A_GROUP
from parquet_keytools.storage.locations import FileLocation


def make_files(folder: Path, files: int, folders: int) -> None:
    """Make empty files with the names that Spark gives."""
    for number in range(folders):
        inside = folder / f"day=2026-01-01-{number:05d}"
        inside.mkdir()
        for part in range(files // folders):
            (inside / f"part-{part:05d}-3f1d6b2e-9c0a-4a51-8f8e-{number:012d}.c000.snappy.parquet").touch()


class Memory:
    """Peak of this process's memory, in MB, since it was made."""

    def __init__(self) -> None:
        self._start = self._peak()

    @staticmethod
    def _peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    @property
    def megabytes(self) -> float:
        """How much it grew."""
        return self._peak() - self._start


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=1_000)
    parser.add_argument("--slots", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        make_files(folder, arguments.files, arguments.folders)
        memory = Memory()

        def tell(what: str, start: float, note: str = "") -> None:
            seconds = time.perf_counter() - start
            print(f"  {what:28} {seconds:7.2f} s   peak {memory.megabytes:6.0f} MB   {note}")

        print(f"{arguments.files:,} files in {arguments.folders:,} folders, {arguments.slots} task slots")
        start = time.perf_counter()
        plan = plan_data_set(FileLocation.resolve(folder))
        tell("list", start, f"{plan.table.nbytes / 1e6:.0f} MB of columns")
        assert plan.table.num_rows == arguments.files // arguments.folders * arguments.folders
        start = time.perf_counter()
        pieces = cut(plan.table, number_of_pieces(plan.table.num_rows, arguments.slots, None))
        tell("cut", start, f"{len(pieces):,} tasks, {sum(map(len, pieces)) / 1e6:.1f} MB to be sent")
        for name, groups in (
            ("one footer key", 1),
            ("1,000 footer keys", 1_000),
            ("a key for each file", 1 << 40),
        ):
            keys = [hash((number * 2_654_435_761) % groups) for number in range(plan.table.num_rows)]
            table = plan.table.append_column("group", pa.array(keys, pa.int64()))
            del keys
            start = time.perf_counter()
            grouped = cut_by_group(table, len(pieces), MOST_PIECES_A_GROUP)
            tell(f"group: {name}", start, f"{len(grouped):,} tasks")
            del table, grouped
        start = time.perf_counter()
        key = {"master_key": "arn:aws:kms:eu-west-1:111122223333:key/1", "version": "1", "number": 3}
        results = [
            task_result(
                [
                    file_row(row["path"], "encrypted", keys=[key], size_bytes=row["size_bytes"], seconds=0.1)
                    for row in rows_of(unpacked_table(piece))
                ]
            ).rows
            for piece in pieces
        ]
        tell("results of all tasks", start, f"{sum(map(len, results)) / 1e6:.1f} MB kept on the driver")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
