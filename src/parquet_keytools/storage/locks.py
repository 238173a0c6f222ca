"""Locks that keep other writers of ours out of a folder.

A lock on the folder itself could be held by anybody who may only read it, for ever. So it is on a file in it,
which only those may open who may write to the folder. The file goes when the lock is left; what a process that
was killed leaves of it is no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import PurePosixPath

from parquet_keytools.errors import OutputError
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.local_files import Folder
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.temporary_files import LOCK_NAME

FOREIGN_LOCK_SECONDS = 60.0
"""How long a lock file is waited for that this user may not open: nobody can say whether its owner is alive."""

_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusive_folder(target: FileLocation) -> Iterator[None]:
    """Keep others who use this out of the folder of a local file, while files are replaced in it.

    Raises:
        OutputError: The lock is not one that can be trusted, or belongs to somebody else.
        OSError: The file system failed.
    """
    if not target.is_local:
        yield
        return
    path = str(PurePosixPath(target.path).parent)
    if not operating_system.POSIX:
        with operating_system.locked_path(f"{path}/{LOCK_NAME}"):
            yield
        return
    with Folder(path) as folder:
        name, lock = _locked(folder)
        try:
            yield
        finally:
            # Removed while it is locked: who waits for it sees that it is gone, and makes another one.
            with contextlib.suppress(OSError):
                folder.unlink(name)
            os.close(lock)


def _locked(folder: Folder) -> tuple[str, int]:
    """Return name and file descriptor of the lock file, locked."""
    path = folder.path
    found = folder.status()
    name, mode = _name_and_mode(found)
    deadline = time.monotonic() + FOREIGN_LOCK_SECONDS
    while True:
        _remove_foreign(folder, found, name, path)
        try:
            lock = _open_lock(folder, found, name, mode)
        except FileExistsError:
            continue
        except PermissionError:
            if not _exists(folder, name):
                raise  # It may not be made: the folder may not be written to.
            if time.monotonic() > deadline:
                raise _not_ours(path, name, "belongs to another user, and this one may not open it") from None
            time.sleep(_POLL_SECONDS)
            continue
        except OSError as error:
            if error.errno not in operating_system.NOT_A_FILE:
                raise
            raise _not_ours(path, name, "is not a regular file") from None
        try:
            status = os.fstat(lock)
            if not stat.S_ISREG(status.st_mode):
                raise _not_ours(path, name, "is not a regular file")
            if _is_foreign(found, status):
                pass  # Put there in this moment.
            elif stat.S_IMODE(status.st_mode) & ~mode & 0o077:
                # From when the folder had other permissions, or put there: others could hold it for ever.
                folder.unlink(name)
            else:
                _wait(lock, path, name)
                if _is_still(folder, name, lock):
                    return name, lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _name_and_mode(folder: os.stat_result) -> tuple[str, int]:
    if folder.st_mode & stat.S_IWOTH:
        # There nobody replaces files of others, or all do.
        stem, _, suffix = LOCK_NAME.rpartition(".")
        return f"{stem}.{operating_system.own_user_id()}.{suffix}", 0o600
    # Who may write to the folder may read and write the lock, and nobody else.
    writers = folder.st_mode & stat.S_IWGRP
    return LOCK_NAME, 0o600 | writers | writers << 1


def _is_foreign(folder: os.stat_result, lock: os.stat_result) -> bool:
    """Return whether a lock is of somebody who may not keep others out of the folder."""
    if folder.st_mode & stat.S_IWOTH:
        return lock.st_uid != operating_system.own_user_id()
    if folder.st_mode & stat.S_IWGRP:
        return False
    return lock.st_uid not in (folder.st_uid, operating_system.own_user_id(), 0)


def _remove_foreign(folder: Folder, folder_found: os.stat_result, name: str, path: str) -> None:
    """Remove a lock that somebody put there who could hold it for ever.

    Raises:
        OutputError: It cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if _is_foreign(folder_found, folder.look(name)):
            try:
                folder.unlink(name)
            except (PermissionError, IsADirectoryError):
                raise _not_ours(path, name, "was put there by another user") from None


def _open_lock(folder: Folder, folder_found: os.stat_result, name: str, mode: int) -> int:
    try:
        return folder.open(name, os.O_RDWR)
    except FileNotFoundError:
        pass
    lock = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # So that no other writer stands before a lock that a dead process of this user left.
    with contextlib.suppress(OSError):
        owner = folder_found.st_uid if operating_system.own_user_id() == 0 else -1
        operating_system.change_owner(lock, owner, folder_found.st_gid)
    if os.fstat(lock).st_gid == folder_found.st_gid:
        with contextlib.suppress(OSError):
            operating_system.change_mode(lock, mode)
    return lock


def _wait(lock: int, path: str, name: str) -> None:
    if not operating_system.try_lock(lock):
        _log.info("waiting for another process that writes to %s, which holds %s there", path, name)
        operating_system.wait_for_lock(lock)


def _is_still(folder: Folder, name: str, lock: int) -> bool:
    return os.path.samestat(folder.look(name), os.fstat(lock))


def _exists(folder: Folder, name: str) -> bool:
    try:
        folder.look(name)
    except FileNotFoundError:
        return False
    return True


def _not_ours(path: str, name: str, why: str) -> OutputError:
    return OutputError(
        f"{path}: its lock {name} {why}.", hint="Remove that file, if no process of parquet-keytools writes there."
    )


def written_meanwhile(target: FileLocation) -> OutputError:
    """Return the error for a target that was not there when its replacement was begun."""
    return OutputError(f"{target} was written by another process meanwhile.", hint="Try again.")
