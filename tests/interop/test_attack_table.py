"""The attacks of tests/tamper, with Spark among the readers: the documentation shows the results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tamper"))

from attack_table import comparison, table_of_page
from attacks import Attacked


# The readers start Spark; without it, its column cannot be compared.
@pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out")
def test_the_documentation_shows_what_was_found(tmp_path: Path) -> None:
    assert table_of_page() == comparison(Attacked(tmp_path / "attacks")), (
        "run: python tests/tamper/attack_table.py"
    )
