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
import os
import sys
import time
import weakref


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

_WAIT_SECONDS = 2.0
"""The longest that the end of a process is put off."""

_QUIET_SECONDS = 0.2
"""What has been there for so long is held by the program, not by a thread that is about to drop it.

On a machine with more to do than it can, such a thread was late by more than a twentieth of a second.
"""

_shared: weakref.WeakSet[object] = weakref.WeakSet()


def share_with_arrow(shared: object) -> None:
    """Remember an object that threads of Arrow may be the last to hold."""
    _shared.add(shared)


def _wait_for_arrow() -> None:
    end = time.monotonic() + _WAIT_SECONDS
    count = len(_shared)
    quiet_since = time.monotonic()
    while count and (now := time.monotonic()) < end and now - quiet_since < _QUIET_SECONDS:
        time.sleep(0.001)
        if len(_shared) != count:
            count, quiet_since = len(_shared), time.monotonic()


atexit.register(_wait_for_arrow)
# The threads that share them do not exist in a child.
os.register_at_fork(after_in_child=_shared.clear)
