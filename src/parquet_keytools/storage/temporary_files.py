"""Temporary files: their names say who writes there, and those of processes that are gone are removed.

A name holds the machine (and container) of its process, the process's id and when it began. So another process of
the same machine knows whether it is still there, also on stores that have no locks. Of other machines only time
tells. What a process left that was killed while it wrote is removed when somebody writes there again.
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
from parquet_keytools.storage.local_files import Folder, UnsupportedRenameError, exchange
from parquet_keytools.storage.locations import FileLocation

DEAD_AFTER_SECONDS = 24 * 3600.0
"""How long a process of another machine may be at work on one file."""

_MOST_BYTES_OF_NAME = 140
_NAME = re.compile(
    r"\..+\.[0-9a-f]{12}-(?P<machine>[0-9a-f]{8})-(?P<process>[0-9a-f]+)-(?P<began>[0-9a-f]+)"
    r"\.(?:tmp|(?P<new>[0-9a-f]+)-(?P<old>[0-9a-f]+)-(?P<old_time>[0-9a-f]+)\.swap)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Swap:
    """Two files that exchange their names: which is which.

    Attributes:
        new: Inode of the new file.
        old: Inode of the one that it replaces.
        old_time: When that was changed last, in ns.
    """

    new: int
    old: int
    old_time: int


@dataclass(frozen=True)
class TemporaryName:
    """What the name of a temporary file says.

    Attributes:
        target: Name of the file that it will be; of long names a digest.
        machine: Where it is written.
        process_id: By whom.
        began: When that process began.
        swap: What exchanges its name with the target; None where nothing does.
    """

    target: str
    machine: str
    process_id: int
    began: int
    swap: Swap | None

    def is_dead(self, age_seconds: float) -> bool:
        """Return whether nobody writes there any more."""
        is_alive = _is_alive(self.process_id, self.began) if self.machine == _machine() else None
        return age_seconds > DEAD_AFTER_SECONDS if is_alive is None else not is_alive


def temporary_name(target: str, swap: Swap | None = None) -> str:
    """Return a new name for a temporary file beside a target.

    It starts with a dot: Arrow's and Spark's data sets pass over it.
    """
    encoded = os.fsencode(target)
    # The operating system takes 255 bytes.
    stem = target if len(encoded) <= _MOST_BYTES_OF_NAME else hashlib.sha256(encoded).hexdigest()
    process_id = os.getpid()
    writer = f"{secrets.token_hex(6)}-{_machine()}-{process_id:x}-{_began(process_id):x}"
    end = "tmp" if swap is None else f"{swap.new:x}-{swap.old:x}-{swap.old_time:x}.swap"
    return f".{stem}.{writer}.{end}"


def parse_temporary_name(name: str) -> TemporaryName | None:
    """Return what a name says, or None where it is no temporary file of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    swap = None
    if found["new"] is not None:
        swap = Swap(int(found["new"], 16), int(found["old"], 16), int(found["old_time"], 16))
    target = name[1:].rsplit(".", 2 if swap is None else 3)[0]
    return TemporaryName(target, found["machine"], int(found["process"], 16), int(found["began"], 16), swap)


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of what two processes have in common that see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _is_alive(process_id: int, began: int) -> bool | None:
    is_running = operating_system.is_running(process_id)
    return _began(process_id) in (began, 0) if is_running else is_running


def _began(process_id: int) -> int:
    """Return when a process began, in ticks; 0 where that is not known, and -1 where it ended."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_bytes()
    except OSError:
        return 0
    # The name of the program comes in brackets, and may hold any.
    state, *others = text.rpartition(b")")[2].split()
    return -1 if state in (b"Z", b"X") else int(others[18])


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
    """Remove temporary files from a folder whose processes are gone.

    Only those that are surely ours and dead; what cannot be looked at or removed stays. A folder is not looked
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
                    _remove_lock(folder, name)
            elif (parsed := parse_temporary_name(name)) is not None:
                with contextlib.suppress(OSError, UnsupportedRenameError):
                    _remove(folder, found, name, parsed)
        _scans.done(key, time.monotonic() - started)


def _remove_lock(folder: Folder, name: str) -> None:
    """Remove the file of a lock that nobody holds."""
    if not operating_system.POSIX:
        # It is refused as long as the file is open.
        folder.unlink(name)
        return
    lock = folder.open(name, os.O_RDWR)
    try:
        if operating_system.try_lock(lock):
            status = os.fstat(lock)
            if stat.S_ISREG(status.st_mode) and os.path.samestat(folder.look(name), status):
                folder.unlink(name)
    finally:
        os.close(lock)


def _remove(folder: Folder, folder_found: os.stat_result, name: str, parsed: TemporaryName) -> None:
    found = folder.look(name)
    if not stat.S_ISREG(found.st_mode) or not parsed.is_dead(time.time() - found.st_mtime):
        return
    swap = parsed.swap
    try:
        target = folder.look(parsed.target)
    except FileNotFoundError:
        target = None
    if swap is not None and (found.st_ino, found.st_mtime_ns) == (swap.old, swap.old_time):
        folder.unlink(name)
        return
    if swap is None or found.st_ino == swap.new:
        owners = {operating_system.own_user_id()}
        if operating_system.own_user_id() == 0:
            # Who may do all gives a new file to the owner of the old one before it is in its place.
            owners |= {folder_found.st_uid} | (set() if target is None else {target.st_uid})
        if found.st_uid in owners:
            folder.unlink(name)
        return
    # It was killed after it had taken the place of a file that came meanwhile, and before it could put that back.
    if target is None or target.st_ino != swap.new or not _may_replace(found, target, folder_found):
        _log.warning("%r is a version of %r that somebody wrote meanwhile; it is kept", name, parsed.target)
        return
    exchange(folder.descriptor, name, parsed.target)
    if folder.look(name).st_ino == swap.new:
        folder.unlink(name)


def _may_replace(file: os.stat_result, target: os.stat_result, folder: os.stat_result) -> bool:
    """Return whether the owner of a file may have put it in place of another one.

    In a folder with the sticky bit others may not: then they had its name made up, to have this user replace it.
    """
    return not folder.st_mode & stat.S_ISVTX or file.st_uid in (target.st_uid, folder.st_uid, 0)


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
        parsed = parse_temporary_name(info.base_name)
        if info.type == pafs.FileType.File and parsed is not None and parsed.is_dead(_age_seconds(info)):
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
