"""Jobs of the tests of AAD prefixes: reading files through our factory. A job returns what became of each read:

{"config": ..., "reads": [[file, {option: value}], ...]}
"""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from spark_driver import Sessions, new_session

from parquet_keytools.spark import configure


def main(sessions: Sessions, arguments: dict[str, Any]) -> list[list[int] | str]:
    """Read each file in one session."""
    sessions.stop()
    spark = new_session("local[1]", {}, lambda builder: configure(builder, arguments["config"]))
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
