"""Files of a data set verified rule by rule, and all of them as one data set."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from parquet_keytools import file_verification
from parquet_keytools.config.settings import Configuration
from parquet_keytools.conformance.data_set import Member
from parquet_keytools.conformance.file_keys import use_fingerprint_key
from parquet_keytools.conformance.file_verifier import FileFacts
from parquet_keytools.conformance.nonce_ledger import Invocations, NonceLedger
from parquet_keytools.conformance.report import FileReport, RuleResult, Verdict, verdict_of
from parquet_keytools.conformance.shared_nonces import SharedNonces
from parquet_keytools.spark.pipelines.footer_groups import group_files
from parquet_keytools.spark.pipelines.job import Job, configuration_of
from parquet_keytools.spark.pipelines.places import file_at, location_of, place_of
from parquet_keytools.spark.pipelines.planned_files import left_out_of, packed, plan_files, rows_of, unpacked
from parquet_keytools.spark.pipelines.report import (
    RULE_ROWS,
    PipelineReport,
    TaskResult,
    file_row,
    frame_of,
    task_result,
)
from parquet_keytools.spark.pipelines.worker_keys import CarriedKeys, worker_keys
from parquet_keytools.storage import PathLike

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
class _Work:
    keys: CarriedKeys
    place: str
    table_name: str | None
    aad_prefix: str | None
    fingerprint_key: bytes
    shared: frozenset[bytes] = frozenset()


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
    aad_prefix: str | None = None,
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
    place = place_of(path)
    root = location_of(place)
    job = Job(spark, configuration_of(configuration), None, file_on_nodes, max_tasks)
    try:
        if table_name is not None:
            job.configuration.select_table(table_name)
        plan = plan_files(root)
        grouped = group_files(job, place, plan.table)
        pieces = grouped.pieces(job, whole_files=True)
        # Fingerprints can be compared within the job, and mean nothing outside of it.
        key = secrets.token_bytes(32)
        work = _Work(job.carried_keys(len(pieces)), place, table_name, aad_prefix, key)
        rows: list[bytes] = []
        rules: list[bytes] = []
        found: list[_Found] = []
        columns: dict[object, Any] = {}
        for result in job.run(f"verify {root}", partial(_verify_piece, work), pieces):
            rows.append(result.rows)
            rules.append(result.other[0])
            for file in result.other[1]:
                # The same for all files, as a rule.
                paths = columns.setdefault(file.facts.column_paths, file.facts.column_paths)
                found.append(replace(file, facts=replace(file.facts, column_paths=paths)))
        verdicts = Counter(file.verdict for file in found)
        if grouped.table["path"].to_pylist() != [""]:
            found.sort(key=lambda file: file.name)
            nonces = _shared_nonces(job, work, found, grouped.table)
            data_set = file_verification.folder_report(
                root,
                [],
                [Member(file.name, file.facts) for file in found],
                nonces,
                left_out_of(root, plan),
                part_count=part_count,
            )
            rules.append(_packed_rules(str(root), data_set.rules))
            unreadable = [_row(other, 0, 0.0) for other in data_set.files]
            for other in data_set.files:
                rules.append(_packed_rules(other.path, other.rules))
                verdicts[other.verdict] += 1
            extra = task_result(unreadable, Counter())
            job.outcomes += extra.outcomes
            rows.append(extra.rows)
            verdicts[verdict_of(data_set.rules, with_keys=True)] += 1
        rows.append(job.unreadable(plan, Verdict.INCOMPLETE.value))
        verdicts[Verdict.INCOMPLETE] += len(plan.unreadable)
        verdict = Verdict.CONFORMS if found else Verdict.INCOMPLETE
        for worse in (Verdict.INCOMPLETE, Verdict.VIOLATED):
            verdict = worse if verdicts[worse] else verdict
    finally:
        job.close()
    return VerificationReport(**vars(job.report(rows)), packed_rules=tuple(rules), verdict=verdict)


# --- the driver ---


def _shared_nonces(job: Job, work: _Work, found: list[_Found], files: pa.Table) -> SharedNonces:
    """Return the nonces of files that share a DEK; there are none as a rule, and then no second look is needed."""
    users = Counter(fingerprint for file in found for fingerprint in file.fingerprints)
    shared = frozenset(fingerprint for fingerprint, number in users.items() if number > 1)
    nonces: dict[str, Nonces] = {}
    if shared:
        names = [file.name for file in found if not shared.isdisjoint(file.fingerprints)]
        again = files.filter(pc.is_in(files["path"], pa.array(names, pa.string())))
        pieces = [packed(again.slice(at, 64)) for at in range(0, again.num_rows, 64)]
        second = replace(work, keys=job.carried_keys(len(pieces)), shared=shared)
        for result in job.run("compare nonces of files that share a DEK", partial(_nonces_piece, second), pieces):
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


def _verify_piece(work: _Work, position: int, attempt: int, piece: bytes) -> TaskResult:
    rows: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []
    found: list[_Found] = []
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    for name, size_bytes, report, facts, seconds in _verified(work, position, piece):
        rows.append(_row(report, size_bytes, seconds))
        rules += _rule_rows(report.path, report.rules)
        ledger = facts.nonces
        fingerprints = {key: ledger.invocations(key) for key in ledger.fingerprints} if ledger is not None else {}
        found.append(_Found(name, report.verdict, replace(facts, nonces=None), fingerprints))
    packed_rules = packed(pa.Table.from_pylist(rules, RULE_ROWS))
    return task_result(rows, worker.kms_counts() - before, (packed_rules, found))


def _nonces_piece(work: _Work, position: int, attempt: int, piece: bytes) -> TaskResult:
    found: dict[str, Nonces] = {}
    worker = worker_keys(work.keys, position)
    before = worker.kms_counts()
    for name, _, _, facts, _ in _verified(work, position, piece):
        ledger = facts.nonces
        if ledger is not None:
            found[name] = {key: list(ledger.nonces(key)) for key in work.shared.intersection(ledger.fingerprints)}
    return TaskResult(kms_keys=worker.kms_counts() - before, other=found)


def _verified(work: _Work, position: int, piece: bytes) -> Iterator[tuple[str, int, FileReport, FileFacts, float]]:
    use_fingerprint_key(work.fingerprint_key)
    keys = worker_keys(work.keys, position).keys
    root = location_of(work.place)
    for file in rows_of(unpacked(piece)):
        started = time.monotonic()
        # Of its own for each file: the answers of all would pile up. KEKs stay in the cache of the service.
        report, facts = file_verification.verify_member(
            keys, keys.kms_keys(), file_at(root, file["path"]), work.table_name, work.aad_prefix, threads=1
        )
        yield file["path"], file["size_bytes"], report, facts, time.monotonic() - started


def _row(report: FileReport, size_bytes: int, seconds: float) -> dict[str, Any]:
    detail = "; ".join(f"{user}: {reason}" for user, reason in report.denied.items())
    return file_row(report.path, report.verdict.value, detail=detail, size_bytes=size_bytes, seconds=seconds)


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
