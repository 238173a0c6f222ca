"""The rules that files and data sets are checked against: one table, from which the documentation is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from parquet_keytools.conformance import rules_of_columns, rules_of_footers


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


def _rules(severity: Severity, scope: Scope, rows: tuple[tuple[str, str, str, str], ...]) -> tuple[Rule, ...]:
    return tuple(Rule(rule_id, section, severity, scope, holds, gain) for rule_id, section, holds, gain in rows)


RULES: tuple[Rule, ...] = (
    *_rules(Severity.VIOLATION, Scope.ENVELOPE, rules_of_footers.ENVELOPE_VIOLATIONS),
    *_rules(Severity.WEAKNESS, Scope.ENVELOPE, rules_of_footers.ENVELOPE_WEAKNESSES),
    *_rules(Severity.NOTE, Scope.ENVELOPE, rules_of_footers.ENVELOPE_NOTES),
    *_rules(Severity.VIOLATION, Scope.FOOTER, rules_of_footers.FOOTER_VIOLATIONS),
    *_rules(Severity.WEAKNESS, Scope.FOOTER, rules_of_footers.FOOTER_WEAKNESSES),
    *_rules(Severity.NOTE, Scope.FOOTER, rules_of_footers.FOOTER_NOTES),
    *_rules(Severity.VIOLATION, Scope.COLUMN, rules_of_columns.COLUMN_VIOLATIONS),
    *_rules(Severity.WEAKNESS, Scope.COLUMN, rules_of_columns.COLUMN_WEAKNESSES),
    *_rules(Severity.NOTE, Scope.COLUMN, rules_of_columns.COLUMN_NOTES),
    *_rules(Severity.VIOLATION, Scope.CONFIGURATION, rules_of_columns.CONFIGURATION_VIOLATIONS),
    *_rules(Severity.VIOLATION, Scope.DATA_SET, rules_of_columns.DATA_SET_VIOLATIONS),
    *_rules(Severity.WEAKNESS, Scope.DATA_SET, rules_of_columns.DATA_SET_WEAKNESSES),
    *_rules(Severity.NOTE, Scope.DATA_SET, rules_of_columns.DATA_SET_NOTES),
)

RULES_BY_ID = {rule.id: rule for rule in RULES}

FILE_SCOPES = (Scope.ENVELOPE, Scope.FOOTER, Scope.COLUMN, Scope.CONFIGURATION)
"""The scopes of rules that are about one file."""
