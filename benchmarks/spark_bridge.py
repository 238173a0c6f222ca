"""What does the bridge cost? Spark writes and reads a table in plaintext and encrypted, in one session.

    python benchmarks/spark_bridge.py [--megabytes 700] [--rounds 5] [--cores 2] [--compression snappy]

All columns are encrypted, each under one of three master keys of a keystore. Rounds alternate between the ways,
so that a slow moment of the machine hits both; ratios are medians over rounds, against plaintext.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generated_files import COLUMNS, write_generated

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file
from parquet_keytools.spark import PLAINTEXT_FILES, configure

MASTER_KEYS = ("footer", "first", "second")


def make_configuration(folder: Path) -> Path:
    """Make a keystore, and a configuration that encrypts every column."""
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    for name in MASTER_KEYS:
        keystore.create_key(name)
    path = folder / "spark.yaml"
    column_keys = {"first": COLUMNS[:3], "second": COLUMNS[3:]}
    document = {
        "version": 1,
        "kms": {"type": "keystore", "path": "keystore.json", "passphrase_file": "passphrase"},
        "tables": {"t": {"footer_key": "footer", "column_keys": column_keys, "unlisted_columns": "plaintext"}},
    }
    path.write_text(json.dumps(document))
    return path


def make_session(configuration: Path, folder: Path, cores: int) -> Any:
    """Make a session on this machine."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = configure(builder, configuration).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def ways(
    spark: Any, keytools: Keytools, folder: Path, compression: str
) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return functions that write and read the table, for each way."""
    frame = spark.read.options(**PLAINTEXT_FILES).parquet(str(folder / "source.parquet"))
    options = {"plaintext": PLAINTEXT_FILES, "encrypted": keytools.spark_options("t", frame.schema)}
    # Part of every column, so that each page is read and decoded, and nothing else takes time.
    largest = [f"max({name})" for name in COLUMNS]

    def write(way: str) -> None:
        frame.write.mode("overwrite").options(compression=compression, **options[way]).parquet(str(folder / way))

    def read(way: str) -> None:
        reader = spark.read.options(**PLAINTEXT_FILES) if way == "plaintext" else spark.read
        reader.parquet(str(folder / way)).selectExpr(*largest).collect()

    return {way: (lambda way=way: write(way), lambda way=way: read(way)) for way in options}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--compression", default="snappy", help="Spark's default is snappy.")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        write_generated(folder / "source.parquet", arguments.megabytes)
        configuration = make_configuration(folder)
        spark = make_session(configuration, folder, arguments.cores)
        seconds: dict[tuple[str, str], list[float]] = {}
        in_turn = list(ways(spark, Keytools.from_yaml(configuration), folder, arguments.compression).items())
        for round_number in range(arguments.rounds + 1):
            in_turn = in_turn[1:] + in_turn[:1]
            for name, operations in in_turn:
                for operation, call in zip(("write", "read"), operations, strict=True):
                    start = time.perf_counter()
                    call()
                    if round_number:  # The first is a warm-up.
                        seconds.setdefault((name, operation), []).append(time.perf_counter() - start)
        how = f"{arguments.compression}, {arguments.rounds} rounds, {arguments.cores} cores"
        print(f"{arguments.megabytes} MB, {how}")
        for operation in ("write", "read"):
            for name in ("plaintext", "encrypted"):
                these, base = seconds[name, operation], seconds["plaintext", operation]
                ratio = statistics.median(a / b for a, b in zip(these, base, strict=True))
                print(f"  {operation:5} {name:10} {statistics.median(these):7.2f} s   ratio {ratio:5.2f}")
        print("  KMS:", spark._jvm.parquet_keytools.PythonKmsClient.statistics())
        spark.stop()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
