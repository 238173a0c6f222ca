"""Which lines and branches of the package the tests reach: `--coverage`.

SlipCover names lines and branches when Python compiles a source file. Python 3.12 reports each of them once; for
Python 3.11, `coverage_marks` marks them. Where coverage.py traces, before Python 3.14, parsers take four times as
long. Child processes are not measured.
"""

from __future__ import annotations

import ast
import json
import marshal
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from coverage_marks import Label
    from slipcover import Slipcover

PACKAGE = "parquet_keytools"

OMITTED = f"src/{PACKAGE}/kms/contract_tests.py"
"""Tests for the authors of KMS clients: pytest compiles them."""

NO_STATEMENTS = ["@overload", "raise NotImplementedError", r"^\s*\.\.\.$"]

TABLE = ".coverage.txt"

LEAST_PERCENT = 92
"""A run of all tests fails below it."""

LISTED_BELOW_PERCENT = 85

_MARKING = b"".join(
    Path(__file__).with_name(name).read_bytes() for name in ("coverage_marks.py", Path(__file__).name)
)
"""How source files are compiled: when it changes, those that are kept are compiled again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let coverage be measured."""
    parser.addoption(
        "--coverage",
        action="store_true",
        help=f"measure lines and branches that tests reach, into {TABLE}; all tests fail below {LEAST_PERCENT} %",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure coverage, where asked for."""
    if config.getoption("coverage"):
        config.pluginmanager.register(_Coverage(config))


class _Coverage:
    """Measures in each process of the tests, and sums up in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        from slipcover import Slipcover

        early = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
        if early:
            raise pytest.UsageError(f"coverage cannot be measured: imported before it began: {early}")
        self._config = config
        self._marks = Slipcover(branch=True, exclude_also=NO_STATEMENTS)
        self._of_workers: list[dict[str, Any]] = []
        self._sum: dict[str, Any] = {}
        self._finder = _Finder(self._marks)
        sys.meta_path.insert(0, self._finder)  # type: ignore[arg-type]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process of pytest-xdist has measured; one that died has nothing."""
        if measured := getattr(node, "workeroutput", {}).get("coverage"):
            self._of_workers.append(json.loads(measured))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what was measured here, or judge the sum."""
        for path, labels, seen in self._finder.marked:
            self._marks.all_seen[path].update(
                label for label, mark in zip(labels, seen, strict=True) if mark is not None
            )
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["coverage"] = json.dumps(self._marks.get_coverage())
            return
        from slipcover import merge_coverage, print_coverage

        root = self._config.rootpath
        # Files that nothing has imported count, too.
        for file in (root / "src").rglob("*.py"):
            if file != root / OMITTED:
                _branches_marked(str(file), self._marks)
        self._sum = reduce(merge_coverage, self._of_workers, self._marks.get_coverage())
        with (root / TABLE).open("w", encoding="utf-8") as table:
            print_coverage(self._sum, outfile=table, skip_covered=True, missing_width=100)
        if self._is_too_low() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the sum, and of a run of all tests the files of which much is not reached."""
        if not self._sum:
            return
        terminalreporter.section("coverage")
        for name, file in sorted(self._sum["files"].items()):
            percent = file["summary"]["percent_covered"]
            if percent < LISTED_BELOW_PERCENT and self._all_tests_ran():
                terminalreporter.line(f"{percent:5.1f} % {name}")
        terminalreporter.line(
            f"{self._percent():5.1f} % of the lines and branches of {PACKAGE}; the others are in {TABLE}"
        )
        if self._is_too_low():
            terminalreporter.line(f"ERROR: at least {LEAST_PERCENT} % are required", red=True)

    def _percent(self) -> float:
        percent: float = self._sum["summary"]["percent_covered"]
        return percent

    def _all_tests_ran(self) -> bool:
        option = self._config.option
        is_part = (
            self._config.args_source is not pytest.Config.ArgsSource.TESTPATHS or os.environ.get("SPARK") == "no"
        )
        return not (is_part or option.keyword or option.markexpr)

    def _is_too_low(self) -> bool:
        return self._all_tests_ran() and self._percent() < LEAST_PERCENT


class _Finder:
    """Finds the package's source files before anything else does."""

    def __init__(self, marks: Slipcover) -> None:
        self.marks = marks
        self.marked: list[tuple[str, list[Label], list[int | None]]] = []
        """Of each source file that is imported: what its marks stand for, and the marks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader) and not spec.loader.path.endswith(OMITTED):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
            return spec
        return None


class _Loader(SourceFileLoader):
    """Compiles with marks."""

    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        path, marks = self.path, self._finder.marks
        code, labels = _branches_marked(path, marks)
        if sys.version_info >= (3, 12):
            # As a part of other code: its lines and branches are known already.
            marks.instrument(code, parent=code)
        else:
            from coverage_marks import LIST

            seen: list[int | None] = [None] * len(labels)
            self._finder.marked.append((path, labels, seen))
            vars(module)[LIST] = seen
        exec(code, vars(module))


def _branches_marked(path: str, marks: Slipcover) -> tuple[CodeType, list[Label]]:
    """Return the code of a source file with its branches marked, and add its lines and branches to `marks`.

    Before Python 3.12 its lines are marked, too, and what the marks stand for is returned. Each process of the
    tests needs all files, which takes seconds: they are kept beside what Python compiles.
    """
    import slipcover
    from slipcover.branch import preinstrument

    source = Path(path).read_bytes()
    made_from = (slipcover.__version__, path, sha256(source + _MARKING).digest())
    kept = Path(cache_from_source(path, optimization="branches"))
    found: Any = ()
    with suppress(OSError, EOFError, ValueError, TypeError):
        found = marshal.loads(kept.read_bytes())
    if found[:1] != (made_from,):
        code = compile(preinstrument(ast.parse(source)), path, "exec", dont_inherit=True)
        lines, branches = set(marks.lines_from_code(code)), set(marks.branches_from_code(code))
        labels: list[Label] = []
        if sys.version_info < (3, 12):
            from coverage_marks import marked

            code = marked(code, labels)
        found = (made_from, code, labels, lines, branches)
        if not sys.dont_write_bytecode:
            SourceFileLoader("", path).set_data(str(kept), marshal.dumps(found))
    _, code, labels, marks.code_lines[path], marks.code_branches[path] = found
    return code, labels
