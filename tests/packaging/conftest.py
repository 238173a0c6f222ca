"""Runs the programs of the documentation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_python import WarmPython


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """A process that runs the programs of all pages."""
    warm = WarmPython()
    yield warm
    warm.close()
