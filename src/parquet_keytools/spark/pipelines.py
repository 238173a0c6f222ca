"""Commands over whole data sets as Spark jobs; the module encryptor works on each file, in a Python task."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from parquet_keytools.config.settings import Configuration
from parquet_keytools.conformance import verification
from parquet_keytools.conformance.data_set import folder_report
from parquet_keytools.conformance.file_keys import (
    FileNonces,
    Invocations,
    NoncePart,
    SharedNonces,
    use_fingerprint_key,
)
from parquet_keytools.conformance.file_verifier import FileFacts
from parquet_keytools.conformance.report import FileReport, RuleResult, Verdict, verdict_of, worst_of
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsError,
    KmsUnavailableError,
    NotEncryptedError,
    OutputError,
    ReusedKeysError,
)
from parquet_keytools.files import conversion
from parquet_keytools.files.conversion import FilePlan, FileResult, plaintext_footer, plan_files
from parquet_keytools.files.field_labels import labels_of_footer
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.files.table_check import TableCheck
from parquet_keytools.kms.client import KmsClient, RewrapRequest
from parquet_keytools.rotation.data_set_run import CONCURRENT_FILES, RunOptions
from parquet_keytools.rotation.file_keys import Rewrapped, Rewrapper, RewrapTask
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory, uses_of_left_out
from parquet_keytools.rotation.rekeying import Rekeying
from parquet_keytools.rotation.report import FileRotation, RotationOutcome, RotationReport
from parquet_keytools.rotation.rotate import (
    Rewrapping,
    RotationPlan,
    plan_rotation,
    prefix_of,
    rotate_data_set,
    trust_master_keys,
)
from parquet_keytools.spark.map_files import (
    FAILED,
    FileFunction,
    Job,
    NamedFile,
    Outcome,
    Worker,
    file_at,
    node_location,
    place_of,
)
from parquet_keytools.spark.session import prove_keys
from parquet_keytools.storage.locations import OBJECT_STORES, FileLocation, PathLike
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.walk import BehindLink, Entry, LeftOut, ParquetFile, data_set, data_set_in_place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PipelineReport", "VerificationReport", "decrypt", "encrypt", "keys", "rekey", "rotate", "verify"]


# --- reports ---

KEY = pa.struct(
    [
        ("master_key", pa.string()),
        ("version", pa.string()),
        ("new_master_key", pa.string()),
        ("new_version", pa.string()),
        ("number", pa.int64()),
        ("column", pa.string()),
        ("is_footer", pa.bool_()),
        ("wrapping", pa.string()),
        ("kek_id", pa.string()),
        ("data_key", pa.string()),
    ]
)
"""A key of a file; null where a command does not know it."""

FILE_ROWS = pa.schema(
    [
        ("path", pa.string()),
        ("outcome", pa.string()),
        ("detail", pa.string()),
        ("keys", pa.list_(KEY)),
        ("bytes", pa.int64()),
        ("seconds", pa.float64()),
        ("error_class", pa.string()),
        ("error", pa.string()),
    ]
)
"""A row for each file; null where a command has nothing to say."""

_TEXTS = ("file", "rule", "severity", "outcome", "message", "place")
RULE_ROWS = pa.schema([*((name, pa.string()) for name in _TEXTS), ("offset", pa.int64())])
"""A row for each rule and file, or for each finding; rules about the data set as a whole have its path."""

_ROWS_PER_PART = 4096
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True)
class PipelineReport:
    """What came of a pipeline.

    Attributes:
        session: The session.
        packed_files: Rows of files, packed some thousand at a time.
        outcomes: How many files had each outcome.
        kms_keys: For how many keys the KMS was asked, by operation, by the driver and all tasks that ended well.
        tasks: How many tasks there were.
        seconds: How long it took.
    """

    session: SparkSession
    packed_files: Sequence[bytes]
    outcomes: Counter[str]
    kms_keys: Counter[str]
    tasks: int
    seconds: float

    @property
    def files(self) -> DataFrame:
        """A row for each file: path, outcome, detail, keys, bytes, seconds, error_class, error."""
        return _frame(self.session, self.packed_files, FILE_ROWS)

    @property
    def succeeded(self) -> bool:
        """Whether nothing failed."""
        return not self.outcomes[FAILED]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the same rows as dictionaries, without Spark."""
        return _rows_of(self.packed_files)

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of files that failed."""
        return (row for row in self.rows() if row["outcome"] == FAILED)


@dataclass(frozen=True)
class VerificationReport(PipelineReport):
    """What a verification found. The outcome of a file is its verdict.

    Attributes:
        packed_rules: Rows of rules, packed some thousand at a time.
        verdict: The verdict on the data set.
        conforms_strictly: Whether it conforms without weaknesses, except for weaknesses that the table accepts.
    """

    packed_rules: Sequence[bytes] = ()
    verdict: Verdict = Verdict.INCOMPLETE
    conforms_strictly: bool = False

    @property
    def rules(self) -> DataFrame:
        """A row for each rule and file: file, rule, severity, outcome, message, place, offset."""
        return _frame(self.session, self.packed_rules, RULE_ROWS)

    def rule_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the same rows as dictionaries, without Spark."""
        return _rows_of(self.packed_rules)

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict.conforms

    @property
    def succeeded(self) -> bool:
        """Whether it conforms."""
        return self.conforms


