"""Does a plan for a million files fit into the driver? Lists and splits it, and reads results, without Spark.

    python benchmarks/spark_plan.py [--files 1000000] [--folders 1000] [--cores 400]

The files are real and empty, and are listed as by `parquet-keytools spark keys`; the tasks run here, and open no
file. The measurement covers this process: seconds, and its peak memory beyond the memory after its imports.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import resource
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parquet_keytools.spark import pipelines
from parquet_keytools.spark.map_files import NamedFile, Outcome
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import data_set

KEY = {"master_key": "arn:aws:kms:eu-west-1:111122223333:key/1", "version": "1", "number": 3}
CONFIGURATION = "version: 1\nkms: {type: in_memory, keys: {footer: MDEyMzQ1Njc4OTAxMjM0NQ==}}\n"


class Context:
    """What a job needs of Spark's context. Its tasks open no file: each file is listed, with three keys."""

    def __init__(self, cores: int) -> None:
        self.defaultParallelism = cores
        self.sparkContext = self
        self.said: list[str] = []

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return no settings."""
        return {}

    def getLocalProperty(self, _: str) -> None:  # noqa: N802
        """Return no property."""

    def setLocalProperty(self, _name: str, _value: object) -> None:  # noqa: N802
        """Set nothing."""

    def setJobGroup(self, _group: str, _description: str) -> None:  # noqa: N802
        """Set nothing."""

    def parallelize(self, pieces: list[Any], number: int) -> Any:
        """Take pieces as Spark does: pickled."""
        sent = [pickle.dumps(piece) for piece in pieces]
        self.said.append(f"{number:,} tasks, {sum(map(len, sent)) / 1e6:.1f} MB sent")

        def run(task: Any) -> Any:
            _, *rest = task.args
            listing = functools.partial(task.func, listed, *rest)
            results = [found for data in sent for found in listing(0, iter([pickle.loads(data)]))]
            self.said.append(f"{sum(map(len, results)) / 1e6:.1f} MB of results")
            return SimpleNamespace(collect=lambda: results)

        return SimpleNamespace(mapPartitionsWithIndex=run)


def listed(_: object, location: FileLocation, file: NamedFile) -> Outcome:
    """Return the result of `keys` for a file."""
    return Outcome(str(location), "listed", keys=[KEY] * 3, bytes=file.size_bytes)


def make_files(folder: Path, files: int, folders: int) -> None:
    """Create empty files with Spark's file names."""
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
        """Its growth."""
        return self._peak() - self._start


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=1_000)
    parser.add_argument("--cores", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        data = folder / "data"
        data.mkdir()
        make_files(data, arguments.files, arguments.folders)
        configuration = folder / "c.yaml"
        configuration.write_text(CONFIGURATION)
        configuration.chmod(0o600)
        print(f"{arguments.files:,} files in {arguments.folders:,} folders, {arguments.cores} cores")
        memory, start, context = Memory(), time.perf_counter(), Context(arguments.cores)
        for _ in data_set(FileLocation.resolve(data)):
            pass
        print(f"  list: {time.perf_counter() - start:.1f} s, peak {memory.megabytes:.0f} MB")
        start = time.perf_counter()
        report = pipelines.keys(context, data, configuration)
        seconds = time.perf_counter() - start
        print(f"  all: {seconds:.1f} s, peak {memory.megabytes:.0f} MB; {', '.join(context.said)}")
        print(f"  rows: {sum(map(len, report.packed_files)) / 1e6:.1f} MB kept on the driver; {report.outcomes}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
