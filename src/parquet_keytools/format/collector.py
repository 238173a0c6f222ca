"""The collector of reference cycles rests while what a file is made of is built.

A wide footer is hundreds of thousands of objects without a cycle, and the collector would look at all of them
again and again: half the time of encrypting a thousand columns.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from parquet_keytools.runtime.operating_system import register_at_fork

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running by itself in a block; blocks of several threads may overlap.

    For work whose memory is bounded by the length of a footer: cycles of other threads wait until it is done.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(_pauses - 1, 0)  # A child that was forked in the block starts at 0.
            if _pauses == 0 and _was_enabled:
                gc.enable()


def paused_for(length: int) -> contextlib.AbstractContextManager[None]:
    """Return what pauses the collector for work on a whole file, if that is done before cycles could pile up.

    Args:
        length: Of the file, in bytes. Of a longer one the most time goes into its bytes, and not into objects.
    """
    return paused_collector() if length <= _SHORT_FILE else contextlib.nullcontext()


_SHORT_FILE = 64 * 1024 * 1024


def _start_anew() -> None:
    """In a forked child: the threads that paused the collector are not there."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


register_at_fork(after_in_child=_start_anew)
