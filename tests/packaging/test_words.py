"""Words that readers would have to decode stay out of the documentation, help texts and messages.

CONTRIBUTING.md lists them, with what to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_trees import PACKAGE, source_trees

ROOT = Path(__file__).parents[2]
PHRASES = re.compile(
    r"""\b(?:
        anew
        | (?:cannot|can|could \s not|could) \s be \s had
        | (?:is|are|was|were|be) \s told | tells
        | who \s is \s thought \s of
        | what \s stands
        | has \s (?:its|their) \s turn | (?:is|are) \s tried \s again
        | the \s answer \s is \s no
        | looked \s into
        | (?:is|are) \s passed \s over
        | (?:said|told) \s otherwise
        | unnoticed | notices | noticed
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
DOCUMENTS = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md", "configs/*.yaml", "examples/*.py")
    for file in ROOT.glob(pattern)
)


def found_in(text: str) -> list[str]:
    """Return the phrases of a text that are on the list."""
    return [" ".join(found[0].split()) for found in PHRASES.finditer(text)]


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of a source file, without docstrings: help texts, errors, reports."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_documentation_has_the_words_that_people_search_for() -> None:
    assert "README.md" in DOCUMENTS
    for page in DOCUMENTS:
        text = (ROOT / page).read_text(encoding="utf-8")
        if page == "CONTRIBUTING.md":
            text = re.sub(r"^\| not \| but \|\n(?:\|.*\|\n)+", "", text, flags=re.MULTILINE)
        assert found_in(text) == [], page


def test_messages_have_the_words_that_people_search_for() -> None:
    assert len(source_trees()) > 100
    for file, tree in source_trees().items():
        assert [(line, found_in(text)) for line, text in messages(tree) if found_in(text)] == [], file
        if file.startswith("cli/"):
            # Docstrings of commands are their help.
            assert found_in((PACKAGE / file).read_text(encoding="utf-8")) == [], file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("keys are wrapped anew", ["anew"]),
        ("The key\ncannot be had.", ["cannot be had"]),
        ("That is told once; it tells all.", ["is told", "tells"]),
        ("re-wrap the keys, which are unavailable", []),
    ],
)
def test_phrases_are_found(text: str, expected: list[str]) -> None:
    assert found_in(text) == expected


@pytest.mark.parametrize(("word", "in_full"), [("DEK", "data encryption key"), ("KEK", "key encryption key")])
def test_each_page_spells_out_kinds_of_keys_at_first_use(word: str, in_full: str) -> None:
    pages = [
        page for page in DOCUMENTS if page.endswith(".md") and not page.startswith(("docs/adr/", "docs/upstream/"))
    ]
    for page in pages:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        if first := re.search(rf"\b{word}s?\b", text):
            assert in_full in text[max(0, first.start() - 80) : first.end() + 80].lower(), page
