"""Jobs of the pipeline tests. A job names settings and calls, and returns the result of each:

{"master": "local[2]", "folder": ..., "settings": {}, "calls": [["encrypt", ["from", "to", "flights.yaml"], {}]]}
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from spark_driver import Sessions, new_session
from spark_jvm import TRUSTING_OPTIONS

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import configure, pipelines
from parquet_keytools.spark.map_files import FileFunction, Job, NamedFile, Outcome, Worker
from parquet_keytools.storage.locations import FileLocation


def make_session(master: str, folder: Path, settings: dict[str, str]) -> Any:
    """Create a session without the bridge, which pipelines do not need."""
    own = {
        "spark.executor.extraJavaOptions": TRUSTING_OPTIONS,
        "spark.executor.memory": "500m",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    return new_session(master, own | settings, log_level="ERROR")


def result_of(session: Any, name: str, arguments: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Call a pipeline, and read its result as a user does: through its DataFrames."""
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


Change = Callable[[str, FileFunction, NamedFile], FileFunction]
"""Takes what a job does, its function, and its last file; returns the function that tasks call instead."""


@contextlib.contextmanager
def changed_tasks(change: Change) -> Iterator[None]:
    """Make the jobs that write files call another function."""
    map_files = Job.map_files

    def map_changed(
        job: Job, what: str, function: FileFunction, files: Sequence[NamedFile]
    ) -> Iterator[tuple[NamedFile, Outcome]]:
        name = what.partition(" ")[0]
        is_writing = name in ("encrypt", "rotate", "rekey")
        return map_files(job, what, change(name, function, files[-1]) if is_writing else function, files)

    Job.map_files = map_changed  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Job.map_files = map_files  # type: ignore[method-assign]


def slow(name: str, function: FileFunction, _: NamedFile, *, notes: Path) -> FileFunction:
    """Delay the first attempt of the first task beyond all time limits.

    Args:
        notes: A folder where each attempt of this task leaves a file, with its process id.
    """

    def slow_function(worker: Worker, location: FileLocation, file: NamedFile) -> Outcome:
        context: Any = TaskContext.get()
        if context.partitionId() == 0:
            attempt = context.attemptNumber()
            (notes / f"{name} {attempt}").write_text(str(os.getpid()))
            time.sleep(0 if attempt else 100)
        return function(worker, location, file)

    return slow_function


def held(_: str, function: FileFunction, last: NamedFile, *, until: Path) -> FileFunction:
    """Hold back the last file until another file exists, or for a minute, so that the job is still running."""

    def held_function(worker: Worker, location: FileLocation, file: NamedFile) -> Outcome:
        end = time.monotonic() + 60
        while file == last and not until.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return function(worker, location, file)

    return held_function


def at_work(notes: Path) -> list[str]:
    """Return the slow attempts whose processes exist; on a cluster of this machine."""
    return [note.name for note in notes.glob("* 0") if Path(f"/proc/{note.read_text()}").exists()]


def main(sessions: Sessions, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the calls one after the other."""
    made_with = [arguments[name] for name in ("master", "folder", "settings")]
    session = sessions.get(made_with, lambda: make_session(made_with[0], Path(made_with[1]), made_with[2]))
    notes = Path(arguments.get("slow", "/nowhere"))
    with contextlib.ExitStack() as stack:
        if "slow" in arguments:
            stack.enter_context(changed_tasks(partial(slow, notes=notes)))
        if "held" in arguments:
            stack.enter_context(changed_tasks(partial(held, until=Path(arguments["held"]))))
        return [result_of(session, *call) | {"at_work": at_work(notes)} for call in arguments["calls"]]


def read(sessions: Sessions, arguments: dict[str, Any]) -> list[float]:
    """Read the output of pipelines with Spark's own reader; return sums that identify a set of flights."""
    sessions.stop()
    session = new_session("local[2]", {}, lambda builder: configure(builder, arguments["config"]))
    try:
        frame = session.read.parquet(arguments["path"])
        row = frame.selectExpr("count(*)", "sum(distance)", "count(DISTINCT tailnum)").collect()[0]
        return [float(value) for value in row]
    finally:
        session.stop()
