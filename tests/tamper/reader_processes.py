"""How readers of other engines react to the attacks, in separate processes: some attacks crash them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from attacks import CRASHED, Attacked

_TIME_LIMIT_SECONDS = 180
_LAST = "sealed-length"
"""Ends Spark: a later attack would need a new JVM."""


def pyarrow_outcomes(attacked: Attacked) -> dict[str, str]:
    """Return attack -> outcome in pyarrow alone."""
    return _outcomes(attacked, "pyarrow_reader.py")


def spark_outcomes(attacked: Attacked) -> dict[str, str]:
    """Return attack -> outcome in Spark."""
    return _outcomes(attacked, "spark_reader.py")


def _outcomes(attacked: Attacked, reader: str) -> dict[str, str]:
    """Return attack -> outcome; a reader that dies is restarted for the remaining attacks."""
    names = {str(path): name for name, path in attacked.paths.items()}
    left = sorted(names, key=lambda path: names[path] == _LAST)
    outcomes: dict[str, str] = {}
    while left:
        command = [sys.executable, str(Path(__file__).with_name(reader)), "0", *left]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=_TIME_LIMIT_SECONDS, check=False
            )
            text = done.stdout
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode()
        for line in text.splitlines():
            answer = json.loads(line)
            outcomes[names[answer["file"]]] = answer["outcome"]
        if len(left) == len(names) and not outcomes:
            raise AssertionError(f"{reader} cannot be started")
        left = [path for path in left if names[path] not in outcomes]
        if left:
            outcomes[names[left.pop(0)]] = CRASHED
    return outcomes
