"""Files that go wrong after their data set was opened: our error, in time, and never a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scan_fault_worker import FAULTS

SECONDS = 240
"""Seconds for one run; it takes about ten on a quiet machine."""


def test_files_that_go_wrong_under_a_scan(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "scan_fault_worker.py"
    source = Path(sys.modules["parquet_keytools"].__file__ or "").parent.parent
    run = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)],
        env={"PYTHONPATH": f"{source}:{worker.parent.parent}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()) == (0, list(FAULTS)), run.stderr
