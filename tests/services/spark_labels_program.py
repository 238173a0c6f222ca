"""Jobs of the tests of labels: Spark writes a frame whose columns carry metadata.

{"config": ..., "target": ..., "labels": {column: label}}
"""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from spark_driver import Sessions, new_session

from parquet_keytools import Keytools
from parquet_keytools.spark import configure


def main(sessions: Sessions, arguments: dict[str, Any]) -> dict[str, Any]:
    """Write the frame with labels, and again with a label that the options do not know; return what came of it."""
    from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

    sessions.stop()
    spark = new_session("local[1]", {}, lambda builder: configure(builder, arguments["config"]))
    item = StructType([StructField("iban", StringType(), True, {"class": "payment"})])
    labels = arguments["labels"]

    def schema(**more: str) -> StructType:
        given = {**labels, **more}
        kinds = {"id": LongType(), "email": StringType(), "name": StringType(), "orders": ArrayType(item)}
        metadata = {name: {"class": given[name]} if name in given else {} for name in kinds}
        return StructType([StructField(name, kind, True, metadata[name]) for name, kind in kinds.items()])

    try:
        tools = Keytools.from_yaml(arguments["config"])
        rows = [(1, "a@b", "Ada", [("i",)])]
        frame = spark.createDataFrame(rows, schema())
        options = tools.spark_options("t", frame.schema)
        frame.write.options(**options).parquet(arguments["target"])
        read = spark.read.options(**tools.spark_read_options("t")).parquet(arguments["target"]).collect()
        found: dict[str, Any] = {"rows": [row["email"] for row in read]}
        try:
            later = spark.createDataFrame(rows, schema(name="pii"))
            later.write.options(**options).mode("append").parquet(arguments["target"])
            found["later"] = "written"
        except Py4JJavaError as error:
            found["later"] = str(error.java_exception)
    finally:
        spark.stop()
    return found
