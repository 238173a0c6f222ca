"""Which files of a data set depend on which master keys."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory
from parquet_keytools.rotation.master_key_versions import MasterKeyVersions
from parquet_keytools.rotation.request import prefix_of
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.spark.pipelines.footer_groups import group_files
from parquet_keytools.spark.pipelines.job import Job, configuration_of
from parquet_keytools.spark.pipelines.places import file_at, location_of, place_of
from parquet_keytools.spark.pipelines.planned_files import plan_files, rows_of, unpacked
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, TaskResult, file_row, task_result
from parquet_keytools.spark.pipelines.worker_keys import CarriedKeys, WorkerKeys, worker_keys
from parquet_keytools.storage import PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LISTED = "listed"
NOT_ENCRYPTED = "not encrypted"
INCOMPLETE = "not all keys can be seen"


@dataclass(frozen=True)
class _Work:
    keys: CarriedKeys
    place: str
    table_name: str | None
    aad_prefix: str | None


def keys(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
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

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    place = place_of(path)
    job = Job(spark, configuration_of(configuration), None, file_on_nodes, max_tasks)
    try:
        plan = plan_files(location_of(place))
        pieces = group_files(job, place, plan.table).pieces(job)
        work = _Work(job.carried_keys(len(pieces)), place, table_name, aad_prefix)
        results = job.run(f"list the keys of {place}", partial(_list_piece, work), pieces)
        rows = [*(result.rows for result in results), job.unreadable(plan)]
    finally:
        job.close()
    return job.report(rows)


def _list_piece(work: _Work, position: int, attempt: int, piece: bytes) -> TaskResult:
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    inventory = _inventory(worker, work)
    root = location_of(work.place)
    rows = []
    for file in rows_of(unpacked(piece)):
        location, started = file_at(root, file["path"]), time.monotonic()
        try:
            (uses,) = inventory.list(location)
            rows.append(_row(uses, file["size_bytes"], time.monotonic() - started))
        except (KeytoolsError, OSError) as error:
            rows.append(file_row(str(location), FAILED, error=error))
    return task_result(rows, worker.kms_counts() - before)


def _inventory(worker: WorkerKeys, work: _Work) -> Inventory:
    """Return what remembers the footer keys of all tasks in this process."""
    if "inventory" not in worker.remembered:
        kms = worker.keys.kms
        worker.remembered["inventory"] = Inventory(
            Rewrapper(kms, kms, new_keks=False, only_count=False) if kms is not None else None,
            MasterKeyVersions(kms, kms) if kms is not None else None,
            worker.keys.data_keys,
            prefix_of(worker.keys, work.table_name, work.aad_prefix),
        )
    found: Inventory = worker.remembered["inventory"]
    return found


def _row(file: FileKeyUses, size_bytes: int, seconds: float) -> dict[str, Any]:
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
    return file_row(file.path, outcome, keys=uses, size_bytes=size_bytes, seconds=seconds, error=file.unknown)
