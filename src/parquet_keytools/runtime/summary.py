"""How results show themselves in a console and in a notebook: by a few facts, for their parts may be thousands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape


class Summarised(ABC):
    """Has a short `repr`, and a table of the same facts where a notebook shows it."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Return name -> value of the facts."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.summary().items())
        return f"<{type(self).__name__} {facts}>"

    def __dir__(self) -> list[str]:
        # What consoles offer: names of ours that are not for callers would be half of it.
        return [name for name in super().__dir__() if name.startswith("__") or not name.startswith("_")]

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"
