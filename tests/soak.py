"""How many of the repeatable cases run: a sample, or all with SOAK=yes, which `make soak` sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SOAK = os.environ.get("SOAK") == "yes"


def sample(points: Sequence[T], step: int, offset: int) -> Sequence[T]:
    """Return all points in a soak; otherwise every `step`-th one, and the last.

    Args:
        points: Where something can happen, in order.
        step: How many points there are for each one in the sample; less where a sample would have fewer than five.
        offset: The variant of the test, so that variants take other points.
    """
    step = min(step, len(points) // 4)
    if SOAK or step <= 1:
        return points
    chosen = list(points[offset % step : -1 : step])
    return [*chosen, points[-1]]


def how_many(sampled: int, soaked: int) -> int:
    """Return the number of mutants, which the environment variable MUTANTS can set, too."""
    return int(os.environ.get("MUTANTS", soaked if SOAK else sampled))


class SecondForm:
    """Marks the contract of a KMS for a second form of its keys or their names, or over a second server.

    Load tests exercise the same code there: they run in a soak only.
    """

    if not SOAK:
        test_many_keys_may_be_very_many = None
        test_many_threads_share_a_client = None
