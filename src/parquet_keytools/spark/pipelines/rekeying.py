"""Files of a data set re-encrypted in their place, with new data keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import NotEncryptedError
from parquet_keytools.rotation.rekeying import RekeyRequest, rekey_data_set
from parquet_keytools.rotation.report import RotationOutcome
from parquet_keytools.spark.pipelines.footer_groups import group_files
from parquet_keytools.spark.pipelines.job import Job, PipelineTask
from parquet_keytools.spark.pipelines.planned_files import node_location, place_of, plan_data_set
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, file_row
from parquet_keytools.spark.pipelines.worker_keys import WorkerKeys
from parquet_keytools.storage.locations import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    """Re-encrypt the files of a data set, in their place, with new data keys and KEKs, as after a leak.

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
    with Job(spark, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        new_table_name, _ = job.configuration.select_table(table_name)
        plan = plan_data_set(node_location(place))
        pieces = group_files(job, place, plan.table).pieces(job, whole_files=True)
        task = RekeyTask(job.carried_keys(len(pieces)), place, table_name, aad_prefix, new_table_name)
        job.work_on_files(f"rekey {node_location(place)}", task, pieces)
        job.add_unseen(plan)
    return job.report()


@dataclass(frozen=True)
class RekeyTask(PipelineTask):
    """Encrypts files with new data keys."""

    new_table_name: str

    def row(self, worker: WorkerKeys, location: FileLocation, file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a file, after it was encrypted."""
        request = RekeyRequest(
            table_name=self.table_name, new_table_name=self.new_table_name, aad_prefix=self.aad_prefix
        )
        worker.keys.take_last_keys()
        try:
            report = rekey_data_set(worker.keys, worker.keys, location, request)
        except NotEncryptedError as error:
            # As on one machine: in a folder there is nothing to do for it.
            is_alone = not file["path"]
            outcome = FAILED if is_alone else RotationOutcome.NOT_ENCRYPTED.value
            return file_row(
                str(location), outcome, size_bytes=file["size_bytes"], error=error if is_alone else None
            )
        (result,) = report.files
        return file_row(
            str(location),
            result.outcome.value,
            keys=worker.keys.take_last_keys() if result.outcome is RotationOutcome.REKEYED else (),
            size_bytes=file["size_bytes"],
            error=result.error,
        )
