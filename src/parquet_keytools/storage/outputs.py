"""Files written whole or not at all: the one way in which this package puts a file in its place."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import ChangedMeanwhileError, OutputError
from parquet_keytools.format.file_layout import Bytes, ByteSink, ByteSource, FileSource
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.presentation import is_url
from parquet_keytools.runtime.threads_and_forks import OwnerProcess, share_with_arrow
from parquet_keytools.storage.local_files import (
    DEAD_AFTER_SECONDS,
    SCANS,
    Folder,
    FolderIdentity,
    failing_as_output,
    folder_moved,
    identity_of_folder,
    may_give_attributes,
    parse_temporary_name,
    refuse_in_child,
    remove_hadoop_checksums,
    remove_leftovers,
    take_attributes,
    temporary_name,
)
from parquet_keytools.storage.locations import OBJECT_STORES, FileLocation, fsspec_of, open_source

_log = logging.getLogger(__name__)


class TargetExistsError(OutputError):
    """The target exists, and must not be replaced."""


def exists_already(target: FileLocation) -> TargetExistsError:
    """Return the error for a target that exists and must not be replaced."""
    return TargetExistsError(
        f"{target} exists already.", hint="Use --overwrite to replace it; in Python overwrite=True."
    )


def changed_meanwhile(target: FileLocation) -> ChangedMeanwhileError:
    """Return the error for a target that changed since it was checked."""
    return ChangedMeanwhileError(f"{target} was changed by another process meanwhile.", hint="Try again.")


class LocalSink:
    """A local file that is written in any order, by any number of threads; errors name the target."""

    takes_any_order = True

    def __init__(self, file_descriptor: int, target: object = "the output") -> None:
        self.file_descriptor = file_descriptor
        self._target = target

    def reserve(self, length: int) -> None:
        """Reserve the space, where the system can, so that a full disk is noticed before the work is done."""
        if length:
            with failing_as_output(self._target, only_writing=True):
                operating_system.reserve(self.file_descriptor, length)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        with failing_as_output(self._target, only_writing=True):
            while len(view):
                written = operating_system.write_at(self.file_descriptor, view, offset)
                view = view[written:]
                offset += written


class StreamSink:
    """A stream, written in order; `length` is the number of bytes written."""

    takes_any_order = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.length = 0

    def reserve(self, length: int) -> None:
        """Do nothing: a stream grows."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Append `data`; `offset` must be the end of what was written."""
        if offset != self.length:
            raise OutputError(f"a stream was written at {offset} instead of {self.length}.")
        # A stream may keep the data, to upload it later, and the caller reuses the buffer.
        self._stream.write(data if isinstance(data, bytes) else bytes(data))
        self.length += len(data)


PLAINTEXT_MODE = 0o600
"""The default mode of outputs that hold decrypted values."""

Check = Callable[[], None]
"""Raises if a file may not be replaced any more."""

_DESCRIPTORS = Path("/proc/self/fd")
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL
_NOT_THE_FILE = operating_system.NOT_A_FILE | {errno.ENOENT}
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
MOST_STAYING_OPEN = 50
"""How many files stay open although they may be closed, each with its folder: macOS allows 256 descriptors.

Files that stay open are locked, so the next writer in a folder removes what a killed process left.
"""

_staying_open: set[int] = set()


