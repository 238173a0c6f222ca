"""What must not go wrong at an end: a file is closed while an exception is on its way, and a process ends.

`try: ... finally: file.close()` closes a file with an exception on its way, as `except` clauses do: it would look
whole, and lack rows.

A read is over for its caller while threads of Arrow still drop what they shared: file systems, KMS clients and
buffers that belong to Python. Up to Python 3.13 a thread that needs the interpreter for that, when it is being
finalised, ends by force, and C++ then aborts the whole process after all its work was done. So the end of a
process gives them time.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from parquet_keytools.runtime.operating_system import register_at_fork


class ExceptionWatch:
    """Finds the exception because of which a file is closed; made when the file is opened."""

    def __init__(self) -> None:
        self._known = sys.exception()

    def refuse(self, target: object) -> None:
        """Return if the file may be finished.

        Args:
            target: The file, which must not be written if this raises.

        Raises:
            BaseException: The one that was raised since; whoever let it pass does not see a difference.
        """
        error, known, self._known = sys.exception(), self._known, None
        # The end of what a file is written from is no failure.
        if error is None or error is known or isinstance(error, StopIteration | StopAsyncIteration):
            return
        error.add_note(
            f"{target} is not written, because it was closed while this exception was handled: rows may be "
            "missing. To keep what was written, close it outside of `except` and `finally`."
        )
        raise error


# --- the end of a process ---

_WAIT_SECONDS = 5.0
"""The longest that the end of a process is put off."""

_LOOK_SECONDS = 0.001

_LOOKS = 5
"""How many looks in a row must find no other thread at work.

A thread that waits for the interpreter sleeps while this one looks, and is awake in the next look.
"""

_BLIND_LOOKS = 200
"""The same where the states of threads are unknown, and the number of shared objects is all there is to see.

Looks are counted, and not seconds: on a machine with more to do than it can, both threads are late.
"""

_TASKS = Path("/proc/self/task")

_shared: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""By numbers: objects that are equal count each, and some cannot be hashed yet."""

_numbers = itertools.count()
_has_shared = False
_in_use: set[int] = set()


def share_with_arrow(shared: object) -> None:
    """Remember an object that threads of Arrow may be the last to hold."""
    global _has_shared
    _has_shared = True
    _shared[next(_numbers)] = shared


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Mark this thread as one that works for Arrow, also where it waits for a server."""
    thread = threading.get_ident()
    is_outermost = thread not in _in_use
    _in_use.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _in_use.discard(thread)


def _wait_for_arrow() -> None:
    if not _has_shared:
        return
    end = time.monotonic() + _WAIT_SECONDS
    count = -1
    quiet_looks = 0
    while time.monotonic() < end:
        at_work = _other_threads_work()
        is_quiet = not _in_use and not at_work and count == len(_shared)
        quiet_looks = quiet_looks + 1 if is_quiet else 0
        if quiet_looks >= (_BLIND_LOOKS if at_work is None else _LOOKS):
            return
        count = len(_shared)
        time.sleep(_LOOK_SECONDS)


def _other_threads_work() -> bool | None:
    """Return whether another thread of this process runs, or waits for a core or a disk; None if unknown."""
    own = str(threading.get_native_id())
    try:
        states = [_state(task) for task in _TASKS.iterdir() if task.name != own]
    except OSError:  # Only Linux has these files.
        return None
    return not {"R", "D"}.isdisjoint(states)


def _state(task: Path) -> str:
    try:
        # The name of a thread, in parentheses, may hold anything.
        return (task / "stat").read_bytes().rpartition(b") ")[2][:1].decode()
    except (FileNotFoundError, ProcessLookupError):  # It ended.
        return ""


def _forget_parent() -> None:
    """Forget what was shared with threads that do not exist in a child."""
    global _has_shared
    _has_shared = False
    _shared.clear()
    _in_use.clear()


atexit.register(_wait_for_arrow)
register_at_fork(after_in_child=_forget_parent)
