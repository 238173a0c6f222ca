"""docs/recipes/*.md: the pages that need no service; tests/interop and tests/services have the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_pages import run_blocks
from warm_python import WarmPython


@pytest.mark.parametrize("page", ["migrate-from-pyarrow"])
def test_all_blocks_run_as_printed(page: str, tmp_path: Path, warm_python: WarmPython) -> None:
    run_blocks(page, tmp_path, python=warm_python.python, programs=warm_python.command.parent)
