"""The imports of every source file, at its top or not.

A unit is a package of `parquet_keytools`, or a source file beside the packages. Each imports only units
above it in this list, and only the ones that it names.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache

import pytest
from source_trees import PACKAGE, source_trees

GROUND = {"errors", "secret_bytes", "strict_base64", "runtime", "audit", "telemetry"}

LAYERS: dict[str, set[str]] = {
    # ground: imports nothing of ours
    "errors": set(),
    "secret_bytes": set(),
    "strict_base64": set(),
    "runtime": {"errors"},
    "audit": set(),
    "telemetry": {"runtime"},
    # bytes of a Parquet file; knows no keys and no ciphers
    "format": {"errors", "runtime"},
    # files and folders on any file system; says which packages an address needs
    "storage": {"errors", "format", "runtime"},
    # ciphers, used by several threads; knows no KMS, and meets `keys` only at the protocol KeyRetriever
    "encryption": {"errors", "secret_bytes", "strict_base64", "format", "runtime"},
    # KMS clients; knows no Parquet
    "kms": GROUND,
    # key material; knows no ciphers of files
    "keys": GROUND | {"kms", "storage"},
    # YAML
    "config": GROUND | {"encryption", "kms"},
    # one file and its keys: joins keys and ciphers
    "files": GROUND | {"format", "storage", "encryption", "kms", "keys", "config"},
    # the rules of the specification
    "conformance": GROUND | {"format", "storage", "encryption", "keys", "config", "files"},
    # files as plain Parquet, and file systems of fsspec: encrypt what is written, decrypt what is read
    "view": GROUND | {"format", "storage", "encryption", "keys", "config", "files"},
    # pyarrow's encryption; shows columns that are null by a view
    "tables": GROUND | {"format", "storage", "encryption", "kms", "keys", "config", "files", "view"},
    # master keys of files and data sets
    "rotation": GROUND | {"format", "storage", "encryption", "kms", "keys", "config", "files"},
    # columns that look like personal data; values are read through views
    "scan": GROUND | {"format", "storage", "encryption", "keys", "config", "files", "view"},
    # a read-only file system over HTTP and S3, or mounted; the walk says which files belong to the data set
    "serve": GROUND | {"storage"},
    # encrypted tables of Iceberg; its keys and its streams know no Parquet
    "iceberg": GROUND
    | {"format", "storage", "encryption", "kms", "keys", "config", "files", "conformance", "tables", "view"},
    # the end of the master keys of one value; rows removed from files
    "erasure": GROUND
    | {"format", "storage", "encryption", "kms", "keys", "config", "files", "conformance", "view", "rotation"},
    # Spark's own reader and writer, pipelines over data sets, and KEKs of Iceberg for its Java library
    "spark": GROUND
    | {"storage", "encryption", "kms", "keys", "config", "files", "conformance", "rotation", "iceberg"},
    # the facade
    "keytools": GROUND
    | {"storage", "kms", "keys", "config", "files", "tables", "conformance", "rotation", "spark", "view"}
    | {"iceberg", "scan", "erasure"},
    # an auditor's questions, answered with the inventory and the verification
    "protection_report": GROUND | {"storage", "kms", "files", "conformance", "rotation", "keytools"},
    # the entry point of fsspec
    "fsspec_chain": {"errors", "keytools"},
    # what the command line needs beyond the facade
    "configuration_check": GROUND | {"storage", "encryption", "kms", "keys", "config", "files"},
    "__init__": {"errors", "secret_bytes", "kms", "config", "keytools"},
    # an example script that the command line runs
    "demo": {"__init__", "errors", "kms", "runtime"},
    "cli": GROUND
    | {
        "__init__",
        "storage",
        "kms",
        "config",
        "files",
        "keytools",
        "conformance",
        "encryption",
        "rotation",
        "spark",
        "iceberg",
        "configuration_check",
        "serve",
        "demo",
        "protection_report",
        "scan",
        "erasure",
    },
    "__main__": {"cli"},
}

OUTSIDE: dict[str, list[str]] = {
    # package, or part of it -> the source files that may import it; the longest name decides
    "azure": ["kms/azure.py"],
    "boto3": ["kms/aws.py", "rotation/s3_*.py"],
    "botocore": ["kms/aws.py", "rotation/s3_*.py", "erasure/s3_*.py"],
    "dbt_artifacts_parser": ["config/labels.py"],
    "filelock": ["runtime/operating_system.py"],
    "fsspec": ["fsspec_chain.py", "storage/locations.py", "view/*.py"],
    "google": ["kms/gcp.py"],
    "grpc": ["kms/gcp.py"],
    "mfusepy": ["serve/fuse_mount.py"],
    "open_data_contract_standard": ["config/labels.py"],
    "pkcs11": ["kms/pkcs11.py"],
    "polars": ["tables/properties.py", "tables/reading.py"],
    "opentelemetry": ["telemetry.py"],
    "requests": ["kms/http_session.py"],
    "urllib3": ["kms/http_session.py"],
    "cryptography": ["encryption/module_cipher.py", "keys/key_wrapping.py", "kms/*.py"],
    "pyarrow": [
        "tables/*.py",
        "cli/file_work.py",
        "demo.py",
        "erasure/*.py",
        "files/*.py",
        "iceberg/*.py",
        "keys/material_store.py",
        "keytools.py",
        "spark/*.py",
        "rotation/s3_*.py",
        "scan/scanner.py",
        "storage/*.py",
        "view/*.py",
    ],
    "pyarrow.dataset": ["tables/*.py"],
    # views decode columns that are shown as digests
    "pyarrow.parquet": [
        "tables/*.py",
        "demo.py",
        "iceberg/*.py",
        "scan/scanner.py",
        "view/digests.py",
        "erasure/rewrite.py",
    ],
    "pyarrow.parquet.encryption": ["tables/*.py", "iceberg/*.py"],
    "pydantic": ["config/*.py", "kms/*.py", "scan/scanner.py"],
    "pydantic_core": ["config/*.py"],
    "py4j": ["spark/*.py"],
    "pyspark": ["cli/spark.py", "spark/*.py"],
    "pyiceberg": ["iceberg/*.py"],
    "phonenumbers": ["scan/*.py"],
    "stdnum": ["scan/*.py"],
    "pytest": ["kms/contract_tests.py"],
    "rich": ["cli/*.py"],
    "typer": ["cli/*.py"],
    "yaml": ["config/document.py"],
}


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        source_file: The importing file, relative to the package.
        line: The line.
        name: Full name of the imported module.
        for_types: Whether only the type checker sees it.
    """

    source_file: str
    line: int
    name: str
    for_types: bool

    @property
    def unit(self) -> str:
        return self.source_file.partition("/")[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.source_file}:{self.line} imports {self.name}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        getattr(inner, "id", getattr(inner, "attr", None)) == "TYPE_CHECKING" for inner in ast.walk(node.test)
    )


