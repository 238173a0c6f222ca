"""Every file of the vector kit breaks exactly its rule, and the good files conform."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from vector_kit.breaches import breaking_vectors
from vector_kit.plain_file import TABLE
from vector_kit.vector import MASTER_KEYS, Vector
from vector_kit.write_kit import all_vectors, data_keys, manifest, place_vector, write_kit

from parquet_keytools import Keytools
from parquet_keytools.conformance import file_keys
from parquet_keytools.conformance.report import (
    RULES,
    DataSetReport,
    FileReport,
    Outcome,
    RuleResult,
    Severity,
    Verdict,
)
from parquet_keytools.encryption.module_cipher import MAX_INVOCATIONS


def kit_keytools(expected: dict[str, Any]) -> Keytools:
    """Return a Keytools with the keys of the kit, and the expected result of one vector."""

    def encoded(keys: dict[str, bytes]) -> dict[str, str]:
        return {name: base64.b64encode(key).decode() for name, key in keys.items()}

    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": encoded(MASTER_KEYS)},
        "data_keys": encoded(data_keys()),
    }
    if "table" in expected:
        document["tables"] = {"table": expected["table"]}
    reading = {name: expected[name] for name in ("keys_without_metadata", "plaintext_files") if name in expected}
    if reading:
        document["reading"] = reading
    return Keytools.from_mapping(document)


def verified(vector: Vector, path: Path) -> FileReport | DataSetReport:
    """Verify a vector as its entry in the manifest says."""
    expected = dict(vector.expected)
    limit = expected.get("invocation_limit", MAX_INVOCATIONS)
    with kit_keytools(expected) as keytools, patch.object(file_keys, "MAX_INVOCATIONS", limit):
        if vector.is_folder:
            return keytools.verify_folder(path, part_count=expected.get("parts"))
        return keytools.verify_file(path, aad_prefix=expected.get("aad_prefix"))


def all_results(report: FileReport | DataSetReport) -> list[RuleResult]:
    results = list(report.rules)
    if isinstance(report, DataSetReport):
        results += [result for file in report.files for result in file.rules]
    return results


def broken(report: FileReport | DataSetReport) -> set[str]:
    return {result.rule.id for result in all_results(report) if result.outcome is Outcome.BROKEN}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    write_kit(folder)
    return folder


@pytest.mark.parametrize("vector", list(all_vectors()), ids=lambda vector: vector.name)
def test_exactly_its_rules_are_reported(vector: Vector, kit: Path) -> None:
    report = verified(vector, kit / vector.name)
    details = [
        (finding.rule.id, finding.where, finding.message)
        for result in all_results(report)
        for finding in result.findings
    ]
    assert broken(report) == vector.broken, details
    severities = {rule.severity for rule in RULES if rule.id in vector.broken}
    if Severity.VIOLATION in severities:
        assert report.verdict is Verdict.VIOLATED
    else:
        expected = Verdict.WEAK if Severity.WEAKNESS in severities else Verdict.CONFORMS
        assert report.verdict is expected, [
            (result.rule.id, result.reasons) for result in all_results(report) if result.reasons
        ]


def test_there_is_a_breaking_vector_for_each_rule() -> None:
    assert [vector.rule for vector in breaking_vectors()] == [rule.id for rule in RULES if rule.id != "file-list"]


def test_good_files_check_every_rule_somewhere(kit: Path) -> None:
    """A rule that no good file checks could be one that never holds."""
    seen: set[str] = set()
    for vector in all_vectors():
        if vector.name.startswith("good/"):
            report = verified(vector, kit / vector.name)
            seen |= {result.rule.id for result in all_results(report) if result.outcome is Outcome.HOLDS}
    # No configuration belongs to the kit; see below.
    with_configuration = {"file-list", *(rule.id for rule in RULES if rule.id.startswith("wanted-"))}
    assert {rule.id for rule in RULES} - seen == with_configuration


@pytest.mark.parametrize(
    ("name", "table"),
    [
        (
            "column-keys",
            {"footer_key": "kf", "column_keys": {"k1": ["id"], "k2": ["name"]}, "unlisted_columns": "plaintext"},
        ),
        (
            "double-wrapping",
            {
                "footer_key": "footer",
                "column_keys": {"column": ["id"]},
                "unlisted_columns": "plaintext",
                "data_key_length_bits": 256,
            },
        ),
    ],
)
def test_a_file_that_follows_its_table_conforms(name: str, table: dict[str, Any], tmp_path: Path) -> None:
    good = next(vector for vector in all_vectors() if vector.name == f"good/{name}.parquet")
    with kit_keytools({"table": {**table, "unlisted_columns": "footer_key"}}) as keytools:
        report = keytools.verify_file(place_vector(good, tmp_path))
    assert report.conforms
    held = {result.rule.id for result in report.rules if result.outcome is Outcome.HOLDS}
    # The length of a data key is its owner's choice.
    others = {"wanted-key-length"} if name == "column-keys" else set()
    assert {rule.id for rule in RULES if rule.id.startswith("wanted-")} - others <= held


def test_an_index_page_has_no_ordinal(tmp_path: Path) -> None:
    """The specification has no such module, so `verify` stops; a reader that continues counts only data pages."""
    vector = next(vector for vector in all_vectors() if vector.name == "broken/index-page.parquet")
    plain = tmp_path / "plain.parquet"
    with kit_keytools({}) as keytools:
        keytools.decrypt_file(place_vector(vector, tmp_path), plain)
    assert pq.read_table(plain).equals(TABLE)


def test_the_kit_is_written_and_the_same_each_time(kit: Path) -> None:
    for entry in manifest()["vectors"]:
        assert (kit / entry["name"]).exists()
    for vector in all_vectors():
        path = kit / vector.name
        # It takes a second.
        contents = vector.contents() if vector.rule != "ordinal-limit" else {}
        for name, content in contents.items():
            assert ((path if vector.is_folder else path.parent) / name).read_bytes() == content
    assert (kit / "manifest.json").exists()
    assert "good ones for each feature" in (kit / "README.md").read_text(encoding="utf-8")
