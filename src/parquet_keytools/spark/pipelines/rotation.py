"""Master keys of a data set rotated: each distinct wrapped key is wrapped anew once, then files are written.

1. Tasks read the end of each file: which wrapped keys show without a key. The KMS is asked nothing.
2. Where footers are encrypted, tasks open them to see the keys of columns. Files are grouped by their footer's
   wrapped key, so that few tasks unwrap the same one.
3. The driver has each distinct wrapped key wrapped anew, in batches, with all that the KMS's limits allow.
4. Tasks write the new keys into the files, grouped as before. What they unwrap proves the new wrapped keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from parquet_keytools.config.key_names import check_moves
from parquet_keytools.config.mistakes import Mistake
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import KeytoolsError, KmsUnavailableError, value_or_raise
from parquet_keytools.keys.kek import Kek
from parquet_keytools.rotation.data_set_rotation import RunOptions, rotate_data_set
from parquet_keytools.rotation.file_keys import FileKeys, read_file_keys
from parquet_keytools.rotation.kept_keys import new_rotation_id
from parquet_keytools.rotation.new_material import KmsInstance
from parquet_keytools.rotation.report import FileRotation
from parquet_keytools.rotation.request import (
    RotationRequest,
    prefix_of,
    rotation_context,
    trust_master_keys,
)
from parquet_keytools.rotation.rewrap_task import RewrapTask
from parquet_keytools.rotation.rewrapper import Rewrapper
from parquet_keytools.rotation.rotation_plan import RotationPlan
from parquet_keytools.rotation.window import RotationContext
from parquet_keytools.spark.pipelines.footer_groups import KeyOf, group_files
from parquet_keytools.spark.pipelines.given_rewraps import (
    GivenRewrapper,
    KnownVersions,
    all_known,
    rewrap_each_once,
)
from parquet_keytools.spark.pipelines.job import Job, configuration_of
from parquet_keytools.spark.pipelines.places import file_at, location_of, place_of
from parquet_keytools.spark.pipelines.planned_files import plan_files, rows_of, unpacked
from parquet_keytools.spark.pipelines.report import FAILED, PipelineReport, TaskResult, file_row, task_result
from parquet_keytools.spark.pipelines.worker_keys import CarriedKeys, WorkerKeys, worker_keys
from parquet_keytools.storage import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class _Work:
    """What every task of the job is sent."""

    keys: CarriedKeys
    place: str
    table_name: str | None
    aad_prefix: str | None
    plan: RotationPlan


@dataclass(frozen=True)
class _WriteWork(_Work):
    instance: KmsInstance | None
    versions: Mapping[tuple[bool, str], str | None]
    keep_old: bool
    dry_run: bool
    given: Broadcast[Any]


def rotate(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    moves: Mapping[str, str] | None = None,
    only_master_keys: list[str] | None = None,
    older_than: str | None = None,
    new_keks: bool = False,
    keep_old: bool | None = None,
    dry_run: bool = False,
    to: Configuration | PathLike | None = None,
    table_name: str | None = None,
    aad_prefix: str | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> PipelineReport:
    """Wrap the keys of a data set anew; see `Keytools.rotate`, which does the same on one machine.

    Each distinct wrapped key is wrapped anew once for all files. Footer keys are unwrapped by at most 16 tasks
    each. With `new_keks`, each Python worker makes fresh KEKs of its own.

    A run that was cut off goes on when it is called again in the same way: files tell what is left to do.

    Args:
        spark: A session.
        path: A path or URI that every node understands.
        configuration: The configuration, or its YAML file.
        moves: Old master key -> the one that takes its place; names of the configuration, or identifiers. None
            takes those of the configuration.
        only_master_keys: The master keys that are rotated.
        older_than: Only keys that an older version wrapped, or one that nobody can tell.
        new_keks: Make fresh KEKs, as after a leak of one.
        keep_old: Keep the old keys beside the files, for `Keytools.undo_rotation`; None does as the configuration
            says.
        dry_run: Change nothing; the rows say what would change.
        to: The configuration of another KMS, whose master keys wrap from now on.
        table_name: Table of the files, for an AAD prefix that they do not store.
        aad_prefix: The AAD prefix that they must have.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.

    Raises:
        ConfigurationError: There is no KMS, or the moves are not possible, or an executor lacks something.
        KmsError: A master key to move to cannot be used, or the KMS answers nothing.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    place = place_of(path)
    new_configuration = None if to is None else configuration_of(to)
    job = Job(spark, configuration_of(configuration), new_configuration, file_on_nodes, max_tasks)
    try:
        if keep_old is None:
            keep_old = job.configuration.rotation.keep_old
        request = RotationRequest(
            moves=_configured_moves(job) if moves is None else moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            dry_run=dry_run,
            new_kms=job.new_keys.kms if to is not None else None,
            new_configuration=new_configuration,
            table_name=table_name,
            aad_prefix=aad_prefix,
        )
        context = rotation_context(job.keys, request)
        plan = plan_files(location_of(place))
        grouped = group_files(job, place, plan.table, with_keys=True)
        distinct = grouped.visible
        hiding = grouped.table.filter(pc.field("hides"))
        if hiding.num_rows:
            pieces = grouped.pieces(job, hiding)
            work = _Work(job.carried_keys(len(pieces)), place, table_name, aad_prefix, context.plan)
            for result in job.run(f"open footers of {place}", partial(_collect_piece, work), pieces):
                distinct |= result.other
        given = {} if new_keks or dry_run else _rewrap(job, context, distinct)
        if dry_run:
            # So that versions are known, as in a rotation.
            _tasks(context, distinct)
        pieces = grouped.pieces(job)
        broadcast = spark.sparkContext.broadcast(given)
        writing = _WriteWork(
            job.carried_keys(len(pieces)),
            place,
            table_name,
            aad_prefix,
            context.plan,
            context.instance,
            all_known(context.versions),
            keep_old,
            dry_run,
            broadcast,
        )
        results = job.run(f"rotate the keys of {place}", partial(_rotate_piece, writing), pieces)
        rows = [*(result.rows for result in results), job.unreadable(plan)]
        broadcast.destroy()
    finally:
        job.close()
    return job.report(rows)


