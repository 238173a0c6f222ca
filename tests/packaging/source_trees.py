"""The source files of the package, read and parsed once for all tests that look into them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import parquet_keytools

PACKAGE = Path(parquet_keytools.__file__).parent


@cache
def source_trees() -> dict[str, ast.Module]:
    """Return the tree of each source file, by its path below the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
