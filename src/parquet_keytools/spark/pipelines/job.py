"""Runs a function over pieces of a data set as a job of Spark; files that share a footer key can go together."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, KeytoolsError, SparkJobFailedError, without_frames
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.rotation.file_keys import read_file_keys
from parquet_keytools.spark.pipelines.file_tables import (
    FAILED,
    PipelineReport,
    PlannedFiles,
    TaskResult,
    cut,
    cut_by_group,
    file_at,
    file_row,
    node_location,
    number_of_pieces,
    packed,
    place_of,
    rows_of,
    task_result,
    unpacked,
)
from parquet_keytools.spark.pipelines.worker_keys import (
    CarriedKeys,
    WorkerKeys,
    most_tasks_of,
    spare_modules,
    task_slots,
    worker_keys,
)
from parquet_keytools.spark.transport import carried, carried_file, refuse_generated_keys
from parquet_keytools.storage.locations import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST_SECONDS_TO_END = 60.0
"""So long, at most, Spark is waited for to end tasks that nobody needs any more."""

Work = Callable[[int, int, bytes], TaskResult]
"""Takes the position of the task, the number of its attempt from 0, and its piece."""

RowOf = Callable[[FileLocation, Mapping[str, Any]], dict[str, Any]]
"""Does something with a file that the plan has, and returns its row for the report."""

MOST_PIECES_A_GROUP = 16
"""Into how many pieces the files of one footer key are cut where only their ends are read and written: so many
tasks, at most, unwrap it."""

_GROUPED = pa.schema(
    [("path", pa.string()), ("size_bytes", pa.int64()), ("group", pa.int64()), ("is_encrypted", pa.bool_())]
)


@dataclass(frozen=True)
class TaskFiles:
    """The files of one task: `path`, `size_bytes`, and what the pipeline added.

    The task has a position in its job, and was begun so often before.
    """

    position: int
    attempt: int
    table: pa.Table

    @property
    def files(self) -> Iterator[dict[str, Any]]:
        """The rows of the table."""
        return rows_of(self.table)


@dataclass(frozen=True)
class PipelineTask:
    """What each task of a job does with the files of its piece; made on the driver, and called on an executor.

    A pipeline implements `row`, or `result` where it wants to know more than a row for each file. Files are of the
    only table, and have its AAD prefix, if no other is given.
    """

    keys: CarriedKeys
    place: str
    table_name: str | None
    aad_prefix: str | bytes | None

    def __call__(self, position: int, attempt: int, piece: bytes) -> TaskResult:
        """Do it."""
        worker = worker_keys(self.keys, position)
        before = worker.kms_counts()
        result = self.result(worker, node_location(self.place), TaskFiles(position, attempt, unpacked(piece)))
        result.kms_keys = worker.kms_counts() - before
        return result

    def result(self, worker: WorkerKeys, root: FileLocation, piece: TaskFiles) -> TaskResult:
        """Return what came of the files of a piece."""
        make_row = partial(self.row, worker)
        return task_result([timed_row(make_row, file_at(root, file["path"]), file) for file in piece.files])

    def row(self, worker: WorkerKeys, location: FileLocation, file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a file; what it raises makes the row of one that failed."""
        raise NotImplementedError


