"""The package leaves Python's own state and other libraries' private parts alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from source_trees import source_trees

EXCEPTIONS = {
    "spark/": "PySpark shows the driver's JVM in private attributes only, and Hadoop's settings are there",
    "config/loader.py": "uses a private part of our own `Configuration`",
    "kms/remote_client.py": "an operation calls the private hooks of our own client",
    "iceberg/pyiceberg_classes.py": "the only file that touches PyIceberg's protected classes (ADR 10)",
}
"""Folder or file -> the reason why it may."""

FORBIDDEN = {
    *("gc.disable", "gc.enable", "gc.freeze", "gc.set_threshold", "gc.get_referrers", "gc.get_objects"),
    *("sys.getrefcount", "sys.settrace", "sys.setprofile", "inspect.currentframe", "inspect.stack"),
    *("inspect.trace", "traceback.walk_stack", "traceback.extract_stack"),
}
"""The interpreter's state, which belongs to the host, and looks at the caller."""

FORBIDDEN_ENDS = {name.rpartition(".")[2] for name in FORBIDDEN}

FRAME_ATTRIBUTES = {"f_back", "f_code", "f_globals", "f_locals", "tb_frame", "gi_frame", "cr_frame"}

PYTHONS_OWN = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Public names of Python's library that begin with an underscore."""

FSSPEC_HOOKS = {"_open", "_strip_protocol"}
"""Methods that fsspec file systems implement for each other."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def defined_in(tree: ast.Module) -> set[str]:
    """Return the private names that a source file gives to classes and objects of its own."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
            names.add(node.attr)
    return names


def is_own_object(value: ast.expr) -> bool:
    is_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    return is_super or (isinstance(value, ast.Name) and value.id in ("self", "cls"))


def problems_in(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield what a source file must not do; `known` are the private names of the whole package."""
    own = defined_in(tree) | PYTHONS_OWN | FSSPEC_HOOKS
    for node in ast.walk(tree):
        place = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            if node.attr in FRAME_ATTRIBUTES or (node.attr in FORBIDDEN_ENDS and ast.unparse(node) in FORBIDDEN):
                yield f"{place}: {ast.unparse(node)}"
            elif is_private(node.attr) and node.attr not in (own | known if is_own_object(node.value) else own):
                yield f"{place}: {ast.unparse(node)} is private in another library or source file"
            elif node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                yield f"{place}: assigns {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_ours = module.startswith("parquet_keytools")
            for name in (*module.split("."), *(alias.name for alias in node.names)):
                if is_private(name) and not is_ours:
                    yield f"{place}: imports {name} from {module}"
            for alias in node.names:
                if f"{module}.{alias.name}" in FORBIDDEN:
                    yield f"{place}: imports {alias.name} from {module}"
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.func, ast.Name):
            second = node.args[1]
            text = str(second.value) if isinstance(second, ast.Constant) else ""
            if is_private(text) and text not in own and node.func.id in ("getattr", "setattr", "hasattr"):
                yield f"{place}: {ast.unparse(node)}"


def test_no_source_file_reaches_into_another_library() -> None:
    trees = source_trees()
    known = set().union(*map(defined_in, trees.values())) | FSSPEC_HOOKS
    found = {name: list(problems_in(tree, known)) for name, tree in trees.items()}
    excepted = tuple(EXCEPTIONS)
    assert {name: problems for name, problems in found.items() if problems and not name.startswith(excepted)} == {}


def test_reading_and_rotating_iceberg_do_not_need_the_write_path() -> None:
    """PyIceberg will get its own write path with encryption, and these parts stay."""
    replaceable = {"encrypted_table", "pyiceberg_classes", "written_files"}
    for name, tree in source_trees().items():
        package, _, module = name.removesuffix(".py").partition("/")
        if package == "iceberg" and module not in {*replaceable, "__init__"}:
            imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not {module.rpartition(".")[2] for module in imported} & replaceable, name


def test_each_trick_is_found() -> None:
    tricks = [
        "gc.disable()",
        "from gc import disable",
        "sys.getrefcount(x)",
        "frame.f_locals",
        "inspect.currentframe()",
        "catalog.__class__ = Other",
        "context._jvm",
        "getattr(client, '_credentials')",
        "self._of_a_base_class_elsewhere()",
        "from library.module import _Hidden",
        "from library._hidden import Shown",
    ]
    for trick in tricks:
        assert list(problems_in(ast.parse(trick), set())), trick
    fine = ["self._own", "record._replace(x=1)", "gc.collect()", "from parquet_keytools import _x", "x.__class__"]
    for code in fine:
        assert not list(problems_in(ast.parse(code), {"_own"})), code
