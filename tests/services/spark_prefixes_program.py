"""A program of Spark that reads files through our factory. A job returns what became of each read:

{"config": ..., "reads": [[file, {option: value}], ...]}
"""

from __future__ import annotations

import warnings
from typing import Any

from py4j.protocol import Py4JJavaError
from spark_driver import JVM_SETTINGS, serve, start_jvm

from parquet_keytools.spark import configure


def main(arguments: dict[str, Any]) -> list[list[int] | str]:
    """Read each file in one session."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").appName("prefixes")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        **JVM_SETTINGS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = configure(builder, arguments["config"]).getOrCreate()
    found: list[list[int] | str] = []
    try:
        for path, options in arguments["reads"]:
            try:
                found.append(sorted(row["other"] for row in spark.read.options(**options).parquet(path).collect()))
            except Py4JJavaError as error:
                cause = error.java_exception
                while cause.getCause() is not None:
                    cause = cause.getCause()
                found.append(cause.toString())
    finally:
        spark.stop()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    start_jvm()
    serve(main)
