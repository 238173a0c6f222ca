"""A client of Spark Connect for `spark_ways.py`, in a process of its own. A job returns its result, or an error:

{"action": "write", "port": 15002, "folder": ..., "label": ..., "options": {}}
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from spark_driver import serve
from spark_ways import CONNECT_READ, Session, attempt, read_all, text_of

from parquet_keytools.spark import configure


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Do one job in a session of its own."""
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.remote(f"sc://127.0.0.1:{arguments['port']}")
    try:
        session = Session(builder.create(), Path(arguments["folder"]))
        return {"result": write(session, arguments) if arguments["action"] == "write" else read(session, builder)}
    except Exception as error:
        return {"error": text_of(error)}


def write(session: Session, arguments: dict[str, Any]) -> None:
    """Write the frame of an attempt."""
    session.label = arguments["label"]
    writer = session.frame().write.mode(arguments.get("mode", "error"))
    writer.options(**arguments["options"]).parquet(session.path)


def read(session: Session, builder: Any) -> dict[str, object]:
    """Read what there is to read, and configure a session."""
    found = read_all(
        session.folder,
        {CONNECT_READ: lambda options, path: len(session.spark.read.options(**options).parquet(path).collect())},
    )
    configured = attempt(lambda: configure(builder, session.folder / "c.yaml").getOrCreate().range(3).count())
    return found | {"configure": configured}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(main)
