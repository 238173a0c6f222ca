"""The ends of files and processes.

`try: ... finally: file.close()` closes a file while an exception is raised: the file would look whole, but lack
rows.

After a read, threads of Arrow still drop objects that belong to Python. Up to Python 3.13, if such a thread needs
the interpreter while it is finalised, C++ aborts the process. So the end of a process waits for these threads.
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
    """Finds the exception that closes a file; created when the file is opened."""

    def __init__(self) -> None:
        self._known = sys.exception()

    def refuse(self, target: object) -> None:
        """Raise the exception that was raised since the file was opened: the file must not be written then."""
        error, known, self._known = sys.exception(), self._known, None
        # The end of an iterator is not a failure.
        if error is None or error is known or isinstance(error, StopIteration | StopAsyncIteration):
            return
        error.add_note(
            f"{target} is not written, because it was closed while this exception was handled: rows may be "
            "missing. To keep what was written, close it outside of `except` and `finally`."
        )
        raise error


# --- the end of a process ---

_WAIT_SECONDS = 5.0
"""How long the end of a process is delayed at most."""

_LOOK_SECONDS = 0.001

_LOOKS = 5
"""How many looks in a row must find no other thread at work.

A thread that waits for the interpreter sleeps while this one looks, and runs in the next look.
"""

_BLIND_LOOKS = 200
"""The same where only the number of shared objects is known, and not the states of threads.

Looks are counted, not seconds: on an overloaded machine, both threads are late.
"""

_TASKS = Path("/proc/self/task")

_shared: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""By number, because objects may be equal, or not hashable yet."""

_numbers = itertools.count()
_has_shared = False
_in_use: set[int] = set()


def share_with_arrow(shared: object) -> None:
    """Register an object that a thread of Arrow may be the last to hold."""
    global _has_shared
    _has_shared = True
    _shared[next(_numbers)] = shared


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Mark this thread as working for Arrow, even while it waits for a server."""
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
    """Return whether another thread of this process runs, or waits for a disk; None if unknown."""
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
    """Forget objects shared with threads, which do not exist in a child."""
    global _has_shared
    _has_shared = False
    _shared.clear()
    _in_use.clear()


atexit.register(_wait_for_arrow)
register_at_fork(after_in_child=_forget_parent)
