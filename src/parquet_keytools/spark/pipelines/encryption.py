"""A plaintext data set to an encrypted one, file by file, by the module encryptor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.footer import Footer, read_envelope
from parquet_keytools.errors import ConfigurationError, KeytoolsError, OutputError
from parquet_keytools.files import conversion
from parquet_keytools.files.file_plan import check_target_file, check_target_folder
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.spark.pipelines.file_tables import (
    FAILED,
    LEFT_OUT,
    PipelineReport,
    PlannedFiles,
    TaskResult,
    cut,
    file_at,
    file_row,
    is_object_store,
    node_location,
    place_of,
    plan_data_set,
    rows_of,
    task_result,
)
from parquet_keytools.spark.pipelines.finished_files import FinishedFiles, RecordFolder, parameters_hash, state_of
from parquet_keytools.spark.pipelines.job import Job, PipelineTask, TaskFiles, timed_row
from parquet_keytools.spark.pipelines.worker_keys import JobKeyService, WorkerKeys
from parquet_keytools.spark.transport import configuration_identity
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.storage.outputs import whole_output, write_whole
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.temporary_files import parse_temporary_name
from parquet_keytools.storage.walk import LeftOutReason, all_files, file_or_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENCRYPTED = "encrypted"
FINISHED_BEFORE = "finished before"
COPIED = "copied"

SUCCESS_FILE = "_SUCCESS"
RECORDS = "._parquet_keytools_encrypt"

_COPY_LENGTH = 8 * 1024 * 1024
_TRIES = 3


def encrypt(
    spark: SparkSession,
    source: PathLike,
    target: PathLike,
    configuration: Configuration | PathLike,
    table_name: str | None = None,
    *,
    overwrite: bool = False,
    copy_others: bool = False,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> PipelineReport:
    """Encrypt the Parquet files of a folder into another one, with the same folders in it.

    A file that fails is in the report, and keeps no other from being encrypted. `_SUCCESS` is written when every
    file is there. A run that was cut off, or in which files failed, goes on when it is called again in the same
    way: files that it finished, and that did not change since, are not encrypted again.

    Nothing else is copied: `_metadata` and `_common_metadata` hold statistics of all columns in plaintext, and
    other files may hold anything. Each has a row that says so.

    Args:
        spark: A session; its executors need this package, the configuration's KMS, and source and target.
        source: A path or URI that every node understands.
        target: Likewise. What is in it stays, except that `overwrite` replaces files of the same names.
        configuration: The configuration, or its YAML file.
        table_name: The table in the configuration; None where it has only one.
        overwrite: Whether the target may hold files.
        copy_others: Whether files that are not Parquet are copied, as they are; hidden ones and summaries never.
        file_on_nodes: The YAML file on every node, or the name of one of Spark's files, in place of the
            configuration, which executors otherwise get without its secrets.
        max_tasks: How many tasks there may be.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor; or values of a column that has a
            key are in the names of folders.
        FileNotFoundError: There is no source.
        OutputError: The target is the source or in it, or holds files.
        ParquetFormatError: The source has no Parquet files.
        SparkJobFailedError: Spark gave the job up.
    """
    target_place = place_of(target)
    target_root = node_location(target_place)
    with Job(spark, source, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        source_root = job.root
        name, table = job.configuration.select_table(table_name)
        if table.key_material == "external" and is_object_store(target_root):
            raise ConfigurationError(
                "external key material cannot be written to an object store by several tasks: there is no lock "
                "that keeps two attempts of one file from mixing their keys.",
                hint="Set `key_material: internal`.",
            )
        is_folder = not file_or_folder(source_root).is_file
        run = {"source": job.place, "configuration": configuration_identity(job.configuration), "table": name}
        records_root = target_root if is_folder else target_root.sibling(f".{target_root.name}")
        records = RecordFolder(records_root.child(RECORDS), parameters_hash(run))
        _check_target(source_root, target_root, records, overwrite=overwrite, is_folder=is_folder)
        refuse_target = partial(_refuse_target, os.path.realpath(target_root.path), source_root)
        plan = plan_data_set(source_root, refuse_target)
        check = TableCheck(job.configuration, name, ignores_case=True)
        check.refuse_folder_names(plan.table["path"].to_pylist())
        known = _begin(target_root, records, is_folder=is_folder)
        number = job.number_of_pieces(plan.table.num_rows)
        task = EncryptionTask(job.carried_keys(number), job.place, name, None, target_place, records.run)
        pieces = cut(_with_records(plan.table, known), number)
        job.work_on_files(f"encrypt {source_root}", task, pieces)
        job.add_rows(_other_files(plan, source_root, target_root, copy_others=copy_others))
        job.add_unseen(plan)
        _check_complete(job, plan)
        if not job.outcomes[FAILED]:
            _finish(target_root, records, is_folder=is_folder)
    return job.report()


# --- the driver ---


def _check_target(
    source: FileLocation, target: FileLocation, records: RecordFolder, *, overwrite: bool, is_folder: bool
) -> None:
    """Refuse what must not be written to; nothing is changed."""
    if is_folder:
        if records.other_runs() and not overwrite:
            raise OutputError(
                f"{target} has what another run began and did not finish: of another source, table or "
                "configuration.",
                hint="Finish that run first, or use --overwrite.",
            )
        check_target_folder(source, target, overwrite=overwrite or records.exists())
        return
    check_target_file(source, target, overwrite=overwrite)


def _begin(target: FileLocation, records: RecordFolder, *, is_folder: bool) -> pa.Table:
    """Write that the run has begun, and return what an earlier one like it has finished."""
    if records.other_runs():
        # What they finished is not what this run is asked for.
        records.remove()
    if is_folder:
        with contextlib.suppress(FileNotFoundError):
            # Until all is done, nobody shall take the target for complete.
            target.filesystem.delete_file(target.child(SUCCESS_FILE).path)
    known = records.read()
    records.begin()
    return known


def _refuse_target(target: str, source: FileLocation, folder: str) -> None:
    """Refuse a source that leads into the target by a link: its files would be encrypted twice."""
    if source.is_local and os.path.commonpath([target, os.path.realpath(folder)]) == target:
        raise OutputError(f"{folder} is inside the target {target}.", hint="Choose another folder for the output.")


def _with_records(files: pa.Table, records: pa.Table) -> pa.Table:
    """Give each file the record of an earlier run, if there is one."""
    # Of several records, any may be the one that fits; the last one written is the likeliest.
    last = pa.TableGroupBy(records, "path", use_threads=False).aggregate(
        [(name, "last") for name in records.column_names if name != "path"]
    )
    last = last.rename_columns([name.removesuffix("_last") for name in last.column_names])
    return files.join(last, "path").sort_by("path")


def _other_files(
    plan: PlannedFiles, source: FileLocation, target: FileLocation, *, copy_others: bool
) -> list[dict[str, Any]]:
    """Return the rows of all that is no Parquet file, after what is to be copied was."""
    rows = []
    for left in rows_of(plan.left_out):
        path, reason = left["path"], left["reason"]
        if path == SUCCESS_FILE:
            # It is written again, last of all.
            continue
        if copy_others and reason == LeftOutReason.NOT_PARQUET:
            started = time.monotonic()
            try:
                size = _copy(source.child(path), target.child(path))
                seconds = time.monotonic() - started
                rows.append(file_row(str(source.child(path)), COPIED, size_bytes=size, seconds=seconds))
            except (KeytoolsError, OSError) as error:
                rows.append(file_row(str(source.child(path)), FAILED, error=error))
        else:
            rows.append(file_row(str(source.child(path)), LEFT_OUT, detail=reason))
    return rows


def _copy(source: FileLocation, target: FileLocation) -> int:
    if not is_object_store(target):
        target.filesystem.create_dir(target.path.rpartition("/")[0], recursive=True)
    size = 0
    with (
        source.filesystem.open_input_file(source.path) as file,
        whole_output(target) as pending,
        pending.open_sink() as sink,
    ):
        while data := file.read(_COPY_LENGTH):
            sink.write_at(size, data)
            size += len(data)
    return size


def _check_complete(job: Job, plan: PlannedFiles) -> None:
    """Check that each planned file had its turn; a mistake here would leave one unencrypted in silence."""
    done = sum(job.outcomes[outcome] for outcome in (ENCRYPTED, FINISHED_BEFORE, FAILED))
    expected = plan.table.num_rows + len(plan.unseen)
    if done < expected:
        raise OutputError(f"of {expected} files, {expected - done} were not processed.", hint="Repeat the call.")


def _finish(target: FileLocation, records: RecordFolder, *, is_folder: bool) -> None:
    """Remove what the run needed, and say last of all that the target is complete."""
    if is_folder:
        _remove_leftovers(target)
    records.remove()
    if is_folder:
        write_whole(target.child(SUCCESS_FILE), b"")
    else:
        # Of a single file: the folder of its records has nothing else in it, if it is not somebody's own.
        folder = FileLocation(target.filesystem, records.folder.path.rpartition("/")[0])
        with contextlib.suppress(OSError):
            if next(all_files(folder), None) is None:
                target.filesystem.delete_dir(folder.path)


def _remove_leftovers(target: FileLocation) -> None:
    """Remove temporary files of attempts that were killed.

    An attempt that is still at work on one fails when it puts it into its place, where the file is already.
    """
    for file in all_files(target):
        if parse_temporary_name(file.name) is not None:
            with contextlib.suppress(OSError):
                target.filesystem.delete_file(file.path)


# --- the tasks ---


@dataclass(frozen=True)
class EncryptionTask(PipelineTask):
    """Encrypts files. Another attempt may do the same at the same time: both end well."""

    target_place: str
    run: str

    def result(self, worker: WorkerKeys, root: FileLocation, piece: TaskFiles) -> TaskResult:
        """Return what came of the files, after they were encrypted."""
        target_root = node_location(self.target_place)
        is_single = piece.table.num_rows == 1 and piece.table["path"][0].as_py() == ""
        records_root = target_root.sibling(f".{target_root.name}") if is_single else target_root
        finished = FinishedFiles(
            RecordFolder(records_root.child(RECORDS), self.run),
            f"{self.keys.job_id[:12]}-{piece.position}",
            piece.attempt,
            {file["path"]: file for file in piece.files if file["source_bytes"] is not None},
        )
        folders: set[str] = set()
        rows = []
        for file in piece.files:
            encrypt = partial(self._encrypt, worker.keys, target_root, finished, folders)
            rows.append(timed_row(encrypt, file_at(root, file["path"]), file))
        # After the last of a run, the records are gone: an attempt that comes too late has nothing to say.
        with contextlib.suppress(OSError, OutputError):
            finished.flush()
        return task_result(rows)

    def _is_encrypted(self, keys: JobKeyService, source: FileLocation, target: FileLocation) -> bool:
        """Return whether a target is a file of the table with as many rows as the source.

        Records lie in the target, where others may write them. They only say where it is worth to look.
        """
        try:
            (opened,) = keys.open_files([target], self.table_name, wanted=lambda _: ())
            with open_source(source) as file:
                plain = read_envelope(file).open(None)
        except (KeytoolsError, OSError):
            return False
        return opened.is_encrypted and _rows(opened.footer) == _rows(plain)

    def _encrypt(
        self,
        keys: JobKeyService,
        target_root: FileLocation,
        finished: FinishedFiles,
        folders: set[str],
        source: FileLocation,
        file: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the row of a file, after it was encrypted."""
        name, target, path = file["path"], file_at(target_root, file["path"]), str(source)
        folder = target.path.rpartition("/")[0]
        if folder not in folders and not is_object_store(target):
            target.filesystem.create_dir(folder, recursive=True)
            folders.add(folder)
        state = state_of(source)
        if finished.is_finished(name, state, state_of(target)) and self._is_encrypted(keys, source, target):
            return file_row(path, FINISHED_BEFORE, size_bytes=0 if state is None else state[0])
        for turn in range(_TRIES):
            before = state_of(source)
            try:
                result = conversion.encrypt_file(keys, source, target, self.table_name, threads=1)
            except OutputError:
                # Another attempt wrote the key material file of the same target meanwhile.
                if turn == _TRIES - 1 or target.info().type != pafs.FileType.File:
                    raise
                continue
            after, written = state_of(source), state_of(target)
            if before == after and after is not None and written is not None:
                with contextlib.suppress(OSError, OutputError):
                    finished.add(name, after, written)
                return file_row(path, ENCRYPTED, keys=keys.take_last_keys(), size_bytes=result.source_bytes)
        raise OutputError(f"{path} is constantly being changed by others.", hint="Stop its writers, then retry.")


def _rows(footer: Footer) -> tuple[object, ...]:
    return [leaf.path for leaf in footer.leaves], [row_group.num_rows for row_group in footer.row_groups]
