"""docs/engines.md: its blocks work as printed, in their order, in one folder; those of Python in one program."""

import os
import re
import subprocess
import sys
from pathlib import Path

from warm_python import WarmPython

from parquet_keytools import load_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_all_blocks_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    environment = os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(PAGE)]
    assert {language for language, _ in blocks} == {"yaml", "python", "bash"}
    python = "\n".join(text for language, text in blocks if language == "python")
    for language, text in blocks:
        if language == "yaml":
            name = text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert load_configuration(tmp_path / name).tables
        elif language == "bash":
            run(["bash", "-euo", "pipefail", "-c", text], tmp_path, environment)
    # Not a fork of a warm process: Ray and Dask start threads and processes of their own.
    (tmp_path / "page.py").write_text(python, encoding="utf-8")
    run([sys.executable, "page.py"], tmp_path, environment)


def run(command: list[str | Path], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
