"""The rules that files and data sets are checked against, and what a verification found.

The rules are in the tables of `rules.md`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from importlib import resources
from typing import Any

from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.runtime.presentation import Summarised, printable


class Severity(Enum):
    """How bad it is when a rule is broken."""

    VIOLATION = "violation"
    """The file breaks the specification, or is not what was asked for."""
    WEAKNESS = "weakness"
    """The file is legal and protects less than it could."""
    NOTE = "note"
    """Legal and not weak, and still worth knowing."""


class Scope(Enum):
    """What has to be readable before a rule can be checked."""

    ENVELOPE = "envelope"
    """What is visible without any key."""
    FOOTER = "footer"
    """The footer: with an encrypted one, its key."""
    COLUMN = "column"
    """The modules of columns: the keys of these."""
    CONFIGURATION = "configuration"
    """What a table of the configuration asks for; and the footer."""
    DATA_SET = "data set"
    """All files of a folder together."""


@dataclass(frozen=True)
class Rule:
    """One thing that must hold.

    Attributes:
        id: Short and lasting name.
        section: Of the encryption specification, or what else says so.
        holds: What must hold.
        gain: What an attacker gains, or who suffers, where it does not.
    """

    id: str
    section: str
    severity: Severity
    scope: Scope
    holds: str
    gain: str

    def __reduce__(self) -> tuple[Any, ...]:
        # Reports of thousands of files come from worker processes.
        return rule_named, (self.id,)


_ROW = re.compile(r"\| `(\S+)` \((\w+)\) \| (.+?) \| (.+?) \| (.+?) \|")


def _table() -> Iterator[Rule]:
    """Read `rules.md`: a heading for each scope, and a row for each rule."""
    text = resources.files(__package__).joinpath("rules.md").read_text("utf-8")
    for part, scope in zip(text.split("\n## ")[1:], Scope, strict=True):
        for rule_id, severity, section, holds, gain in _ROW.findall(part):
            yield Rule(rule_id, section, Severity(severity), scope, holds, gain)


RULES: tuple[Rule, ...] = tuple(_table())

RULES_BY_ID = {rule.id: rule for rule in RULES}


def rule_named(rule_id: str) -> Rule:
    """Return a rule by its id."""
    return RULES_BY_ID[rule_id]


FILE_SCOPES = (Scope.ENVELOPE, Scope.FOOTER, Scope.COLUMN, Scope.CONFIGURATION)
"""The scopes of rules that are about one file."""


# --- What becomes of them ---


class Outcome(Enum):
    """What became of a rule, or of a module."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_CHECKED = "not checked"
    NOT_APPLICABLE = "not applicable"
    """There is nothing in the file that the rule is about."""


