"""New key material put in place: at each moment the old file is there, whole, or the new one."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from parquet_keytools.errors import ChangedMeanwhileError
from parquet_keytools.files.replacement import replacement
from parquet_keytools.keys.material_store import MAX_FILE_BYTES
from parquet_keytools.rotation.tail import (
    CheckWritten,
    ReplacedTail,
    Tail,
    changed_while_rotated,
    check_read_back,
    check_unchanged,
)
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import LocalSink
from parquet_keytools.storage.sources import open_source, read_whole

COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time where they go through this process."""


def replace_tail(
    location: FileLocation, tail: Tail, new: bytes, check: CheckWritten, *, locked_folder: str | None = None
) -> ReplacedTail:
    """Give a file a new tail: at each moment the file is there, whole, the old or the new one.

    Raises:
        ChangedMeanwhileError: The file is no longer the one that was read; nothing was changed.
        KeytoolsError: What `check` raises; nothing was changed.
        OSError: It cannot be written; nothing was changed.
    """
    reason = why_unconditional(location)
    if reason is None:
        # A store that copies ranges by itself has its own source file.
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return replace_object_tail(location, tail, new, check)
    with replacement(location, lambda: check_unchanged(location, tail), locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            if location.is_local:
                # The data is copied by the operating system.
                assert isinstance(sink, LocalSink)
                with Path(location.path).open("rb") as opened:
                    how = copy_beginning(opened.fileno(), sink.file_descriptor, tail.offset)
            else:
                how = None
                sink.reserve(tail.offset + len(new))
                with open_source(location) as source:
                    for offset in range(0, tail.offset, COPY_LENGTH):
                        sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
            sink.write_at(tail.offset, new)
        with pending.open_written() as written:
            check(written)
    by_hand = tail.offset if how in (None, COPIED) else 0
    text = f"new tail, data {how}" if how is not None else f"rewritten whole{f'; {reason}' if reason else ''}"
    return ReplacedTail(text, len(new) + by_hand, tail.offset - by_hand)


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition and with its data copied by the store; None if it can.

    Returns:
        For people, where it is in S3; else empty.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.storage.s3_connection import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, and no role that Arrow assumes, the store would copy the data"


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
        data = operating_system.read_at(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = operating_system.write_at(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


def _reflink(source: int, target: int, length: int) -> bool:
    """Have the whole file shared and cut off: ranges would have to fit the file system's blocks."""
    if sys.platform != "linux" or not operating_system.POSIX:
        return False
    import fcntl

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
    if sys.platform != "linux" or not hasattr(os, "copy_file_range"):
        return copied
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


def replace_external_material(
    location: FileLocation,
    old: bytes,
    new: bytes,
    check_parquet_file: Callable[[], None],
    *,
    locked_folder: str | None = None,
) -> None:
    """Replace a key material file.

    Raises:
        ChangedMeanwhileError: Its content is another one now.
        OutputError: It cannot be written, or does not read back as it was written.
    """

    def check() -> None:
        try:
            check_parquet_file()
            if read_whole(location, MAX_FILE_BYTES) == old:
                return
        except FileNotFoundError:
            pass
        raise changed_while_rotated(location)

    if why_unconditional(location) is None:
        from parquet_keytools.rotation.s3_replacement import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check, locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, new)
        with pending.open_written() as written:
            check_read_back(written, 0, new)
