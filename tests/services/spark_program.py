"""Jobs of the tests of the bridge: what a user would do; a job returns what came of each of its parts.

As a program, under spark-submit, which takes stdin, the one job is an argument: '{"master": "local[2]", ...}'
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline_program import result_of
from py4j.protocol import Py4JJavaError
from spark_driver import JVM_SETTINGS, Sessions, new_session
from spark_jvm import TRUSTING_OPTIONS, kms_workers_below

from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import PLAINTEXT_FILES, configure

SELECTED = ["flight", "tailnum"]
CONDITION = "distance > 2500 AND month = 3"


def main(sessions: Sessions, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the parts that the arguments name, in a session that is kept where they say so."""
    folder = Path(arguments["folder"])
    keytools = Keytools.from_yaml(folder / "flights.yaml")
    made_with = {name: value for name, value in arguments.items() if name != "parts"}
    spark = sessions.get(made_with, lambda: make_session(arguments, folder))
    results: dict[str, Any] = {}
    try:
        # For the audit log of KMS workers.
        log4j = spark._jvm.org.apache.logging.log4j
        log4j.core.config.Configurator.setLevel("parquet_keytools", log4j.Level.INFO)
        # spark-submit starts the JVM, and the JVM this program.
        program = os.getppid() if "PYSPARK_GATEWAY_PORT" in os.environ else os.getpid()
        before = kms_workers_below({program})
        for part in arguments["parts"]:
            results[part] = PARTS[part](spark, keytools, folder)
        results["settings"] = dict(spark.sparkContext.getConf().getAll())
        results["kms_workers"] = list(kms_workers_below({program}) - before)
    finally:
        if not arguments.get("keep"):
            sessions.stop()
    return results


def make_session(arguments: dict[str, Any], folder: Path) -> Any:
    """Make a session with the bridge."""
    settings = {
        **JVM_SETTINGS,
        "spark.executor.extraJavaOptions": TRUSTING_OPTIONS,
        "spark.executor.memory": "600m",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    } | arguments.get("settings", {})
    more = {name: arguments[name] for name in ("python", "file_on_nodes") if name in arguments}
    return new_session(
        arguments["master"], settings, lambda builder: configure(builder, folder / "flights.yaml", **more)
    )


def reader(spark: Any, table_name: str = "flights") -> Any:
    """Return a reader of the files of a table."""
    return spark.read.option("parquet.keytools.table", table_name)


def plain_flights(spark: Any, folder: Path) -> Any:
    """Return the flights, read from the plaintext file."""
    return spark.read.options(**PLAINTEXT_FILES).parquet(str(folder / "plain.parquet"))


