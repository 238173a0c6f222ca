"""A program of Spark for the tests of pipelines. A job names settings and calls, and returns what came of each:

{"master": "local[2]", "folder": ..., "settings": {}, "calls": [["encrypt", ["from", "to", "flights.yaml"], {}]]}
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spark_driver import JVM_SETTINGS, serve, start_jvm
from spark_jvm import JAVA_OPTIONS

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import pipelines
from parquet_keytools.spark.pipelines import encryption, rotation
from parquet_keytools.spark.pipelines.job import Job, Work
from parquet_keytools.spark.pipelines.report import TaskResult

SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    **JVM_SETTINGS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
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


class Sessions:
    """The session of the last job, which the next one uses if its settings are the same."""

    def __init__(self) -> None:
        self._made_with: tuple[str, dict[str, str]] | None = None
        self._session: Any = None

    def get(self, master: str, folder: Path, settings: dict[str, str]) -> Any:
        """Return a session with these settings."""
        if self._made_with != (master, settings):
            self.stop()
            self._session = make_session(master, folder, settings)
            self._session.sparkContext.setLogLevel("ERROR")
            self._made_with = master, settings
        return self._session

    def stop(self) -> None:
        """Stop the session that is there."""
        if self._session is not None:
            self._session.stop()
            self._session = self._made_with = None


def main(sessions: Sessions, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the calls one after the other."""
    session = sessions.get(arguments["master"], Path(arguments["folder"]), arguments["settings"])
    notes = Path(arguments.get("slow", "/nowhere"))
    with slow_tasks(notes) if "slow" in arguments else contextlib.nullcontext():
        return [result_of(session, *call) | {"at_work": at_work(notes)} for call in arguments["calls"]]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Spark's, that it does not know this pandas.
    start_jvm()
    ours = Sessions()
    try:
        serve(lambda arguments: main(ours, arguments))
    finally:
        ours.stop()