def timed_row(make_row: RowOf, location: FileLocation, file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a file that something was done with, and how long that took; an error makes one, too."""
    started = time.monotonic()
    try:
        found = make_row(location, file)
    except (KeytoolsError, OSError, UnicodeEncodeError, pa.ArrowException) as error:
        found = file_row(str(location), FAILED, error=error)
    return found | {"seconds": time.monotonic() - started}


class Job:
    """A pipeline that runs, as one job of Spark or several; ends with its block.

    It is over the data set at `root`. New keys come from `new_configuration`, if there is one.
    """

    def __init__(
        self,
        spark: SparkSession,
        path: PathLike,
        configuration: Configuration | PathLike,
        new_configuration: Configuration | PathLike | None = None,
        *,
        file_on_nodes: str | None = None,
        max_tasks: int | None = None,
    ) -> None:
        """Begin; raise `ConfigurationError` where Spark or its executors could not do with a configuration."""
        self._started = time.monotonic()
        self.place = place_of(path)
        self.root = node_location(self.place)
        self._spark = spark
        self.configuration = _configuration_of(configuration)
        self.new_configuration = None if new_configuration is None else _configuration_of(new_configuration)
        self._file_on_nodes = file_on_nodes
        self._job_id = uuid.uuid4().hex
        try:
            assert spark.sparkContext is not None
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
            refuse_generated_keys(service.kms)
        self._kms_keys: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.tasks = 0
        self._rows: list[bytes] = []
        # A speculative copy of a task asks the KMS too.
        speculates = spark.sparkContext.getConf().get("spark.speculation", "false").lower() == "true"
        self._attempts_at_a_time = 2 if speculates else 1
        most_calls = most_tasks_of(self.configuration, self.new_configuration)
        if most_calls is not None:
            most_calls = max(1, most_calls // self._attempts_at_a_time)
        limits = [max_tasks, most_calls]
        self._most_tasks = min((limit for limit in limits if limit is not None), default=None)
        self._slots = task_slots(spark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back the driver's connections, and count what it asked the KMS for."""
        for service in {id(service): service for service in (self.keys, self.new_keys)}.values():
            if service.kms is not None:
                self._kms_keys += service.kms.call_counts
                service.kms.close()

    def number_of_pieces(self, files: int) -> int:
        """Return into how many pieces so many files are cut."""
        slots = self._slots or int(self._spark.sparkContext.defaultParallelism)
        return number_of_pieces(files, slots, self._most_tasks)

    def carried_keys(self, pieces: int) -> CarriedKeys:
        """Return what makes the keys in workers, for a job of so many pieces."""
        text = carried(self.configuration) if self._file_on_nodes is None else carried_file(self._file_on_nodes)
        new = None if self.new_configuration is None else carried(self.new_configuration)
        tasks = self._tasks_of(pieces) * self._attempts_at_a_time
        return CarriedKeys(self._job_id, text, tasks if self._slots is None else min(tasks, self._slots), new)

    def _tasks_of(self, pieces: int) -> int:
        return pieces if self._most_tasks is None else min(pieces, self._most_tasks)

    def run(self, what: str, work: Work, pieces: Sequence[bytes]) -> Iterator[TaskResult]:
        """Run a task for each piece, or fewer where their number is limited; yield results when all have ended.

        Raises:
            KeytoolsError: A task could not begin.
            SparkJobFailedError: A task failed again and again, in a way that says nothing of a file.
        """
        if not pieces:
            return
        context = self._spark.sparkContext
        tag = f"parquet-keytools-{uuid.uuid4().hex}"
        context.setJobDescription(f"parquet-keytools: {what}")
        context.addJobTag(tag)
        try:
            tasks = self._tasks_of(len(pieces))
            data = context.parallelize(list(pieces), tasks)
            results: list[TaskResult] = data.mapPartitionsWithIndex(partial(_run, work)).collect()
        except Exception as error:
            raise SparkJobFailedError(
                f"Spark aborted the job: {_last_line(error)}",
                hint="Finished files are kept; the same call continues from there. See the logs of the executors.",
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
            self._kms_keys += result.kms_keys
            self.outcomes += result.outcomes
            yield result

    def grouped(self, files: pa.Table) -> pa.Table:
        """Return files with what brings those together whose footers have the same wrapped key.

        Then few tasks need the same key. This reads the end of each file, in a job of its own, and asks the KMS
        nothing.

        Returns:
            `path`, `size_bytes`, `group`, and `is_encrypted`.
        """
        # To read the end of a file costs the same for each.
        alike = files.set_column(1, "size_bytes", pa.nulls(files.num_rows, pa.int64()).fill_null(0))
        pieces = cut(alike, self.number_of_pieces(files.num_rows))
        task = partial(_group_piece, self.place)
        results = self.run(f"find the keys of {self.root}", task, pieces)
        tables = [_GROUPED.empty_table(), *(unpacked(result.rows) for result in results)]
        grouped = pa.concat_tables(tables).drop_columns("size_bytes").join(files, "path")
        return grouped.select(_GROUPED.names)

    def pieces(self, grouped: pa.Table, *, whole_files: bool = False) -> list[bytes]:
        """Return files, or some of them, cut into pieces by group.

        Of `whole_files`, which are read as a whole, a footer key is unwrapped in each Python worker rather than
        by few tasks: no task slot shall be idle.
        """
        pieces = self.number_of_pieces(grouped.num_rows)
        return cut_by_group(grouped, pieces, pieces if whole_files else MOST_PIECES_A_GROUP)

    def work_on_files(self, what: str, work: Work, pieces: Sequence[bytes]) -> list[TaskResult]:
        """Run a task for each piece, and keep the rows of files for the report; see `run`."""
        results = list(self.run(what, work, pieces))
        self._rows += [result.rows for result in results]
        return results

    def add_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of files that no task worked on."""
        result = task_result(rows)
        self.outcomes += result.outcomes
        self._rows.append(result.rows)

    def add_unseen(self, plan: PlannedFiles, outcome: str = FAILED) -> None:
        """Add the rows of what could not be looked into, or is behind links: no task works on it."""
        self.add_rows([file_row(entry.path, outcome, error=entry.error) for entry in plan.unseen])
        self.add_rows(
            [file_row(of.path, of.outcome.value, detail=of.how, error=of.error) for of in plan.behind_links]
        )

    def report(self) -> PipelineReport:
        """Return what came of it; after the end."""
        seconds = time.monotonic() - self._started
        return PipelineReport(self._spark, self._rows, self.outcomes, self._kms_keys, self.tasks, seconds)


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


def _configuration_of(configuration: Configuration | PathLike) -> Configuration:
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
            yield TaskResult(error=without_frames(error))
    spare_modules()


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


def _group_piece(place: str, position: int, attempt: int, piece: bytes) -> TaskResult:
    root = node_location(place)
    rows = []
    for file in rows_of(unpacked(piece)):
        group, is_encrypted = 0, False
        try:
            keys = read_file_keys(file_at(root, file["path"]))
            if (held := keys.footer_key) is not None:
                text = f"{held.wrapped_key.master_key_id}\n{held.wrapped_key.wrapped_key}".encode()
                group = int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)
            is_encrypted = keys.is_encrypted
        except (KeytoolsError, OSError):
            # Whoever works on it says what is wrong with it.
            pass
        rows.append({**file, "group": group, "is_encrypted": is_encrypted})
    return TaskResult(packed(pa.Table.from_pylist(rows, _GROUPED)))
