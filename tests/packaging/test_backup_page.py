"""docs/backup.md: its blocks work as printed, in their order, in one folder."""

import os
import re
import subprocess
from pathlib import Path

from warm_python import WarmPython

PAGE = (Path(__file__).parents[2] / "docs" / "backup.md").read_text(encoding="utf-8")


def test_all_blocks_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    environment = os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for text in blocks:
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
