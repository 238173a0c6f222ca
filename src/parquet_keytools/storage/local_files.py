"""Local folders and their files, by descriptor of the folder where possible: a path may lead elsewhere by now."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Self

from parquet_keytools.errors import OutputError, StorageFailedError
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.threads_and_forks import OwnerProcess
from parquet_keytools.storage.locations import FileLocation

_log = logging.getLogger(__name__)

# --- failures ---


_HINTS = {
    errno.ENOSPC: "Make space, then repeat the command.",
    errno.EDQUOT: "Make space within the quota, then repeat the command.",
    errno.EROFS: "Have the file system mounted for writing, then repeat the command.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`), then repeat the command.",
    errno.ENFILE: "Close other programs, or raise the system's limit of open files, then repeat the command.",
    errno.ENOMEM: "Free memory, then repeat the command.",
}


def storage_failure(
    error: BaseException, path: object, hints: Mapping[int, str] = _HINTS
) -> StorageFailedError | None:
    """Return the error that ends a run, if other files would fail, too; None if only this file failed."""
    if isinstance(error, StorageFailedError):
        return error
    number = (isinstance(error, OSError) and error.errno) or 0
    if number not in hints:
        return None
    message = f"{path} cannot be written: {os.strerror(number).lower()}."
    return StorageFailedError(message, error_number=number, hint=hints[number])


@contextlib.contextmanager
def failing_as_output(target: object, *, only_writing: bool = False) -> Iterator[None]:
    """Turn failures of the storage into `OutputError`s; with `only_writing`, an I/O error concerns the output."""
    found: OutputError | None
    try:
        yield
    except OSError as error:
        hints = {**_HINTS, errno.EIO: "Check the disk, then repeat the command."} if only_writing else _HINTS
        found = storage_failure(error, target, hints)
        if error.errno == errno.EFBIG:
            found = OutputError(f"{target} cannot be written: file too large.", hint="Raise the limit.")
        if found is None:
            raise
    else:
        return
    raise found


def refuse_in_child(owner: OwnerProcess, target: object) -> None:
    """Raise `OutputError` in a forked child: parent and child would write into the same file."""
    if not owner.is_here:
        raise OutputError(
            f"{target} is not written by this process: the one from which it was forked has opened it.",
            hint="Open files in the process that writes them.",
        )


# --- folders, and attributes of files ---

_ACCESS_LISTS = "system.posix_acl_"
_HADOOP_CHECKSUMS_MAGIC = b"crc\x00"

FolderIdentity = tuple[int, int]
"""Device and inode: a path may lead to another folder by now."""


def identity_of_folder(path: str) -> FolderIdentity:
    """Return device and inode of a folder."""
    found = os.stat(path)  # noqa: PTH116
    return found.st_dev, found.st_ino


class Folder:
    """An open folder, and operations on names in it; links are never followed.

    On Windows, `descriptor` is None and each operation is by path: a folder that was moved is not detected.
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
        """Return the status of the folder itself."""
        return os.stat(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH116

    def identity(self) -> FolderIdentity:
        """Return its device and inode."""
        found = self.status()
        return found.st_dev, found.st_ino

    def names(self) -> list[str]:
        """Return the names in it."""
        return os.listdir(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH208

    def look(self, name: str) -> os.stat_result:
        """Return the status of a name in it."""
        return os.stat(self._place(name), dir_fd=self.descriptor, follow_symlinks=False)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file in it, and return its file descriptor."""
        place = self._place(name)
        return operating_system.open_file(place, flags, mode, follow_link=False, folder=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a name from it."""
        os.unlink(self._place(name), dir_fd=self.descriptor)

    def replace(self, name: str, new_name: str) -> None:
        """Rename a file, in place of a file of the new name."""
        os.replace(
            self._place(name), self._place(new_name), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor
        )

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name, which must be free."""
        if self.descriptor is None:
            os.link(self._place(name), self._place(new_name))
        else:
            os.link(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)

    def sync(self) -> None:
        """Sync its names to the disk; Windows keeps them in the journal of its file system."""
        if self.descriptor is not None:
            operating_system.sync(self.descriptor)

    def _place(self, name: str) -> str:
        return f"{self.path}/{name}" if self.descriptor is None else name


def state_of_local(path: str) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to, whatever its times are set to; follows links."""
    found = os.stat(path)  # noqa: PTH116 - no object for each of a million files
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def folder_moved(target: object) -> OutputError:
    """Return the error for a folder that is no longer the one in which something was begun."""
    return OutputError(f"the folder of {target} was moved or replaced meanwhile.", hint="Try again.")


def may_give_attributes(file: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether a file's owner decides who reads its replacement: not if anyone may have put it there."""
    if not stat.S_ISREG(file.st_mode):
        return False
    return not folder.st_mode & stat.S_IWOTH or file.st_uid == operating_system.own_user_id()


def take_attributes(new: int, old: int, *, all_attributes: bool) -> None:
    """Give a new file owner, mode and access list of an old one, or all attributes, as far as this user may."""
    # Where the access list cannot be copied, the group loses its permissions: with an access list, the group bits
    # of the mode are the most that anyone in the list has, and not what the group has.
    found = os.fstat(old)
    mode = stat.S_IMODE(found.st_mode) & 0o777
    try:
        operating_system.change_owner(new, found.st_uid, found.st_gid)
    except OSError:
        try:
            # A user who may not give files away may still give them to a group of their own.
            operating_system.change_owner(new, -1, found.st_gid)
        except OSError:
            # The permissions of the old group are not for another group.
            mode = mode & ~0o070 | ((mode & 0o007) << 3)
    lost = operating_system.copy_attributes(new, old, lambda n: all_attributes or n.startswith(_ACCESS_LISTS))
    if any(name.startswith(_ACCESS_LISTS) for name in lost):
        mode &= ~0o070
    operating_system.change_mode(new, mode)


def remove_hadoop_checksums(folder: Folder, target: str) -> None:
    """Remove Hadoop's checksums of a local file: Spark would refuse the new file with the old ones."""
    name = f".{target}.crc"
    with contextlib.suppress(OSError):
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
    """Remove a local file from a data set, by descriptor of its folder and without following links."""
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
    """Remove a file if its folder, by device and inode, is still the same; None stands for any folder."""
    if folder is None or not location.is_local:
        location.filesystem.delete_file(location.path)
    else:
        base = FileLocation(location.filesystem, str(PurePosixPath(location.path).parent))
        remove_beneath(base, folder, location)


# --- locks on folders ---

# Anyone who may read a folder could hold a lock on the folder itself for ever. So the lock is on a file in it,
# which only users who may write to the folder may open. It is removed with the lock. A killed process leaves it
# unlocked.

FOREIGN_LOCK_SECONDS = 60.0
"""How long to wait for a lock file that this user may not open: its owner may be dead."""

LOCK_NAME = ".parquet-keytools.lock"
"""Name of the lock file; where everyone may write, each user has one, with the user's number in its name."""

_LOCK_NAME = re.compile(r"\.parquet-keytools(\.[0-9]+)?\.lock")
_POLL_SECONDS = 0.1

_held: contextvars.ContextVar[str | None] = contextvars.ContextVar("parquet_keytools_locked_folder", default=None)
"""The folder that this context has locked."""


@contextlib.contextmanager
def exclusive_folder(target: FileLocation) -> Iterator[None]:
    """Lock the folder of a local file against other users of this function, while files in it are replaced."""
    # The same context, and threads that run in a copy of it, may lock the folder again.
    path = str(PurePosixPath(target.path).parent)
    if not target.is_local or _held.get() == path:
        yield
        return
    token = _held.set(path)
    try:
        if not operating_system.POSIX:
            with operating_system.locked_path(f"{path}/{LOCK_NAME}"):
                yield
            return
        with Folder(path) as folder:
            name, lock = _locked(folder)
            try:
                yield
            finally:
                # Removed while it is locked: waiting processes see that it is gone, and make another one.
                with contextlib.suppress(OSError):
                    folder.unlink(name)
                os.close(lock)
    finally:
        _held.reset(token)


def _locked(folder: Folder) -> tuple[str, int]:
    """Return name and file descriptor of the lock file, locked."""
    found = folder.status()
    name, mode = LOCK_NAME, 0o600
    if found.st_mode & stat.S_IWOTH:
        stem, _, suffix = LOCK_NAME.rpartition(".")
        name = f"{stem}.{operating_system.own_user_id()}.{suffix}"
    elif found.st_mode & stat.S_IWGRP:
        # Only users who can write to the folder can open the lock.
        mode = 0o660
    deadline = time.monotonic() + FOREIGN_LOCK_SECONDS
    while True:
        _remove_foreign(folder, found, name)
        try:
            lock = _open_lock(folder, found, name, mode)
        except FileExistsError:
            continue
        except PermissionError:
            if name not in folder.names():
                raise  # The folder may not be written to.
            if time.monotonic() > deadline:
                raise _not_ours(folder, name, "belongs to another user, and this one may not open it") from None
            time.sleep(_POLL_SECONDS)
            continue
        except OSError as error:
            if error.errno not in operating_system.NOT_A_FILE:
                raise
            raise _not_ours(folder, name, "is not a regular file") from None
        try:
            status = os.fstat(lock)
            if not stat.S_ISREG(status.st_mode):
                raise _not_ours(folder, name, "is not a regular file")
            if _is_foreign(found, status):
                pass  # Another user put it there just now.
            elif stat.S_IMODE(status.st_mode) & ~mode & 0o077:
                folder.unlink(name)  # Others could hold it for ever.
            else:
                if not operating_system.try_lock(lock):
                    _log.info("waiting for another process that holds the lock %s/%s", folder.path, name)
                    operating_system.wait_for_lock(lock)
                if os.path.samestat(folder.look(name), os.fstat(lock)):
                    return name, lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _is_foreign(folder: os.stat_result, lock: os.stat_result) -> bool:
    """Return whether a lock belongs to a user who may not keep others out of the folder."""
    if folder.st_mode & stat.S_IWOTH:
        return lock.st_uid != operating_system.own_user_id()
    if folder.st_mode & stat.S_IWGRP:
        return False
    return lock.st_uid not in (folder.st_uid, operating_system.own_user_id(), 0)


def _remove_foreign(folder: Folder, folder_found: os.stat_result, name: str) -> None:
    """Remove a lock of another user, who could hold it for ever, or raise `OutputError`."""
    with contextlib.suppress(FileNotFoundError):
        if _is_foreign(folder_found, folder.look(name)):
            try:
                folder.unlink(name)
            except (PermissionError, IsADirectoryError):
                raise _not_ours(folder, name, "was put there by another user") from None


def _open_lock(folder: Folder, folder_found: os.stat_result, name: str, mode: int) -> int:
    try:
        return folder.open(name, os.O_RDWR)
    except FileNotFoundError:
        pass
    lock = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Other writers must be able to open a lock that a dead process of this user left.
    with contextlib.suppress(OSError):
        owner = folder_found.st_uid if operating_system.own_user_id() == 0 else -1
        operating_system.change_owner(lock, owner, folder_found.st_gid)
    if os.fstat(lock).st_gid == folder_found.st_gid:
        with contextlib.suppress(OSError):
            operating_system.change_mode(lock, mode)
    return lock


def _not_ours(folder: Folder, name: str, why: str) -> OutputError:
    return OutputError(
        f"{folder.path}: its lock {name} {why}.",
        hint="Remove that file, if no process of parquet-keytools writes there.",
    )


# --- temporary files ---

# A lock ends with its process. So the next writer in a folder removes temporary files that are not locked, and
# never a file that is being written. Where locks say nothing, the age of a file decides: on object stores, on
# Windows, on file systems without locks, and for files of other machines, whose locks may not be visible here.

DEAD_AFTER_SECONDS = 24 * 3600.0
"""The age at which a temporary file without a meaningful lock counts as left over."""

_MOST_BYTES_OF_NAME = 140
_NO_LOCK = "0" * 8

parse_temporary_name = re.compile(
    r"\.(?P<target>.+)\.[0-9a-f]{12}-(?P<machine>[0-9a-f]{8})\.tmp", re.DOTALL
).fullmatch
"""Match the name of a temporary file: the name of its target, or a digest, and of the machine that has a lock."""


def temporary_name(target: str, *, is_locked: bool = True) -> str:
    """Return a new name for a temporary file; it starts with a dot, so readers of data sets skip it."""
    encoded = os.fsencode(target)
    # The operating system takes 255 bytes.
    stem = target if len(encoded) <= _MOST_BYTES_OF_NAME else hashlib.sha256(encoded).hexdigest()
    return f".{stem}.{secrets.token_hex(6)}-{_machine() if is_locked else _NO_LOCK}.tmp"


def belongs_to_writer(name: str) -> bool:
    """Return whether a name is that of a lock file or a temporary file, which its writer removes by itself."""
    return _LOCK_NAME.fullmatch(name) is not None or parse_temporary_name(name) is not None


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest that processes share if they see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


class OccasionalScan:
    """Limits scans of a folder to a twentieth of the time."""

    def __init__(self) -> None:
        self._next: dict[object, float] = {}

    def is_due(self, folder: object) -> bool:
        """Return whether the folder is to be scanned now."""
        return time.monotonic() >= self._next.get(folder, 0.0)

    def done(self, folder: object, seconds: float) -> None:
        """Note how long a scan took."""
        if len(self._next) > 4096:
            self._next.clear()
        self._next[folder] = time.monotonic() + 20 * seconds


SCANS = OccasionalScan()


def without_leftovers(locations: Iterable[FileLocation]) -> Iterator[FileLocation]:
    """Yield files, and remove what killed processes left in their folders."""
    folders: set[str] = set()
    for location in locations:
        if location.is_local:
            # A file is replaced where its link leads.
            for path in {location.path, os.path.realpath(location.path)}:
                folder = str(Path(path).parent)
                if folder not in folders:
                    folders.add(folder)
                    with contextlib.suppress(OSError), Folder(folder) as opened:
                        remove_leftovers(opened)
        yield location


def remove_leftovers(folder: Folder) -> None:
    """Remove this user's temporary files that no process writes any more, as far as they can be removed."""
    with contextlib.suppress(OSError):
        found = folder.status()
        key = found.st_dev, found.st_ino
        if not SCANS.is_due(key):
            return
        started = time.monotonic()
        for name in folder.names():
            if not name.startswith("."):
                continue
            with contextlib.suppress(OSError):
                if _LOCK_NAME.fullmatch(name):
                    _remove_unlocked(folder, name)
                elif (parsed := parse_temporary_name(name)) is not None:
                    _remove(folder, found, name, parsed)
        SCANS.done(key, time.monotonic() - started)


def _remove_unlocked(folder: Folder, name: str, flags: int = os.O_RDWR) -> None:
    """Remove a file that no process has locked."""
    if not operating_system.POSIX:
        # Windows refuses as long as the file is open.
        folder.unlink(name)
        return
    file = folder.open(name, flags)
    try:
        if operating_system.try_lock(file):
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and os.path.samestat(folder.look(name), status):
                folder.unlink(name)
    finally:
        os.close(file)


def _remove(folder: Folder, folder_found: os.stat_result, name: str, parsed: re.Match[str]) -> None:
    found = folder.look(name)
    if not stat.S_ISREG(found.st_mode):
        return
    owners = {operating_system.own_user_id()}
    if operating_system.own_user_id() == 0:
        # When running as root, a new file gets the owner of the old one before it is in its place.
        owners.add(folder_found.st_uid)
        with contextlib.suppress(FileNotFoundError):
            owners.add(folder.look(parsed["target"]).st_uid)
    if found.st_uid not in owners:
        return
    if parsed["machine"] == _machine():
        # It already has the mode of the file that it was to replace, which may be read-only.
        _remove_unlocked(folder, name, os.O_RDWR if found.st_mode & stat.S_IWUSR else os.O_RDONLY)
    elif time.time() - found.st_mtime > DEAD_AFTER_SECONDS:
        folder.unlink(name)