class _Rows:
    """Rows of a report on their way into packed columns: as Python objects, a million would be a gigabyte."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._waiting: list[dict[str, Any]] = []
        self._parts: list[bytes] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._waiting.append(row)
            if len(self._waiting) >= _ROWS_PER_PART:
                self.packed()

    def packed(self) -> Sequence[bytes]:
        if self._waiting:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self._schema, options=_COMPRESSED) as writer:
                writer.write_table(pa.Table.from_pylist(self._waiting, self._schema))
            self._parts.append(sink.getvalue().to_pybytes())
            self._waiting = []
        return self._parts


def _rows_of(parts: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield from pa.ipc.open_stream(part).read_all().to_pylist()


def _frame(session: SparkSession, parts: Sequence[bytes], schema: pa.Schema) -> DataFrame:
    tables = [schema.empty_table(), *(pa.ipc.open_stream(part).read_all() for part in parts)]
    return session.createDataFrame(pa.concat_tables(tables))


class _Pipeline(Job):
    """A job, and the outcomes of its files as they arrive."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rows = _Rows(FILE_ROWS)
        self.outcomes: Counter[str] = Counter()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.outcomes[outcome.outcome] += 1
            self._rows.add([{name: getattr(outcome, name) for name in FILE_ROWS.names}])

    def add_files(self, what: str, function: FileFunction, files: Sequence[NamedFile]) -> None:
        self.add(outcome for _, outcome in self.map_files(f"{what} {self.root}", function, files))

    def report(self) -> PipelineReport:
        seconds = time.monotonic() - self.started
        packed = self._rows.packed()
        return PipelineReport(self.session, packed, self.outcomes, self.kms_keys, self.tasks, seconds)


def _listed(
    root: FileLocation, *, follow_links: bool | None = None, with_key_material: bool = False
) -> tuple[list[NamedFile], list[LeftOut], list[Outcome]]:
    """List a data set: its files, what is left out, and what could not be checked or is behind links.

    For changes in place, `follow_links` says whether files outside the root, behind links, are changed, too.
    """
    files: list[NamedFile] = []
    left_out: list[LeftOut] = []
    others: list[Outcome] = []
    entries: Iterator[Entry | BehindLink] = data_set(
        root, into_passed_over=True, with_key_material=with_key_material
    )
    if follow_links is not None:
        entries = data_set_in_place(root, follow_links=follow_links, into_passed_over=True)
    for entry in entries:
        if isinstance(entry, ParquetFile):
            files.append(NamedFile(entry.location.path_within(root), entry.size_bytes))
        elif isinstance(entry, LeftOut):
            left_out.append(entry)
        elif isinstance(entry, BehindLink):
            others.append(_of_rotation(FileRotation.of_link(entry)))
        else:
            others.append(Outcome.of_error(entry.path, entry.error))
    return files, left_out, others


# --- encrypt ---

FINISHED_BEFORE = "finished before"
LEFT_OUT = "skipped"

