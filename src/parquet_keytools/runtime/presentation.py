"""How this package deals with people.

Results have a short text, warnings the line of the caller, and missing packages a command that installs them.
Paths may begin with `~`, as people and configurations write them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape
from pathlib import Path


class Summarised(ABC):
    """Has a short `repr`, and a table of the same facts where a notebook shows it: its parts may be thousands."""

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


# --- warnings, at the line of the caller ---


_INSIDE = (str(Path(__file__).parents[1]), contextlib.__file__)
"""This package, and what enters its context managers for it and for callers."""


def warn_caller(text: str) -> None:
    """Show a `UserWarning` at the line that called this package; before Python 3.12, at a line of this package."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, UserWarning, skip_file_prefixes=_INSIDE)
    else:
        warnings.warn(text, UserWarning, stacklevel=2)


# --- what to install for an extra ---


_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install_hint(extra: str) -> str:
    """Return what to do where the packages of an extra are missing.

    The packages are named, for ours may have been installed from anywhere.
    """
    from importlib import metadata

    try:
        requirements = metadata.requires("parquet-keytools") or []
    except metadata.PackageNotFoundError:  # imported from its sources
        requirements = []
    found = [match for text in requirements if (match := _REQUIREMENT.fullmatch(text)) and match["extra"] == extra]
    packages = " ".join(f"'{match['package']}'" for match in found)
    return f"Install what it needs: pip install {packages}" if packages else f"Install the extra [{extra}]"


# --- paths with a home folder ---


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with a home folder in place of the `~` or `~user` that it begins with.

    As with a shell, `~name` is a name like any other where there is no such user.

    Raises:
        FileNotFoundError: This user has no home folder, as in some containers.
    """
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.parts[0] != "~":
            return path
        raise FileNotFoundError(
            errno.ENOENT, "this user has no home folder: set HOME, or write the whole path", str(path)
        ) from None
