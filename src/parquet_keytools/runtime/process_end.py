"""What happens at the end of a process: Arrow's threads get time to let go of Python objects.

A read is over for its caller while threads of Arrow still drop what they shared: file systems, KMS clients and
buffers that belong to Python. Up to Python 3.13 a thread that needs the interpreter for that, when it is being
finalised, ends by force, and C++ then aborts the whole process after all its work was done.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref

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
