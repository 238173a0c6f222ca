"""What a run found before, of bounded number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from parquet_keytools.errors import KmsError

REMEMBERED_KEYS = 100_000
"""How many distinct keys a run remembers, so that a KEK of many files is rewrapped once."""

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """What was found last; what was not used for longest goes first."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def split(self, wanted: Iterable[K], found: dict[K, V] | dict[K, V | KmsError]) -> list[K]:
        """Put into `found` what is known, and return the rest, each once."""
        missing = []
        for key in dict.fromkeys(wanted):
            if key in self._values:
                self._values.move_to_end(key)
                found[key] = self._values[key]
            else:
                missing.append(key)
        return missing

    def remember(self, key: K, value: V) -> None:
        """Keep what was found."""
        self._values[key] = value
        if len(self._values) > REMEMBERED_KEYS:
            self._values.popitem(last=False)
