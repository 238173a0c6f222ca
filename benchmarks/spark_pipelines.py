"""What does the `encrypt` pipeline save, compared with Spark reading and writing the same data encrypted?

    python benchmarks/spark_pipelines.py [--megabytes 400] [--files 8] [--rounds 3] [--compression snappy]

One session for each number of cores, 1 and 2; in each, rounds alternate between the two ways. `spark` reads the
plaintext files with Spark and writes them encrypted with the bridge, in as many files. Ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from generated_files import write_generated
from spark_bridge import make_configuration, make_session

from parquet_keytools import Keytools
from parquet_keytools.spark import PLAINTEXT_FILES, pipelines


def make_source(folder: Path, megabytes: int, files: int, compression: str) -> None:
    """Write the plaintext data set."""
    folder.mkdir()
    for number in range(files):
        path = folder / f"part-{number:05d}.parquet"
        write_generated(path, megabytes // files)
        if compression != "none":
            pq.write_table(pq.read_table(path), path, compression=compression, use_dictionary=["word"])


def run_session(folder: Path, cores: int, files: int, rounds: int, compression: str) -> dict[str, list[float]]:
    """Measure both ways in one session with this number of cores."""
    configuration = folder / "spark.yaml"
    spark = make_session(configuration, folder, cores)
    keytools = Keytools.from_yaml(configuration)
    source = str(folder / "source")
    seconds: dict[str, list[float]] = {"spark": [], "pipeline": []}

    def native(target: str) -> None:
        frame = spark.read.options(**PLAINTEXT_FILES).parquet(source)
        options = keytools.spark_options("t", frame.schema)
        frame.coalesce(files).write.options(compression=compression, **options).parquet(target)

    def pipeline(target: str) -> None:
        report = pipelines.encrypt(spark, source, target, configuration)
        assert report.succeeded and report.outcomes["encrypted"] == files

    ways = {"spark": native, "pipeline": pipeline}
    for round_number in range(rounds + 1):
        for name in (*ways,) if round_number % 2 else (*reversed(ways),):
            target = folder / "target"
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            start = time.perf_counter()
            ways[name](str(target))
            if round_number:  # The first is a warm-up.
                seconds[name].append(time.perf_counter() - start)
    spark.stop()
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--compression", default="snappy", help="Spark's default is snappy.")
    parser.add_argument("--cores", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cores is not None:
        found = run_session(
            arguments.folder, arguments.cores, arguments.files, arguments.rounds, arguments.compression
        )
        print(json.dumps(found))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        make_source(folder / "source", arguments.megabytes, arguments.files, arguments.compression)
        make_configuration(folder)
        print(f"{arguments.megabytes} MB in {arguments.files} files, {arguments.compression}")
        for cores in (1, 2):
            options = {"files": arguments.files, "rounds": arguments.rounds, "compression": arguments.compression}
            settings = [f"--{name}={value}" for name, value in options.items()]
            # A separate JVM for each, with no more CPUs than it reports.
            command = [sys.executable, __file__, "--folder", str(folder), f"--cores={cores}", *settings]
            if shutil.which("taskset"):
                command = ["taskset", "--cpu-list", f"0-{cores - 1}", *command]
            environment = {"PYSPARK_PYTHON": sys.executable, **os.environ}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            seconds = json.loads(done.stdout.splitlines()[-1])
            ratio = statistics.median(a / b for a, b in zip(seconds["spark"], seconds["pipeline"], strict=True))
            times = ", ".join(f"{name} {statistics.median(found):.2f} s" for name, found in seconds.items())
            print(f"  {cores} cores: {times}; the pipeline is {ratio:.1f} times as fast")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