class LocalOutput:
    """A local file that is written under a temporary name beside its target; see `pending_output`.

    On POSIX, the folder is opened once, and all names are relative to its descriptor: a path leads elsewhere when
    another user who may write to one of its folders puts a link there.
    """

    def __init__(
        self,
        target: FileLocation,
        *,
        overwrite: bool,
        mode: int | None,
        like: FileLocation | None,
        keeps_open: bool,
        folder: FolderIdentity | None,
        durable: bool,
    ) -> None:
        self.target = target
        self._owner = OwnerProcess()
        self._overwrite = overwrite
        self._durable = durable
        self._folder_path = str(PurePosixPath(target.path).parent)
        self._name = PurePosixPath(target.path).name
        self._mode = mode
        self._like = like
        self._is_synced = False
        self._stays_open = keeps_open or len(_staying_open) < MOST_STAYING_OPEN
        self._temporary = ""
        self._place: Folder | None = Folder(self._folder_path)
        self._file: int | None = None
        try:
            self.folder: FolderIdentity | None = self._place.identity()
            if folder not in (None, self.folder):
                raise folder_moved(target)
            remove_leftovers(self._place)
            if self._stays_open and not keeps_open:
                _staying_open.add(id(self))
            with failing_as_output(target, only_writing=True):
                self._file = self._create(self._place)
        except BaseException:
            self._close()
            raise
        if not self._stays_open:
            self._close_descriptors()

    @contextlib.contextmanager
    def open_sink(self) -> Iterator[ByteSink]:
        """Open it for writing."""
        with self._opened() as (_, file):
            yield LocalSink(file, self.target)

    def open_stream(self) -> pa.NativeFile:
        """Open it for Arrow."""
        with self._opened() as (_, file):
            if (_DESCRIPTORS / str(file)).exists():
                # The same file, whatever has its name by now.
                return pafs.LocalFileSystem().open_output_stream(f"{_DESCRIPTORS}/{file}", compression=None)
            stream = io.FileIO(os.dup(file), "wb")
            share_with_arrow(stream)
            return pa.PythonFile(stream, mode="w")

    @contextlib.contextmanager
    def open_written(self) -> Iterator[ByteSource]:
        """Open what was written, before it is in its place."""
        with self._opened() as (_, file):
            yield FileSource.of(str(self.target), file)

    def sync(self) -> None:
        """Sync the complete file to the disk: what takes long is done before locks are taken."""
        with self._opened() as (folder, file), failing_as_output(self.target, only_writing=True):
            if not self._is_synced:
                self._set_attributes(folder, file)
                self._identity = _identity(os.fstat(file))
                if self._durable:
                    operating_system.sync(file)
                self._is_synced = True

    def discard(self) -> None:
        """Remove what was written, unless it is in its place; a forked child leaves it to its parent."""
        if self._owner.is_here:
            self._close()

    def commit(self, check: Check | None = None, *, syncs_folder: bool = True) -> None:
        """Put the complete file in its place; `check` raises if the target may not be replaced any more."""
        # A file that another writer puts there between this check and the rename is replaced (docs/operations.md).
        # Without `syncs_folder`, the caller calls `sync_folder`, once for many files.
        refuse_in_child(self._owner, self.target)
        self.sync()
        if not operating_system.POSIX:
            # Windows does not rename open files.
            self._close_descriptors()
        with self._opened_folder() as folder, failing_as_output(self.target, only_writing=True):
            self._put_in_place(folder, check)
            if syncs_folder:
                folder.sync()
        self._close()

    def _close(self) -> None:
        """Remove what is not in its place, and close what is open."""
        if not operating_system.POSIX:
            # Windows does not remove open files.
            self._close_descriptors()
        if self._temporary:
            with contextlib.suppress(OSError, OutputError), self._opened_folder() as folder:
                if _identity(folder.look(self._temporary)) == self._identity:
                    folder.unlink(self._temporary)
        self._temporary = ""
        self._close_descriptors()
        _staying_open.discard(id(self))

    # --- how it is created and opened ---

    def _replaced(self, folder: Folder) -> os.stat_result | None:
        """Return the file at the target, if it decides who may use the new one."""
        try:
            found = folder.look(self._name)
        except FileNotFoundError:
            return None
        return found if may_give_attributes(found, folder.status()) else None

    def _create(self, folder: Folder) -> int:
        """Create it under a temporary name, locked if it stays open and the file system has locks."""
        is_lockable = self._stays_open and operating_system.POSIX
        # The most that others may do with it while it is written.
        permissions = 0o600
        if self._mode is None and self._like is None:
            found = self._replaced(folder)
            permissions = 0o666 if found is None else found.st_mode & 0o666 | 0o600
        while True:
            name = temporary_name(self._name, is_locked=is_lockable)
            file = folder.open(name, _CREATE, permissions)
            self._temporary, self._identity = name, _identity(os.fstat(file))
            if not is_lockable:
                return file
            is_lockable = False
            with contextlib.suppress(OSError):
                is_lockable = operating_system.try_lock(file)
            with contextlib.suppress(FileNotFoundError):
                if _identity(folder.look(name)) == self._identity:
                    if is_lockable:
                        return file
                    folder.unlink(name)
            # There are no locks, or another writer removed the file just before it was locked.
            os.close(file)

    @contextlib.contextmanager
    def _opened_folder(self) -> Iterator[Folder]:
        """Yield the folder, which is opened again if it did not stay open."""
        if self._place is not None:
            yield self._place
            return
        with Folder(self._folder_path) as folder:
            if folder.identity() != self.folder:
                raise folder_moved(self.target)
            yield folder

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Folder, int]]:
        """Yield folder and file, which are opened again if they did not stay open."""
        with self._opened_folder() as folder:
            if self._file is not None:
                yield folder, self._file
                return
            try:
                file = folder.open(self._temporary, os.O_RDWR)
            except OSError as error:
                if error.errno not in _NOT_THE_FILE:
                    raise
                raise self._exchanged() from None
            try:
                if _identity(os.fstat(file)) != self._identity:
                    raise self._exchanged()
                yield folder, file
            finally:
                os.close(file)

    def _close_descriptors(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._place is not None:
            self._place.close()
        self._file = self._place = None

    # --- how it takes its place ---

    def _set_attributes(self, folder: Folder, file: int) -> None:
        if self._mode is not None:
            operating_system.change_mode(file, self._mode)
            return
        try:
            if self._like is not None:
                old = operating_system.open_file(self._like.path, os.O_RDONLY, follow_link=True)
            elif self._replaced(folder) is not None:
                old = folder.open(self._name, os.O_RDONLY)
            else:
                return
        except FileNotFoundError:
            return
        except PermissionError:
            # Its owner may not even read it, so no other user may.
            operating_system.change_mode(file, 0o600)
            return
        try:
            if self._like is not None or may_give_attributes(os.fstat(old), folder.status()):
                take_attributes(file, old, all_attributes=self._like is not None)
        finally:
            os.close(old)

    def _put_in_place(self, folder: Folder, check: Check | None) -> None:
        self._require_same_folder()
        checked = None
        if check is not None:
            checked = _state(folder, self._name)
            check()
        if checked is not None or (check is None and self._overwrite):
            remove_hadoop_checksums(folder, self._name)
            if checked is not None and _state(folder, self._name) != checked:
                raise changed_meanwhile(self.target)
            self._require_written(folder, self._temporary)
            folder.replace(self._temporary, self._name)
        else:
            self._require_written(folder, self._temporary)
            # A check that passes although the target does not exist expects that.
            self._appear(folder, changed_meanwhile if check is not None else exists_already)
            remove_hadoop_checksums(folder, self._name)
        self._temporary = ""
        self._require_written(folder, self._name)

    def _appear(self, folder: Folder, refusal: Callable[[FileLocation], Exception]) -> None:
        """Take a name that is free."""
        try:
            try:
                folder.link(self._temporary, self._name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A file system without links: an empty file holds the place.
                os.close(folder.open(self._name, _CREATE))
                folder.replace(self._temporary, self._name)
            else:
                folder.unlink(self._temporary)
        except FileExistsError:
            raise refusal(self.target) from None

    # --- what is refused ---

    def _require_written(self, folder: Folder, name: str) -> None:
        found = _state(folder, name)
        if found is None or found[:2] != self._identity[:2]:
            raise self._exchanged()

    def _require_same_folder(self) -> None:
        try:
            found = identity_of_folder(self._folder_path)
        except FileNotFoundError:
            raise folder_moved(self.target) from None
        if found != self.folder:
            raise folder_moved(self.target)

    def _exchanged(self) -> OutputError:
        return OutputError(
            f"the file at {self.target} is not the one that was written.",
            hint="Another process writes there: check who may write to this folder.",
        )


class _StoredOutput:
    """A file on any other file system, under a temporary name; see `LocalOutput` for its methods."""

    folder: FolderIdentity | None = None

    def __init__(self, target: FileLocation, *, overwrite: bool) -> None:
        self.target = target
        self.location = target.sibling(temporary_name(target.name, is_locked=False))
        self._owner = OwnerProcess()
        self._overwrite = overwrite
        self._is_done = False

    @contextlib.contextmanager
    def open_sink(self) -> Iterator[ByteSink]:
        with self.open_stream() as stream:
            yield StreamSink(stream)

    def open_stream(self) -> pa.NativeFile:
        return self.location.filesystem.open_output_stream(self.location.path, compression=None)

    def open_written(self) -> contextlib.AbstractContextManager[ByteSource]:
        return open_source(self.location)

    def sync(self) -> None:
        pass

    def commit(self, check: Check | None = None, *, syncs_folder: bool = True) -> None:
        refuse_in_child(self._owner, self.target)
        if check is not None:
            check()
        if not self._overwrite and self.target.info().type != pafs.FileType.NotFound:
            raise exists_already(self.target)
        _move(self.location, self.target)
        self._is_done = True

    def discard(self) -> None:
        if not self._is_done and self._owner.is_here:
            remove_object(self.location)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    """Return the identity of a file, with its owner: another user's file may reuse the inode of a removed file."""
    return found.st_dev, found.st_ino, found.st_uid


def _state(folder: Folder, name: str) -> tuple[int, ...] | None:
    """Return values that change when a file is replaced or written to; None if there is no file."""
    try:
        found = folder.look(name)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


PendingOutput = LocalOutput | _StoredOutput
"""A file that is being written, and is not in its place yet."""


def pending_output(
    target: FileLocation,
    *,
    mode: int | None = None,
    like: FileLocation | None = None,
    overwrite: bool = True,
    keeps_open: bool = True,
    folder: FolderIdentity | None = None,
    durable: bool = True,
) -> PendingOutput:
    """Begin a file that is discarded unless it is committed.

    Args:
        target: The final place.
        overwrite: Whether it may replace a file.
        mode: Permissions of a local file; by default, as the replaced file, unless any user may have put it there.
        like: The file of which it is a new version, with the same owner, permissions and attributes.
        keeps_open: Whether it stays open even if many do. A killed process leaves a closed file for 24 hours.
        folder: Device and inode that the folder of a local file must have; None for any.
        durable: Whether a local file is synced to the disk before it is in its place.
    """
    if is_url(target.path):
        raise OutputError(f"{target} is on a web server, which is read-only.", hint="Write to another place.")
    check_target(target, overwrite=overwrite)
    if target.makes_folders:
        Path(target.path).parent.mkdir(parents=True, exist_ok=True)
    elif target.is_local and not Path(target.path).parent.is_dir():
        raise OutputError(f"the folder of {target} does not exist.", hint="Create it first.")
    if not target.is_local:
        remove_stored_leftovers(target)
        return _StoredOutput(target, overwrite=overwrite)
    like = like if like is not None and like.is_local else None
    return LocalOutput(
        target, overwrite=overwrite, mode=mode, like=like, keeps_open=keeps_open, folder=folder, durable=durable
    )


@contextlib.contextmanager
def discarded_unless_done(pending: PendingOutput) -> Iterator[PendingOutput]:
    """Discard an output at the end of the block, unless it was committed."""
    try:
        with failing_as_output(pending.target):
            yield pending
    finally:
        pending.discard()


@contextlib.contextmanager
def whole_output(
    target: FileLocation, *, like: FileLocation | None = None, folder: FolderIdentity | None = None
) -> Iterator[PendingOutput]:
    """Write a file that appears whole at the end of the block; arguments as of `pending_output`."""
    with discarded_unless_done(pending_output(target, like=like, folder=folder)) as pending:
        yield pending
        pending.commit()


_COPY_AND_DELETE = ("s3", "gcs")
"""Stores without a rename."""


def _move(location: FileLocation, target: FileLocation) -> None:
    size = location.info().size
    fsspec = fsspec_of(location.filesystem)
    if location.filesystem.type_name in _COPY_AND_DELETE:
        location.filesystem.copy_file(location.path, target.path)
        # Without the permission to delete, the object is written all the same.
        remove_object(location)
    elif fsspec is None:
        location.filesystem.move(location.path, target.path)
    else:
        # fsspec's own move treats names as patterns.
        fsspec.cp_file(location.path, target.path)
        fsspec.rm_file(location.path)
    if target.info().type != pafs.FileType.File or target.info().size != size:
        raise OutputError(f"{target} is not complete.", hint="Try again.")


def check_target(target: FileLocation, *, overwrite: bool) -> None:
    """Raise `OutputError` if no file can be written there."""
    kind = target.info().type
    if kind == pafs.FileType.Directory:
        raise OutputError(f"{target} is a folder.", hint="Name a file in it.")
    if kind == pafs.FileType.Unknown:
        raise OutputError(f"{target} is not a regular file.", hint="Name a file.")
    if not overwrite and kind != pafs.FileType.NotFound:
        raise exists_already(target)


def written_bytes(targets: Iterable[FileLocation]) -> int:
    """Return the total length of files that were just put in their places; raise `OutputError` if one is gone."""
    size_bytes = 0
    for target in targets:
        info = target.info()
        if info.type != pafs.FileType.File:
            raise OutputError(
                f"{target} was written, and was removed or replaced meanwhile.",
                hint="Find the process that did it, then write the file again.",
            )
        size_bytes += info.size or 0
    return size_bytes


def sync_folder(target: FileLocation) -> None:
    """Sync the folder of a local file to the disk."""
    if target.is_local:
        path = str(PurePosixPath(target.path).parent)
        with failing_as_output(target, only_writing=True), Folder(path) as folder:
            folder.sync()


def write_whole(
    target: FileLocation,
    data: bytes,
    *,
    like: FileLocation | None = None,
    folder: FolderIdentity | None = None,
) -> None:
    """Write a small file whole or not at all; arguments as of `pending_output`."""
    with whole_output(target, like=like, folder=folder) as pending, pending.open_sink() as sink:
        sink.write_at(0, data)


# --- leftovers on object stores ---


def remove_stored_leftovers(target: FileLocation) -> None:
    """Remove leftover temporary objects beside an object; warn of those that cannot be removed."""
    folder = target.path.rpartition("/")[0]
    key = target.filesystem.type_name, folder
    if not SCANS.is_due(key):
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
    SCANS.done(key, time.monotonic() - started)


def remove_object(location: FileLocation) -> None:
    """Remove a temporary object; if that is refused, a warning names it."""
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        pass
    except OSError:
        _log.warning("%s is a leftover temporary object and cannot be removed: remove it", location)


def _age_seconds(info: pafs.FileInfo) -> float:
    return 0.0 if info.mtime_ns is None else time.time() - info.mtime_ns / 1e9


# --- folders made for files, whose names may be values of columns ---

_TOP = ("", "/", ".")


class MadeFolders:
    """Creates folders, and removes those that were missing if the write fails.

    Threads use one object together. A promised folder is first created and then no longer promised, so a
    thread reads the promises before it looks which folders are missing: each is then found in one of the two.
    """

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem
        self._made: dict[str, None] = {}
        self._promised: set[str] = set()

    def create(self, path: str, *, recursive: bool) -> None:
        """Create a folder, and with `recursive` its missing parents; in an object store nothing is done."""
        missing = self._missing(path)
        if self._filesystem.type_name in OBJECT_STORES or path in _TOP:
            return
        self._filesystem.create_dir(path, recursive=recursive)
        self._made.update(dict.fromkeys(reversed(missing)))

    def promise(self, path: str, *, recursive: bool) -> None:
        """Create a folder as `create` does, but a partition folder (`name=value`) only with its first file."""
        # After a refused write, threads of an engine may create the folders of further partitions, without a file
        # whose end would remove them.
        promised = self._promised.copy()
        missing = self._missing(path)
        if not any("=" in PurePosixPath(folder).name for folder in missing):
            self.create(path, recursive=recursive)
        elif recursive or len(missing) == 1 or missing[1] in promised:
            self._promised.update(missing)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def is_promised(self, path: str) -> bool:
        """Return whether a folder will be created with its first file."""
        return path in self._promised and self._is_missing(path)

    def begin(self, path: str) -> None:
        """Create the missing folders of a file, if all of them are promised or partition folders."""
        # Another object for the same place may have promised a partition folder, in another process, too.
        folder = str(PurePosixPath(path).parent)
        promised = self._promised.copy()
        missing = self._missing(folder)
        if missing and all(name in promised or "=" in PurePosixPath(name).name for name in missing):
            self.create(folder, recursive=True)
        self._promised.difference_update(_with_parents(folder))

    def forget(self, path: str) -> None:
        """Forget the promised folders at a path and below."""
        self._promised -= {folder for folder in self._promised.copy() if path in _with_parents(folder)}

    def remove_empty(self, below: str | None = None) -> None:
        """Remove the folders that were created, or only the folders of one file, if they are empty."""
        above = None if below is None else _with_parents(below)
        for folder in reversed(self._made.copy()):
            if above is None or folder in above:
                with contextlib.suppress(Exception):  # It is not empty, or gone, or another program's link.
                    self._remove(folder)
                    del self._made[folder]

    def _missing(self, path: str) -> list[str]:
        """Return a folder and its parents, as far as they are missing, the innermost first."""
        is_store = self._filesystem.type_name in OBJECT_STORES
        return [] if is_store else list(itertools.takewhile(self._is_missing, _with_parents(path)))

    def _is_missing(self, folder: str) -> bool:
        return folder not in _TOP and self._filesystem.get_file_info(folder).type == pafs.FileType.NotFound

    def _remove(self, folder: str) -> None:
        """Remove a folder, but never what is in it."""
        fsspec: Any = fsspec_of(self._filesystem)
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            os.rmdir(folder)  # noqa: PTH106 - one call for each of many
        elif fsspec is not None and not fsspec.ls(folder):
            fsspec.rmdir(folder)


def _with_parents(path: str) -> list[str]:
    return [path, *map(str, PurePosixPath(path).parents)]
