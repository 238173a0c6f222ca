"""The package stays small enough to be read: no source file is long, and no name means two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import parquet_keytools

PACKAGE = Path(parquet_keytools.__file__).parent
MOST_LINES = 400

# A module's own entry points: Python or a command finds them by these names, in their own module only.
ENTRY_POINTS = {"main", "run"}


def test_no_source_file_is_long() -> None:
    lengths = {
        str(file.relative_to(PACKAGE)): len(file.read_text(encoding="utf-8").splitlines())
        for pattern in ("*.py", "*.java")
        for file in PACKAGE.rglob(pattern)
    }
    assert len(lengths) > 100
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_class_or_public_function_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list] == ["overload"]:
                continue  # the types of the function that follows
            if (isinstance(node, ast.ClassDef) and not node.name.startswith("_")) or is_public:
                places[node.name].append(str(file.relative_to(PACKAGE)))
    assert len(places) > 500
    twice = {name: files for name, files in places.items() if len(files) > 1 and name not in ENTRY_POINTS}
    assert twice == {}
