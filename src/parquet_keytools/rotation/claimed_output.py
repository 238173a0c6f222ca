"""A new version of a file, written beside it under a name that tells whether somebody still writes there.

A process that is killed leaves its temporary file behind, as long as the data. The next one that writes the same
file removes it, and must not remove that of a process that is at work. So whoever writes holds a lock on what it
writes: a process loses its locks when it ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from parquet_keytools.errors import OutputError
from parquet_keytools.storage import FileLocation, PendingOutput, whole_output

_SUFFIX = ".rekey"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def claimed_output(target: FileLocation) -> Iterator[PendingOutput]:
    """Write a file so that it takes the place of one that is there, whole, or not at all.

    Args:
        target: The file; a local one keeps its permissions.

    Raises:
        OutputError: There is no space for it.
    """
    if not target.is_local:
        with whole_output(target) as pending:
            yield pending
        return
    pending, file_descriptor = _claim(target)
    try:
        yield pending
        pending.commit()
    except BaseException as error:
        pending.discard()
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            reason = os.strerror(error.errno).lower()
            raise OutputError(
                f"{target} cannot be written: {reason}.", hint="Make space, then try again."
            ) from None
        raise
    finally:
        os.close(file_descriptor)


def remove_leftovers(target: FileLocation) -> None:
    """Remove what processes left behind that were killed while they wrote a local file."""
    if not target.is_local:
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}", re.DOTALL)
    for entry in os.scandir(Path(target.path).parent):
        if pattern.fullmatch(entry.name):
            _remove_unless_claimed(entry.path)


def _claim(target: FileLocation) -> tuple[PendingOutput, int]:
    """Return a pending output whose temporary file is there and locked, and its file descriptor."""
    while True:
        location = target.sibling(f".{target.name}.{secrets.token_hex(6)}{_SUFFIX}")
        pending = replace(PendingOutput.beside(target), location=location)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file_descriptor = os.open(location.path, flags, pending.permissions)
        fcntl.flock(file_descriptor, fcntl.LOCK_EX)
        # Between the two calls another process may have taken it for left over.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(location.path), os.fstat(file_descriptor)):  # noqa: PTH116
                return pending, file_descriptor
        os.close(file_descriptor)


def _remove_unless_claimed(path: str) -> None:
    # What is not there any more has taken its place, or was removed by another process.
    with contextlib.suppress(FileNotFoundError):
        file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(file_descriptor)
