"""Failures of a storage as a whole, where other files would fare no better; and what it does not let us remove."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import logging
import os
from collections.abc import Callable, Iterator

from parquet_keytools.errors import OutputError, StorageFailedError
from parquet_keytools.runtime.fork_safety import OwnerProcess

_HINTS = {
    errno.ENOSPC: "Make space, then repeat the command.",
    errno.EDQUOT: "Make space within the quota, then repeat the command.",
    errno.EROFS: "Have the file system mounted for writing, then repeat the command.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`), then repeat the command.",
    errno.ENFILE: "Close other programs, or raise the system's limit of open files, then repeat the command.",
    errno.ENOMEM: "Free memory, then repeat the command.",
}

_listener: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "parquet_keytools_left_behind", default=None
)


def storage_failure(error: BaseException, path: object) -> StorageFailedError | None:
    """Return the error that ends a run, if one is of the storage or the system as a whole; None if of one file."""
    if isinstance(error, StorageFailedError):
        return error
    if not isinstance(error, OSError) or error.errno not in _HINTS:
        return None
    return _failed(error.errno, path, _HINTS[error.errno])


@contextlib.contextmanager
def failing_as_output(target: object, *, only_writing: bool = False) -> Iterator[None]:
    """Turn what the storage cannot do for an output into an error that names the output.

    Args:
        target: The output.
        only_writing: Whether nothing is read in the block: an I/O error is then one of the output.

    Raises:
        StorageFailedError: It is full, read-only, or broken.
        OutputError: The file would be larger than it may be.
    """
    found: OutputError | None
    try:
        yield
    except OSError as error:
        found = storage_failure(error, target)
        if error.errno == errno.EFBIG:
            found = OutputError(f"{target} cannot be written: file too large.", hint="Raise the limit.")
        elif only_writing and error.errno == errno.EIO:
            found = _failed(errno.EIO, target, "Check the disk, then repeat the command.")
        if found is None:
            raise
    else:
        return
    raise found


def refuse_in_child(owner: OwnerProcess, target: object) -> None:
    """Refuse to write what a parent process has begun: parent and child would write into the same file.

    Raises:
        OutputError: This is not the process that began it.
    """
    if not owner.is_here:
        raise OutputError(
            f"{target} is not written by this process: the one from which it was forked has opened it.",
            hint="Open files in the process that writes them.",
        )


def _failed(error_number: int, path: object, hint: str) -> StorageFailedError:
    reason = os.strerror(error_number).lower()
    return StorageFailedError(f"{path} cannot be written: {reason}.", error_number=error_number, hint=hint)


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
