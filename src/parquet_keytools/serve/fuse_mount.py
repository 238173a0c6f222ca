"""A tree mounted as a folder of this machine, by FUSE."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import stat
import threading
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
from parquet_keytools.runtime.presentation import install_hint
from parquet_keytools.serve.requests_and_answers import logged_outcome
from parquet_keytools.serve.served_tree import FileReader, ServedFile, ServedTree

_log = logging.getLogger("parquet_keytools.serve")


class MountedTree:
    """What the kernel asks of a mounted tree, which cannot be written to; `on_mounted` is called first."""

    use_ns = True

    def __init__(self, tree: ServedTree, on_mounted: Callable[[], None]) -> None:
        self._tree = tree
        self._on_mounted = on_mounted
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
        """Return what is known of a file or folder."""
        key = path.strip("/")
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        with _as_errno(path):
            try:
                file = self._tree.find_listed(key)
            except FileNotFoundError:
                if not self._tree.is_folder(key):
                    raise
                return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2, **owner}
            modified = int((file.modified or 0) * 1e9)
            times = dict.fromkeys(("st_mtime", "st_ctime", "st_atime"), modified)
            return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": file.size_bytes, **times, **owner}

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        """Return the names in a folder."""
        with _as_errno(path):
            names = [entry.key.rpartition("/")[2] for entry in self._tree.entries(path.strip("/"))]
        return iter([".", "..", *names])

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
    if not Path("/dev/fuse").exists() and os.uname().sysname == "Linux":
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