def read_imports(source_file: str, tree: ast.Module) -> Iterator[Import]:
    for_types = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source_file}:{node.lineno} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(source_file, node.lineno, name, id(node) in for_types)


@cache
def all_imports() -> list[Import]:
    return [found for file, tree in source_trees().items() for found in read_imports(file, tree)]


def unit_of(name: str) -> str:
    """Return the unit that a name of ours is in: names that `parquet_keytools` itself offers are in `__init__`."""
    part = f"{name}.".split(".")[1]
    return part if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file() else "__init__"


def test_every_unit_has_its_layer() -> None:
    units = {file.stem for file in PACKAGE.glob("*.py")} | {file.parent.name for file in PACKAGE.glob("*/*.py")}
    assert units <= LAYERS.keys(), "give it a place in LAYERS"


def test_layers_have_no_cycle() -> None:
    above: set[str] = set()
    for unit, allowed in LAYERS.items():
        assert allowed <= above, f"{unit} may import what stands below it"
        above.add(unit)


def test_units_import_only_their_lower_layers() -> None:
    wrong = []
    for found in all_imports():
        if found.name.split(".")[0] != "parquet_keytools":
            continue
        unit = unit_of(found.name)
        if unit != found.unit and unit not in LAYERS.get(found.unit, set()):
            wrong.append(str(found))
    assert wrong == []


def test_other_packages_are_imported_only_where_they_belong() -> None:
    wrong = []
    for found in all_imports():
        top = found.name.split(".")[0]
        if top == "parquet_keytools" or top in sys.stdlib_module_names:
            continue
        known = [name for name in OUTSIDE if f"{found.name}.".startswith(f"{name}.")]
        assert known, f"{found}: give it a place in OUTSIDE"
        allowed = OUTSIDE[max(known, key=len)]
        if not any(fnmatch(found.source_file, pattern) for pattern in allowed) and not (
            found.for_types and found.source_file == "keytools.py"
        ):
            wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import parquet_keytools.kms.aws", "parquet_keytools.kms.aws"),
        ("def f():\n    from parquet_keytools.kms import client", "parquet_keytools.kms.client"),
        ("if True:\n    from parquet_keytools import keytools as k", "parquet_keytools.keytools"),
    ],
)
def test_no_import_is_overlooked(text: str, name: str) -> None:
    (found,) = read_imports("format/structs.py", ast.parse(text))
    assert (found.name, found.for_types, found.unit) == (name, False, "format")
    assert unit_of(name) not in LAYERS["format"]
