"""Local folders and the files in them: renames, attributes of another file, removal.

On POSIX systems all is done by descriptor of the folder, for a path may lead elsewhere by now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from parquet_keytools.errors import OutputError
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.locations import FileLocation

_ACCESS_LISTS = "system.posix_acl_"
_HADOOP_CHECKSUMS_MAGIC = b"crc\x00"


def may_give_attributes(file: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether a file was put there by somebody who may say who reads what replaces it.

    In a folder that all may write to, anybody can have put a file of this name there beforehand.
    """
    if not stat.S_ISREG(file.st_mode):
        return False
    return not folder.st_mode & stat.S_IWOTH or file.st_uid == operating_system.own_user_id()


def take_attributes(new: int, old: int, *, all_attributes: bool) -> None:
    """Give a new file owner, mode and access list of an old one, as far as this user may.

    Where the access list cannot be copied, the group loses its permissions: with an access list, the group bits of
    the mode are the most that anyone in the list has, and not what the group has.

    Args:
        new: File descriptor of the new file.
        old: File descriptor of the old file.
        all_attributes: Whether the new file is the same one to its users, so that all extended attributes hold.
    """
    found = os.fstat(old)
    mode = stat.S_IMODE(found.st_mode) & 0o777
    try:
        operating_system.change_owner(new, found.st_uid, found.st_gid)
    except OSError:
        try:
            # Who may not give files away may still give them to a group of his own, whose members read them.
            operating_system.change_owner(new, -1, found.st_gid)
        except OSError:
            # What the old group was allowed is nothing for another one.
            mode = mode & ~0o070 | ((mode & 0o007) << 3)
    lost = operating_system.copy_attributes(new, old, lambda n: all_attributes or n.startswith(_ACCESS_LISTS))
    if any(name.startswith(_ACCESS_LISTS) for name in lost):
        mode &= ~0o070
    operating_system.change_mode(new, mode)


FolderIdentity = tuple[int, int]
"""Device and inode: a path may lead to another folder by now."""


def identity_of_folder(path: str) -> FolderIdentity:
    """Return device and inode of a folder."""
    found = os.stat(path)  # noqa: PTH116
    return found.st_dev, found.st_ino


class Folder:
    """An open folder, and what is done with names in it; links are never followed.

    On POSIX systems names are looked up in the folder that was opened. Windows has no such calls: there each is
    by path, and a folder whose path leads elsewhere meanwhile is not noticed.

    Attributes:
        path: Its path when it was opened.
        descriptor: Its file descriptor; None on Windows.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, outer: Folder | None = None) -> None:
        self.path = path
        if outer is None:
            self.descriptor = operating_system.open_folder(path)
        else:
            name = PurePosixPath(path).name
            self.descriptor = operating_system.open_folder_within(outer.descriptor, name, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        if self.descriptor is not None:
            os.close(self.descriptor)

    def status(self) -> os.stat_result:
        """Return what the system says of the folder."""
        return os.stat(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH116

    def identity(self) -> FolderIdentity:
        """Return its device and inode."""
        found = self.status()
        return found.st_dev, found.st_ino

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH208

    def look(self, name: str) -> os.stat_result:
        """Return what the system says of a name in it."""
        return os.stat(self._place(name), dir_fd=self.descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file in it, and return its file descriptor."""
        place = self._place(name)
        return operating_system.open_file(place, flags, mode, follow_link=False, folder=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a name from it."""
        os.unlink(self._place(name), dir_fd=self.descriptor)

    def replace(self, name: str, new_name: str) -> None:
        """Give a file another name, in place of what has that."""
        os.replace(
            self._place(name), self._place(new_name), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor
        )

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name, if nothing has that."""
        if self.descriptor is None:
            os.link(self._place(name), self._place(new_name))
        else:
            os.link(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)

    def sync(self) -> None:
        """Bring to the disk which names it has. Windows keeps that in the journal of its file system."""
        if self.descriptor is not None:
            operating_system.sync(self.descriptor)

    def _place(self, name: str) -> str:
        return f"{self.path}/{name}" if self.descriptor is None else name


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


def remove_hadoop_checksums(folder: Folder, target: str) -> None:
    """Remove the checksums that Hadoop keeps beside a local file: Spark would refuse what takes the file's place.

    Before it does so, for without checksums Hadoop reads both the old file and the new one.
    """
    name = f".{target}.crc"
    with contextlib.suppress(FileNotFoundError, OSError):
        file = folder.open(name, os.O_RDONLY)
        try:
            is_hadoops = (
                stat.S_ISREG(os.fstat(file).st_mode)
                and os.read(file, len(_HADOOP_CHECKSUMS_MAGIC)) == _HADOOP_CHECKSUMS_MAGIC
            )
        finally:
            os.close(file)
        if is_hadoops:
            folder.unlink(name)


def remove_beneath(base: FileLocation, folder: FolderIdentity, location: FileLocation) -> None:
    """Remove a local file from a data set, by descriptor of its folder; what a link leads to is not removed.

    Raises:
        OutputError: The base is another folder, or a folder between it and the file is a link.
        FileNotFoundError: There is no such file.
        OSError: The file system failed.
    """
    *folders, name = PurePosixPath(location.path).relative_to(base.path).parts
    with contextlib.ExitStack() as opened:
        inner = opened.enter_context(Folder(base.path))
        if inner.identity() != folder:
            raise folder_moved(location)
        for part in folders:
            try:
                inner = opened.enter_context(Folder(f"{inner.path}/{part}", inner))
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise OutputError(
                    f"{location} is not removed: {part!r} is a link.", hint="Remove what is in it by hand."
                ) from None
        inner.unlink(name)


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
        base = FileLocation(location.filesystem, str(PurePosixPath(location.path).parent))
        remove_beneath(base, folder, location)
