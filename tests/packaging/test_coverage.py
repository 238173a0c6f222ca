"""What `pytest --coverage` measures, sums up, and fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PACKAGE = '''"""A package with a branch for each test."""

import os
from typing import Protocol


class Counter(Protocol):
    def count(self) -> int:
        """Return a number."""
        ...


def word(number: int) -> str:
    if number > 0:
        number += 0
    if number == 1:
        return "one"
    if number == 2:
        return "two"
    if number == 3:
        return "three"
    return "many"


def child() -> int:
    process = os.fork()
    if process == 0:
        word(3)
        os._exit(0)
    return os.waitpid(process, 0)[1]
'''

TEST = """import parquet_keytools

def test_it():
    assert parquet_keytools.word({number}) == "{word}"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as of this repository: two files of tests, and a module that nothing imports."""
    package = tmp_path / "src" / "parquet_keytools"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "alone.py").write_text("def never() -> None:\n    print()\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(TEST.format(number=1, word="one"))
    (folder / "test_two.py").write_text(
        TEST.format(number=2, word="two") + "\ndef test_child():\n    assert parquet_keytools.child() == 0\n"
    )
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status and the report of a run that measures."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "package_coverage", *arguments],
        cwd=project,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{project / 'src'}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert " passed" in ended.stdout, ended.stdout + ended.stderr
    return ended.returncode, ended.stdout


def missing(project: Path) -> dict[str, str]:
    """Return, for each source file that is not covered, the lines and branches that are missing."""
    rows = (project / ".coverage.txt").read_text().splitlines()
    return {row.split()[0]: row[row.rindex("  ") :].strip() for row in rows if row.startswith("src/")}


def test_processes_are_summed_up_and_a_run_of_all_tests_is_judged(project: Path) -> None:
    """Lines, and branches of which the lines are reached; of a child process, nothing."""
    status, report = run(project, "--numprocesses=2", "--dist=loadfile", "--coverage")
    assert missing(project) == {
        "src/parquet_keytools/__init__.py": "14->16, 20-22, 28-29",
        "src/parquet_keytools/alone.py": "1-2",
    }
    assert "ERROR: at least 92 % are required" in report
    assert "  0.0 % src/parquet_keytools/alone.py" in report
    assert status == 1


def test_part_of_the_tests_is_measured_and_not_judged(project: Path) -> None:
    status, report = run(project, "--coverage", "tests/test_one.py")
    assert "of the lines and branches of parquet_keytools" in report
    assert "ERROR" not in report
    assert status == 0


def test_enough_passes(project: Path) -> None:
    package = project / "src" / "parquet_keytools"
    (package / "alone.py").unlink()
    (package / "__init__.py").write_text(PACKAGE.partition("    if number == 3")[0])
    (project / "tests" / "test_two.py").write_text(TEST.format(number=2, word="two"))
    (project / "tests" / "test_zero.py").write_text(TEST.format(number=0, word="None").replace('"', ""))
    status, report = run(project, "--coverage")
    assert "100.0 % of the lines" in report
    assert "ERROR" not in report
    assert status == 0


def test_compiled_files_are_kept_until_their_source_changes(project: Path) -> None:
    def kept() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in (project / "src").rglob("*.opt-branches.pyc")}

    run(project, "--coverage")
    first, written = missing(project), kept()
    assert len(written) == 2
    run(project, "--coverage")
    assert (missing(project), kept()) == (first, written)
    alone = project / "src" / "parquet_keytools" / "alone.py"
    alone.write_text("\n" + alone.read_text())
    run(project, "--coverage")
    assert missing(project) == first | {"src/parquet_keytools/alone.py": "2-3"}
