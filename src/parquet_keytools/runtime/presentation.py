"""How this package deals with people.

Results have a short text, warnings the line of the caller, missing packages a command that installs them; it says
what it waits for; and paths may begin with `~`, as people and configurations write them.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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


def levels_inside() -> int:
    """Return the `stacklevel` with which the caller shows a warning at the first call from outside."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return max(1, level)


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


# --- what this process waits for ---


SAID_AFTER_SECONDS = 2.0
_LOOK_SECONDS = 0.2

_waits: dict[object, tuple[float, str]] = {}
"""Since when somebody waits, and for what. Each thread changes its own entries only."""

_sayers: list[Callable[[str], None]] = []
"""Who says what is waited for."""


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Note in a block that another machine or process is waited for.

    Args:
        what: For people, such as `the KMS (vault) at https://kms.example`.
    """
    wait = object()
    _waits[wait] = time.monotonic(), what
    try:
        yield
    finally:
        _waits.pop(wait, None)


def waited_for(seconds: float) -> list[str]:
    """Return what has been waited for so many seconds or longer, each once, the longest wait first."""
    # A copy first: other threads go on.
    waits = list(_waits.values())
    now = time.monotonic()
    return list(dict.fromkeys(what for since, what in sorted(waits) if now - since >= seconds))


@contextlib.contextmanager
def saying_what_is_waited_for(say: Callable[[str], None]) -> Iterator[None]:
    """Say what is waited for, while the block runs, once for each thing.

    Args:
        say: Takes a line; called by a thread of its own.
    """
    is_over = threading.Event()
    said: set[str] = set()

    def say_once(text: str) -> None:
        if text not in said and not is_over.is_set():
            said.add(text)
            say(text)

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            for what in waited_for(SAID_AFTER_SECONDS):
                say_once(f"Waiting for {what} ...")

    thread = threading.Thread(target=look, name="parquet-keytools-waiting", daemon=True)
    thread.start()
    _sayers.append(say_once)
    try:
        yield
    finally:
        _sayers.remove(say_once)
        is_over.set()
        thread.join()


def say_what_is_waited_for_elsewhere(text: str) -> None:
    """Say what a worker process waits for, as if this process did, if anybody wants to hear that."""
    for say_once in list(_sayers):
        say_once(text)
