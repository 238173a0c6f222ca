"""Texts for people: short forms of results, warnings, install commands, and what is safe to print.

A hostile file must not control the terminal of its reader, and no address shows its credentials.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from urllib.parse import urlsplit


class Summarised(ABC):
    """Has a short `repr`, and a table of the same facts in notebooks, however many parts it has."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Return name -> value of the facts."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self.summary().items())
        return f"<{type(self).__name__} {facts}>"

    def __dir__(self) -> list[str]:
        # Consoles offer these names; half of all names are not for callers.
        return [name for name in super().__dir__() if name.startswith("__") or not name.startswith("_")]

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


# --- warnings, at the line of the caller ---


_INSIDE = (str(Path(__file__).parents[1]), contextlib.__file__)
"""This package, and the module that enters its context managers."""


def warn_caller(text: str) -> None:
    """Show a `UserWarning` at the line that called this package; before Python 3.12, at a line of this package."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, UserWarning, skip_file_prefixes=_INSIDE)
    else:
        warnings.warn(text, UserWarning, stacklevel=2)


# --- what to install for an extra ---


_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install_hint(extra: str) -> str:
    """Return how to install the packages of an extra; they are named, because this one may not be on an index."""
    from importlib import metadata

    try:
        requirements = metadata.requires("parquet-keytools") or []
    except metadata.PackageNotFoundError:  # imported from its sources
        requirements = []
    found = [match for text in requirements if (match := _REQUIREMENT.fullmatch(text)) and match["extra"] == extra]
    packages = " ".join(f"'{match['package']}'" for match in found)
    return f"Install what it needs: pip install {packages}" if packages else f"Install the extra [{extra}]"


@contextlib.contextmanager
def installed(extra: str) -> Iterator[None]:
    """Import packages of an extra in the block; raise `ConfigurationError` if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        from parquet_keytools.errors import ConfigurationError

        package = str(error.name).partition(".")[0]
        raise ConfigurationError(f"{package} is not installed.", hint=install_hint(extra)) from None


# --- paths with a home folder ---


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with a leading `~` or `~user` replaced by a home folder; unknown users stay as in a shell."""
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.parts[0] != "~":
            return path
        raise FileNotFoundError(
            errno.ENOENT, "this user has no home folder: set HOME, or write the whole path", str(path)
        ) from None


# --- text from files, paths and addresses ---

_MOST_CHARACTERS = 1000
_SHOWN_OF_THE_END = 200


def printable(text: str) -> str:
    """Return a text with escapes for what is not printable, and without its middle if it is very long.

    Control characters in the names of columns, writers and files could overwrite what was printed before, and
    characters that reverse the direction of text could make one name look like another.
    """
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - _SHOWN_OF_THE_END]} ... {text[-_SHOWN_OF_THE_END:]}"
    return _escaped(text)


def escaped_bytes(data: bytes) -> str:
    """Return bytes as text, with escapes for what is not printable, so that different bytes look different."""
    return _escaped(data.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace"))


def escaped_path(path: str) -> str:
    """Return a path with escapes for what is not UTF-8 or not printable."""
    return path if path.isprintable() else _escaped(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def is_url(text: str) -> bool:
    """Return whether a path is the address of a file on a web server."""
    return text.lower().startswith(("https://", "http://"))


def shown_url(url: str) -> str:
    """Return an address without its credentials: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
