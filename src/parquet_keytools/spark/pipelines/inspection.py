"""Data sets looked into, and not changed: which master keys files depend on, and whether they follow the rules."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from parquet_keytools.config.settings import Configuration
from parquet_keytools.conformance import verification
from parquet_keytools.conformance.data_set import Member
from parquet_keytools.conformance.file_keys import use_fingerprint_key
from parquet_keytools.conformance.file_verifier import FileFacts
from parquet_keytools.conformance.nonce_ledger import Invocations, NonceLedger, SharedNonces
from parquet_keytools.conformance.report import FileReport, RuleResult, Verdict, verdict_of
from parquet_keytools.rotation.data_set_run import CONCURRENT_FILES
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory, uses_of_left_out
from parquet_keytools.rotation.rotation_plan import prefix_of
from parquet_keytools.spark.pipelines.file_tables import (
    FAILED,
    PipelineReport,
    TaskResult,
    file_at,
    file_row,
    frame_of,
    packed,
    plan_data_set,
    rows_of,
    task_result,
    unpacked,
)
from parquet_keytools.spark.pipelines.job import Job, PipelineTask, TaskFiles
from parquet_keytools.spark.pipelines.worker_keys import WorkerKeys
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.storage.walk import LeftOut, LeftOutReason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RULE_ROWS = pa.schema(
    [
        ("file", pa.string()),
        ("rule", pa.string()),
        ("severity", pa.string()),
        ("outcome", pa.string()),
        ("message", pa.string()),
        ("place", pa.string()),
        ("offset", pa.int64()),
    ]
)
"""A row for each rule and file, or for each finding; those of the data set as a whole have its path."""

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
    with Job(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        left_out: list[LeftOut] = []
        plan = plan_data_set(job.root, on_left_out=None if ignore_passed_over else left_out.append)
        with ThreadPoolExecutor(CONCURRENT_FILES) as pool:
            passed_over = [_row_of_uses(file, 0) for file in uses_of_left_out(pool, left_out)]
        pieces = job.pieces(job.grouped(plan.table))
        task = InventoryTask(job.carried_keys(len(pieces)), job.place, table_name, aad_prefix)
        job.work_on_files(f"list the keys of {job.place}", task, pieces)
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
        return _row_of_uses(uses, file["size_bytes"])


def _row_of_uses(file: FileKeyUses, size_bytes: int) -> dict[str, Any]:
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


Fingerprints = dict[bytes, Invocations]
Nonces = dict[bytes, list[tuple[bytes, bytes]]]


@dataclass(frozen=True)
class VerificationReport(PipelineReport):
    """What a verification found. The outcome of a file is its verdict.

    Attributes:
        packed_rules: Rows of rules, packed by task.
        verdict: What the whole comes to.
    """

    packed_rules: tuple[bytes, ...] = ()
    verdict: Verdict = Verdict.INCOMPLETE

    @property
    def rules(self) -> DataFrame:
        """A row for each rule and file: file, rule, severity, outcome, message, place, offset."""
        return frame_of(self.session, self.packed_rules, RULE_ROWS)

    def rule_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the same rows as dictionaries, without Spark."""
        for data in self.packed_rules:
            yield from rows_of(unpacked(data))

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict is Verdict.CONFORMS

    @property
    def succeeded(self) -> bool:
        """Whether it conforms."""
        return self.conforms


@dataclass(frozen=True)
class _Found:
    """What the checks of a data set need of a file."""

    name: str
    verdict: Verdict
    facts: FileFacts
    fingerprints: Fingerprints


def verify(
    spark: SparkSession,
    path: PathLike,
    configuration: Configuration | PathLike,
    *,
    table_name: str | None = None,
    aad_prefix: str | bytes | None = None,
    part_count: int | None = None,
    file_on_nodes: str | None = None,
    max_tasks: int | None = None,
) -> VerificationReport:
    """Check every module of every file against the specification, and all files as one data set.

    Rules about several files, such as a DEK that two of them share, are checked on the driver: it keeps some
    hundred bytes of each file, and nonces only of those that share a DEK, which are read once more then.

    Args:
        spark: A session.
        path: A path or URI that every node understands.
        configuration: The configuration, or its YAML file.
        table_name: The table, whose policy the files must follow; None where the configuration has only one.
        aad_prefix: The AAD prefix that every file must have.
        part_count: How many parts there must be, numbered from 0; None where that is not known.
        file_on_nodes: See `encrypt`.
        max_tasks: How many tasks there may be.

    Raises:
        ConfigurationError: The configuration is wrong here, or on an executor.
        FileNotFoundError: There is no such file or folder.
        SparkJobFailedError: Spark gave the job up.
    """
    with Job(spark, path, configuration, file_on_nodes=file_on_nodes, max_tasks=max_tasks) as job:
        if table_name is not None:
            job.configuration.select_table(table_name)
        root = job.root
        plan = plan_data_set(root)
        grouped = job.grouped(plan.table)
        pieces = job.pieces(grouped, whole_files=True)
        # Fingerprints can be compared within the job, and mean nothing outside of it.
        key = secrets.token_bytes(32)
        task = VerificationTask(job.carried_keys(len(pieces)), job.place, table_name, aad_prefix, key)
        rules: list[bytes] = []
        found: list[_Found] = []
        columns: dict[object, Any] = {}
        for result in job.work_on_files(f"verify {root}", task, pieces):
            rules.append(result.other[0])
            for file in result.other[1]:
                # The same for all files, as a rule.
                paths = columns.setdefault(file.facts.column_paths, file.facts.column_paths)
                found.append(replace(file, facts=replace(file.facts, column_paths=paths)))
        verdicts = Counter(file.verdict for file in found)
        if grouped["path"].to_pylist() != [""]:
            found.sort(key=lambda file: file.name)
            nonces = _shared_nonces(job, task, found, grouped)
            data_set = verification.folder_report(
                root,
                [],
                [Member(file.name, file.facts) for file in found],
                nonces,
                [LeftOut(root.child(at["path"]), LeftOutReason(at["reason"])) for at in rows_of(plan.left_out)],
                [],
                part_count=part_count,
            )
            rules.append(_packed_rules(str(root), data_set.rules))
            for other in data_set.files:
                rules.append(_packed_rules(other.path, other.rules))
                verdicts[other.verdict] += 1
            job.add_rows([_row_of_verdict(other, 0) for other in data_set.files])
            verdicts[verdict_of(data_set.rules, with_keys=True)] += 1
        job.add_unseen(plan, Verdict.INCOMPLETE.value)
        verdicts[Verdict.INCOMPLETE] += len(plan.unseen)
        verdict = Verdict.CONFORMS if found else Verdict.INCOMPLETE
        for worse in (Verdict.INCOMPLETE, Verdict.VIOLATED):
            verdict = worse if verdicts[worse] else verdict
    return VerificationReport(**vars(job.report()), packed_rules=tuple(rules), verdict=verdict)


