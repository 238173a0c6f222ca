"""The contents of a file cannot control the terminal of the person who views it."""

from __future__ import annotations

import pytest

from parquet_keytools.conformance.report import FILE_SCOPES, RuleBook
from parquet_keytools.runtime.presentation import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢", "plain ä 漢"),
        ("\x1b[2Kconforms\r\n", "\\x1b[2Kconforms\\r\\n"),
        ("\u202etxt\u2066", "\\u202etxt\\u2066"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_texts_lose_their_middle() -> None:
    shown = printable("a" * 100_000 + "end")
    assert len(shown) < 1100
    assert shown.endswith("end")


def test_messages_and_reasons_are_printable() -> None:
    book = RuleBook(FILE_SCOPES)
    book.broken("schema", "\x07" + "x" * 1_000_000)
    book.not_checked("magic", "\x1b[2K")
    by_id = {result.rule.id: result for result in book.results()}
    assert by_id["schema"].findings[0].message.startswith("\\x07xxx")
    assert len(by_id["schema"].findings[0].message) < 1100
    assert by_id["magic"].reasons == ("\\x1b[2K",)
