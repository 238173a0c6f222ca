"""Scripts of users pass a strict type check with pyarrow's stubs: one process for all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from parquet_keytools import Keytools

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("typed_user.py")

STUBS_ARE_WRONG = {
    # KMS clients return bytes, and factories return encryption properties for writing.
    "pyarrow_interop.py",
    # Of other engines: their own types.
    "polars_lazy_frames.py",
    "ray_tasks.py",
    "served_files.py",
}

SETTINGS = """\
[mypy]
strict = True
mypy_path = {root}/src
# Ours is checked with settings of its own.
[mypy-parquet_keytools.*]
ignore_errors = True
[mypy-pandas.*]
ignore_missing_imports = True
[mypy-pyspark.*]
ignore_missing_imports = True
follow_imports = skip
# What other libraries import, and no script: half of all that would be read.
[mypy-azure.*,boto3.*,botocore.*,dask.*,dbt_artifacts_parser.*,google.*,graphql.*,hypothesis.*,markdown_it.*]
follow_imports = skip
[mypy-moto.*,opentelemetry.*,ray.*,rich.*,sqlalchemy.*,werkzeug.*]
follow_imports = skip
[mypy-charset_normalizer.*,filelock.*,pydantic.*,pydantic_core.*,pyparsing.*,requests.*,urllib3.*]
follow_imports = skip
"""


def test_the_script_calls_every_public_method() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    names = {name for name in dir(Keytools) if not name.startswith("_")}
    assert len(names) > 25
    # It needs a schema of Spark.
    assert {name for name in names if f".{name}" not in text} <= {"spark_options"}


def test_scripts_type_check(tmp_path: Path) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS.format(root=ROOT))
    examples = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in STUBS_ARE_WRONG]
    assert len(examples) > 10
    cache = ROOT / ".mypy_cache" / "users"
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(cache)]
    done = subprocess.run(
        [*command, str(SCRIPT), *map(str, examples)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_consoles_offer_public_names_only() -> None:
    import parquet_keytools

    assert set(parquet_keytools.__all__) <= set(dir(parquet_keytools))
    offered = dir(Keytools.from_mapping({"version": 1}))
    assert {"read_table", "write_table", "configuration"} <= set(offered)
    assert [name for name in offered if name.startswith("_") and not name.startswith("__")] == []
