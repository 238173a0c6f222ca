"""Reports and inspections as documents for other programs: what `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from parquet_keytools.conformance.report import DataSetReport, FileReport, Finding, RuleResult
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.encryption.module_place import ModulePlace


def file_document(report: FileReport) -> dict[str, Any]:
    """Return a report on a file as a document of JSON."""
    return {
        "path": report.path,
        "verdict": report.verdict.value,
        "with_keys": report.with_keys,
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
