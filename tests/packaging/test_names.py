"""Every source file has one subject, and its name is that noun."""

from collections import Counter
from pathlib import Path

import parquet_keytools

PACKAGE = Path(parquet_keytools.__file__).parent
EMPTY_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "misc", "tools", "stuff"}


def test_no_source_file_has_an_empty_name() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert files
    assert [file for file in files if EMPTY_WORDS & set(file.stem.split("_"))] == []


def test_every_source_file_says_what_it_is() -> None:
    silent = [file for file in PACKAGE.rglob("*.py") if not file.read_text(encoding="utf-8").startswith('"""')]
    assert silent == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them only by name: a second file of the same name is not collected, and ends the run."""
    names = Counter(file.name for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert names
    assert [name for name, times in names.items() if times > 1] == []