@dataclass(frozen=True)
class Finding:
    """One breach of a rule.

    Attributes:
        rule: The rule.
        message: What was found.
        place: The module concerned, or the chunk of it; None where no single one is.
        offset: Where it begins, in bytes from the start of the file, or None.
    """

    rule: Rule
    message: str
    place: ModulePlace | None = None
    offset: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {"rule": self.rule.id} | _document(self, "message", "place", "offset")

    @property
    def where(self) -> str:
        """The place for people."""
        place, parts = self.place, []
        if place is not None:
            parts.append(place.module_type.title)
            if place.row_group_ordinal is not None:
                parts.append(f"row group {place.row_group_ordinal}")
            if place.column_ordinal is not None:
                parts.append(f"column {place.column_ordinal}")
            if place.page_ordinal is not None:
                parts.append(f"page {place.page_ordinal}")
        if self.offset is not None:
            parts.append(f"byte {self.offset}")
        return ", ".join(parts)


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule.

    Attributes:
        rule: The rule.
        outcome: BROKEN if it has findings, whatever could not be checked beside.
        findings: The first breaches found; never more than a hundred.
        breaches: How many were found in all.
        reasons: Why it could not be checked, or not everywhere.
    """

    rule: Rule
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    breaches: int = 0
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        rule = _document(self.rule, "id", "section", "severity")
        return rule | _document(self, "outcome", "breaches", "findings", "reasons")


@cache
def _authenticity_rule(module_type: ModuleType) -> str:
    return f"{module_type.name.lower().replace('_meta_data', '_metadata').replace('_', '-')}-authentic"


MAX_FINDINGS = 100
"""How many findings are kept for each rule: a hostile file can break one at every byte."""

_MAX_REASONS = 20


class RuleBook:
    """What became of the rules of some scopes so far, and of modules.

    Attributes:
        modules: How many modules are authentic or broken, or unauthenticated: pages with AES_GCM_CTR_V1 cannot
            show by themselves whether they were altered.
    """

    def __init__(self, scopes: Collection[Scope]) -> None:
        self._rules = tuple(rule for rule in RULES if rule.scope in scopes)
        self._checked: set[str] = set()
        self._findings: dict[str, list[Finding]] = {}
        self._breaches: dict[str, int] = {}
        self._reasons: dict[str, dict[str, None]] = {}
        self.modules: Counter[str] = Counter()

    def holds(self, *rule_ids: str) -> None:
        """Note that rules were checked and hold in one place."""
        self._checked.update(rule_ids)

    def broken(
        self, rule_id: str, message: str, place: ModulePlace | None = None, offset: int | None = None
    ) -> None:
        """Note that a rule is broken."""
        kept = self._findings.setdefault(rule_id, [])
        if len(kept) < MAX_FINDINGS:
            kept.append(Finding(RULES_BY_ID[rule_id], printable(message), place, offset))
        self._breaches[rule_id] = self._breaches.get(rule_id, 0) + 1

    def is_broken(self, rule_id: str) -> bool:
        """Whether a breach of a rule was noted."""
        return rule_id in self._findings

    def check(
        self, rule_id: str, holds: bool, message: str, place: ModulePlace | None = None, offset: int | None = None
    ) -> bool:
        """Note whether a rule holds in one place, and return it."""
        if holds:
            self._checked.add(rule_id)
        else:
            self.broken(rule_id, message, place, offset)
        return holds

    def not_checked(self, rule_id: str, reason: str) -> None:
        """Note that a rule could not be checked, or not everywhere."""
        reasons = self._reasons.setdefault(rule_id, {})
        if len(reasons) < _MAX_REASONS:
            reasons[printable(reason)] = None

    def authentic(self, module_type: ModuleType) -> None:
        """Count a module that authenticates."""
        self._checked.update((_authenticity_rule(module_type), "module-length"))
        self.modules["authentic"] += 1

    def not_authentic(
        self,
        place: ModulePlace,
        offset: int | None,
        rule_id: str = "",
        message: str = "the module does not authenticate.",
    ) -> None:
        """Count a module that does not authenticate, and note the rule that it breaks."""
        self.modules["broken"] += 1
        self.broken(rule_id or _authenticity_rule(place.module_type), message, place, offset)

    def scope_not_checked(self, scope: Scope, reason: str) -> None:
        """Note that what the rules of a scope are about could not be read, or not everywhere."""
        for rule in self._rules:
            if rule.scope is scope:
                self.not_checked(rule.id, reason)

    def results(self) -> tuple[RuleResult, ...]:
        """Return what became of each rule."""
        results = []
        for rule in self._rules:
            findings = sorted(self._findings.get(rule.id, ()), key=lambda finding: finding.offset or 0)
            reasons = tuple(self._reasons.get(rule.id, ()))
            outcome = Outcome.HOLDS if rule.id in self._checked else Outcome.NOT_APPLICABLE
            if findings:
                outcome = Outcome.BROKEN
            elif reasons:
                outcome = Outcome.NOT_CHECKED
            results.append(RuleResult(rule, outcome, tuple(findings), self._breaches.get(rule.id, 0), reasons))
        return tuple(results)


# --- What the whole comes to ---


class Verdict(Enum):
    """What the whole comes to."""

    CONFORMS = "conforms"
    WEAK = "conforms, with weaknesses"
    """Only rules whose breach is a weakness are broken."""
    VIOLATED = "does not conform"
    """A rule whose breach is a violation is broken."""
    INCOMPLETE = "incomplete"
    """Nothing is violated as far as could be seen, and not all that was asked for could be checked."""

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self in (Verdict.CONFORMS, Verdict.WEAK)


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
        modules: `authentic`, `broken`, `unauthenticated` (pages with AES_GCM_CTR_V1) -> number of modules.
        damage: What is lost; None where no keys are given, some are unavailable, or the AAD prefix is missing,
            and of a plaintext file that is not wanted.
        denied: Dotted column path, or `footer` -> why its key is unavailable. A column of that name is
            `column footer`.
        table: The table that it was compared with; None where there is none, or none of several was named.
        asked_for: Ids of rules that must be answered even without keys: the caller asked for them.
        kms_is_unavailable: Whether keys are missing because the KMS could not be reached.
        accepted: Ids of weaknesses that the table accepts: `no-prefix` if it sets no `aad_prefix`.
    """

    path: str
    with_keys: bool
    rules: tuple[RuleResult, ...]
    modules: Mapping[str, int] = field(default_factory=dict)
    damage: Damage | None = None
    denied: Mapping[str, str] = field(default_factory=dict)
    asked_for: frozenset[str] = frozenset()
    table: str | None = None
    kms_is_unavailable: bool = False
    accepted: frozenset[str] = frozenset()

    @cached_property
    def verdict(self) -> Verdict:
        """What it comes to."""
        verdict = verdict_of(self.rules, with_keys=self.with_keys)
        outcomes = {self.result(rule_id).outcome for rule_id in self.asked_for}
        if verdict.conforms and not outcomes <= {Outcome.HOLDS, Outcome.BROKEN}:
            return Verdict.INCOMPLETE
        return verdict

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict.conforms

    @property
    def conforms_strictly(self) -> bool:
        """Whether it conforms without weaknesses, except for weaknesses that its table accepts."""
        others = [result for result in self.rules if result.rule.id not in self.accepted]
        return self.conforms and verdict_of(others, with_keys=self.with_keys) is Verdict.CONFORMS

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

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return _document(self, "path", "verdict", "with_keys", "table", "denied", "rules", "modules", "damage")


