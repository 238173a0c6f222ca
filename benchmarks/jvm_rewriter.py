"""How fast is the module encryptor against parquet-java? Both encrypt all columns of the same file, in one run.

    python benchmarks/jvm_rewriter.py [--megabytes 700] [--page-bytes 140000] [--rounds 5] [--folder DIR]

parquet-java's ParquetRewriter, whose classes are in PySpark's jars, runs in one JVM for all rounds; the first
rounds, while that JVM warms up, are dropped. Rounds alternate, so that a slow moment of the machine hits both.
ParquetRewriter uses one thread for a file; ours uses two, and is timed with one as well. Only ours syncs its
output to the disk; it is timed without that, too.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
from generated_files import COLUMNS, PAGE_BYTES, write_generated
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from parquet_keytools import Keytools
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption, encrypt_source
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source
from parquet_keytools.storage.outputs import LocalSink

KEYS = {name: os.urandom(16) for name in ("footer", *COLUMNS)}
WARM_UP_ROUNDS = 3


@contextlib.contextmanager
def jvm() -> Iterator[Any]:
    """Start a JVM with parquet-java, and end it."""
    jars = Path(pyspark.__file__).parent / "jars"
    port, process = launch_gateway(
        jarpath=str(next(jars.glob("py4j-*.jar"))),
        classpath=f"{jars}/*",
        javaopts=["-Xmx3g", "-XX:+UseParallelGC"],
        die_on_exit=True,
        return_proc=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        yield gateway.jvm
    finally:
        gateway.shutdown()
        process.stdin.close()
        process.wait(30)


class Rewriter:
    """parquet-java's ParquetRewriter, with all columns under their own keys."""

    def __init__(self, java: Any) -> None:
        self._java = java
        self._configuration = java.org.apache.hadoop.conf.Configuration()
        # Without the checksum files that Hadoop writes beside local files.
        self._configuration.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")

    def encrypt(self, source: Path, target: Path) -> None:
        """Encrypt a file."""
        java = self._java
        rewrite = java.org.apache.parquet.hadoop.rewrite
        path = java.org.apache.hadoop.fs.Path
        columns = java.java.util.ArrayList()
        for name in COLUMNS:
            columns.add(name)
        options = (
            rewrite.RewriteOptions.Builder(self._configuration, path(str(source)), path(str(target)))
            .encrypt(columns)
            .encryptionProperties(self._properties())
            .build()
        )
        rewriter = rewrite.ParquetRewriter(options)
        rewriter.processBlocks()
        rewriter.close()

    def _properties(self) -> Any:
        crypto = self._java.org.apache.parquet.crypto
        columns = self._java.java.util.HashMap()
        for name in COLUMNS:
            column = self._java.org.apache.parquet.hadoop.metadata.ColumnPath.fromDotString(name)
            properties = crypto.ColumnEncryptionProperties.builder(column)
            columns.put(column, properties.withKey(KEYS[name]).withKeyID(name).build())
        builder = crypto.FileEncryptionProperties.builder(KEYS["footer"])
        return builder.withFooterKeyID("footer").withEncryptedColumns(columns).build()


def keytools() -> Keytools:
    """Return a Keytools with the same keys."""
    return Keytools.from_mapping(
        {
            "version": 1,
            "data_keys": {name: base64.b64encode(key).decode() for name, key in KEYS.items()},
            "tables": {
                "t": {
                    "footer_key": "footer",
                    "column_keys": {name: [name] for name in COLUMNS},
                    "unlisted_columns": "plaintext",
                }
            },
        }
    )


def encrypt_without_sync(source: Path, target: Path, threads: int) -> None:
    """Encrypt a file with the module encryptor, without syncing it to the disk."""
    encryption = FileEncryption(
        SecretBytes(KEYS["footer"]),
        b"footer",
        {(n,): ColumnKey(SecretBytes(KEYS[n]), n.encode()) for n in COLUMNS},
    )
    with open_source(FileLocation.resolve(source)) as opened, target.open("wb") as file:
        encrypt_source(opened, LocalSink(file.fileno()), encryption, threads=threads)


def time_rounds(
    ways: dict[str, Callable[[Path, Path], object]], source: Path, target: Path, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(WARM_UP_ROUNDS + rounds):
        for name, encrypt in ways.items():
            target.unlink(missing_ok=True)
            os.sync()
            start = time.perf_counter()
            encrypt(source, target)
            elapsed = time.perf_counter() - start
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(elapsed)
    return seconds


def check(ways: dict[str, Callable[[Path, Path], object]], source: Path, target: Path) -> None:
    """Check that the files of all ways decrypt to the same values."""
    tools = keytools()
    expected = pq.read_table(source)
    for name, encrypt in ways.items():
        target.unlink(missing_ok=True)
        encrypt(source, target)
        assert tools.read_table(target).equals(expected), name


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=700)
    parser.add_argument("--page-bytes", type=int, default=PAGE_BYTES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    theirs = "ParquetRewriter, warmed up"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, jvm() as java:
        folder = Path(name)
        source, target = folder / "source.parquet", folder / "target.parquet"
        ways: dict[str, Callable[[Path, Path], object]] = {
            theirs: Rewriter(java).encrypt,
            "ours, two threads": lambda source, target: encrypt_without_sync(source, target, 2),
            "ours, one thread": lambda source, target: encrypt_without_sync(source, target, 1),
            "ours, Keytools.encrypt_file": keytools().encrypt_file,
        }
        write_generated(source, min(10, arguments.megabytes), arguments.page_bytes)
        check(ways, source, target)
        write_generated(source, arguments.megabytes, arguments.page_bytes)
        seconds = time_rounds(ways, source, target, arguments.rounds)
        megabytes = source.stat().st_size / 1e6
    print(f"{megabytes:.0f} MB, pages of {arguments.page_bytes} bytes, {arguments.rounds} rounds\n")
    print(f"{'':<30} {'median s':>9} {'MB/s':>7} {'ratio':>7}")
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = statistics.median(ours / java for ours, java in zip(times, seconds[theirs], strict=True))
        print(f"{name:<30} {median:>9.3f} {megabytes / median:>7.0f} {ratio:>7.2f}")


if __name__ == "__main__":
    main()
