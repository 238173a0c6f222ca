"""What this process waits for just now, so that a command can say it to people."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SAID_AFTER_SECONDS = 2.0
_LOOK_SECONDS = 0.2

_waits: dict[object, tuple[float, str]] = {}
"""Since when somebody waits, and for what. Each thread changes its own entries only."""


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

    def look() -> None:
        said: set[str] = set()
        while not is_over.wait(_LOOK_SECONDS):
            for what in waited_for(SAID_AFTER_SECONDS):
                if what not in said and not is_over.is_set():
                    said.add(what)
                    say(f"Waiting for {what} ...")

    thread = threading.Thread(target=look, name="parquet-keytools-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
