"""What a verification found, rule by rule, module type by module type, and what is lost; as JSON, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from parquet_keytools.conformance.findings import Finding, Outcome, RuleResult, Severity
from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.runtime.presentation import Summarised

__all__ = [
    "Damage",
    "DataSetReport",
    "FileReport",
    "Finding",
    "Loss",
    "ModuleTally",
    "Outcome",
    "RuleResult",
    "Verdict",
    "data_set_document",
    "document_of",
    "file_document",
    "verdict_of",
]


class Verdict(Enum):
    """What the whole comes to."""

    CONFORMS = "conforms"
    VIOLATED = "violated"
    """A rule whose breach is a violation is broken."""
    INCOMPLETE = "incomplete"
    """Nothing is violated as far as could be seen, and not all that was asked for could be checked."""


@dataclass(frozen=True)
class ModuleTally:
    """What became of the modules of one type under one column, or of the footer.

    Attributes:
        module_type: The type.
        column: Dotted path of the column; None for the footer.
        authentic: How many authenticate.
        broken: How many do not.
        unauthenticated: How many cannot show by themselves whether they were altered: pages with AES_GCM_CTR_V1.
    """

    module_type: ModuleType
    column: str | None
    authentic: int = 0
    broken: int = 0
    unauthenticated: int = 0


@dataclass(frozen=True)
class Loss:
    """What damage costs (data-pages.md, error recovery).

    Attributes:
        row_group_ordinal: Of the row group.
        column_ordinal: Of the column.
        column: Its dotted path.
        pages: Ordinals of the data pages that are lost; None for all of the chunk.
        from_page: All data pages from this ordinal on are lost too; None where the walk reached the end.
    """

    row_group_ordinal: int
    column_ordinal: int
    column: str
    pages: tuple[int, ...] | None
    from_page: int | None = None


@dataclass(frozen=True)
class Damage:
    """What is lost, and what can still be read.

    Attributes:
        file_is_lost: The footer cannot be read, or is not authentic.
        losses: What is lost of which chunk.
        row_groups: How many there are.
        readable_row_groups: Ordinals of those that are whole.
        damaged_indexes: (row group ordinal, column ordinal) of chunks whose index or Bloom filter is damaged:
            their values can be read without it.
    """

    file_is_lost: bool = False
    losses: tuple[Loss, ...] = ()
    row_groups: int = 0
    readable_row_groups: tuple[int, ...] = ()
    damaged_indexes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, repr=False)
class FileReport(Summarised):
    """What was found in one file.

    Attributes:
        path: The file.
        with_keys: Whether keys were looked for; without them nothing is authenticated.
        rules: What became of each rule of a file.
        modules: What became of its modules.
        damage: What is lost; None where no key was looked for, not all could be had, or the AAD prefix is missing,
            and of a plaintext file that is not wanted.
        denied: Dotted column path, or `footer` -> why its key is unavailable. A column of that name is
            `column footer`.
        table: The table that it was compared with; None where there is none, or none of several was named.
        asked_for: Ids of rules that must be answered also where no keys are given: somebody asked for them.
    """

    path: str
    with_keys: bool
    rules: tuple[RuleResult, ...]
    modules: tuple[ModuleTally, ...] = ()
    damage: Damage | None = None
    denied: Mapping[str, str] = field(default_factory=dict)
    asked_for: frozenset[str] = frozenset()
    table: str | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """What it comes to."""
        verdict = verdict_of(self.rules, with_keys=self.with_keys)
        if verdict is Verdict.CONFORMS and not all(self._is_answered(rule_id) for rule_id in self.asked_for):
            return Verdict.INCOMPLETE
        return verdict

    def _is_answered(self, rule_id: str) -> bool:
        return self.result(rule_id).outcome in (Outcome.HOLDS, Outcome.BROKEN)

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict is Verdict.CONFORMS

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(finding for result in self.rules for finding in result.findings)

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        broken = [result.rule.id for result in self.rules if result.outcome is Outcome.BROKEN]
        return {"path": self.path, "verdict": self.verdict.value, "broken": broken, "with_keys": self.with_keys}

    def result(self, rule_id: str) -> RuleResult:
        """Return what became of one rule."""
        return next(result for result in self.rules if result.rule.id == rule_id)


@dataclass(frozen=True, repr=False)
class DataSetReport(Summarised):
    """What was found in the files of a folder.

    Attributes:
        path: The folder.
        files: What was found in each.
        rules: What became of each rule of a data set.
        left_out: Path of what else is in the folder -> why it was not looked at.
    """

    path: str
    files: tuple[FileReport, ...]
    rules: tuple[RuleResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """What it comes to: the worst of the files and of the data set."""
        with_keys = all(report.with_keys for report in self.files)
        verdicts = {report.verdict for report in self.files} | {verdict_of(self.rules, with_keys=with_keys)}
        if not self.files:
            return Verdict.INCOMPLETE
        for verdict in (Verdict.VIOLATED, Verdict.INCOMPLETE):
            if verdict in verdicts:
                return verdict
        return Verdict.CONFORMS

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict is Verdict.CONFORMS

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        files = Counter(report.verdict.value for report in self.files)
        broken = [result.rule.id for result in self.rules if result.outcome is Outcome.BROKEN]
        return {"path": self.path, "verdict": self.verdict.value, "files": dict(files), "broken": broken}


def verdict_of(results: Sequence[RuleResult], *, with_keys: bool) -> Verdict:
    """Return what results come to; without keys, what needs them was not asked for."""
    if any(result.outcome is Outcome.BROKEN and result.rule.severity is Severity.VIOLATION for result in results):
        return Verdict.VIOLATED
    if with_keys and any(result.outcome is Outcome.NOT_CHECKED or result.reasons for result in results):
        return Verdict.INCOMPLETE
    return Verdict.CONFORMS


def file_document(report: FileReport) -> dict[str, Any]:
    """Return a report on a file as a document of JSON."""
    return {
        "path": report.path,
        "verdict": report.verdict.value,
        "with_keys": report.with_keys,
        "table": report.table,
        "denied": dict(report.denied),
        "rules": [_rule_document(result) for result in report.rules],
        "modules": document_of(report.modules),
        "damage": document_of(report.damage),
    }


def data_set_document(report: DataSetReport) -> dict[str, Any]:
    """Return a report on a folder as a document of JSON."""
    return {
        "path": report.path,
        "verdict": report.verdict.value,
        "files": [file_document(file) for file in report.files],
        "rules": [_rule_document(result) for result in report.rules],
        "left_out": dict(report.left_out),
    }


def _rule_document(result: RuleResult) -> dict[str, Any]:
    return {
        "id": result.rule.id,
        "section": result.rule.section,
        "severity": result.rule.severity.value,
        "outcome": result.outcome.value,
        "breaches": result.breaches,
        "findings": [_finding_document(finding) for finding in result.findings],
        "reasons": list(result.reasons),
    }


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule.id,
        "message": finding.message,
        "place": document_of(finding.place),
        "offset": finding.offset,
    }


def document_of(value: Any) -> Any:
    """Return dataclasses and what is in them as a document of JSON."""
    if isinstance(value, Finding):
        return _finding_document(value)
    if isinstance(value, ModuleType):
        return value.title
    if isinstance(value, ModulePlace):
        return {name: document_of(part) for name, part in value._asdict().items() if part is not None}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: document_of(part) for name, part in value._asdict().items()}
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: document_of(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): document_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [document_of(part) for part in value]
    return value
