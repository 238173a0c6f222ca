"""Findings that were looked at and accepted: each for a column and a kind, with a reason, until a date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from parquet_keytools.config.document import (
    Mistake,
    UnreadableYamlError,
    YamlDocument,
    configuration_error,
    did_you_mean,
    read_yaml,
)
from parquet_keytools.scan.names import Kind
from parquet_keytools.scan.scanner import Finding


@dataclass(frozen=True)
class Accepted:
    """An entry of a baseline.

    Attributes:
        column: Dotted path of the column.
        kind: The kind of finding.
        reason: Why it is accepted.
        expires: The last day on which it is.
    """

    column: str
    kind: Kind
    reason: str
    expires: date


@dataclass
class Baseline:
    """The entries of a baseline, and what became of them in a scan.

    Attributes:
        entries: All of them.
        expired: Entries that no longer accept anything.
        unmatched: Entries that match no finding.
    """

    entries: Sequence[Accepted] = ()
    expired: list[Accepted] = field(default_factory=list)
    unmatched: list[Accepted] = field(default_factory=list)

    def divide(self, findings: Sequence[Finding]) -> tuple[list[Finding], list[tuple[Finding, Accepted]]]:
        """Return the findings that count, and the accepted ones, each with its entry."""
        today = datetime.now(UTC).date()
        keys = {(finding.column, finding.kind) for finding in findings}
        self.expired = [entry for entry in self.entries if entry.expires < today]
        self.unmatched = [entry for entry in self.entries if (entry.column, entry.kind) not in keys]
        valid = {(entry.column, entry.kind): entry for entry in self.entries if entry.expires >= today}
        accepted = [(f, valid[f.column, f.kind]) for f in findings if (f.column, f.kind) in valid]
        return [f for f in findings if (f.column, f.kind) not in valid], accepted


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from a YAML or JSON file.

    Raises:
        ConfigurationError: It has mistakes; the message names each line.
        OSError: It cannot be read.
    """
    try:
        document = read_yaml(path.read_bytes())
    except UnreadableYamlError as error:
        raise configuration_error([error.mistake], file=str(path), lines={}) from None
    entries, mistakes = _entries(document)
    if mistakes:
        raise configuration_error(mistakes, file=str(path), lines=document.lines)
    return Baseline(entries)


_FIELDS = ("column", "kind", "reason", "expires")


def _entries(document: YamlDocument) -> tuple[list[Accepted], list[Mistake]]:
    mistakes = list(document.mistakes)
    listed = document.value.get("accepted") if isinstance(document.value, dict) else None
    if not isinstance(listed, list) or len(document.value) != 1:
        hint = f"Each entry has {', '.join(_FIELDS)}."
        return [], [*mistakes, Mistake((), "a baseline has one list, `accepted`.", hint)]
    entries = []
    for position, entry in enumerate(listed):
        found = list(_mistakes_of(entry, position))
        mistakes += found
        if not found:
            expires = date.fromisoformat(entry["expires"])
            entries.append(Accepted(entry["column"], Kind(entry["kind"]), entry["reason"], expires))
    return entries, mistakes


def _mistakes_of(entry: Any, position: int) -> list[Mistake]:
    path = ("accepted", position)
    if not isinstance(entry, dict):
        return [Mistake(path, f"an entry has {', '.join(_FIELDS)}.")]
    found = [
        Mistake((*path, name), "there is no such field.", did_you_mean(name, _FIELDS))
        for name in entry.keys() - {*_FIELDS}
    ]
    for name in _FIELDS:
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            found.append(Mistake((*path, name) if name in entry else path, f"`{name}` is missing, or is no text."))
    if isinstance(entry.get("kind"), str) and entry["kind"] not in set(map(str, Kind)):
        found.append(
            Mistake((*path, "kind"), "there is no such kind.", did_you_mean(entry["kind"], map(str, Kind)))
        )
    if isinstance(entry.get("expires"), str):
        try:
            date.fromisoformat(entry["expires"])
        except ValueError:
            found.append(Mistake((*path, "expires"), "this is no date.", "Write it as '2027-01-31'."))
    return found
