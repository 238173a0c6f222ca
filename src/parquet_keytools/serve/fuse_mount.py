"""A tree mounted as a folder of this machine, by FUSE."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    FileChangedError,
    KmsAccessDeniedError,
)
from parquet_keytools.runtime.operating_system import own_group_id, own_user_id
from parquet_keytools.runtime.presentation import install_hint
from parquet_keytools.serve.requests_and_answers import logged_outcome
from parquet_keytools.serve.served_tree import FileReader, ServedFile, ServedTree

_BLOCK_BYTES = 4096
_UNIT_BYTES = 512
"""What `st_blocks` counts, on Linux and macOS."""

_log = logging.getLogger("parquet_keytools.serve")


class MountedTree:
    """What the kernel asks of a mounted tree, which cannot be written to; `on_mounted` is called first."""

    use_ns = True

    def __init__(self, tree: ServedTree, on_mounted: Callable[[], None]) -> None:
        self._tree = tree
        self._on_mounted = on_mounted
        self._began_ns = time.time_ns()
        self._numbers = itertools.count(1)
        self._opened: dict[int, _OpenedFile] = {}
        self._lock = threading.Lock()
        self.was_mounted = False

    def init(self, path: str) -> int:
        """Say that the folder is there."""
        self.was_mounted = True
        self._on_mounted()
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Return what a local file system reports of a file or folder.

        Programs that copy and archive trust it. Fewer blocks than the length needs are holes: GNU tar archives
        these as zeros. A folder has one link, as on btrfs: 2 would say that there are no folders in it.
        """
        key = path.strip("/")
        with _as_errno(path):
            # Before the length: if the file is replaced in between, its time is too old, and it is copied again.
            local = self._tree.local_status(key)
            try:
                file = self._tree.find_listed(key)
            except FileNotFoundError:
                if not self._tree.is_folder(key):
                    raise
                return self._attributes(key, stat.S_IFDIR | 0o500, local.st_size if local else 0, None, local)
            # A name under which the file cannot be read is no link to one under which it can.
            names = local.st_nlink if local and file.version else 1
            found = self._attributes(key, stat.S_IFREG | 0o400, file.size_bytes, file.modified, local)
            return {**found, "st_nlink": names, "st_ino": _inode(key, local if names > 1 else None)}

    def _attributes(
        self, key: str, mode: int, size: int, modified: float | None, local: os.stat_result | None
    ) -> dict[str, int]:
        other = self._began_ns if modified is None else int(modified * 1e9)
        return {
            "st_mode": mode,
            "st_nlink": 1,
            "st_ino": _inode(key),
            "st_size": size,
            "st_blocks": -(-size // _BLOCK_BYTES) * (_BLOCK_BYTES // _UNIT_BYTES),
            "st_blksize": _BLOCK_BYTES,
            "st_atime": local.st_atime_ns if local else other,
            "st_mtime": local.st_mtime_ns if local else other,
            "st_ctime": local.st_ctime_ns if local else other,
            "st_uid": own_user_id(),
            "st_gid": own_group_id(),
        }

    def statfs(self, path: str) -> dict[str, int]:
        """Return what is known of the disk on which the files lie."""
        space = self._tree.local_space()
        if space is None:
            return {"f_bsize": _BLOCK_BYTES, "f_frsize": _BLOCK_BYTES, "f_namemax": 255}
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax")
        return {f"f_{name}": getattr(space, f"f_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Return the names in a folder, with what `getattr` says of their kinds and inodes."""
        folder = path.strip("/")
        with _as_errno(path):
            here = {"st_mode": stat.S_IFDIR, "st_ino": _inode(folder)}
            above = {"st_mode": stat.S_IFDIR, "st_ino": _inode(folder.rpartition("/")[0])}
            found = [(".", here, 0), ("..", above, 0)]
            for entry in self._tree.entries(folder):
                mode, local = stat.S_IFDIR, None
                if not entry.is_folder:
                    mode, local = stat.S_IFREG, self._linked(entry.key)
                attributes = {"st_mode": mode, "st_ino": _inode(entry.key, local)}
                found.append((entry.key.rpartition("/")[2], attributes, 0))
        return iter(found)

    def _linked(self, key: str) -> os.stat_result | None:
        """Return what the disk says of a file that has several names there."""
        try:
            local = self._tree.local_status(key)
        except OSError:
            return None
        return local if local and local.st_nlink > 1 else None

    def open(self, path: str, handle: Any) -> int:
        """Open a file; what is read through the handle is of the file that is there now.

        Of FUSE's handle, `flags` are read, and `fh` and `direct_io` are set.
        """
        if handle.flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with _as_errno(path), contextlib.ExitStack() as stack:
            file = self._tree.find(path.strip("/"))
            reader = stack.enter_context(self._tree.open(file))
            opened = _OpenedFile(file, reader, stack.pop_all(), threading.Lock())
        with self._lock:
            # The kernel has one cache for all who have a file open. Who opened it before it was replaced must not
            # get pages of the new one from there.
            others = [other.file for other in self._opened.values() if other.file.key == file.key]
            handle.direct_io = any(other.etag != file.etag for other in others)
            handle.fh = next(self._numbers)
            self._opened[handle.fh] = opened
        return 0

    def read(self, path: str, size: int, offset: int, handle: Any) -> bytes:
        """Return bytes of a file, all of them authentic."""
        opened = self._opened[handle.fh]
        length = min(size, max(opened.file.size_bytes - offset, 0))
        with _as_errno(path), opened.lock:
            return opened.reader.read(offset, length) if length else b""

    def release(self, path: str, handle: Any) -> int:
        """Close a file."""
        with self._lock:
            opened = self._opened.pop(handle.fh)
        opened.closing.close()
        return 0


def _inode(key: str, local: os.stat_result | None = None) -> int:
    """Return a number that stays with a key, or with a file of this machine under each of its names."""
    identity = key if local is None else f"{local.st_dev}//{local.st_ino}"  # Keys have no empty parts.
    return int.from_bytes(hashlib.blake2b(os.fsencode(identity), digest_size=8).digest()) >> 1 or 1


@dataclass(frozen=True)
class _OpenedFile:
    file: ServedFile
    reader: FileReader
    closing: contextlib.ExitStack
    lock: threading.Lock


def mount(tree: ServedTree, folder: Path, on_mounted: Callable[[], None]) -> None:
    """Mount a tree in an empty folder, and return when it is unmounted: by `umount`, Ctrl-C or SIGTERM.

    Raises:
        ConfigurationError: This machine cannot mount; the text says what is missing.
    """
    mfusepy = _mfusepy()
    operations = MountedTree(tree, on_mounted)
    # Waiting in C, Python would never come to handle it; libfuse unmounts.
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        mfusepy.FUSE(
            operations,
            str(folder),
            foreground=True,
            raw_fi=True,
            ro=True,
            nosuid=True,
            nodev=True,
            noexec=True,
            default_permissions=True,
            use_ino=True,
            fsname="parquet-keytools",
            subtype="keytools",
        )
    except RuntimeError as error:
        # libfuse has its own status for an end by a signal.
        if not operations.was_mounted:
            raise ConfigurationError(
                f"{folder} cannot be mounted: FUSE ended with status {error}.",
                hint="Its own message is above. A container needs /dev/fuse and the right to mount.",
            ) from None
    finally:
        signal.signal(signal.SIGTERM, former or signal.SIG_DFL)


def _mfusepy() -> Any:
    try:
        import mfusepy
    except ImportError:
        raise ConfigurationError("mfusepy is not installed.", hint=install_hint("fuse")) from None
    except OSError:
        raise ConfigurationError(
            "libfuse is not installed.", hint="On Debian: apt install fuse3 libfuse3-3; on macOS install macFUSE."
        ) from None
    if not Path("/dev/fuse").exists() and sys.platform == "linux":
        raise ConfigurationError(
            "this machine has no /dev/fuse, and cannot mount.", hint="Use `parquet-keytools serve` in its place."
        )
    return mfusepy


@contextlib.contextmanager
def _as_errno(path: str) -> Iterator[None]:
    """Turn what is wrong with a file into a number that the kernel knows; the log has the text."""
    try:
        yield
    except FileNotFoundError:
        number = errno.ENOENT
    except Exception as error:
        number = errno.ESTALE if isinstance(error, FileChangedError) else errno.EIO
        if isinstance(error, (ColumnAccessDeniedError, KmsAccessDeniedError, PermissionError)):
            number = errno.EACCES
        outcome, reason = logged_outcome(error)
        _log.warning("%r is not read: %s", path, reason or outcome)
    else:
        return
    raise OSError(number, os.strerror(number))
