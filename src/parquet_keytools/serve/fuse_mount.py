"""Mount a served tree as a local folder with FUSE."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import stat
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
from parquet_keytools.serve.served_tree import ReadRange, ServedFile, ServedTree

_BLOCK_BYTES = 4096
_UNIT_BYTES = 512
"""Unit of `st_blocks` on Linux and macOS."""

_log = logging.getLogger("parquet_keytools.serve")


class MountedTree:
    """The FUSE operations of a read-only tree; `on_mounted` is called when the folder is mounted."""

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
        """Report that the folder is mounted."""
        self.was_mounted = True
        self._on_mounted()
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Return the status of a file or folder; GNU tar takes missing blocks for holes and archives zeros."""
        key = path.strip("/")
        mode, size, modified = stat.S_IFREG | 0o400, 0, None
        with _as_errno(path):
            try:
                file = self._tree.find_listed(key)
                size, modified = file.size_bytes, file.modified
            except FileNotFoundError:
                if not self._tree.is_folder(key):
                    raise
                mode = stat.S_IFDIR | 0o500
        time_ns = self._began_ns if modified is None else int(modified * 1e9)
        return {
            "st_mode": mode,
            "st_nlink": 1,
            "st_size": size,
            "st_blocks": -(-size // _BLOCK_BYTES) * (_BLOCK_BYTES // _UNIT_BYTES),
            "st_blksize": _BLOCK_BYTES,
            **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), time_ns),
            "st_uid": own_user_id(),
            "st_gid": own_group_id(),
        }

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Return the names in a folder, with the same kinds as `getattr`."""
        with _as_errno(path):
            names = {".": stat.S_IFDIR, "..": stat.S_IFDIR}
            for entry in self._tree.entries(path.strip("/")):
                names[entry.key.rpartition("/")[2]] = stat.S_IFDIR if entry.is_folder else stat.S_IFREG
        return iter([(name, {"st_mode": mode}, 0) for name, mode in names.items()])

    def open(self, path: str, handle: Any) -> int:
        """Open the current version of a file; later reads through the handle see this version only."""
        if handle.flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with _as_errno(path), contextlib.ExitStack() as stack:
            file = self._tree.find(path.strip("/"))
            read = stack.enter_context(self._tree.open(file))
            opened = _OpenedFile(file, read, stack.pop_all(), threading.Lock())
        with self._lock:
            # The kernel shares one page cache between all open handles of a path. A handle that was opened before
            # the file was replaced must not get pages of the new version.
            others = [other.file for other in self._opened.values() if other.file.key == file.key]
            handle.direct_io = any(other.etag != file.etag for other in others)
            handle.fh = next(self._numbers)
            self._opened[handle.fh] = opened
        return 0

    def read(self, path: str, size: int, offset: int, handle: Any) -> bytes:
        """Return authenticated bytes of an open file."""
        opened = self._opened[handle.fh]
        length = min(size, max(opened.file.size_bytes - offset, 0))
        with _as_errno(path), opened.lock:
            return opened.read(offset, length) if length else b""

    def release(self, path: str, handle: Any) -> int:
        """Close a file."""
        with self._lock:
            opened = self._opened.pop(handle.fh)
        opened.closing.close()
        return 0


@dataclass(frozen=True)
class _OpenedFile:
    file: ServedFile
    read: ReadRange
    closing: contextlib.ExitStack
    lock: threading.Lock


def mount(tree: ServedTree, folder: Path, on_mounted: Callable[[], None]) -> None:
    """Mount a tree in an empty folder, and return after `umount`, Ctrl-C or SIGTERM."""
    mfusepy = _mfusepy()
    operations = MountedTree(tree, on_mounted)
    # Python cannot run its handler while libfuse waits in C, so libfuse handles the signal and unmounts.
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
            fsname="parquet-keytools",
            subtype="keytools",
        )
    except RuntimeError as error:
        # libfuse returns a non-zero status after a signal, too.
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
    return mfusepy


@contextlib.contextmanager
def _as_errno(path: str) -> Iterator[None]:
    """Translate errors into errno values; the log has their text."""
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
