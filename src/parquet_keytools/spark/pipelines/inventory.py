"""Which files of a data set depend on which master keys."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.rotation.data_set_run import CONCURRENT_FILES
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory, uses_of_left_out
from parquet_keytools.rotation.request import prefix_of
from parquet_keytools.spark.pipelines.job import Job, PipelineTask
from parquet_keytools.spark.pipelines.planned_files import node_location, place_of, plan_data_set
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, file_row
from parquet_keytools.spark.pipelines.worker_keys import WorkerKeys
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.storage.walk import LeftOut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LISTED = "listed"
NOT_ENCRYPTED = "not encrypted"
INCOMPLETE = "not all keys can be seen"


def keys(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
    ignore_passed_over: bool = False,
) -> PipelineReport:
    """List which master keys, and versions of them, each file of a data set depends on; nothing is changed.

    Args:
        spark: A session.
        path: A path or URI that every node understands.
        configuration: The configuration, or its YAML file.
        table_name: Table of the files, for an AAD prefix that they do not store.
        aad_prefix: The AAD prefix that they must have.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.
        ignore_passed_over: Whether encrypted files are left out that readers of data sets pass over for their
            names. Else they count as failed: which keys they need is unknown.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    place = place_of(path)
    with Job(spark, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        left_out: list[LeftOut] = []
        plan = plan_data_set(node_location(place), on_left_out=None if ignore_passed_over else left_out.append)
        with ThreadPoolExecutor(CONCURRENT_FILES) as pool:
            passed_over = [_row(file, 0) for file in uses_of_left_out(pool, left_out)]
        pieces = job.pieces(job.grouped(place, plan.table))
        task = InventoryTask(job.carried_keys(len(pieces)), place, table_name, aad_prefix)
        job.work_on_files(f"list the keys of {place}", task, pieces)
        job.add_unseen(plan)
        job.add_rows(passed_over)
    return job.report()


@dataclass(frozen=True)
class InventoryTask(PipelineTask):
    """Lists the keys of files."""

    def row(self, worker: WorkerKeys, location: FileLocation, file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a file, with its keys."""
        if "inventory" not in worker.remembered:
            # It remembers the footer keys of all tasks in this process.
            worker.remembered["inventory"] = Inventory(
                worker.keys, prefix_of(worker.keys, self.table_name, self.aad_prefix)
            )
        inventory: Inventory = worker.remembered["inventory"]
        (uses,) = inventory.list(location)
        return _row(uses, file["size_bytes"])


def _row(file: FileKeyUses, size_bytes: int) -> dict[str, Any]:
    outcome = LISTED if file.is_encrypted else NOT_ENCRYPTED
    if file.unknown is not None:
        outcome = INCOMPLETE if file.uses else FAILED
    uses = [
        {
            "master_key": use.master_key_id,
            "version": use.version,
            "number": 1,
            "column": use.column,
            "is_footer": use.is_footer,
            "wrapping": use.wrapping,
            "kek_id": use.kek_id,
            "data_key": use.data_key,
        }
        for use in file.uses
    ]
    return file_row(file.path, outcome, keys=uses, size_bytes=size_bytes, error=file.unknown)
