"""A program of Spark for the tests of pipelines; prints what came of each call as JSON.

python pipeline_program.py '{"master": "local[2]", "calls": [["encrypt", ["from", "to", "flights.yaml"], {}]]}'
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import pipelines
from parquet_keytools.spark.pipelines import encryption, rotation

SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "700m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "500m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def make_session(master: str, folder: Path, settings: dict[str, str]) -> Any:
    """Make a session without the bridge: pipelines need none of it."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("parquet-keytools pipelines")
    own = {"spark.local.dir": str(folder / "local"), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    for name, value in (SETTINGS | own | settings).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def result_of(session: Any, name: str, arguments: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Call a pipeline, and look at what it returns as a user does: by its DataFrames."""
    try:
        report = getattr(pipelines, name)(session, *arguments, **options)
    except (KeytoolsError, OSError) as error:
        return {"raised": type(error).__name__, "text": str(error)}
    found = {
        "rows": [row.asDict(recursive=True) for row in report.files.collect()],
        "outcomes": dict(report.outcomes),
        "kms_keys": dict(report.kms_keys),
        "succeeded": report.succeeded,
        "tasks": report.tasks,
        "seconds": report.seconds,
    }
    if isinstance(report, pipelines.VerificationReport):
        found["rules"] = [row.asDict() for row in report.rules.where("outcome != 'not applicable'").collect()]
        found["verdict"] = report.verdict.value
    return found


def make_slow(notes: Path) -> None:
    """Let the first attempt of a job's first task begin later than anybody waits.

    Args:
        notes: A folder where each attempt of this task leaves a file, with its process id.
    """
    for module, name in ((encryption, "_encrypt_piece"), (rotation, "_rotate_piece")):
        setattr(module, name, slow(getattr(module, name), notes))


def slow(work: Callable[..., Any], notes: Path) -> Callable[..., Any]:
    """Return what a task does instead."""

    def slow_work(state: Any, position: int, attempt: int, piece: bytes) -> Any:
        if position == 0:
            (notes / f"{work.__name__} {attempt}").write_text(str(os.getpid()))
            time.sleep(0 if attempt else 100)
        return work(state, position, attempt, piece)

    return slow_work


def at_work(notes: Path) -> list[str]:
    """Return the slow attempts whose processes are there; on a cluster of this machine."""
    return [note.name for note in notes.glob("* 0") if Path(f"/proc/{note.read_text()}").exists()]


def main(arguments: dict[str, Any]) -> None:
    """Make the calls one after the other."""
    warnings.simplefilter("ignore")  # Spark's, that it does not know this pandas.
    session = make_session(arguments["master"], Path(arguments["folder"]), arguments.get("settings", {}))
    session.sparkContext.setLogLevel("ERROR")
    notes = Path(arguments.get("slow", "/nowhere"))
    if "slow" in arguments:
        make_slow(notes)
    try:
        results = [result_of(session, *call) | {"at_work": at_work(notes)} for call in arguments["calls"]]
    finally:
        session.stop()
    print(json.dumps(results, default=str))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
