"""Files of a data set encrypted anew in their place, with new data keys."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import KeytoolsError, NotEncryptedError
from parquet_keytools.rotation.rekeying import RekeyOutcome, RekeyRequest, rekey_data_set
from parquet_keytools.spark.pipelines.footer_groups import group_files
from parquet_keytools.spark.pipelines.job import Job, configuration_of
from parquet_keytools.spark.pipelines.places import file_at, location_of, place_of
from parquet_keytools.spark.pipelines.planned_files import plan_files, rows_of, unpacked
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, TaskResult, file_row, task_result
from parquet_keytools.spark.pipelines.worker_keys import CarriedKeys, WorkerKeys, worker_keys
from parquet_keytools.storage import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class _Work:
    keys: CarriedKeys
    place: str
    table_name: str | None
    new_table_name: str
    aad_prefix: str | None


def rekey(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> PipelineReport:
    """Encrypt the files of a data set anew, in their place, with new data keys and KEKs, as after a leak.

    Each file is replaced in one step. One that fails stays as it is, and is in the report. A second run encrypts
    all files once more; a task that Spark tries again may do so with the files that were done.

    Args:
        spark: A session.
        path: A path or URI that every node understands.
        configuration: The configuration, or its YAML file.
        table_name: The table of the files; None where there is only one.
        aad_prefix: The AAD prefix that they must have.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    place = place_of(path)
    job = Job(spark, configuration_of(configuration), None, file_on_nodes, max_tasks)
    try:
        new_table_name, _ = job.configuration.select_table(table_name)
        plan = plan_files(location_of(place))
        pieces = group_files(job, place, plan.table).pieces(job, whole_files=True)
        work = _Work(job.carried_keys(len(pieces)), place, table_name, new_table_name, aad_prefix)
        results = job.run(f"rekey {location_of(place)}", partial(_rekey_piece, work), pieces)
        rows = [*(result.rows for result in results), job.unreadable(plan)]
    finally:
        job.close()
    return job.report(rows)


def _rekey_piece(work: _Work, position: int, attempt: int, piece: bytes) -> TaskResult:
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    root = location_of(work.place)
    rows = [
        _rekey_file(worker, work, file_at(root, file["path"]), file["size_bytes"], is_alone=not file["path"])
        for file in rows_of(unpacked(piece))
    ]
    return task_result(rows, worker.kms_counts() - before)


def _rekey_file(
    worker: WorkerKeys, work: _Work, location: FileLocation, size_bytes: int, *, is_alone: bool
) -> dict[str, Any]:
    started = time.monotonic()
    request = RekeyRequest(
        table_name=work.table_name, new_table_name=work.new_table_name, aad_prefix=work.aad_prefix
    )
    worker.keys.take_last_keys()
    try:
        report = rekey_data_set(worker.keys, worker.keys, location, request)
    except NotEncryptedError as error:
        # As on one machine: in a folder there is nothing to do for it.
        outcome = FAILED if is_alone else RekeyOutcome.NOT_ENCRYPTED.value
        return file_row(
            str(location),
            outcome,
            size_bytes=size_bytes,
            seconds=time.monotonic() - started,
            error=error if is_alone else None,
        )
    except (KeytoolsError, OSError) as error:
        return file_row(str(location), FAILED, seconds=time.monotonic() - started, error=error)
    (result,) = report.files
    return file_row(
        str(location),
        result.outcome.value,
        keys=worker.keys.take_last_keys() if result.outcome is RekeyOutcome.REKEYED else (),
        size_bytes=size_bytes,
        seconds=time.monotonic() - started,
        error=result.error,
    )
