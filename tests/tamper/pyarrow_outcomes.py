"""What pyarrow alone makes of the attacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from attacks import CRASHED, Attacked

_TIME_LIMIT_SECONDS = 60


def pyarrow_outcomes(attacked: Attacked) -> dict[str, str]:
    """Return attack -> outcome; a reader that dies is started again for what is left."""
    names = {str(path): name for name, path in attacked.paths.items()}
    left = list(names)
    outcomes: dict[str, str] = {}
    while left:
        command = [sys.executable, str(Path(__file__).with_name("pyarrow_reader.py")), "0", *left]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIME_LIMIT_SECONDS, check=False
            )
            text = done.stdout
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode()
        for line in text.splitlines():
            answer = json.loads(line)
            outcomes[names[answer["file"]]] = answer["outcome"]
        left = [path for path in left if names[path] not in outcomes]
        if left:
            outcomes[names[left.pop(0)]] = CRASHED
    return outcomes
