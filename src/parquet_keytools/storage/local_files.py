"""Local files by descriptor of their folder: renames, attributes of another file, removal.

A path may lead elsewhere by now.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from parquet_keytools.errors import OutputError
from parquet_keytools.storage.locations import FileLocation

_NOREPLACE = 1
_EXCHANGE = 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What a kernel or a file system answers that has no such rename."""

_FOLDER_AND_NO_LINK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsupportedRenameError(Exception):
    """The file system has no such rename."""


def exchange(folder: int, first: str, second: str) -> None:
    """Exchange two names of a folder in one step.

    Raises:
        UnsupportedRenameError: The file system cannot; nothing was changed.
        FileNotFoundError: One of them is not there; nothing was changed.
        OSError: The file system failed.
    """
    _rename(folder, first, second, _EXCHANGE)


def rename_new(folder: int, name: str, new_name: str) -> None:
    """Rename within a folder; nothing is replaced.

    Raises:
        UnsupportedRenameError: The file system cannot; nothing was changed.
        FileExistsError: There is something of the new name; nothing was changed.
        OSError: The file system failed.
    """
    _rename(folder, name, new_name, _NOREPLACE)


def _rename(folder: int, old: str, new: str, flags: int) -> None:
    function = _renameat2()
    if function is None:
        raise UnsupportedRenameError
    while function(folder, os.fsencode(old), folder, os.fsencode(new), flags):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _UNKNOWN:
            raise UnsupportedRenameError
        raise OSError(number, os.strerror(number), new)


@cache
def _renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    renameat2: Callable[..., int] = function
    return renameat2


_ACCESS_LISTS = "system.posix_acl_"
_HADOOP_CHECKSUMS_MAGIC = b"crc\x00"


def may_give_attributes(file: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether a file was put there by somebody who may say who reads what replaces it.

    In a folder that all may write to, anybody can have put a file of this name there beforehand.
    """
    if not stat.S_ISREG(file.st_mode):
        return False
    return not folder.st_mode & stat.S_IWOTH or file.st_uid == os.geteuid()


def take_attributes(new: int, old: int, *, all_attributes: bool) -> None:
    """Give a new file owner, mode and access list of an old one, as far as this user may.

    Args:
        new: File descriptor of the new file.
        old: File descriptor of the old file.
        all_attributes: Whether the new file is the same one to its users, so that all extended attributes hold.
    """
    found = os.fstat(old)
    mode = stat.S_IMODE(found.st_mode) & 0o777
    try:
        os.fchown(new, found.st_uid, found.st_gid)
    except OSError:
        try:
            # Who may not give files away may still give them to a group of his own, whose members read them.
            os.fchown(new, -1, found.st_gid)
        except OSError:
            # What the old group was allowed is nothing for another one.
            mode = mode & ~0o070 | ((mode & 0o007) << 3)
    with contextlib.suppress(OSError):
        for name in os.listxattr(old):
            if all_attributes or name.startswith(_ACCESS_LISTS):
                # What the system guards for itself cannot be set.
                with contextlib.suppress(OSError):
                    os.setxattr(new, name, os.getxattr(old, name))
    os.fchmod(new, mode)


def open_folder(path: str) -> int:
    """Return a file descriptor of a folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def opened_folder(path: str) -> Iterator[int]:
    """Open a folder for as long as a block runs."""
    folder = open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)


FolderIdentity = tuple[int, int]
"""Device and inode: a path may lead to another folder by now."""


def identity_of_folder(folder: int | str) -> FolderIdentity:
    """Return device and inode of a folder, by its file descriptor or path."""
    found = os.stat(folder)  # noqa: PTH116
    return found.st_dev, found.st_ino


def state_of_local(path: str) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to, whatever its times are set to; follows links."""
    found = os.stat(path)  # noqa: PTH116 - one call, and no object for each of a million files
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def folder_moved(target: object) -> OutputError:
    """Return the error for a folder that is no longer the one in which something was begun."""
    return OutputError(f"the folder of {target} was moved or replaced meanwhile.", hint="Try again.")


@dataclass(frozen=True)
class Identity:
    """What one look at a file says of it, and what a rename does not change."""

    device: int
    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        """Return that of a file that was looked at."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def remove_hadoop_checksums(folder: int, target: str) -> None:
    """Remove the checksums that Hadoop keeps beside a local file: Spark would refuse what takes the file's place.

    Before it does so, for without checksums Hadoop reads both the old file and the new one.
    """
    name = f".{target}.crc"
    with contextlib.suppress(FileNotFoundError, OSError):
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            is_hadoops = (
                stat.S_ISREG(os.fstat(file).st_mode)
                and os.read(file, len(_HADOOP_CHECKSUMS_MAGIC)) == _HADOOP_CHECKSUMS_MAGIC
            )
        finally:
            os.close(file)
        if is_hadoops:
            os.unlink(name, dir_fd=folder)


def remove_beneath(base: FileLocation, folder: FolderIdentity, location: FileLocation) -> None:
    """Remove a local file from a data set, by descriptor of its folder; what a link leads to is not removed.

    Raises:
        OutputError: The base is another folder, or a folder between it and the file is a link.
        FileNotFoundError: There is no such file.
        OSError: The file system failed.
    """
    *folders, name = PurePosixPath(location.path).relative_to(base.path).parts
    with contextlib.ExitStack() as descriptors:
        inner = descriptors.enter_context(opened_folder(base.path))
        if identity_of_folder(inner) != folder:
            raise folder_moved(location)
        for part in folders:
            try:
                inner = os.open(part, _FOLDER_AND_NO_LINK, dir_fd=inner)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise OutputError(
                    f"{location} is not removed: {part!r} is a link.", hint="Remove what is in it by hand."
                ) from None
            descriptors.callback(os.close, inner)
        os.unlink(name, dir_fd=inner)


def remove_from_folder(location: FileLocation, folder: FolderIdentity | None) -> None:
    """Remove a file, if its folder is still the same one.

    Args:
        location: The file.
        folder: Device and inode of its folder; None where there are none.

    Raises:
        OutputError: The folder is another one: what has this name there is another file.
        FileNotFoundError: There is no such file.
        OSError: The file system failed.
    """
    if folder is None or not location.is_local:
        location.filesystem.delete_file(location.path)
    else:
        remove_beneath(FileLocation(location.filesystem, str(Path(location.path).parent)), folder, location)
