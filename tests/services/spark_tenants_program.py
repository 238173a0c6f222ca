"""Jobs of the tests of keys by template: Spark writes and reads the files of tenants.

{"master": ..., "folder": ..., "config": ..., "calls": [["read", "events", {}], ...]}; an error is its text.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from spark_driver import Sessions, new_session
from spark_jvm import TRUSTING_OPTIONS, kms_workers_below

from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import configure


def main(sessions: Sessions, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make calls in one new session, whose executors have nothing cached."""
    sessions.stop()
    folder = Path(arguments["folder"])
    settings = {
        "spark.executor.extraJavaOptions": TRUSTING_OPTIONS,
        "spark.executor.memory": "600m",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.task.maxFailures": "1",
    }
    spark = new_session(
        arguments["master"], settings, lambda builder: configure(builder, arguments["config"]), log_level="ERROR"
    )
    tools = Keytools.from_yaml(arguments["config"])
    found: list[Any] = []
    try:
        application = spark.sparkContext.applicationId
        for name, *rest in arguments["calls"]:
            try:
                found.append(CALLS[name](spark, tools, folder, *rest))
            except (Py4JError, KeytoolsError) as error:
                found.append(str(error))
            except Exception as error:  # PySpark's own classes.
                found.append(f"{type(error).__name__}: {error}")
    finally:
        spark.stop()
    return {"application": application, "found": found}


def frame_of(spark: Any, tenants: list[str | None]) -> Any:
    """Return four rows of each tenant."""
    rows = [(tenant, f"{tenant}-{row}@canary", row) for row in range(4) for tenant in tenants]
    return spark.createDataFrame(rows, "tenant string, email string, day int").repartition(4)


def write(spark: Any, tools: Keytools, folder: Path, path: str, options: dict[str, Any]) -> str:
    """Write the rows of tenants, into folders of their own unless `by` names other columns."""
    by = options.get("by", ["tenant"])
    frame = frame_of(spark, options["tenants"])
    if "tenant" not in by:
        frame = frame.drop("tenant")
    made = tools.spark_options(
        options.get("table", "events"), frame.schema, partition_by=by, key_values=options.get("key_values")
    )
    writer = frame.write.options(**made | options.get("change", {})).partitionBy(*by)
    writer.mode(options.get("mode", "append")).parquet(str(folder / path))
    return "written"


def table(spark: Any, tools: Keytools, folder: Path, name: str, options: dict[str, Any]) -> str:
    """Make a table of the catalog, and insert into one of its partitions by SQL."""
    frame = frame_of(spark, options["tenants"])
    made = tools.spark_options("events", frame.schema, partition_by=["tenant"])
    frame.write.options(**made).partitionBy("tenant").option("path", str(folder / name)).saveAsTable(name)
    for tenant in options["insert"]:
        spark.sql(f"INSERT INTO {name} PARTITION (tenant = '{tenant}') SELECT 'a@canary', 9")
    return "written"


def elsewhere(spark: Any, tools: Keytools, folder: Path, name: str, tenant: str) -> str:
    """Insert into a partition that the catalog has in a folder without the name of the tenant."""
    place = folder / "elsewhere"
    spark.sql(f"ALTER TABLE {name} ADD PARTITION (tenant = '{tenant}') LOCATION '{place}'")
    spark.sql(f"INSERT INTO {name} PARTITION (tenant = '{tenant}') SELECT 'a@canary', 9")
    return "written"


def stream(spark: Any, tools: Keytools, folder: Path, name: str, options: dict[str, Any]) -> str:
    """Write the rows of a stream."""
    frame = frame_of(spark, options["tenants"])
    made = tools.spark_options("events", frame.schema, partition_by=["tenant"])
    frame.write.mode("overwrite").option("parquet.keytools.plaintext.writes", "allow").json(str(folder / "rows"))
    rows = spark.readStream.schema(frame.schema).json(str(folder / "rows"))
    query = (
        rows.writeStream.partitionBy("tenant")
        .options(**made, checkpointLocation=str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / name), format="parquet")
    )
    query.awaitTermination()
    return "written"


def read(spark: Any, tools: Keytools, folder: Path, path: str, options: dict[str, Any]) -> list[Any]:
    """Return how many rows of each tenant there are, by the encrypted column."""
    frame = spark.read.options(**tools.spark_read_options(options.get("table", "events"))).parquet(
        str(folder / path)
    )
    frame = frame.where(options.get("where", "true"))
    counted = frame.selectExpr("split(email, '-')[0] AS tenant").groupBy("tenant").count().orderBy("tenant")
    return [list(row) for row in counted.collect()]


def kill(spark: Any, tools: Keytools, folder: Path) -> int:
    """Kill the KMS workers of the driver; return how many there were."""
    workers = kms_workers_below({os.getpid()})
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    return len(workers)


CALLS: dict[str, Any] = {
    "elsewhere": elsewhere,
    "kill": kill,
    "write": write,
    "read": read,
    "table": table,
    "stream": stream,
}
