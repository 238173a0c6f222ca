"""`--skipped-to`: write how many tests were skipped, and why, in one line that ends the output of `make test`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--skipped-to", type=Path, help="a file for one line on the tests that were skipped")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the line; the file is empty if no test was skipped."""
    if (path := config.getoption("skipped_to")) is None:
        return
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    each = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    total = reasons.total()
    path.write_text(
        f"{total} {'test was' if total == 1 else 'tests were'} skipped. {each}\n" if total else "",
        encoding="utf-8",
    )
