"""Runs a function over pieces of a data set as a job of Spark."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, KeytoolsError, OutputError, SparkJobFailedError
from parquet_keytools.key_service import KeyService
from parquet_keytools.spark.carried_configuration import carried, carried_file
from parquet_keytools.spark.pipelines.kms_share import most_tasks_of, task_slots
from parquet_keytools.spark.pipelines.planned_files import PlannedFiles, number_of_pieces
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, TaskResult, file_row, task_result
from parquet_keytools.spark.pipelines.worker_keys import CarriedKeys
from parquet_keytools.storage import PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST_SECONDS_TO_END = 60.0
"""So long, at most, Spark is waited for to end tasks that nobody needs any more."""

Work = Callable[[int, int, bytes], TaskResult]
"""Takes the position of the task, the number of its attempt from 0, and its piece."""


@dataclass
class Job:
    """A pipeline that runs.

    Attributes:
        spark: The session.
        configuration: Whose keys it uses.
        new_configuration: The one that new keys come from; None for the same.
        file_on_nodes: The YAML file on every node; None where the configuration travels.
        max_tasks: How many tasks there may be; None for as many as suits.
    """

    spark: SparkSession
    configuration: Configuration
    new_configuration: Configuration | None = None
    file_on_nodes: str | None = None
    max_tasks: int | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.job_id = uuid.uuid4().hex
        try:
            assert self.spark.sparkContext is not None
        except Exception:
            raise ConfigurationError(
                "the session has no SparkContext: pipelines need a classic session, not one of Spark Connect."
            ) from None
        # Names of keys that do not exist show here, and not on every executor.
        self.keys = KeyService(self.configuration, None, time.monotonic)
        self.new_keys = self.keys
        if self.new_configuration is not None:
            self.new_keys = KeyService(self.new_configuration, None, time.monotonic)
        for service in (self.keys, self.new_keys):
            if getattr(service.kms, "has_generated_keys", False):
                raise ConfigurationError(
                    "the in_memory KMS generates master keys, and every executor would have others.",
                    hint="Write its keys into the configuration, or use a keystore.",
                )
        self.kms_keys: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.tasks = 0
        # A speculative copy of a task asks the KMS too.
        speculates = self.spark.sparkContext.getConf().get("spark.speculation", "false").lower() == "true"
        self._attempts_at_a_time = 2 if speculates else 1
        most_calls = most_tasks_of(self.configuration, self.new_configuration)
        if most_calls is not None:
            most_calls = max(1, most_calls // self._attempts_at_a_time)
        limits = [self.max_tasks, most_calls]
        self._most_tasks = min((limit for limit in limits if limit is not None), default=None)
        self._slots = task_slots(self.spark)

    @property
    def slots(self) -> int:
        """How many tasks may run at a time, for planning."""
        return self._slots or int(self.spark.sparkContext.defaultParallelism)

    def number_of_pieces(self, files: int) -> int:
        """Return into how many pieces so many files are cut."""
        return number_of_pieces(files, self.slots, self._most_tasks)

    def carried_keys(self, pieces: int) -> CarriedKeys:
        """Return what makes the keys in workers, for a job of so many pieces."""
        text = carried(self.configuration) if self.file_on_nodes is None else carried_file(self.file_on_nodes)
        new = None if self.new_configuration is None else carried(self.new_configuration)
        return CarriedKeys(self.job_id, text, self._tasks_at_a_time(pieces), new)

    def _tasks_of(self, pieces: int) -> int:
        return pieces if self._most_tasks is None else min(pieces, self._most_tasks)

    def _tasks_at_a_time(self, pieces: int) -> int:
        most = self._tasks_of(pieces) * self._attempts_at_a_time
        return most if self._slots is None else min(most, self._slots)

    def run(self, what: str, work: Work, pieces: Sequence[bytes]) -> Iterator[TaskResult]:
        """Run a task for each piece, or fewer where their number is limited; yield results when all have ended.

        Args:
            what: For people, in Spark's web UI.
            work: What is done with each piece.
            pieces: Of the data set.

        Raises:
            KeytoolsError: A task could not begin.
            SparkJobFailedError: A task failed again and again, in a way that says nothing of a file.
        """
        if not pieces:
            return
        context = self.spark.sparkContext
        tag = f"parquet-keytools-{uuid.uuid4().hex}"
        context.setJobDescription(f"parquet-keytools: {what}")
        context.addJobTag(tag)
        try:
            tasks = self._tasks_of(len(pieces))
            data = context.parallelize(list(pieces), tasks)
            results: list[TaskResult] = data.mapPartitionsWithIndex(partial(_run, work)).collect()
        except Exception as error:
            raise SparkJobFailedError(
                f"Spark gave the job up: {_last_line(error)}",
                hint="What was done is kept; the same call goes on from there. The executors' logs say more.",
            ) from None
        finally:
            context.setJobDescription("")
            context.removeJobTag(tag)
            if self._attempts_at_a_time > 1:
                # Where Spark is gone, so are its tasks.
                with contextlib.suppress(Exception):
                    _wait_for_attempts(context, tag)
        self.tasks += tasks
        for result in results:
            if result.error is not None:
                raise result.error
        for result in results:
            self.kms_keys += result.kms_keys
            self.outcomes += result.outcomes
            yield result

    def unreadable(self, plan: PlannedFiles, outcome: str = FAILED) -> bytes:
        """Return rows of the files that no task can be told of, for their names are not valid UTF-8."""
        rows = [
            file_row(name, outcome, error=OutputError(f"the name {name} is not valid UTF-8."))
            for name in plan.unreadable
        ]
        result = task_result(rows, Counter())
        self.outcomes += result.outcomes
        return result.rows

    def report(self, packed_files: Sequence[bytes]) -> PipelineReport:
        """Return what came of it."""
        return PipelineReport(
            self.spark,
            packed_files,
            self.outcomes,
            self.kms_keys,
            self.tasks,
            time.monotonic() - self.started,
        )

    def close(self) -> None:
        """Give back the driver's connections, and count what it asked the KMS for."""
        services = {id(service): service for service in (self.keys, self.new_keys)}
        for service in services.values():
            if service.kms is not None:
                self.kms_keys += service.kms.call_counts
                service.kms.close()


