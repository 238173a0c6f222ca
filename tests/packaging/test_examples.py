"""Each example runs by itself, and leaves nothing behind."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from soak import SOAK
from warm_python import WarmPython

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
# Each starts its own cluster. The pages on Ray and Spark do the same.
LONG = ("ray_tasks", "spark_native")


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if SOAK or path.stem not in LONG], ids=lambda path: path.stem
)
def test_it_runs(path: Path, tmp_path: Path, warm_python: WarmPython) -> None:
    if path.stem.startswith("spark_") and os.environ.get("SPARK") == "no":
        pytest.skip("SPARK=no leaves the examples with Spark out")
    # Spark starts in half the time. Settings of users stay in effect.
    java = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {import_module('services.spark_jvm').JAVA_OPTIONS}"
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    done = subprocess.run(
        # In a soak, each runs in its own Python.
        [sys.executable, "-W", "error::DeprecationWarning:__main__", path] if SOAK else [warm_python.python, path],
        cwd=work,
        # Paths of Ray's sockets must be short.
        env=os.environ | {"TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp", "SPARK_SUBMIT_OPTS": java},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= len(done.stdout.splitlines()) <= 6
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 13
