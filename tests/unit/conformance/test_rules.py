"""The table of rules is sound, each of its rows is used, and the documentation is a copy of it."""

from __future__ import annotations

from pathlib import Path

from parquet_keytools.conformance.report import FILE_SCOPES, RULES, RULES_BY_ID, Scope

DOCS = Path(__file__).parents[3] / "docs"
SOURCES = Path(__file__).parents[3] / "src" / "parquet_keytools" / "conformance"
TABLE = SOURCES / "rules.md"


def test_ids_are_unique_and_everything_is_said() -> None:
    assert len(RULES_BY_ID) == len(RULES)
    for rule in RULES:
        assert rule.id == rule.id.lower()
        assert rule.holds.endswith("."), rule.id
        assert rule.gain.endswith("."), rule.id
        assert rule.section
    assert set(FILE_SCOPES) | {Scope.DATA_SET} == set(Scope)


def test_each_row_of_the_table_is_a_rule() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert rows == [
        f"| `{rule.id}` ({rule.severity.value}) | {rule.section} | {rule.holds} | {rule.gain} |" for rule in RULES
    ]


def test_the_page_is_a_copy_of_the_table() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert text == TABLE.read_text(encoding="utf-8"), "run: cp src/parquet_keytools/conformance/rules.md docs/"
