"""A file replaced whole, only while it is still the one that was read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from parquet_keytools.format.byte_ranges import ByteSink
from parquet_keytools.rotation.claimed_output import claimed_output
from parquet_keytools.storage import FileLocation, LocalSink, PendingOutput, exclusive_folder

COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time where they go through this process."""


def real_location(location: FileLocation) -> FileLocation:
    """Return the file that a link leads to: replaced is the file, and the link stays."""
    if not location.is_local:
        return location
    return FileLocation(location.filesystem, os.path.realpath(location.path))


def folder_path(location: FileLocation) -> str:
    """Return the path of the folder that a file lies in."""
    return str(PurePosixPath(real_location(location).path).parent)


@contextlib.contextmanager
def replacement(
    location: FileLocation, check: Callable[[], None], *, locked_folder: str | None = None
) -> Iterator[PendingOutput]:
    """Write what takes the place of a file; it does so when the block ends and nobody else changed the file.

    Args:
        location: The file.
        check: Raises if it is no longer the one that was read.
        locked_folder: Path of a folder whose lock the caller has.

    Raises:
        KeytoolsError: What `check` raises; the file stays as it is.
    """
    target = real_location(location)
    with contextlib.ExitStack() as lock, claimed_output(target) as pending:
        yield pending
        if folder_path(target) != locked_folder:
            lock.enter_context(exclusive_folder(target))
        check()


@contextlib.contextmanager
def sink_like(pending: PendingOutput, location: FileLocation) -> Iterator[ByteSink]:
    """Open a pending output that gets owner and attributes of a file."""
    with pending.open_sink() as sink:
        if isinstance(sink, LocalSink):
            _take_attributes(sink.file_descriptor, location.path)
        yield sink


def _take_attributes(file_descriptor: int, path: str) -> None:
    """Copy owner and extended attributes, as far as this user may; the times are those of the new file."""
    found = os.stat(path)  # noqa: PTH116
    try:
        os.fchown(file_descriptor, found.st_uid, found.st_gid)
    except OSError:
        # Who may not give files away may still give them to a group of his own, whose members read them.
        with contextlib.suppress(OSError):
            os.fchown(file_descriptor, -1, found.st_gid)
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):
            # Among them access lists; what the system guards for itself cannot be set.
            with contextlib.suppress(OSError):
                os.setxattr(file_descriptor, name, os.getxattr(path, name))