# --- the driver ---


def _shared_nonces(job: Job, task: VerificationTask, found: list[_Found], files: pa.Table) -> SharedNonces:
    """Return the nonces of files that share a DEK; there are none as a rule, and then no second look is needed."""
    users = Counter(fingerprint for file in found for fingerprint in file.fingerprints)
    shared = frozenset(fingerprint for fingerprint, number in users.items() if number > 1)
    nonces: dict[str, Nonces] = {}
    if shared:
        names = [file.name for file in found if not shared.isdisjoint(file.fingerprints)]
        again = files.filter(pc.is_in(files["path"], pa.array(names, pa.string())))
        pieces = [packed(again.slice(at, 64)) for at in range(0, again.num_rows, 64)]
        first = vars(task) | {"keys": job.carried_keys(len(pieces))}
        second = NoncesTask(**first, shared=shared)
        for result in job.run("compare nonces of files that share a DEK", second, pieces):
            nonces |= result.other
    collected = SharedNonces()
    for file in found:
        ledger = _CarriedLedger(file.fingerprints, nonces.get(file.name, {}))
        collected.add_file(file.name, cast(NonceLedger, ledger))
    return collected


class _CarriedLedger:
    """What `SharedNonces` asks of a ledger, as it came from a task."""

    def __init__(self, fingerprints: Fingerprints, nonces: Mapping[bytes, list[tuple[bytes, bytes]]]) -> None:
        self._invocations = fingerprints
        self._nonces = nonces

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        return tuple(self._invocations)

    def invocations(self, fingerprint: bytes) -> Invocations:
        return self._invocations[fingerprint]

    def nonces(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._nonces.get(fingerprint, ()))


# --- the tasks ---


@dataclass(frozen=True)
class VerificationTask(PipelineTask):
    """Verifies files."""

    fingerprint_key: bytes

    def result(self, worker: WorkerKeys, root: FileLocation, piece: TaskFiles) -> TaskResult:
        """Return rows of files, and with them the rows of rules and what the checks of the data set need."""
        rows: list[dict[str, Any]] = []
        rules: list[dict[str, Any]] = []
        found: list[_Found] = []
        for file in piece.files:
            started = time.monotonic()
            report, facts = self._verified(worker, root, file["path"])
            rows.append(_row_of_verdict(report, file["size_bytes"]) | {"seconds": time.monotonic() - started})
            rules += _rule_rows(report.path, report.rules)
            fingerprints: Fingerprints = {}
            if (ledger := facts.nonces) is not None:
                fingerprints = {key: ledger.invocations(key) for key in ledger.fingerprints}
            found.append(_Found(file["path"], report.verdict, replace(facts, nonces=None), fingerprints))
        return task_result(rows, (packed(pa.Table.from_pylist(rules, RULE_ROWS)), found))

    def _verified(self, worker: WorkerKeys, root: FileLocation, name: str) -> tuple[FileReport, FileFacts]:
        use_fingerprint_key(self.fingerprint_key)
        # Of its own for each file: the answers of all would pile up. KEKs stay in the cache of the service.
        verify = verification.MemberVerifier(worker.keys, self.table_name, self.aad_prefix)
        return verify(file_at(root, name), threads=1)


@dataclass(frozen=True)
class NoncesTask(VerificationTask):
    """Collects the nonces of files that share a DEK."""

    shared: frozenset[bytes]

    def result(self, worker: WorkerKeys, root: FileLocation, piece: TaskFiles) -> TaskResult:
        """Return the nonces of the files."""
        found: dict[str, Nonces] = {}
        for file in piece.files:
            _, facts = self._verified(worker, root, file["path"])
            ledger = facts.nonces
            if ledger is not None:
                shared = self.shared.intersection(ledger.fingerprints)
                found[file["path"]] = {key: list(ledger.nonces(key)) for key in shared}
        return TaskResult(other=found)


def _row_of_verdict(report: FileReport, size_bytes: int) -> dict[str, Any]:
    detail = "; ".join(f"{user}: {reason}" for user, reason in report.denied.items())
    return file_row(report.path, report.verdict.value, detail=detail, size_bytes=size_bytes)


def _packed_rules(path: str, results: tuple[RuleResult, ...]) -> bytes:
    return packed(pa.Table.from_pylist(list(_rule_rows(path, results)), RULE_ROWS))


def _rule_rows(path: str, results: tuple[RuleResult, ...]) -> Iterator[dict[str, Any]]:
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
