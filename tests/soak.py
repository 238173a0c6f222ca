"""How much of what can be repeated at will is done: a sample, or with SOAK=yes, as `make soak` sets it, all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SOAK = os.environ.get("SOAK") == "yes"


def sample(points: Sequence[T], step: int, offset: int) -> Sequence[T]:
    """Return all points in a soak, and else every `step`-th one, and the last.

    Args:
        points: Where something can happen, in their order.
        step: How many there are for one of the sample; fewer where a sample would have less than five.
        offset: Which variant of the test it is, so that variants take other points.
    """
    step = min(step, len(points) // 4)
    if SOAK or step <= 1:
        return points
    chosen = list(points[offset % step : -1 : step])
    return [*chosen, points[-1]]


def how_many(sampled: int, soaked: int) -> int:
    """Return how many there are, which the environment variable MUTANTS can say, too."""
    return int(os.environ.get("MUTANTS", soaked if SOAK else sampled))


class SecondForm:
    """Goes before the contract of a KMS for a second form of its keys or their names, or over a second server.

    Loads meet the same code there: they are for a soak.
    """

    if not SOAK:
        test_many_keys_may_be_very_many = None
        test_many_threads_share_a_client = None
