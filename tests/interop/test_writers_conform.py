"""The files of all writers are verified; each deviation from the specification is attributed to its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import engines.ours as ours
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from engines import policy as policies
from engines.ours import MODULE_PATH
from engines.plain_pyarrow import FewLinesKms
from engines.policy import AAD_PREFIX, EncryptedFile, Policy
from matrix import DUCKDB, ON_SPARK, POLARS, PYARROW, ROWS, Matrix
from pyarrow import fs as pafs

from parquet_keytools.conformance.report import RULES_BY_ID, Outcome, Severity, Verdict


@dataclass(frozen=True)
class Difference:
    """A writer's deviation from the rules.

    Attributes:
        whose: The engine.
        rule: The rule.
        sentence: What the writer does.
        applies: Whether a file shows it.
    """

    whose: str
    rule: str
    sentence: str
    applies: Callable[[EncryptedFile], bool]


DIFFERENCES = (
    Difference(
        "pyarrow",
        "metadata-stripped",
        "leaves size statistics of encrypted columns, with numbers of nulls, in plaintext footers",
        lambda file: file.writer == PYARROW and file.policy.plaintext_footer,
    ),
    Difference(
        "parquet-java",
        "metadata-stripped",
        "leaves size statistics and Bloom filter offsets of encrypted columns in plaintext footers",
        lambda file: file.writer in ON_SPARK and file.policy.plaintext_footer,
    ),
    Difference(
        "parquet-java",
        "page-v2-whole",
        "leaves the levels of V2 data pages in plaintext, before the module",
        lambda file: file.writer in ON_SPARK and file.policy.data_page_version == 2,
    ),
    Difference(
        "parquet-java",
        "padding",
        "encrypts the unused rest of its buffer after each Thrift structure",
        lambda file: file.writer in ON_SPARK,
    ),
    Difference(
        "Polars",
        "layout-gap",
        "writes the metadata of plaintext columns, statistics included, behind their chunks, in plaintext also "
        "where the footer is encrypted",
        lambda file: file.writer == POLARS and file.policy.column_keys,
    ),
    Difference(
        "DuckDB",
        "file-unique",
        "writes no aad_file_unique, and encrypts without an AAD",
        lambda file: file.writer == DUCKDB,
    ),
)

NATURE = (
    ("no-prefix", lambda policy: policy.aad_prefix == "none"),
    ("ctr", lambda policy: policy.algorithm == "AES_GCM_CTR_V1"),
    ("names-visible", lambda policy: policy.plaintext_footer),
)
"""Weaknesses that the policy itself causes."""


def check(matrix: Matrix, writer: str, policy: Policy) -> None:
    file = matrix.file(writer, policy)
    prefix = None if policy.aad_prefix == "none" else AAD_PREFIX
    report = ours.keytools_for(file).verify_file(file.path, aad_prefix=prefix)
    expected = {rule for rule, applies in NATURE if applies(policy)}
    expected |= {difference.rule for difference in DIFFERENCES if difference.applies(file)}
    broken = {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}
    assert broken == expected, [(finding.rule.id, finding.where, finding.message) for finding in report.findings]
    severities = {RULES_BY_ID[rule].severity for rule in expected}
    if Severity.VIOLATION in severities:
        assert report.verdict is Verdict.VIOLATED
    else:
        verdict = Verdict.WEAK if Severity.WEAKNESS in severities else Verdict.CONFORMS
        assert report.verdict is verdict, [(r.rule.id, r.reasons) for r in report.rules if r.reasons]
        assert report.damage is not None
        assert not report.damage.losses


@pytest.mark.parametrize(
    ("writer", "policy"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].title}") for row in ROWS if row[0] not in ON_SPARK],
)
def test_without_spark(matrix: Matrix, writer: str, policy: Policy) -> None:
    check(matrix, writer, policy)


@pytest.mark.parametrize(
    ("writer", "policy"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].title}") for row in ROWS if row[0] in ON_SPARK],
)
def test_spark(matrix_with_spark: Matrix, writer: str, policy: Policy) -> None:
    check(matrix_with_spark, writer, policy)


@pytest.mark.parametrize(
    "policy",
    [policies.COLUMN_KEYS, policies.PLAINTEXT_FOOTER, policies.CTR, policies.V2_PAGES],
    ids=lambda p: p.title,
)
@pytest.mark.parametrize("writer", [MODULE_PATH, PYARROW])
def test_pyarrow_says_the_same(matrix: Matrix, writer: str, policy: Policy) -> None:
    file = matrix.file(writer, policy)
    shown = ours.keytools_for(file).inspect_file(file.path)
    properties = pe.CryptoFactory(FewLinesKms).file_decryption_properties(
        pe.KmsConnectionConfig(), pe.DecryptionConfiguration(), str(file.path), pafs.LocalFileSystem()
    )
    metadata = pq.read_metadata(file.path, decryption_properties=properties)
    assert (shown.num_rows, shown.created_by) == (metadata.num_rows, metadata.created_by)
    assert len(shown.row_groups) == metadata.num_row_groups
    for chunk in shown.chunks:
        theirs = metadata.row_group(chunk.row_group_ordinal).column(chunk.column_ordinal)
        assert shown.columns[chunk.column_ordinal].path == theirs.path_in_schema
        assert chunk.num_values == theirs.num_values
        pages = [module for module in chunk.modules if module.module_type.title.startswith(("data", "dictionary"))]
        assert sum(module.length for module in pages) == theirs.total_compressed_size
        starts = [offset for offset in (theirs.dictionary_page_offset, theirs.data_page_offset) if offset]
        assert min(module.offset for module in pages) == min(starts)


def test_each_difference_is_met() -> None:
    files = [EncryptedFile(writer, policy, None) for writer, policy in ROWS]  # type: ignore[arg-type]
    assert all(any(difference.applies(file) for file in files) for difference in DIFFERENCES)
    assert not any(d.applies(file) for d in DIFFERENCES for file in files if file.writer == MODULE_PATH)