def write(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Write the flights, partitioned by month."""
    frame = plain_flights(spark, folder).repartition(4)
    options = keytools.spark_options("flights", frame.schema, partition_by=["month"])
    frame.write.partitionBy("month").options(**options).parquet(str(folder / "spark"))
    return {"rows": frame.count(), "options": options}


def read(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Read what Spark and Keytools wrote, with projection and pushed-down filter."""
    results: dict[str, Any] = {}
    for name in ("spark", "dataset", "modules"):
        results[name] = read_some(spark, folder / name)
        results[name]["total"] = reader(spark).parquet(str(folder / name)).count()
    frames = {"everything": reader(spark).parquet(str(folder / "spark")), "plain": plain_flights(spark, folder)}
    columns = [name for name in frames["plain"].columns if name != "month"]
    for name, frame in frames.items():
        # A number in the name of a folder is read as a shorter type.
        rows = frame.select(*columns, frame.month.cast("bigint"))
        results[name] = list(rows.selectExpr("sum(hash(*))", "count(*)").collect()[0])
    return results


def each_table(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Write the flights as each table; read what Spark and Keytools wrote, and the plaintext."""
    frame = plain_flights(spark, folder).repartition(4)
    frames = {"plain": frame}
    for name in keytools.configuration.tables:
        options = keytools.spark_options(name, frame.schema)
        frame.write.options(**options).parquet(str(folder / "spark" / name))
        for writer in ("spark", "keytools"):
            frames[f"{writer} {name}"] = reader(spark, name).parquet(str(folder / writer / name))
    return {
        name: list(frame.selectExpr("sum(hash(*))", "count(*)").collect()[0]) for name, frame in frames.items()
    }


def rotate_tables(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Rotate what Spark wrote as each table, by a pipeline."""
    config = folder / "flights.yaml"
    return {
        name: result_of(spark, "rotate", [str(folder / "spark" / name), str(config)], {"table_name": name})
        for name in keytools.configuration.tables
    }


def read_some(spark: Any, folder: Path) -> dict[str, Any]:
    """Read with projection and pushed-down filter."""
    selected = reader(spark).parquet(str(folder)).filter(CONDITION).select(*SELECTED)
    rows = sorted(map(tuple, selected.collect()), key=str)
    return {"rows": rows, "plan": selected._jdf.queryExecution().executedPlan().toString()}


def refused_writes(spark: Any, keytools: Keytools, folder: Path) -> dict[str, str]:
    """Try what would leave something in plaintext."""
    numbers = itertools.count()
    frame = plain_flights(spark, folder).limit(10)
    options = keytools.spark_options("flights", frame.schema)
    # Of this table, unlisted columns are plaintext.
    single = keytools.spark_options("single", frame.schema)
    other = Keytools.from_yaml(folder / "other.yaml").spark_options("flights", frame.schema)

    def attempt(frame: Any, **options: str) -> str:
        return error_of(
            lambda: frame.write.options(**options).parquet(str(folder / "refused" / str(next(numbers))))
        )

    return {
        "without options": attempt(frame),
        "a new column": attempt(frame.withColumn("ssn", frame.tailnum), **single),
        "a column less": attempt(frame.drop("year"), **options),
        "of another configuration": attempt(frame, **other),
        "V2 pages": attempt(frame, **options, **{"parquet.writer.version": "v2"}),
        "external": attempt(frame, **options | {"parquet.encryption.key.material.store.internally": "false"}),
        "by hand": attempt(frame, **{"parquet.encryption.uniform.key": "footer"}),
        "partitioned unannounced": error_of(
            lambda: frame.write.options(**options).partitionBy("month").parquet(str(folder / "refused" / "month"))
        ),
        "a key column as partition": error_of(
            lambda: keytools.spark_options("flights", frame.schema, partition_by=["tailnum"])
        ),
    }


def plaintext(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Read a plaintext file in place of an encrypted one, and where it is meant."""
    path = str(folder / "plain.parquet")
    meant = str(folder / "meant")
    plain_flights(spark, folder).limit(10).write.options(**PLAINTEXT_FILES).parquet(meant)

    def no_ctr(table_name: str) -> Any:
        return reader(spark, table_name).option("parquet.keytools.ctr.files", "reject")

    return {
        "ctr": error_of(lambda: no_ctr("ctr").parquet(str(folder / "ctr")).count()),
        "ctr, plaintext footer": error_of(
            lambda: no_ctr("ctr_signed").parquet(str(folder / "ctr-signed")).count()
        ),
        "ctr, allowed": reader(spark, "ctr").parquet(str(folder / "ctr")).count(),
        "gcm": no_ctr("flights").parquet(str(folder / "modules")).count(),
        "prefix": spark.read.options(**keytools.spark_read_options("prefix"))
        .parquet(str(folder / "prefix"))
        .count(),
        "prefix of the table alone": reader(spark, "prefix").parquet(str(folder / "prefix")).count(),
        "another prefix": error_of(
            lambda: with_prefix(reader(spark, "prefix"), "p/other").parquet(str(folder / "prefix")).count()
        ),
        "no prefix": error_of(lambda: with_prefix(reader(spark), "p/x").parquet(str(folder / "modules")).count()),
        "rejected": error_of(lambda: spark.read.parquet(path).count()),
        "schema": error_of(lambda: spark.read.parquet(path).printSchema()),
        "meant": spark.read.options(**PLAINTEXT_FILES).parquet(meant).count(),
    }


def with_prefix(spark_reader: Any, prefix: str) -> Any:
    """Return the reader with an AAD prefix that files must have."""
    return spark_reader.option("parquet.keytools.aad.prefix", prefix)


def refused_columns(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Read with a master key that was disabled before."""
    frame = reader(spark).parquet(str(folder / "spark"))
    before = {path: path.read_bytes() for path in (folder / "spark").rglob("*.parquet")}
    rows = plain_flights(spark, folder).limit(10)
    overwrite = rows.write.mode("overwrite").options(**keytools.spark_options("flights", rows.schema))
    overwritten = error_of(lambda: overwrite.parquet(str(folder / "spark")))
    return {
        "overwritten": overwritten,
        "kept": before == {path: path.read_bytes() for path in (folder / "spark").rglob("*.parquet")},
        "others": sorted(map(tuple, frame.filter(CONDITION).select("flight").collect()), key=str),
        "selected": error_of(lambda: frame.select("tailnum").collect()),
        "filtered": error_of(lambda: frame.filter("tailnum = 'N14228'").select("flight").collect()),
        "written": error_of(lambda: write(spark, keytools, folder / "no")),
    }


def many_requests(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Write with single wrapping: each file wraps each of its keys, while others may kill workers."""
    frame = plain_flights(spark, folder).repartition(8)
    options = keytools.spark_options("single", frame.schema)
    for number in range(6):
        frame.write.options(**options).parquet(str(folder / f"single-{number}"))
        time.sleep(0.1)
    read = reader(spark, "single").parquet(*(str(folder / f"single-{number}") for number in range(6)))
    return {"rows": read.count(), "tailnums": read.select("tailnum").distinct().count()}


def ways_to_write(spark: Any, keytools: Keytools, folder: Path) -> dict[str, Any]:
    """Write in all ways that Spark has, and nested columns, and names that are not plain."""
    frame = plain_flights(spark, folder).where("day = 15").select("flight", "tailnum", "month").cache()
    rows = frame.count()
    options = keytools.spark_options("few", frame.schema)
    by_month = keytools.spark_options("few", frame.schema, partition_by=["month"])
    path = {
        name: str(folder / "ways" / name)
        for name in ("partitions", "merged", "stream", "batches", "nested", "odd")
    }
    results: dict[str, Any] = {}

    frame.write.partitionBy("month").options(**by_month).parquet(path["partitions"])
    some = frame.where("month = 1").limit(7)
    overwrite = some.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    overwrite.partitionBy("month").options(**by_month).parquet(path["partitions"])
    results["partitions"] = [
        frame.where("month != 1").count() + 7,
        reader(spark, "few").parquet(path["partitions"]).count(),
    ]

    wider = frame.selectExpr("*", "1 AS more")
    wider.write.options(**keytools.spark_options("few", wider.schema)).parquet(f"{path['merged']}/part=1")
    frame.write.options(**options).parquet(f"{path['merged']}/part=2")
    merged = reader(spark, "few").option("mergeSchema", "true").parquet(path["merged"])
    results["merged"] = [[2 * rows, rows], list(merged.selectExpr("count(*)", "sum(more)").collect()[0])]

    frame.write.options(**options).saveAsTable("saved")
    frame.limit(3).write.insertInto("saved")
    spark.sql("INSERT INTO saved SELECT * FROM saved LIMIT 4")
    frame.write.bucketBy(2, "tailnum").sortBy("tailnum").options(**options).saveAsTable("bucketed")
    results["tables"] = [[rows + 7, rows], [spark.table("saved").count(), spark.table("bucketed").count()]]
    spark.sql("ALTER TABLE saved ADD COLUMNS (ssn STRING)")
    spark.sql("INSERT INTO saved SELECT flight, tailnum, month, tailnum FROM bucketed")
    results["grown"] = [
        spark.table("bucketed").where("tailnum IS NOT NULL").count(),
        spark.table("saved").where("ssn = tailnum").count(),
    ]
    results["a table without options"] = error_of(
        lambda: spark.sql("CREATE TABLE bare USING parquet AS SELECT * FROM bucketed")
    )

    frame.write.options(**PLAINTEXT_FILES).parquet(str(folder / "stream-plain"))
    stream = spark.readStream.schema(frame.schema).options(**PLAINTEXT_FILES).parquet(str(folder / "stream-plain"))

    def run(writer: Any) -> None:
        started = writer.trigger(availableNow=True).start()
        started.awaitTermination()

    def write_batch(batch: Any, _: int) -> None:
        batch.write.mode("append").options(**options).parquet(path["batches"])

    checkpoints = folder / "checkpoints"
    sink = stream.writeStream.format("parquet").option("path", path["stream"])
    run(sink.options(**options).option("checkpointLocation", str(checkpoints / "1")))
    run(stream.writeStream.foreachBatch(write_batch).option("checkpointLocation", str(checkpoints / "2")))
    bare = stream.writeStream.format("parquet").option("path", str(folder / "ways" / "bare"))
    results["a stream without options"] = error_of(
        lambda: run(bare.option("checkpointLocation", str(checkpoints / "3")))
    )
    results["streams"] = [
        [rows, rows],
        [reader(spark, "few").parquet(path[name]).count() for name in ("stream", "batches")],
    ]

    nested = frame.selectExpr(
        "flight",
        "array(tailnum) AS tags",
        "map('k', tailnum) AS m",
        "struct(tailnum AS a, flight AS b) AS s",
        "array(struct(tailnum AS x, flight AS y)) AS l",
    )
    nested.write.options(**keytools.spark_options("nested", nested.schema)).parquet(path["nested"])
    back = reader(spark, "nested").parquet(path["nested"])
    results["nested"] = [frame.join(back, frame.tailnum == back.s.a).count() > 0, True]
    odd = frame.selectExpr("tailnum AS `a b`", "tailnum AS `größe 大`", "flight AS `x.y`", "flight AS `c,d:e;f`")
    odd.write.options(**keytools.spark_options("odd", odd.schema)).parquet(path["odd"])
    results["odd"] = [rows, reader(spark, "odd").parquet(path["odd"]).count()]

    results["summary"] = error_of(
        lambda: (
            frame.write.options(**options)
            .option("parquet.summary.metadata.level", "ALL")
            .parquet(str(folder / "ways" / "summary"))
        )
    )
    for name in ("ignoreCorruptFiles", "spark.sql.files.ignoreCorruptFiles"):
        results[name] = error_of(lambda name=name: count_ignoring(spark, name, path["stream"]))
    frame.unpersist()
    return results


def count_ignoring(spark: Any, name: str, path: str) -> int:
    """Count rows with a setting, of the session or of the read, that passes over files."""
    if "." not in name:
        return int(reader(spark, "few").option(name, "true").schema("flight BIGINT").parquet(path).count())
    spark.conf.set(name, "true")
    try:
        return int(reader(spark, "few").parquet(path).count())
    finally:
        spark.conf.unset(name)


def error_of(call: Callable[[], object]) -> str:
    """Return class and text of the first cause of an error."""
    try:
        call()
    except Py4JJavaError as error:
        cause = error.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        return str(cause.toString())
    except KeytoolsError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # Spark's own, with the causes as text.
        return f"{type(error).__name__}: {error}"
    return "no error"


PARTS: dict[str, Callable[[Any, Keytools, Path], dict[str, Any]]] = {
    "write": write,
    "read": read,
    "each_table": each_table,
    "rotate_tables": rotate_tables,
    "read_spark": lambda spark, _, folder: read_some(spark, folder / "spark"),
    "refused_writes": refused_writes,
    "plaintext": plaintext,
    "refused_columns": refused_columns,
    "many_requests": many_requests,
    "ways_to_write": ways_to_write,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Spark's, that it does not know this pandas.
    print(json.dumps(main(Sessions(), json.loads(sys.argv[1])), default=str))
