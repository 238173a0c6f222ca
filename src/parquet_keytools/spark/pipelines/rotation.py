"""Master keys of a data set rotated, and files re-encrypted with new data keys.

In a rotation each distinct wrapped key is re-wrapped once, then files are written:

1. Tasks read the end of each file, and the KMS is asked nothing. Files are grouped by their footer's wrapped key,
   so that few tasks unwrap the same one.
2. Tasks authenticate the footers: only the wrapped keys that these refer to are re-wrapped.
3. The driver has each distinct wrapped key re-wrapped, in batches, with all that the KMS's limits allow.
4. Tasks write the new keys into the files, grouped as before. What they unwrap is proven by what it opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import KeytoolsError, KmsError, KmsUnavailableError, NotEncryptedError
from parquet_keytools.kms.client import KmsClient, RewrapRequest
from parquet_keytools.rotation.data_set_run import RunOptions
from parquet_keytools.rotation.file_keys import FileKeys, read_file_keys
from parquet_keytools.rotation.rekeying import RekeyRequest, rekey_data_set
from parquet_keytools.rotation.report import FileRotation, RotationOutcome
from parquet_keytools.rotation.rewrapper import Rewrapped, Rewrapper, RewrapTask, WrappedKey
from parquet_keytools.rotation.rewrapping import Rewrapping, rotate_data_set
from parquet_keytools.rotation.rotation_plan import (
    RotationPlan,
    TableMembership,
    plan_rotation,
    prefix_of,
    trust_master_keys,
)
from parquet_keytools.spark.pipelines.file_tables import (
    FAILED,
    PipelineReport,
    TaskResult,
    file_at,
    file_row,
    plan_data_set,
)
from parquet_keytools.spark.pipelines.job import Job, PipelineTask, TaskFiles
from parquet_keytools.spark.pipelines.worker_keys import WorkerKeys
from parquet_keytools.storage.locations import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

_KEYS_A_BATCH = 1000
"""For so many the KMS client is asked together."""

_KeyOf = tuple[WrappedKey, bool]
"""A wrapped key, and whether it is a KEK."""

Given = Mapping[RewrapTask, str | KmsError]
"""What the driver got for wrapped keys: the new ones, and why there is none. No secret."""


def rotate(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    moves: Mapping[str, str] | None = None,
    only_master_keys: list[str] | None = None,
    older_than: str | None = None,
    new_keks: bool = False,
    dry_run: bool = False,
    to: Configuration | PathLike | None = None,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
    follow_links: bool = False,
) -> PipelineReport:
    """Re-wrap the keys of a data set; see `Keytools.rotate`, which does the same on one machine.

    What the KMS re-wraps by itself is re-wrapped once for all files. Footer keys are unwrapped by at most 16 tasks
    each. With `new_keks`, with `to`, and where the KMS does not re-wrap by itself, each Python worker makes fresh
    KEKs of its own.

    After an interrupted run, call it again in the same way: files whose keys show that they are current stay as
    they are. Where the KMS hides versions, and with `new_keks`, all keys are re-wrapped again.

    Args:
        spark: A session.
        path: A path or URI that every node understands.
        configuration: The configuration, or its YAML file.
        moves: Old master key -> the one that takes its place; names of the configuration, or identifiers. None
            takes those of the configuration.
        only_master_keys: The master keys that are rotated.
        older_than: Only keys that an older version wrapped, or one that nobody can tell.
        new_keks: Make fresh KEKs, as after a leak of one.
        dry_run: Change nothing; the rows say what would change.
        to: The configuration of another KMS, whose master keys wrap from now on.
        table_name: Table of the files, for an AAD prefix that they do not store.
        aad_prefix: The AAD prefix that they must have.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.
        follow_links: Whether files are changed, too, that links lead to outside of `path`; if not, each such file
            or folder has a row as one that failed.

    Raises:
        ConfigurationError: There is no KMS, or the moves are not possible, or an executor lacks something.
        KmsError: A master key to move to cannot be used, or the KMS answers nothing.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    with Job(spark, path, configuration, to, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        new_kms = job.new_keys.kms if to is not None else None
        plan = plan_rotation(
            job.keys,
            moves=moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            dry_run=dry_run,
            new_kms=new_kms,
            new_configuration=job.new_configuration,
            table_name=table_name,
            aad_prefix=aad_prefix,
        )
        rewrapping = Rewrapping(job.keys, plan, new_kms)
        place = job.place
        files = plan_data_set(job.root, follow_links=follow_links)
        grouped = job.grouped(files.table)
        distinct: set[_KeyOf] = set()
        encrypted = grouped.filter(pc.field("is_encrypted"))
        if encrypted.num_rows:
            pieces = job.pieces(encrypted)
            opening = OpeningTask(job.carried_keys(len(pieces)), place, table_name, aad_prefix, plan)
            for result in job.run(f"open footers of {place}", opening, pieces):
                distinct |= result.other
        assert job.keys.kms is not None
        given: Given = {} if dry_run else _rewrap(job.keys.kms, rewrapping, distinct)
        if dry_run:
            # So that versions are known, as in a rotation.
            _tasks(rewrapping, distinct)
        pieces = job.pieces(grouped)
        broadcast = spark.sparkContext.broadcast(given)
        writing = WritingTask(
            job.carried_keys(len(pieces)),
            place,
            table_name,
            aad_prefix,
            replace(plan, known_versions=rewrapping.versions.known),
            broadcast,
        )
        job.work_on_files(f"rotate the keys of {place}", writing, pieces)
        job.add_unseen(files)
        broadcast.destroy()
    return job.report()


# --- the driver ---


def _tasks(rewrapping: Rewrapping, distinct: set[_KeyOf]) -> list[RewrapTask]:
    """Return which of some wrapped keys to re-wrap."""
    tasks = []
    for key, is_kek in sorted(distinct, key=lambda found: (found[0].master_key_id, found[0].wrapped_key)):
        target = rewrapping.target_of(key, has_kek=is_kek)
        if target is not None:
            rewrapping.versions.current(target, new=True)
            tasks.append(RewrapTask(key, target, is_kek))
    return tasks


def _rewrap(kms: KmsClient, rewrapping: Rewrapping, distinct: set[_KeyOf]) -> Given:
    """Have the KMS re-wrap what it can by itself, each wrapped key once.

    What came back is proven where it is used. Keys that have to be unwrapped are left to the tasks: none travels.
    """
    tasks = [task for task in _tasks(rewrapping, distinct) if not rewrapping.rewrapper.is_unwrapped(task)]
    given: dict[RewrapTask, str | KmsError] = {}
    for start in range(0, len(tasks), _KEYS_A_BATCH):
        batch = tasks[start : start + _KEYS_A_BATCH]
        requests = [RewrapRequest(t.old.wrapped_key, t.old.master_key_id, t.new_master_key_id) for t in batch]
        given |= dict(zip(batch, kms.rewrap_many(requests), strict=True))
    unreachable = [outcome for outcome in given.values() if isinstance(outcome, KmsUnavailableError)]
    if unreachable and len(unreachable) == len(given):
        # The files would all fail with it.
        raise unreachable[0]
    return given


# --- the tasks ---


@dataclass(frozen=True)
class OpeningTask(PipelineTask):
    """Authenticates footers, and finds the wrapped keys that they refer to."""

    plan: RotationPlan

    def result(self, worker: WorkerKeys, root: FileLocation, piece: TaskFiles) -> TaskResult:
        """Return the wrapped keys of the files."""
        kms = worker.keys.kms
        assert kms is not None
        trust_master_keys(self.plan, kms, kms)
        unwrapper = worker.remembered.setdefault("unwrapper", Rewrapper(kms))
        membership = TableMembership.of(worker.keys, self.plan)
        found: set[_KeyOf] = set()
        for file in piece.files:
            try:
                keys = read_file_keys(file_at(root, file["path"]))
                self._open(keys, unwrapper, membership, worker)
                found |= {(held.wrapped_key, held.material.double_wrapping) for held in keys.referenced}
            except (KeytoolsError, OSError):
                # The task that writes it says what is wrong with it.
                continue
        return TaskResult(other=found)

    def _open(self, keys: FileKeys, unwrapper: Rewrapper, membership: TableMembership, worker: WorkerKeys) -> None:
        expected = prefix_of(
            worker.keys, self.table_name, self.aad_prefix, opens_to_others=self.plan.opens_to_others
        )
        aad_prefix = keys.expected_prefix(expected)
        membership.check_footer(keys)
        held = keys.footer_key
        found = unwrapper.unwrap([] if held is None else [held.wrapped_key])
        keys.open(keys.footer_dek(found, worker.keys.data_keys), aad_prefix)
        membership.check_columns(keys)


@dataclass(frozen=True)
class WritingTask(PipelineTask):
    """Writes the new keys into files; a file that has them already stays as it is.

    The driver had the given wrapped keys re-wrapped.
    """

    plan: RotationPlan
    given: Broadcast[Any]

    def row(self, worker: WorkerKeys, location: FileLocation, file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a file, after its keys were written."""
        if "rewrapping" not in worker.remembered:
            worker.remembered["rewrapping"] = self._rewrapping(worker)
        report = rotate_data_set(location, worker.remembered["rewrapping"], RunOptions())
        (result,) = report.files
        return _row(result, file["size_bytes"])

    def _rewrapping(self, worker: WorkerKeys) -> Rewrapping:
        kms, new_kms = worker.keys.kms, worker.new_keys.kms
        assert kms is not None
        assert new_kms is not None
        trust_master_keys(self.plan, kms, new_kms)
        rewrapper = None
        if not self.plan.dry_run:
            rewrapper = GivenRewrapper(kms, new_kms, self.given.value, new_keks=self.plan.new_keks)
        return Rewrapping(worker.keys, self.plan, new_kms, rewrapper)


class GivenRewrapper(Rewrapper):
    """Takes new wrapped keys from the driver, and unwraps them: that proves them, and opens footers.

    What the driver did not re-wrap is done here: keys that have to be unwrapped, and those of files that changed.
    """

    def __init__(self, kms: KmsClient, new_kms: KmsClient, given: Given, *, new_keks: bool) -> None:
        super().__init__(kms, new_kms, new_keks=new_keks)
        self._given = given

    def rewrap(self, wanted: Iterable[RewrapTask]) -> dict[RewrapTask, Rewrapped | KmsError]:
        """Return what wrapped keys became; see `Rewrapper.rewrap`."""
        found: dict[RewrapTask, Rewrapped | KmsError] = {}
        missing = self._rewrapped.split(wanted, found)
        given = {task: self._given[task] for task in missing if task in self._given}
        found.update(super().rewrap([task for task in missing if task not in given]))
        found.update(zip(given, self._proven(self._new_kms, list(given), list(given.values())), strict=True))
        for task in missing:
            proven = found[task]
            if isinstance(proven, Rewrapped):
                self._rewrapped.remember(task, proven)
        return found


def _row(file: FileRotation, size_bytes: int) -> dict[str, Any]:
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
        file.path, file.outcome.value, detail=file.how, keys=changes, size_bytes=size_bytes, error=file.error
    )


def rekey(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
    follow_links: bool = False,
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
        follow_links: Whether files are changed, too, that links lead to outside of `path`; if not, each such file
            or folder has a row as one that failed.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    with Job(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        new_table_name, _ = job.configuration.select_table(table_name)
        plan = plan_data_set(job.root, follow_links=follow_links)
        pieces = job.pieces(job.grouped(plan.table), whole_files=True)
        task = RekeyTask(job.carried_keys(len(pieces)), job.place, table_name, aad_prefix, new_table_name)
        job.work_on_files(f"rekey {job.root}", task, pieces)
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
