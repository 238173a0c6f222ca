"""The rules that files and data sets are checked against: those of the table in `rules.md`."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
