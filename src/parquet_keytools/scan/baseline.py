"""Findings that were looked at and accepted: each for a column and a kind, with a reason, until a date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError

from parquet_keytools.config.document import UnreadableYamlError, configuration_error, did_you_mean, read_yaml
from parquet_keytools.config.loader import mistakes_of
from parquet_keytools.scan.names import Kind
from parquet_keytools.scan.scanner import Finding


def _checked_date(value: Any) -> date:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError("this is no date: write it as '2027-01-31'") from None


def _checked_kind(value: Any) -> Kind:
    if not isinstance(value, str) or value not in set(Kind):
        raise ValueError(f"there is no such kind. {did_you_mean(str(value), map(str, Kind))}".strip())
    return Kind(value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Accepted(_Strict):
    """A finding that is accepted, up to a day."""

    column: str
    kind: Annotated[Kind, BeforeValidator(_checked_kind)]
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    expires: Annotated[date, BeforeValidator(_checked_date)]


class _File(_Strict):
    accepted: tuple[Accepted, ...]


@dataclass
class Baseline:
    """The entries of a baseline, and those that accepted nothing in a scan."""

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
    mistakes = list(document.mistakes)
    try:
        entries = _File.model_validate(document.value).accepted
    except ValidationError as error:
        mistakes += mistakes_of(error, _File, document.value)
    if mistakes:
        raise configuration_error(mistakes, file=str(path), lines=document.lines)
    return Baseline(entries)
