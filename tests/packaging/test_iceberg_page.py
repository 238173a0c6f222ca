"""docs/iceberg.md: the blocks of its first table work as printed, in their order, in one folder."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from warm_python import WarmPython

PAGE = (Path(__file__).parents[2] / "docs" / "iceberg.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_first_table_run_as_printed(
    tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    section = PAGE.partition("## The first table")[2].partition("\n## ")[0]
    blocks = [(found[1], found[2]) for found in BLOCK.finditer(section)]
    assert [language for language, _ in blocks] == ["bash", "yaml", "python", "yaml", "bash"]
    with contextlib.ExitStack() as stack:
        for language, text in blocks:
            if language == "yaml":
                name = text.partition("\n")[0].removeprefix("# ")
                (tmp_path / name).write_text(text, encoding="utf-8")
                if name == ".pyiceberg.yaml":
                    # PyIceberg reads it while it is imported.
                    warm_python = stack.enter_context(contextlib.closing(WarmPython()))
                continue
            program = ["bash", "-euo", "pipefail"] if language == "bash" else [warm_python.python]
            done = subprocess.run(
                [*program, "-c", text],
                cwd=tmp_path,
                env=os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert not any(b"example.com" in path.read_bytes() for path in (tmp_path / "warehouse").rglob("*.*"))
