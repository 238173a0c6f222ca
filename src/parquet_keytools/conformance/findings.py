"""What becomes of single rules, and the book in which that is noted while a file is verified."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from parquet_keytools.conformance.rules import RULES, RULES_BY_ID, Rule, Scope
from parquet_keytools.encryption.aad import ModulePlace
from parquet_keytools.storage.printable import printable


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
