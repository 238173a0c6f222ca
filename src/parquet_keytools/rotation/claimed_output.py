"""A new version of a file, written beside it under a name that tells whether somebody still writes there.

A process that is killed leaves its temporary file behind, as long as the data. The next one that writes the same
file removes it, and must not remove that of a process that is at work. So whoever writes holds a lock on what it
writes: a process loses its locks when it ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from parquet_keytools.storage import FileLocation, PendingOutput, committed, whole_output

_SUFFIX = ".claimed"
_NAME = re.compile(rf"\..+\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}", re.DOTALL)


@contextlib.contextmanager
def claimed_output(target: FileLocation, *, as_private_as: FileLocation | None = None) -> Iterator[PendingOutput]:
    """Write a file so that it takes the place of one that is there, whole, or not at all.

    Args:
        target: The file; a local one keeps its permissions.
        as_private_as: See `PendingOutput.beside`.

    Raises:
        OutputError: There is no space for it.
    """
    if not target.is_local:
        with whole_output(target, as_private_as=as_private_as) as pending:
            yield pending
        return
    pending, file_descriptor = _claim(target, as_private_as)
    try:
        with committed(pending, target):
            yield pending
    finally:
        os.close(file_descriptor)


def without_leftovers(locations: Iterable[FileLocation]) -> Iterator[FileLocation]:
    """Yield files, and remove what processes left behind that were killed while they wrote in their folders."""
    folders: set[str] = set()
    for location in locations:
        if location.is_local:
            # Where a link leads is where its file is replaced.
            for path in {location.path, os.path.realpath(location.path)}:
                folder = str(Path(path).parent)
                if folder not in folders:
                    folders.add(folder)
                    with contextlib.suppress(FileNotFoundError):
                        _remove_leftovers(Path(folder))
        yield location


def _remove_leftovers(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                _remove_unless_claimed(entry.path)


def _claim(target: FileLocation, as_private_as: FileLocation | None) -> tuple[PendingOutput, int]:
    """Return a pending output whose temporary file is there and locked, and its file descriptor."""
    while True:
        pending = PendingOutput.beside(target, as_private_as)
        location = pending.location.sibling(pending.location.name.removesuffix(".tmp") + _SUFFIX)
        pending = replace(pending, location=location)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file_descriptor = os.open(location.path, flags, pending.permissions)
        fcntl.flock(file_descriptor, fcntl.LOCK_EX)
        # Between the two calls another process may have taken it for left over.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(location.path), os.fstat(file_descriptor)):  # noqa: PTH116
                return pending, file_descriptor
        os.close(file_descriptor)


def _remove_unless_claimed(path: str) -> None:
    # What is gone has taken its place, or was removed by another process; that of another user stays.
    with contextlib.suppress(OSError):
        file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # Fails where somebody still writes.
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink()
        finally:
            os.close(file_descriptor)