SUCCESS_FILE = "_SUCCESS"

_TRIES = 3


def encrypt(
    spark: SparkSession,
    source: PathLike,
    target: PathLike,
    configuration: Configuration | PathLike,
    table_name: str | None = None,
    *,
    overwrite: bool = False,
    skip_existing: bool = False,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> PipelineReport:
    """Encrypt the Parquet files of a folder into another one, with the same folders in it.

    A file that fails is in the report, and the others are encrypted all the same. `_SUCCESS` is written when every
    file is there. After an interruption, or when files failed, repeat the call with `skip_existing`.

    Nothing else is copied: `_metadata` and `_common_metadata` hold statistics of all columns in plaintext, and
    other files may hold anything. Each has a row that says so.

    Args:
        spark: A session; its executors need this package, the configuration's KMS, and source and target.
        source: A path or URI that every node understands.
        target: Likewise. What is in it stays, except that `overwrite` replaces files of the same names.
        configuration: The configuration, or its YAML file.
        table_name: The table in the configuration; None where it has only one.
        overwrite: Whether the target may hold files.
        skip_existing: Whether the target may hold files, and a file is skipped that is newer than its source, and
            has the same rows, columns and statistics; see `Keytools.encrypt_file`.
        file_on_nodes: The YAML file on every node, or the name of one of Spark's files, in place of the
            configuration, which executors otherwise get without its secrets.
        max_tasks: How many tasks there may be.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor; or the table's columns do not fit
            the files; or values of a column that has a key are in the names of folders.
        KmsError: The KMS does not answer, or refuses a master key of the table.
        FileNotFoundError: There is no source.
        OutputError: The target is the source or in it, or holds files.
        ParquetFormatError: The source has no Parquet files.
        SparkJobFailedError: Spark gave the job up.
    """
    target_root = node_location(place_of(target))
    with _Pipeline(spark, source, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        name, table = job.configuration.select_table(table_name)
        if table.key_material == "external" and target_root.filesystem.type_name in OBJECT_STORES:
            raise ConfigurationError(
                "external key material cannot be written to an object store by several tasks: there is no lock "
                "that keeps two attempts of one file from mixing their keys.",
                hint="Set `key_material: internal`.",
            )
        plan = plan_files(job.root, target_root, overwrite=overwrite or skip_existing)
        TableCheck(job.configuration, name, ignores_case=True).refuse_folder_names(plan.paths_in_folder)
        _refuse_table_mistakes(job.keys, name, [file.source for file in plan.files])
        replaces: dict[str, Any] = {"overwrite": overwrite or not skip_existing, "skip_existing": skip_existing}
        encrypt_file = partial(conversion.encrypt_file, table_name=name, threads=1, **replaces)
        return _mirror(job, "encrypt", encrypt_file, plan, target, {})


def _refuse_table_mistakes(keys: KeyService, table_name: str, files: Sequence[FileLocation]) -> None:
    """Raise before the job what every file would fail with: the table's columns, or a master key that is refused.

    If the table fits the first, the middle or the last file, single files fail, and their rows say so.
    """
    mistake: ConfigurationError | None = None
    for file in {str(files[at]): files[at] for at in (0, len(files) // 2, -1)}.values() if files else ():
        try:
            footer = plaintext_footer(file)
            policy = keys.policy(table_name, [leaf.path for leaf in footer.leaves], labels_of_footer(footer))
        except ConfigurationError as error:
            mistake = mistake or error
        except (KeytoolsError, OSError):
            continue  # Its task reports it.
        else:
            if keys.kms is not None:
                prove_keys(keys.kms, policy.used_master_key_ids())
            return
    if mistake is not None:
        raise mistake


def _files_of(plan: FilePlan) -> list[NamedFile]:
    is_folder = plan.source_is_folder
    return [NamedFile(file.path_in_folder if is_folder else "", file.size_bytes) for file in plan.files]


def _mirror(
    job: _Pipeline,
    what: str,
    convert: Callable[..., FileResult],
    plan: FilePlan,
    target: PathLike,
    refused: Mapping[NamedFile, Outcome],
) -> PipelineReport:
    """Convert the files of a plan but the refused ones, and write `_SUCCESS` last if every file is there."""
    place = place_of(target)
    success = node_location(place).below(SUCCESS_FILE)
    job.add(refused.values())
    if plan.source_is_folder:
        with contextlib.suppress(FileNotFoundError):
            # Until all is done, the target is not complete.
            success.filesystem.delete_file(success.path)
    convert_one = partial(_convert, convert=convert, outcome=f"{what}ed", target_place=place)
    job.add_files(what, convert_one, [file for file in _files_of(plan) if file not in refused])
    job.add(
        Outcome(entry.path, LEFT_OUT, entry.reason.value)
        for entry in plan.left_out
        if entry.location.path != job.root.below(SUCCESS_FILE).path
    )
    job.add(Outcome.of_error(unseen.path, unseen.error) for unseen in plan.unseen)
    if plan.source_is_folder and not job.outcomes[FAILED]:
        write_whole(success, b"")
    return job.report()


def _convert(
    worker: Worker,
    source: FileLocation,
    file: NamedFile,
    *,
    convert: Callable[..., FileResult],
    outcome: str,
    target_place: str,
) -> Outcome:
    """Convert a file. Another attempt of the task may do the same at the same time: both end well."""
    target = file_at(node_location(target_place), file.name)
    if file.name and target.filesystem.type_name not in OBJECT_STORES:
        target.filesystem.create_dir(target.path.rpartition("/")[0], recursive=True)
    for tries_left in reversed(range(_TRIES)):
        try:
            result = convert(worker.keys, source, target)
            break
        except OutputError:
            # The other attempt put the same file there meanwhile, or its key material file.
            if not tries_left or not target.is_file():
                raise
    if result.skipped or result.copied:
        return Outcome(str(source), FINISHED_BEFORE if result.skipped else COPIED, bytes=result.source_bytes)
    return Outcome(str(source), outcome, keys=worker.keys.take_last_keys(), bytes=result.source_bytes)


# --- decrypt ---

COPIED = "copied"


def decrypt(
    spark: SparkSession,
    source: PathLike,
    target: PathLike,
    configuration: Configuration | PathLike,
    table_name: str | None = None,
    *,
    aad_prefix: str | bytes | None = None,
    overwrite: bool = False,
    skip_existing: bool = False,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> PipelineReport:
    """Decrypt the Parquet files of a folder into another one, with the same folders in it; see `encrypt`.

    First, tasks open all files: a file that has the keys of another one is a copy, and fails. With
    `plaintext_files: allow`, plaintext files are copied.

    Without `table_name`, files may be of any table; `aad_prefix` is the AAD prefix that they must have. For the
    other arguments and the errors, see `encrypt`.
    """
    target_root = node_location(place_of(target))
    with _Pipeline(spark, source, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        job.configuration.table_of_files(table_name)
        plan = plan_files(job.root, target_root, overwrite=overwrite or skip_existing)
        open_file = partial(_open, table_name=table_name, aad_prefix=aad_prefix, salt=secrets.token_bytes(32))
        copies = _copies(job, open_file, _files_of(plan))
        replaces: dict[str, Any] = {"overwrite": overwrite or not skip_existing, "skip_existing": skip_existing}
        decrypt_file = partial(_decrypt, table_name=table_name, aad_prefix=aad_prefix, **replaces)
        return _mirror(job, "decrypt", decrypt_file, plan, target, copies)


def _copies(job: _Pipeline, open_file: FileFunction, files: list[NamedFile]) -> dict[NamedFile, Outcome]:
    """Return files that cannot be opened, or have data key and file unique of an earlier file."""
    refused: dict[NamedFile, Outcome] = {}
    seen: dict[bytes, FileLocation] = {}
    allows = job.configuration.reading.reused_encryption_properties == "allow"
    for file, outcome in job.map_files(f"open the files of {job.root}", open_file, files):
        location = file_at(job.root, file.name)
        if outcome.outcome == FAILED:
            refused[file] = outcome
        elif outcome.other is not None and not allows:
            first = seen.setdefault(outcome.other, location)
            # One file under two names, by way of links, is no copy.
            if first is not location and not first.is_same_file(location):
                refused[file] = Outcome.of_error(str(location), ReusedKeysError(str(location), str(first)))
    return refused


def _open(worker: Worker, location: FileLocation, file: NamedFile, *, salt: bytes, **options: Any) -> Outcome:
    """Open a file; the outcome has a digest of its data key and file unique, which only this job can make."""
    alone = FileIdentities(refuses=False)
    (opened,) = worker.keys.open_files([location], identities=alone, **options)
    digest = None
    if opened.is_encrypted:
        envelope = opened.footer.envelope
        dek = opened.retriever.footer_dek(envelope.key_metadata)
        digest = hmac.digest(salt, dek.reveal() + (envelope.aad_file_unique or b""), "sha256")
    return Outcome(str(location), "opened", bytes=file.size_bytes, other=digest)


def _decrypt(keys: KeyService, source: FileLocation, target: FileLocation, **options: Any) -> FileResult:
    """Decrypt a file; `_copies` compares files."""
    return conversion.decrypt_file(keys, source, target, identities=FileIdentities(refuses=False), **options)


# --- rotate ---

_KEYS_PER_CALL = 1000

_Given = Mapping[RewrapTask, str | KmsError]
"""New wrapped keys, and why there are none. Not secret."""


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
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
    follow_links: bool = False,
) -> PipelineReport:
    """Re-wrap the keys of a data set; see `Keytools.rotate`, which does the same on one machine.

    First, tasks open all files as in a dry run. Then the driver has the KMS re-wrap each distinct wrapped key
    once, and tasks write the new wrapped keys into the files, where they are proven by what they unwrap to. With
    `new_keks` there is no first pass: each Python worker makes fresh KEKs of its own.

    After an interruption, call it again in the same way: files whose keys show that they are current stay as
    they are. Where the KMS hides versions, and with `new_keks`, all keys are re-wrapped again.

    Args:
        spark: See `encrypt`.
        path: The data set, by a path or URI that every node understands.
        configuration: See `encrypt`.
        moves: Old master key -> the one that takes its place; names of the configuration, or identifiers. None
            takes those of the configuration.
        only_master_keys: The master keys that are rotated.
        older_than: Only keys that an older version wrapped, or an unknown version.
        new_keks: Make fresh KEKs, as after a leak of one.
        dry_run: Change nothing; the rows say what would change.
        table_name: Table of the files, for an AAD prefix that they do not store.
        aad_prefix: The AAD prefix that they must have.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.
        follow_links: Whether files are changed, too, that links lead to outside of `path`; if not, each such file
            or folder has a row as one that failed.

    Raises:
        ConfigurationError: There is no KMS, or the moves are not possible, or an executor lacks something.
        KmsError: A master key to move to cannot be used, or the KMS answers nothing.
    """
    with _Pipeline(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        plan = plan_rotation(
            job.keys,
            moves=moves,
            only_master_keys=only_master_keys,
            older_than=older_than,
            new_keks=new_keks,
            dry_run=dry_run,
            table_name=table_name,
            aad_prefix=aad_prefix,
        )
        files, _, others = _listed(job.root, follow_links=follow_links)
        job.add(others)
        given: _Given = {}
        if dry_run or not new_keks:
            left: list[NamedFile] = []
            wanted: set[RewrapTask] = set()
            find = partial(_rotate, plan=replace(plan, dry_run=True))
            for file, outcome in job.map_files(f"open the files of {job.root}", find, files):
                if not dry_run and outcome.outcome == RotationOutcome.WOULD_ROTATE.value:
                    left.append(file)
                    wanted |= outcome.other
                else:
                    job.add([outcome])
            files = left
            assert job.keys.kms is not None
            given = _rewrapped(job.keys.kms, wanted)
        if not dry_run:
            job.add_files("rotate the keys of", partial(_rotate, plan=plan, given=given), files)
        return job.report()


def _rewrapped(kms: KmsClient, wanted: Collection[RewrapTask]) -> _Given:
    """Have the KMS re-wrap what it can by itself, each wrapped key once; tasks prove the new keys.

    Keys that have to be unwrapped are left to the tasks: no key travels.
    """
    rewrapper = Rewrapper(kms)
    tasks = sorted(
        (task for task in wanted if not rewrapper.is_unwrapped(task)), key=lambda task: task.old.wrapped_key
    )
    given: dict[RewrapTask, str | KmsError] = {}
    for start in range(0, len(tasks), _KEYS_PER_CALL):
        some = tasks[start : start + _KEYS_PER_CALL]
        requests = [RewrapRequest(t.old.wrapped_key, t.old.master_key_id, t.new_master_key_id) for t in some]
        given |= dict(zip(some, kms.rewrap_many(requests), strict=True))
    unreachable = [outcome for outcome in given.values() if isinstance(outcome, KmsUnavailableError)]
    if unreachable and len(unreachable) == len(given):
        # All files would fail with it.
        raise unreachable[0]
    return given


class _Recorder(Rewrapper):
    """Notes the keys of a file that a rotation would re-wrap."""

    def __init__(self, kms: KmsClient, *, new_keks: bool) -> None:
        super().__init__(kms, new_keks=new_keks, dry_run=True)
        self.wanted: set[RewrapTask] = set()

    def rewrap(self, wanted: Iterable[RewrapTask]) -> dict[RewrapTask, Rewrapped | KmsError]:
        tasks = list(wanted)
        self.wanted.update(tasks)
        return super().rewrap(tasks)


def _rotate(
    worker: Worker, location: FileLocation, file: NamedFile, *, plan: RotationPlan, given: _Given | None = None
) -> Outcome:
    """Write new wrapped keys into a file; a file that has them already stays as it is.

    In a dry run, the outcome has the keys to re-wrap, which count if the file would rotate.
    """

    def rewrapping() -> Rewrapping:
        kms = worker.keys.kms
        assert kms is not None
        trust_master_keys(plan, kms)
        if plan.dry_run:
            return Rewrapping(worker.keys, plan, _Recorder(kms, new_keks=plan.new_keks))
        return Rewrapping(worker.keys, plan, Rewrapper(kms, new_keks=plan.new_keks, given=given or {}))

    kept = worker.keep("dry run" if plan.dry_run else "rotation", rewrapping)
    wanted: set[RewrapTask] | None = None
    if isinstance(kept.rewrapper, _Recorder):
        wanted = kept.rewrapper.wanted = set()
    outcome = _of_rotation(_result_of(rotate_data_set(location, kept, RunOptions())), file)
    return replace(outcome, other=wanted)


def _result_of(report: RotationReport) -> FileRotation:
    """Return the result for the one file of a run; raise why there is none, such as a full disk."""
    if report.stopped_by is not None and not report.files:
        raise report.stopped_by
    (result,) = report.files
    return result


def _of_rotation(result: FileRotation, file: NamedFile | None = None) -> Outcome:
    size_bytes = 0 if file is None else file.size_bytes
    if result.error is not None:
        return Outcome.of_error(result.path, result.error, result.outcome.value, size_bytes)
    changes = [
        {
            "master_key": change.master_key_id,
            "version": change.version,
            "new_master_key": change.new_master_key_id,
            "new_version": change.new_version,
            "number": change.keys,
        }
        for change in result.keys
    ]
    return Outcome(result.path, result.outcome.value, result.how or None, changes, size_bytes)


# --- rekey ---


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

    For arguments and errors, see `rotate` and `encrypt`.
    """
    with _Pipeline(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        new_table_name, _ = job.configuration.select_table(table_name)
        files, _, others = _listed(job.root, follow_links=follow_links)
        rekey_one = partial(_rekey, names=(table_name, new_table_name), aad_prefix=aad_prefix)
        job.add_files("rekey", rekey_one, files)
        job.add(others)
        return job.report()


def _rekey(
    worker: Worker,
    location: FileLocation,
    file: NamedFile,
    *,
    names: tuple[str | None, str],
    aad_prefix: str | bytes | None,
) -> Outcome:
    """Encrypt a file with new data keys; `names` has its table, and the table of the new file."""
    worker.keys.take_last_keys()
    try:
        rekeying = Rekeying(worker.keys, worker.keys, *names, aad_prefix)
        result = _result_of(rekeying.run(location, RunOptions()))
    except NotEncryptedError:
        # As on one machine: in a folder there is nothing to do for it.
        if not file.name:
            raise
        return Outcome(str(location), RotationOutcome.NOT_ENCRYPTED.value, bytes=file.size_bytes)
    rekeyed = _of_rotation(result, file)
    if result.outcome is RotationOutcome.REKEYED:
        rekeyed = replace(rekeyed, keys=worker.keys.take_last_keys())
    return rekeyed


# --- keys ---

LISTED = "listed"
NOT_ENCRYPTED = "not encrypted"
INCOMPLETE = "not all keys can be seen"


def keys(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
    ignore_skipped: bool = False,
) -> PipelineReport:
    """List which master keys, and versions of them, each file of a data set depends on; nothing is changed.

    Encrypted files that readers of data sets pass over for their names count as failed, unless `ignore_skipped`:
    which keys they need is unknown. For the rest, see `rotate` and `encrypt`.
    """
    with _Pipeline(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        files, left_out, others = _listed(job.root)
        list_one = partial(_list_keys, table_name=table_name, aad_prefix=aad_prefix)
        job.add_files("list the keys of", list_one, files)
        job.add(others)
        if not ignore_skipped:
            with ThreadPoolExecutor(CONCURRENT_FILES) as pool:
                job.add(_of_uses(uses, 0) for uses in uses_of_left_out(pool, left_out))
        return job.report()


def _list_keys(worker: Worker, location: FileLocation, file: NamedFile, **options: Any) -> Outcome:
    """List the keys of a file; this process keeps the keys of footers for its next tasks."""
    inventory = worker.keep("inventory", lambda: Inventory(worker.keys, prefix_of(worker.keys, **options)))
    (uses,) = inventory.list(location)
    return _of_uses(uses, file.size_bytes)


def _of_uses(file: FileKeyUses, size_bytes: int) -> Outcome:
    same = ("version", "column", "is_footer", "wrapping", "kek_id", "data_key")
    uses = [
        {"master_key": use.master_key_id, "number": 1, **{name: getattr(use, name) for name in same}}
        for use in file.uses
    ]
    if file.unknown is not None:
        failed = Outcome.of_error(file.path, file.unknown, INCOMPLETE if uses else FAILED, size_bytes)
        return replace(failed, keys=uses)
    return Outcome(file.path, LISTED if file.is_encrypted else NOT_ENCRYPTED, keys=uses, bytes=size_bytes)


# --- verify ---


def verify(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    part_count: int | None = None,
    allow_plaintext: Sequence[str] = (),
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> VerificationReport:
    """Check every module of every file against the specification, and all files as one data set.

    Rules about several files, such as a DEK that two of them share, are checked on the driver: it keeps some
    hundred bytes of each file, and nonces only of those that share a DEK, which are read once more then.

    The files must follow the policy of the table `table_name`, and have `part_count` parts, numbered from 0, where
    that is known. `allow_plaintext` has globs of paths within the folder of accepted plaintext files; `*` matches
    `/`, too. For the rest, see `rotate` and `encrypt`.
    """
    with _Pipeline(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        if table_name is not None:
            job.configuration.select_table(table_name)
        root = job.root
        files, left_out, others = _listed(root, with_key_material=True)
        rules = _Rows(RULE_ROWS)
        verify_one = partial(
            _verify,
            table_name=table_name,
            aad_prefix=aad_prefix,
            allow_plaintext=tuple(allow_plaintext),
            # Fingerprints of DEKs can be compared within this job alone.
            fingerprint_key=secrets.token_bytes(32),
        )
        found: list[tuple[FileFacts, dict[bytes, Invocations]]] = []
        verdicts, strictly = Counter[Verdict](), True
        columns: dict[object, Any] = {}
        for _, outcome in job.map_files(f"verify {root}", verify_one, files):
            job.add([outcome])
            if outcome.other is None:
                continue
            facts, fingerprints, conforms_strictly, rows = outcome.other
            # The same for all files, as a rule.
            facts = replace(facts, column_paths=columns.setdefault(facts.column_paths, facts.column_paths))
            found.append((facts, fingerprints))
            verdicts[Verdict(outcome.outcome)] += 1
            strictly = strictly and conforms_strictly
            rules.add(rows)
        verdicts[Verdict.INCOMPLETE] += len(others) + job.outcomes[FAILED]
        if [file.name for file in files] != [""]:
            found.sort(key=lambda file: file[0].name)
            all_facts = [facts for facts, _ in found]
            # Nonces of files that share a DEK are compared; usually there are none.
            nonces = SharedNonces(partial(_read_again, job, verify_one, files))
            for facts, fingerprints in found:
                nonces.add_file(facts.name, fingerprints)
            data_set = folder_report(
                root, [], all_facts, nonces, left_out, part_count=part_count, allow_plaintext=allow_plaintext
            )
            rules.add(_rule_rows(str(root), data_set.rules))
            for other in data_set.files:
                rules.add(_rule_rows(other.path, other.rules))
                verdicts[other.verdict] += 1
                job.add([_of_verdict(other, 0)])
            of_data_set = verdict_of(data_set.rules, with_keys=True)
            verdicts[of_data_set] += 1
            strictly = strictly and of_data_set is Verdict.CONFORMS
        job.add(replace(other, outcome=Verdict.INCOMPLETE.value) for other in others)
        verdict = worst_of(+verdicts) if found or verdicts[Verdict.VIOLATED] else Verdict.INCOMPLETE
        return VerificationReport(
            **vars(job.report()),
            packed_rules=rules.packed(),
            verdict=verdict,
            conforms_strictly=strictly and verdict.conforms,
        )


def _verify(
    worker: Worker,
    location: FileLocation,
    file: NamedFile,
    *,
    table_name: str | None,
    aad_prefix: str | bytes | None,
    allow_plaintext: tuple[str, ...],
    fingerprint_key: bytes,
    part: NoncePart | None = None,
) -> Outcome:
    """Verify a file; the outcome has what `verify` needs to know, without nonces, or only the nonces of a part."""
    use_fingerprint_key(fingerprint_key)
    folder = replace(location, path=location.path.removesuffix(file.name).rstrip("/")) if file.name else None
    # One for each file: the answers of all would pile up. KEKs stay in the cache of the service.
    verifier = verification.MemberVerifier(worker.keys, table_name, aad_prefix, folder, allow_plaintext)
    report, facts = verifier.look_at(location, nonce_part=part)
    other: object = facts.nonces
    if part is None:
        fingerprints: dict[bytes, Invocations] = {} if facts.nonces is None else facts.nonces.invocations
        facts = replace(facts, name=file.name, nonces=None)
        other = facts, fingerprints, report.conforms_strictly, list(_rule_rows(report.path, report.rules))
    return replace(_of_verdict(report, file.size_bytes), other=other)


def _read_again(
    job: _Pipeline, verify_one: partial[Outcome], files: list[NamedFile], names: Collection[str], part: NoncePart
) -> Iterator[tuple[str, FileNonces | None]]:
    """Yield name and nonces of files that share a DEK."""
    wanted = set(names)
    again = [file for file in files if file.name in wanted]
    read = partial(verify_one, part=part)
    for file, outcome in job.map_files("compare nonces of files that share a DEK", read, again):
        yield file.name, outcome.other


def _of_verdict(report: FileReport, size_bytes: int) -> Outcome:
    detail = "; ".join(f"{user}: {reason}" for user, reason in report.denied.items())
    return Outcome(report.path, report.verdict.value, detail or None, bytes=size_bytes)


def _rule_rows(path: str, results: Sequence[RuleResult]) -> Iterator[dict[str, Any]]:
    """Yield a row for each rule, or one for each finding and for each reason why it could not be checked."""
    for result in results:
        about = {
            "file": path,
            "rule": result.rule.id,
            "severity": result.rule.severity.value,
            "outcome": result.outcome.value,
        }
        for finding in result.findings:
            yield about | {"message": finding.message, "place": finding.where or None, "offset": finding.offset}
        for reason in result.reasons:
            yield about | {"outcome": "not checked", "message": reason}
        if not result.findings and not result.reasons:
            yield about
