"""What becomes of single rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from parquet_keytools.conformance.rules import Rule

if TYPE_CHECKING:
    from parquet_keytools.encryption.aad import ModulePlace


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
