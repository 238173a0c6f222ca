"""The rules that files and data sets are checked against, and what becomes of each while a file is verified.

The rules are those of the tables in `rules.md`.
"""

from __future__ import annotations

import pkgutil
import re
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from parquet_keytools.encryption.aad import ModulePlace
from parquet_keytools.runtime.presentation import printable


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
        severity: How bad it is when it is broken.
        scope: What has to be readable to check it.
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
    text = (pkgutil.get_data(__package__, "rules.md") or b"").decode()
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


MAX_FINDINGS = 100
"""How many findings are kept for each rule: a hostile file can break one at every byte."""

_MAX_REASONS = 20


class RuleBook:
    """What became of the rules of some scopes so far; may be written to by any number of threads.

    Attributes:
        breaches: How many breaches were noted, of all rules.
    """

    def __init__(self, scopes: Collection[Scope]) -> None:
        self._rules = tuple(rule for rule in RULES if rule.scope in scopes)
        self._checked: set[str] = set()
        self._findings: dict[str, list[Finding]] = {}
        self._breaches: dict[str, int] = {}
        self._reasons: dict[str, dict[str, None]] = {}
        self._lock = threading.Lock()
        self.breaches = 0

    def holds(self, *rule_ids: str) -> None:
        """Note that rules were checked and hold in one place."""
        self._checked.update(rule_ids)

    def broken(
        self, rule_id: str, message: str, place: ModulePlace | None = None, offset: int | None = None
    ) -> None:
        """Note that a rule is broken."""
        with self._lock:
            kept = self._findings.setdefault(rule_id, [])
            if len(kept) < MAX_FINDINGS:
                kept.append(Finding(RULES_BY_ID[rule_id], printable(message), place, offset))
            self._breaches[rule_id] = self._breaches.get(rule_id, 0) + 1
            self.breaches += 1

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
        with self._lock:
            reasons = self._reasons.setdefault(rule_id, {})
            if len(reasons) < _MAX_REASONS:
                reasons[printable(reason)] = None

    def scope_not_checked(self, scope: Scope, reason: str) -> None:
        """Note that what the rules of a scope are about could not be read, or not everywhere."""
        for rule in self._rules:
            if rule.scope is scope:
                self.not_checked(rule.id, reason)

    def results(self) -> tuple[RuleResult, ...]:
        """Return what became of each rule."""
        return tuple(self._result(rule.id) for rule in self._rules)

    def _result(self, rule_id: str) -> RuleResult:
        findings = sorted(self._findings.get(rule_id, ()), key=lambda finding: finding.offset or 0)
        reasons = tuple(self._reasons.get(rule_id, ()))
        if findings:
            outcome = Outcome.BROKEN
        elif reasons:
            outcome = Outcome.NOT_CHECKED
        elif rule_id in self._checked:
            outcome = Outcome.HOLDS
        else:
            outcome = Outcome.NOT_APPLICABLE
        return RuleResult(RULES_BY_ID[rule_id], outcome, tuple(findings), self._breaches.get(rule_id, 0), reasons)
