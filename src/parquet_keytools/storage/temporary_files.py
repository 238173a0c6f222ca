"""Temporary files: their writers lock them, and what is left of killed processes is removed.

A lock ends with its process, whatever ends that. So the next writer in a folder removes temporary files that are
not locked, and never a file that is being written. Where locks say nothing, only time does: on object stores, on
Windows, on file systems without locks, and of other machines, whose locks may not be visible here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pyarrow import fs as pafs

from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.failures import warn_left_behind
from parquet_keytools.storage.local_files import Folder
from parquet_keytools.storage.locations import FileLocation

DEAD_AFTER_SECONDS = 24 * 3600.0
"""How long a file whose lock says nothing may stay as it is before it is taken for left over."""

_MOST_BYTES_OF_NAME = 140
_NO_LOCK = "0" * 8
_NAME = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{12}-(?P<machine>[0-9a-f]{8})\.tmp", re.DOTALL)


@dataclass(frozen=True)
class TemporaryName:
    """What the name of a temporary file says.

    Attributes:
        target: Name of the file that it will be; of long names a digest.
        is_locked_here: Whether its writer, on this machine, has it locked.
    """

    target: str
    is_locked_here: bool


def temporary_name(target: str, *, is_locked: bool = True) -> str:
    """Return a new name for a temporary file beside a target, which its writer locks.

    It starts with a dot: Arrow's and Spark's data sets pass over it.
    """
    encoded = os.fsencode(target)
    # The operating system takes 255 bytes.
    stem = target if len(encoded) <= _MOST_BYTES_OF_NAME else hashlib.sha256(encoded).hexdigest()
    return f".{stem}.{secrets.token_hex(6)}-{_machine() if is_locked else _NO_LOCK}.tmp"


def parse_temporary_name(name: str) -> TemporaryName | None:
    """Return what a name says, or None where it is no temporary file of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else TemporaryName(found["target"], found["machine"] == _machine())


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of what processes have in common that see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


class OccasionalScan:
    """Lets a scan of a folder come again only when it is not more than a twentieth of the time."""

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


_log = logging.getLogger(__name__)
_scans = OccasionalScan()

LOCK_NAME = ".parquet-keytools.lock"
"""Of the file that is locked; where all may write, each user has one, with their number in its name."""

_LOCK_NAME = re.compile(r"\.parquet-keytools(\.[0-9]+)?\.lock")


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
                    with contextlib.suppress(OSError), Folder(folder) as opened:
                        remove_leftovers(opened)
        yield location


def remove_leftovers(folder: Folder) -> None:
    """Remove temporary files from a folder that no process writes any more.

    Only files of this user; what cannot be looked at or removed stays. A folder is not looked
    through again and again: that would take as long as there are files in it, for each file in it.
    """
    with contextlib.suppress(OSError):
        found = folder.status()
        key = found.st_dev, found.st_ino
        if not _scans.is_due(key):
            return
        started = time.monotonic()
        for name in folder.names():
            if not name.startswith("."):
                continue
            if _LOCK_NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(folder, name)
            elif (parsed := parse_temporary_name(name)) is not None:
                with contextlib.suppress(OSError):
                    _remove(folder, found, name, parsed)
        _scans.done(key, time.monotonic() - started)


def _remove_unlocked(folder: Folder, name: str, flags: int = os.O_RDWR) -> None:
    """Remove a file that no process has locked."""
    if not operating_system.POSIX:
        # It is refused as long as the file is open.
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


def _remove(folder: Folder, folder_found: os.stat_result, name: str, parsed: TemporaryName) -> None:
    found = folder.look(name)
    if not stat.S_ISREG(found.st_mode):
        return
    owners = {operating_system.own_user_id()}
    if operating_system.own_user_id() == 0:
        # When running as root, a new file gets the owner of the old one before it is in its place.
        owners.add(folder_found.st_uid)
        with contextlib.suppress(FileNotFoundError):
            owners.add(folder.look(parsed.target).st_uid)
    if found.st_uid not in owners:
        return
    if parsed.is_locked_here:
        # It has the mode of the file that it was to replace already, and that may be read-only.
        _remove_unlocked(folder, name, os.O_RDWR if found.st_mode & stat.S_IWUSR else os.O_RDONLY)
    elif time.time() - found.st_mtime > DEAD_AFTER_SECONDS:
        folder.unlink(name)


def remove_stored_leftovers(target: FileLocation) -> None:
    """Remove what is surely left over beside an object that is about to be written, of any target in that place.

    What cannot be listed or removed stays, and a warning names it.
    """
    folder = target.path.rpartition("/")[0]
    key = target.filesystem.type_name, folder
    if not _scans.is_due(key):
        return
    started = time.monotonic()
    selector = pafs.FileSelector(folder, allow_not_found=True)
    try:
        found = target.filesystem.get_file_info(selector) if folder else []
    except Exception:
        found = []
    for info in found:
        is_ours = info.type == pafs.FileType.File and parse_temporary_name(info.base_name) is not None
        if is_ours and _age_seconds(info) > DEAD_AFTER_SECONDS:
            remove_object(FileLocation(target.filesystem, info.path))
    if target.is_in_s3 and importlib.util.find_spec("boto3") is not None:
        from parquet_keytools.storage.s3_connection import end_dead_uploads

        end_dead_uploads(target)
    _scans.done(key, time.monotonic() - started)


def remove_object(location: FileLocation) -> None:
    """Remove a temporary object; if that is refused, a warning names it."""
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        pass
    except OSError:
        text = f"{location} is a temporary object that is left over, and cannot be removed: remove it"
        warn_left_behind(_log, text)


def _age_seconds(info: pafs.FileInfo) -> float:
    return 0.0 if info.mtime_ns is None else time.time() - info.mtime_ns / 1e9
