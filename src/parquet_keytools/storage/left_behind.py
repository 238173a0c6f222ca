"""What stays in a store because nobody may remove it, or look for it: logged, and named to the run that is on."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator

_listener: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "parquet_keytools_left_behind", default=None
)


@contextlib.contextmanager
def naming_left_behind(listener: Callable[[str], None]) -> Iterator[None]:
    """Have what is left behind within the block named, also in threads that run in a copy of its context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def warn_left_behind(log: logging.Logger, text: str, *, is_logged: bool = True) -> None:
    """Say what is left behind.

    Args:
        log: Of who found it.
        text: For people: what it is, why it stays, and what to do.
        is_logged: Whether the log has to have it, too; False where it had it before.
    """
    if is_logged:
        log.warning("%s", text)
    listener = _listener.get()
    if listener is not None:
        listener(text)
