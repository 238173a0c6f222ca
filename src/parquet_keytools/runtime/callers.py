"""Who called this package: warnings are shown there."""

from __future__ import annotations

import inspect
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def levels_inside() -> int:
    """Return the `stacklevel` with which the caller shows a warning at the first call from outside."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return max(1, level)
