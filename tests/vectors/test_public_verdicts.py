"""All public files get the right verdict."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools import Keytools
from parquet_keytools.conformance.report import RULES_BY_ID, FileReport, Outcome, Severity, Verdict
from parquet_keytools.conformance.verification import verify_file
from parquet_keytools.storage.locations import FileLocation

ENCRYPTED = {
    "encrypt_columns_and_footer.parquet.encrypted": {"no-prefix"},
    "encrypt_columns_and_footer_aad.parquet.encrypted": set[str](),
    "encrypt_columns_and_footer_ctr.parquet.encrypted": {"no-prefix", "ctr"},
    "encrypt_columns_plaintext_footer.parquet.encrypted": {"no-prefix", "names-visible"},
    "uniform_encryption.parquet.encrypted": {"no-prefix"},
    "external_key_material_java.parquet.encrypted": {"no-prefix", "padding"},
    "aes256/encrypt_columns_and_footer.parquet.encrypted": {"no-prefix", "padding"},
}
"""File -> broken rules; none of them is a violation. The last two are parquet-java's."""

GAPS = {
    "alltypes_dictionary.parquet",
    "alltypes_plain.parquet",
    "alltypes_plain.snappy.parquet",
    "byte_array_decimal.parquet",
    "byte_stream_split.zstd.parquet",
    "column_chunk_key_value_metadata.parquet",
    "concatenated_gzip_members.parquet",
    "data_index_bloom_encoding_with_length.parquet",
    "delta_length_byte_array.parquet",
    "float16_nonzeros_and_nans.parquet",
    "list_columns.parquet",
    "lz4_raw_compressed.parquet",
    "null_list.parquet",
    "sort_columns.parquet",
}
"""Plaintext files whose writers leave the metadata of a column behind its chunk."""


def keytools_for(name: str) -> Keytools:
    keys = {b"kf": b"0123456789012345", b"kc1": b"1234567890123450", b"kc2": b"1234567890123451"}
    if name.startswith("aes256/"):
        keys = {b"kc%d" % n: b"1234567890123456789012345678901%d" % (n + 1) for n in range(1, 9)}
        keys[b"kf"] = b"01234567890123456789012345678901"
    encoded = {name.decode(): base64.b64encode(key).decode() for name, key in keys.items()}
    document: dict[str, Any] = {"version": 1, "reading": {"plaintext_files": "allow"}}
    if name.startswith("external"):
        document["kms"] = {"type": "in_memory", "keys": encoded}
    else:
        document["data_keys"] = encoded
    return Keytools.from_mapping(document)


def broken(report: FileReport) -> set[str]:
    return {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}


@pytest.mark.parametrize("name", ENCRYPTED)
def test_encrypted_files_conform(parquet_test_data: Path, name: str) -> None:
    report = keytools_for(name).verify_file(parquet_test_data / name)
    assert broken(report) == ENCRYPTED[name]
    is_weak = any(RULES_BY_ID[rule_id].severity is Severity.WEAKNESS for rule_id in ENCRYPTED[name])
    expected = Verdict.WEAK if is_weak else Verdict.CONFORMS
    assert report.verdict is expected, [(r.rule.id, r.reasons) for r in report.rules if r.reasons]
    assert report.modules["authentic"]
    assert "broken" not in report.modules


@pytest.mark.parametrize("name", ENCRYPTED)
def test_without_keys_nothing_is_authenticated(parquet_test_data: Path, name: str) -> None:
    report = verify_file(None, FileLocation.resolve(parquet_test_data / name))
    assert report.conforms
    assert not report.with_keys
    outcomes = {result.rule.id: result.outcome for result in report.rules}
    assert outcomes["data-page-authentic"] is Outcome.NOT_CHECKED
    assert outcomes["nonce-reuse"] is Outcome.NOT_CHECKED
    authenticity = [outcome for rule, outcome in outcomes.items() if rule.endswith("-authentic")]
    assert Outcome.HOLDS not in [*authenticity, outcomes["signature-valid"]]


@pytest.mark.parametrize("name", [name for name in ENCRYPTED if not name.startswith("external")])
def test_wrong_keys_are_not_a_pass(parquet_test_data: Path, name: str) -> None:
    length = 32 if name.startswith("aes256/") else 16
    wrong = {
        f"k{kind}": base64.b64encode(b"\1" * length).decode() for kind in ("f", *(f"c{n}" for n in range(1, 9)))
    }
    report = Keytools.from_mapping({"version": 1, "data_keys": wrong}).verify_file(parquet_test_data / name)
    assert report.verdict is Verdict.VIOLATED
    assert broken(report) & {"footer-authentic", "signature-valid"}


def plain_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def test_plaintext_files_are_not_protected(parquet_test_data: Path) -> None:
    files = plain_files(parquet_test_data)
    assert len(files) > 30
    for path in files:
        report = verify_file(None, FileLocation.resolve(path))
        assert broken(report) == {"encrypted"}, path.name
        assert report.verdict is Verdict.VIOLATED


def test_plaintext_files_hold_together(parquet_test_data: Path) -> None:
    for path in plain_files(parquet_test_data):
        report = keytools_for(path.name).verify_file(path)
        assert broken(report) == ({"layout-gap"} if path.name in GAPS else set()), path.name
        assert report.verdict is Verdict.CONFORMS
