"""Files that go wrong after their data set was opened: our error, in time, and never a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scan_fault_worker import FAULTS

SECONDS = 240
"""One run takes about ten, on a quiet machine."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_goes_wrong_under_a_scan(tmp_path: Path, fault: str) -> None:
    worker = Path(__file__).parent / "scan_fault_worker.py"
    source = Path(sys.modules["parquet_keytools"].__file__ or "").parent.parent
    run = subprocess.run(
        [sys.executable, str(worker), fault, str(tmp_path)],
        env={"PYTHONPATH": f"{source}:{worker.parent.parent}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "all refused"), run.stderr