# --- the driver ---


def _configured_moves(job: Job) -> Mapping[str, str]:
    configuration = job.configuration
    moves = configuration.rotation.moves
    if moves and job.new_configuration is not None:
        mistake = Mistake(("rotation", "moves"), "these moves are within one KMS, and another one is named.")
        raise configuration.error_for([mistake])
    if moves and job.keys.kms is not None:
        check_moves(configuration, job.keys.kms.master_key_ids())
    return moves


def _tasks(context: RotationContext, distinct: set[KeyOf]) -> list[RewrapTask]:
    """Return what is to be wrapped anew among wrapped keys."""
    tasks = []
    for key, is_kek in sorted(distinct, key=lambda found: (found[0].master_key_id, found[0].wrapped_key)):
        target = context.plan.new_master_key_id(
            key.master_key_id,
            version=context.versions.of(key),
            current_version=context.versions.current,
            has_kek=is_kek,
        )
        if target is not None:
            context.versions.current_new(target)
            tasks.append(RewrapTask(key, target, is_kek))
    return tasks


def _rewrap(job: Job, context: RotationContext, distinct: set[KeyOf]) -> dict[RewrapTask, Any]:
    assert job.keys.kms is not None
    assert job.new_keys.kms is not None
    given = rewrap_each_once(job.keys.kms, job.new_keys.kms, _tasks(context, distinct))
    unreachable = [outcome for outcome in given.values() if isinstance(outcome, KmsUnavailableError)]
    if unreachable and len(unreachable) == len(given):
        # The files would all fail with it.
        raise unreachable[0]
    return given


# --- the tasks ---


