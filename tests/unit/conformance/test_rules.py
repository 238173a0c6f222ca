"""The table of rules is sound, and the documentation is made of it."""

from __future__ import annotations

from pathlib import Path

from parquet_keytools.conformance.rules import FILE_SCOPES, RULES, RULES_BY_ID, Scope
from parquet_keytools.conformance.rules_page import rules_page

DOCS = Path(__file__).parents[3] / "docs"
SOURCES = Path(__file__).parents[3] / "src" / "parquet_keytools" / "conformance"


def test_ids_are_unique_and_everything_is_said() -> None:
    assert len(RULES_BY_ID) == len(RULES)
    for rule in RULES:
        assert rule.id == rule.id.lower()
        assert rule.holds.endswith("."), rule.id
        assert rule.gain.endswith("."), rule.id
        assert rule.section
    assert set(FILE_SCOPES) | {Scope.DATA_SET} == set(Scope)


def test_the_page_is_made_of_the_table() -> None:
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    assert text == rules_page(), "run: python -m parquet_keytools.conformance.rules_page > docs/rules.md"


def test_nothing_but_the_table_goes_through_files_for_the_verifier() -> None:
    """The verifier shares formats and ciphers with the module encryptor, and none of its walks."""
    walks = ("page_walk", "chunk_rewrite", "chunk_pages", "page_cipher", "file_rewriter", "file_decryptor")
    for source in SOURCES.glob("*.py"):
        if source.name == "salvage.py":
            continue  # It decrypts what the verifier found whole.
        text = source.read_text(encoding="utf-8")
        assert not [walk for walk in walks if f"encryption.{walk}" in text], source.name
