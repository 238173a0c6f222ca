"""docs/iceberg.md: the blocks of its first table work as printed, in their order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from warm_python import WarmPython

PAGE = (Path(__file__).parents[2] / "docs" / "iceberg.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_first_table_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    # The warm process makes a keystore that opens fast. It is not for PyIceberg, which the import configures.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs, "PYICEBERG_HOME": str(tmp_path)}
    warm = environment | {"PATH": f"{warm_python.command.parent}{os.pathsep}{environment['PATH']}"}
    section = PAGE.partition("## The first table")[2].partition("\n## ")[0]
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(section)]
    assert [language for language, _ in blocks] == ["bash", "yaml", "python", "yaml", "bash"]
    for language, text in blocks:
        if language == "yaml":
            (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=warm if "create-key" in text else environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert not any(b"example.com" in path.read_bytes() for path in (tmp_path / "warehouse").rglob("*.*"))