@dataclass(frozen=True, repr=False)
class DataSetReport(Summarised):
    """What was found in the files of a folder.

    Attributes:
        path: The folder.
        files: What was found in each.
        rules: What became of each rule of a data set.
        skipped: Path of what else is in the folder -> why it was not looked at.
        not_attempted: Paths of the files that were not checked because the KMS could not be reached.
        tables_lack_kms: Whether tables of Iceberg were not checked because the KMS could not be reached.
    """

    path: str
    files: tuple[FileReport, ...]
    rules: tuple[RuleResult, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    not_attempted: tuple[str, ...] = ()
    tables_lack_kms: bool = False

    @property
    def kms_is_unavailable(self) -> bool:
        """Whether keys are missing because the KMS could not be reached."""
        return self.tables_lack_kms or any(report.kms_is_unavailable for report in self.files)

    @property
    def verdict(self) -> Verdict:
        """What it comes to: the worst of the files and of the data set."""
        with_keys = all(report.with_keys for report in self.files)
        if not self.files:
            return Verdict.INCOMPLETE
        verdicts = [*(report.verdict for report in self.files), verdict_of(self.rules, with_keys=with_keys)]
        # Whether a file is plaintext shows without keys, if the file can be read.
        if any(result.rule.id == "plaintext-skipped" and result.reasons for result in self.rules):
            verdicts.append(Verdict.INCOMPLETE)
        return worst_of(verdicts)

    @property
    def conforms(self) -> bool:
        """Whether all that was asked for was checked, and no violation was found."""
        return self.verdict.conforms

    @property
    def conforms_strictly(self) -> bool:
        """Whether the files and the data set conform without weaknesses; see `FileReport.conforms_strictly`."""
        weak = verdict_of(self.rules, with_keys=False) is Verdict.WEAK
        return self.conforms and not weak and all(report.conforms_strictly for report in self.files)

    def summary(self) -> Mapping[str, object]:
        """Return the facts in short."""
        files = Counter(report.verdict.value for report in self.files)
        broken = [result.rule.id for result in self.rules if result.outcome is Outcome.BROKEN]
        return {"path": self.path, "verdict": self.verdict.value, "files": dict(files), "broken": broken}

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return _document(self, "path", "verdict", "files", "rules", "skipped", "not_attempted")


def verdict_of(results: Sequence[RuleResult], *, with_keys: bool) -> Verdict:
    """Return what results come to; without keys, what needs them was not asked for."""
    broken = {result.rule.severity for result in results if result.outcome is Outcome.BROKEN}
    if Severity.VIOLATION in broken:
        return Verdict.VIOLATED
    if with_keys and any(result.outcome is Outcome.NOT_CHECKED or result.reasons for result in results):
        return Verdict.INCOMPLETE
    return Verdict.WEAK if Severity.WEAKNESS in broken else Verdict.CONFORMS


def worst_of(verdicts: Collection[Verdict]) -> Verdict:
    """Return the worst verdict; `CONFORMS` if there is none."""
    worst = (Verdict.VIOLATED, Verdict.INCOMPLETE, Verdict.WEAK)
    return next((verdict for verdict in worst if verdict in verdicts), Verdict.CONFORMS)


def _document(value: object, *names: str) -> dict[str, Any]:
    return {name: document_of(getattr(value, name)) for name in names}


def document_of(value: Any) -> Any:
    """Return dataclasses, and what is in them, as a JSON document."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, ModuleType):
        return value.title
    if isinstance(value, ModulePlace):
        return {name: document_of(part) for name, part in value._asdict().items() if part is not None}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: document_of(part) for name, part in value._asdict().items()}
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return _document(value, *(part.name for part in fields(value)))
    if isinstance(value, Mapping):
        return {str(key): document_of(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [document_of(part) for part in value]
    return value
