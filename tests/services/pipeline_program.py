"""Jobs of the tests of pipelines. A job names settings and calls, and returns what came of each:

{"master": "local[2]", "folder": ..., "settings": {}, "calls": [["encrypt", ["from", "to", "flights.yaml"], {}]]}
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spark_driver import Sessions, new_session
from spark_jvm import JAVA_OPTIONS

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import configure, pipelines
from parquet_keytools.spark.pipelines import encryption, rotation
from parquet_keytools.spark.pipelines.job import Job, Work
from parquet_keytools.spark.pipelines.report import TaskResult


def make_session(master: str, folder: Path, settings: dict[str, str]) -> Any:
    """Make a session without the bridge: pipelines need none of it."""
    own = {
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.memory": "500m",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    return new_session(master, own | settings, log_level="ERROR")


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


@contextlib.contextmanager
def slow_tasks(notes: Path) -> Iterator[None]:
    """Let the first attempt of a job's first task begin later than anybody waits.

    Args:
        notes: A folder where each attempt of this task leaves a file, with its process id.
    """
    run = Job.run

    def run_slowly(job: Job, what: str, work: Work, pieces: Sequence[bytes]) -> Iterator[TaskResult]:
        is_writing = isinstance(work, (encryption.EncryptionTask, rotation.WritingTask))
        return run(job, what, slow(work, notes) if is_writing else work, pieces)

    Job.run = run_slowly  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Job.run = run  # type: ignore[method-assign]


def slow(work: Work, notes: Path) -> Work:
    """Return what a task does instead."""

    def slow_work(position: int, attempt: int, piece: bytes) -> TaskResult:
        if position == 0:
            (notes / f"{type(work).__name__} {attempt}").write_text(str(os.getpid()))
            time.sleep(0 if attempt else 100)
        return work(position, attempt, piece)

    return slow_work


def at_work(notes: Path) -> list[str]:
    """Return the slow attempts whose processes are there; on a cluster of this machine."""
    return [note.name for note in notes.glob("* 0") if Path(f"/proc/{note.read_text()}").exists()]


def main(sessions: Sessions, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the calls one after the other."""
    made_with = [arguments[name] for name in ("master", "folder", "settings")]
    session = sessions.get(made_with, lambda: make_session(made_with[0], Path(made_with[1]), made_with[2]))
    notes = Path(arguments.get("slow", "/nowhere"))
    with slow_tasks(notes) if "slow" in arguments else contextlib.nullcontext():
        return [result_of(session, *call) | {"at_work": at_work(notes)} for call in arguments["calls"]]


def read(sessions: Sessions, arguments: dict[str, Any]) -> list[float]:
    """Read what pipelines wrote with Spark's own reader; return sums that tell one set of flights from another."""
    sessions.stop()
    session = new_session("local[2]", {}, lambda builder: configure(builder, arguments["config"]))
    try:
        frame = session.read.parquet(arguments["path"])
        row = frame.selectExpr("count(*)", "sum(distance)", "count(DISTINCT tailnum)").collect()[0]
        return [float(value) for value in row]
    finally:
        session.stop()
