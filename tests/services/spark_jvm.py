"""How the JVMs of the tests run: `python spark_jvm.py` makes an archive of Spark's classes that they load faster.

A JVM that finds no archive, or one of another Java, does without.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
# Much is done once: the first compiler is enough. With it alone, Java reserves a fifth of the space for compiled
# code, throws code away to make room, and compiles it again: a tenth of the time. Garbage is collected seldom;
# otherwise, it would also be collected whenever classes take more space. Java logs nothing about an archive that
# does not fit.
_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m "
    "-XX:+UseSerialGC -XX:MetaspaceSize=256m -XX:NewSize=128m "
    "-Xlog:disable -Xlog:all=error:stderr"
)
JAVA_OPTIONS = f"{_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}" if " " not in str(ARCHIVE) else _OPTIONS
# To verify classes that are not in the archive takes a tenth of the time. spark-submit and spark-sql verify ours.
TRUSTING_OPTIONS = f"{JAVA_OPTIONS} -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


def remember_names() -> None:
    """Let this process ask its JVM once what a name is.

    Java looks for each in all jars of Spark, below every package that PySpark has imported: a quarter of the time
    of a JVM that runs small jobs.
    """
    from py4j.java_gateway import JavaClass, JavaPackage, JVMView

    for view in (JVMView, JavaPackage):

        def find(self: Any, name: str, ask: Callable[[Any, str], Any] = view.__getattr__) -> Any:
            found = ask(self, name)
            # What is no class may become one, with another jar; a package has a small letter.
            if isinstance(found, JavaClass) or (isinstance(found, JavaPackage) and name[:1].islower()):
                vars(self)[name] = found
            return found

        view.__getattr__ = find


def kms_workers_below(processes: set[int]) -> set[int]:
    """Return the KMS workers among the descendants of processes, by process id."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            if b"parquet_keytools.spark.kms_worker" in command and processes & _ancestors(int(entry.name)):
                found.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _ancestors(process_id: int) -> set[int]:
    found = set()
    while process_id > 1:
        stat = Path(f"/proc/{process_id}/stat").read_text()
        process_id = int(stat.rpartition(")")[2].split()[1])
        found.add(process_id)
    return found


def write_archive(path: Path) -> None:
    """Write and read a little with Spark, in a JVM that writes down which classes that took."""
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        settings = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": f"{_OPTIONS} -XX:ArchiveClassesAtExit={made}",
            "spark.local.dir": folder,
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            "spark.sql.shuffle.partitions": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": Path(folder).as_uri(),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        builder = SparkSession.builder.master("local[1]")
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        gateway = spark.sparkContext._gateway.proc
        frame = spark.range(100).selectExpr("id", "id % 3 AS part", "cast(id AS string) AS text")
        frame.repartition(2).write.partitionBy("part").parquet(f"{folder}/data")
        spark.read.parquet(f"{folder}/data").where("part = 1").selectExpr("sum(hash(*))").collect()
        spark.stop()
        # The JVM ends when nobody writes to it any more. A part of an archive would crash the JVMs that use it.
        gateway.stdin.close()
        if gateway.wait(300) == 0 and made.exists():
            made.replace(path)


if __name__ == "__main__":
    if not ARCHIVE.exists() and os.environ.get("SPARK") != "no":
        write_archive(ARCHIVE)