def _wait_for_attempts(context: Any, tag: str) -> None:
    """Wait for the copies of tasks that came too late: until Spark has ended them, they write.

    What is done with the files next could be undone by one of them.
    """
    tracker = context.statusTracker()
    end = time.monotonic() + _MOST_SECONDS_TO_END
    jobs = [tracker.getJobInfo(job) for job in context._jsc.sc().statusTracker().getJobIdsForTag(tag)]
    for stage_id in [stage for job in jobs if job is not None for stage in job.stageIds]:
        while time.monotonic() < end:
            stage = tracker.getStageInfo(stage_id)
            if stage is None or not stage.numActiveTasks:
                break
            time.sleep(0.1)


def configuration_of(configuration: Configuration | PathLike) -> Configuration:
    """Return a configuration, given that or its YAML file."""
    return configuration if isinstance(configuration, Configuration) else load_configuration(configuration)


def _run(work: Work, position: int, pieces: Iterator[bytes]) -> Iterator[TaskResult]:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    attempt = context.attemptNumber() if context is not None else 0
    for piece in pieces:
        try:
            yield work(position, attempt, piece)
        except ConfigurationError as error:
            # The same on every node, or of the nodes: to try again is of no use.
            yield TaskResult(error=_alone(error))


def _alone(error: KeytoolsError) -> KeytoolsError:
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _last_line(error: Exception) -> str:
    """Return the one line of Spark's many that says why."""
    cause: Any = getattr(error, "java_exception", None)
    text = str(error)
    if cause is not None:
        while cause.getCause() is not None:
            cause = cause.getCause()
        text = str(cause.getMessage() or cause.toString())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    stages = [line for line in lines if "Job aborted" in line or "Error" in line]
    return (stages or lines or [type(error).__name__])[-1][:500]
