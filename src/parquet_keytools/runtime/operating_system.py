"""Calls that Linux, macOS and Windows do differently, mostly with open files.

POSIX systems open files relative to a folder's descriptor, can refuse links, and have permission bits. On Windows,
files are opened by path, and permissions mean nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

POSIX = sys.platform != "win32" and find_spec("fcntl") is not None
"""Whether the system has POSIX calls: not Windows, and not Pythons on WebAssembly."""

if sys.platform != "win32" and POSIX:
    import fcntl

    # Do not wait for the other end of a pipe, and do not take a terminal as this process's own.
    _ALWAYS, _NO_LINK = os.O_NONBLOCK | os.O_NOCTTY, os.O_NOFOLLOW
else:
    # Without O_BINARY, Windows translates line endings.
    _ALWAYS, _NO_LINK = getattr(os, "O_BINARY", 0), 0


def open_file(
    path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, follow_link: bool, folder: int | None = None
) -> int:
    """Open a file, and return its file descriptor.

    `path` may be a name in `folder`, which is the descriptor of a folder and always None on Windows. A link that
    is not followed is an `OSError` with a number in `NOT_A_FILE`.
    """
    if not follow_link:
        flags |= _NO_LINK
        if not POSIX and os.path.islink(path):  # noqa: PTH114 - as the rest of this
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    return os.open(path, flags | _ALWAYS, mode, dir_fd=folder)


NOT_A_FILE = frozenset({errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.EOPNOTSUPP})
"""Error numbers of `open_file` for a link, a folder, a pipe or a socket, on any system."""


_position = threading.Lock()
"""Guards the position of descriptors, where the system cannot read and write at an offset."""


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read at most `length` bytes at an offset; for any number of threads."""
    if sys.platform != "win32" and POSIX:
        return os.pread(descriptor, length, offset)
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def write_at(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> int:
    """Write at an offset, and return how many bytes were written; for any number of threads."""
    if sys.platform != "win32" and POSIX:
        return os.pwrite(descriptor, data, offset)
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def reserve(descriptor: int, length: int) -> None:
    """Reserve space on the disk, where the system can, so that a full disk is noticed early."""
    # Some builds of Python for old Linux systems lack this.
    if sys.platform == "linux" and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)


def sync(descriptor: int) -> None:
    """Sync a file or folder to the disk."""
    if sys.platform == "darwin":
        # There `fsync` does not wait until the drive has written the data.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def open_folder(path: str | os.PathLike[str]) -> int | None:
    """Return a file descriptor of a folder; None on Windows."""
    if sys.platform != "win32" and POSIX:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    return None


def open_folder_within(folder: int | None, name: str, path: str) -> int | None:
    """Return a file descriptor of a folder in a folder (None on Windows); a link is ELOOP or ENOTDIR."""
    if sys.platform != "win32" and POSIX:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    # Junctions are no links to Python 3.11.
    if Path(os.path.realpath(path)) != Path(os.path.realpath(Path(path).parent)) / name:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return None


# --- locks ---


def try_lock(descriptor: int) -> bool:
    """Try to lock an open file until it is closed, and return whether it is locked. Not on Windows."""
    if sys.platform != "win32" and POSIX:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    raise NotImplementedError


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file, however long another process holds the lock. Not on Windows."""
    if sys.platform != "win32" and POSIX:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    raise NotImplementedError


@contextlib.contextmanager
def locked_path(path: str | os.PathLike[str], timeout_seconds: float = -1) -> Iterator[None]:
    """Hold a lock by the path of its file, for Windows; negative to wait for ever for other holders."""
    # Not on POSIX, because filelock does not open locks by descriptor of their folder.
    from filelock import FileLock

    with FileLock(os.fspath(path), timeout=timeout_seconds, thread_local=False):
        yield


# --- owners and permissions ---


def own_user_id() -> int:
    """Return the effective user of this process; 0 on Windows, as for every file there."""
    if sys.platform != "win32" and POSIX:
        return os.geteuid()
    return 0


def own_group_id() -> int:
    """Return the effective group of this process; 0 on Windows, as for every file there."""
    if sys.platform != "win32" and POSIX:
        return os.getegid()
    return 0


def permissions(found: os.stat_result, bits: int) -> int:
    """Return which of these permission bits a file has; none on Windows."""
    if sys.platform != "win32" and POSIX:
        return found.st_mode & bits
    return 0


def change_mode(descriptor: int, mode: int) -> None:
    """Set the permissions of an open file; not on Windows."""
    if sys.platform != "win32" and POSIX:
        os.fchmod(descriptor, mode)


def change_owner(descriptor: int, user_id: int, group_id: int) -> None:
    """Set owner and group of an open file, not on Windows; -1 leaves one as it is."""
    if sys.platform != "win32" and POSIX:
        os.fchown(descriptor, user_id, group_id)


def copy_attributes(new: int, old: int, wanted: Callable[[str], bool]) -> list[str]:
    """Copy wanted extended attributes to a new file, only on Linux; return the names of those that are lost."""
    lost: list[str] = []
    if sys.platform == "linux" and hasattr(os, "listxattr"):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listxattr(old)
        for name in filter(wanted, names):
            try:
                os.setxattr(new, name, os.getxattr(old, name))
            except OSError:  # The system guards some attributes.
                lost.append(name)
    return lost


# --- processes ---


def register_at_fork(
    *,
    before: Callable[[], object] = lambda: None,
    after_in_parent: Callable[[], object] = lambda: None,
    after_in_child: Callable[[], object] = lambda: None,
) -> None:
    """Call functions when this process forks, as `os.register_at_fork` does; Windows never forks."""
    if sys.platform != "win32" and POSIX:
        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)


@contextlib.contextmanager
def signals_blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in this thread, and in what it starts; not on Windows."""
    if sys.platform != "win32" and POSIX:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        if sys.platform != "win32" and POSIX:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
