"""docs/rotation.md: its blocks work as printed, in their order, in one folder."""

import os
import re
import subprocess
import textwrap
from pathlib import Path

from warm_python import WarmPython

from parquet_keytools import load_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "rotation.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def test_all_blocks_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    environment = os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"}
    seen = set()
    for found in BLOCK.finditer(PAGE):
        language, text = found[2], textwrap.dedent(found[3])
        seen.add(language)
        if language == "yaml":
            name = text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert load_configuration(tmp_path / name).tables
            continue
        program = [warm_python.python] if language == "python" else ["bash", "-euo", "pipefail"]
        done = subprocess.run(
            [*program, "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert seen == {"yaml", "python", "bash"}
