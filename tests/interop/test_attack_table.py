"""The attacks of tests/tamper, with Spark among the readers: the documentation shows what is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tamper"))

from attack_table import comparison, table_of_page
from attacks import Attacked

if TYPE_CHECKING:
    from engines.spark import Spark


def test_the_documentation_shows_what_was_found(spark: Spark, tmp_path: Path) -> None:
    assert table_of_page() == comparison(Attacked(tmp_path / "attacks"), spark), (
        "run: python tests/tamper/attack_table.py"
    )