def _collect_piece(work: _Work, position: int, attempt: int, piece: bytes) -> TaskResult:
    """Open footers, and find the wrapped keys of columns."""
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    kms = worker.keys.kms
    assert kms is not None
    trust_master_keys(work.plan, kms, kms)
    rewrapper = worker.remembered.setdefault("unwrapper", Rewrapper(kms, kms, new_keks=False, only_count=False))
    root = location_of(work.place)
    found: set[KeyOf] = set()
    for file in rows_of(unpacked(piece)):
        try:
            keys = read_file_keys(file_at(root, file["path"]))
            _open(keys, rewrapper, worker, work)
            found |= {(held.wrapped_key, held.material.double_wrapping) for held in keys.held}
        except (KeytoolsError, OSError):
            # The task that writes it says what is wrong with it.
            continue
    return TaskResult(kms_keys=worker.kms_counts() - before, other=found)


def _open(keys: FileKeys, rewrapper: Rewrapper, worker: WorkerKeys, work: _Work) -> None:
    held = keys.footer_key
    if held is None:
        dek = keys.data_key(worker.keys.data_keys)
    else:
        key = value_or_raise(rewrapper.unwrap([held.wrapped_key])[held.wrapped_key])
        kek_id = held.material.kek_id
        dek = key if kek_id is None else Kek(kek_id, key).unwrap_dek(held.material.wrapped_dek)
    prefix = prefix_of(worker.keys, work.table_name, work.aad_prefix)(keys.location, keys.envelope.aad_prefix)
    keys.take_footer(keys.envelope.open(dek, prefix))


def _rotate_piece(work: _WriteWork, position: int, attempt: int, piece: bytes) -> TaskResult:
    """Write the new keys into the files of a piece; a file that has them already stays as it is."""
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    context = worker.remembered.get("context")
    if context is None:
        context = worker.remembered["context"] = _context(work, worker)
    root = location_of(work.place)
    rows = [
        _rotate_file(context, file_at(root, file["path"]), file["size_bytes"]) for file in rows_of(unpacked(piece))
    ]
    return task_result(rows, worker.kms_counts() - before)


def _context(work: _WriteWork, worker: WorkerKeys) -> RotationContext:
    kms, new_kms = worker.keys.kms, worker.new_keys.kms
    assert kms is not None
    assert new_kms is not None
    trust_master_keys(work.plan, kms, new_kms)
    if work.dry_run or work.plan.new_keks:
        rewrapper = Rewrapper(kms, new_kms, new_keks=work.plan.new_keks, only_count=work.dry_run)
    else:
        rewrapper = GivenRewrapper(kms, new_kms, work.given.value)
    return RotationContext(
        plan=work.plan,
        rewrapper=rewrapper,
        versions=KnownVersions(kms, new_kms, work.versions),
        data_keys=worker.keys.data_keys,
        aad_prefix_of=prefix_of(worker.keys, work.table_name, work.aad_prefix),
        instance=work.instance,
        # Of this process alone: two attempts of a task must not take what the other one keeps for their own.
        keep_old=new_rotation_id() if work.keep_old else None,
        dry_run=work.dry_run,
    )


def _rotate_file(context: RotationContext, location: FileLocation, size_bytes: int) -> dict[str, Any]:
    started = time.monotonic()
    try:
        report = rotate_data_set(location, context, RunOptions())
        (result,) = report.files
    except (KeytoolsError, OSError) as error:
        return file_row(str(location), FAILED, seconds=time.monotonic() - started, error=error)
    return _row(result, size_bytes, time.monotonic() - started)


def _row(file: FileRotation, size_bytes: int, seconds: float) -> dict[str, Any]:
    changes = [
        {
            "master_key": change.master_key_id,
            "version": change.version,
            "new_master_key": change.new_master_key_id,
            "new_version": change.new_version,
            "number": change.keys,
        }
        for change in file.keys
    ]
    return file_row(
        file.path,
        file.outcome.value,
        detail=file.how,
        keys=changes,
        size_bytes=size_bytes,
        seconds=seconds,
        error=file.error,
    )
