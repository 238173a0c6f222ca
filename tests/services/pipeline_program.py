"""Jobs of the tests of pipelines. A job names settings and calls, and returns what came of each:

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

from spark_driver import Sessions, new_session
from spark_jvm import JAVA_OPTIONS

from parquet_keytools.errors import KeytoolsError
from parquet_keytools.spark import configure, pipelines
from parquet_keytools.spark.pipelines import encryption, rotation, worker_keys
from parquet_keytools.spark.pipelines.file_tables import TaskResult
from parquet_keytools.spark.pipelines.job import Job, Work

# On a busy machine, the executors of a new session come further apart.
worker_keys._SETTLED_SECONDS = 3.0


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
def changed_tasks(change: Callable[[Work, int], Work]) -> Iterator[None]:
    """Let the tasks of a job that write files do something else.

    Args:
        change: Takes what a task does, and how many of them there are; returns what each does instead.
    """
    run = Job.run

    def run_changed(job: Job, what: str, work: Work, pieces: Sequence[bytes]) -> Iterator[TaskResult]:
        is_writing = isinstance(work, (encryption.EncryptionTask, rotation.WritingTask, rotation.RekeyTask))
        return run(job, what, change(work, job._tasks_of(len(pieces))) if is_writing else work, pieces)

    Job.run = run_changed  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Job.run = run  # type: ignore[method-assign]


def slow(work: Work, _: int, *, notes: Path) -> Work:
    """Let the first attempt of the first task begin later than anybody waits.

    Args:
        notes: A folder where each attempt of this task leaves a file, with its process id.
    """

    def slow_work(position: int, attempt: int, piece: bytes) -> TaskResult:
        if position == 0:
            (notes / f"{type(work).__name__} {attempt}").write_text(str(os.getpid()))
            time.sleep(0 if attempt else 100)
        return work(position, attempt, piece)

    return slow_work


def held(work: Work, tasks: int, *, until: Path) -> Work:
    """Let the last task begin when there is a file, so that the job is at work until then; or a minute later."""

    def held_work(position: int, attempt: int, piece: bytes) -> TaskResult:
        end = time.monotonic() + 60
        while position == tasks - 1 and not until.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return work(position, attempt, piece)

    return held_work


def at_work(notes: Path) -> list[str]:
    """Return the slow attempts whose processes are there; on a cluster of this machine."""
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
    """Read what pipelines wrote with Spark's own reader; return sums that tell one set of flights from another."""
    sessions.stop()
    session = new_session("local[2]", {}, lambda builder: configure(builder, arguments["config"]))
    try:
        frame = session.read.parquet(arguments["path"])
        row = frame.selectExpr("count(*)", "sum(distance)", "count(DISTINCT tailnum)").collect()[0]
        return [float(value) for value in row]
    finally:
        session.stop()
