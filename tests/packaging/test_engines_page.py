"""docs/engines.md: its blocks work as printed, in order, in one folder; the Python blocks run in one program."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from warm_python import WarmPython

from parquet_keytools import load_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_all_blocks_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    """Python blocks run in one program, up to the next shell block."""
    environment = os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"}
    # Blocks of `console` and `js` are for people.
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(PAGE)]
    assert {language for language, _ in blocks} == {"yaml", "python", "bash", "console", "js"}
    try:
        for language, group in groupby(
            (block for block in blocks if block[0] not in ("console", "js")), key=lambda block: block[0]
        ):
            text = "\n".join(text for _, text in group)
            match language:
                case "yaml":
                    name = text.partition("\n")[0].removeprefix("# ")
                    (tmp_path / name).write_text(text, encoding="utf-8")
                    assert load_configuration(tmp_path / name).tables
                case "bash":
                    run(["bash", "-euo", "pipefail", "-c", text], tmp_path, environment)
                case _:
                    (tmp_path / "page.py").write_text(text, encoding="utf-8")
                    # Ray and Dask start threads.
                    python = sys.executable if "import ray" in text else warm_python.python
                    run([python, "page.py"], tmp_path, environment)
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((tmp_path / "serve.pid").read_text()), signal.SIGKILL)
    assert all(
        json.loads(line)["outcome"] == "ok" for line in (tmp_path / "access.jsonl").read_text().splitlines()
    )


def run(command: list[str | Path], folder: Path, environment: dict[str, str]) -> None:
    with tempfile.TemporaryFile() as output:
        # A pipe would be open for as long as the server runs.
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=240)
        output.seek(0)
        assert done.returncode == 0, output.read().decode(errors="replace")
