"""The beginning of one file copied into another by the operating system."""

from __future__ import annotations

import errno
import fcntl
import os

from parquet_keytools.rotation.replacement import COPY_LENGTH
from parquet_keytools.rotation.tail import ChangedMeanwhileError

REFLINKED = "shared with the old file by the file system"
COPIED_IN_KERNEL = "copied in the kernel"
COPIED = "copied"

_FICLONE = 0x40049409
_NOT_THERE = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
)
"""What a file system answers that cannot do it for these files; an error of the disk is another one."""


def copy_beginning(source: int, target: int, length: int) -> str:
    """Copy the first `length` bytes of a file into an empty one.

    Args:
        source: File descriptor, open for reading.
        target: File descriptor, open for writing.
        length: How many bytes.

    Returns:
        How it was done.

    Raises:
        ChangedMeanwhileError: The source became shorter.
        OSError: It cannot be read, or the target not be written.
    """
    if _reflink(source, target, length):
        return REFLINKED
    copied = _copy_in_kernel(source, target, length)
    if copied == length:
        return COPIED_IN_KERNEL
    while copied < length:
        data = os.pread(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = os.pwrite(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


def _reflink(source: int, target: int, length: int) -> bool:
    """Have the whole file shared and cut off: ranges would have to fit the file system's blocks."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    if os.fstat(target).st_size < length:
        raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
    os.ftruncate(target, length)
    return True


def _copy_in_kernel(source: int, target: int, length: int) -> int:
    """Return how many bytes the kernel copied; fewer than all where it cannot go on."""
    copied = 0
    while copied < length:
        try:
            # The kernel copies no more than about 2 GiB at a time, and may copy less.
            count = os.copy_file_range(source, target, length - copied, copied, copied)
        except OSError as error:
            if error.errno in _NOT_THERE:
                break
            raise
        if count == 0:
            break  # Some file systems end like this what they cannot do; the copy by hand finds the end.
        copied += count
    return copied
