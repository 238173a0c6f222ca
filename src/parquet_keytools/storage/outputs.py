"""Files written whole or not at all: the one way in which this package puts a file in its place."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import ChangedMeanwhileError, OutputError
from parquet_keytools.format.byte_ranges import Bytes, ByteSink, ByteSource, FileSource
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.runtime.fork_safety import OwnerProcess
from parquet_keytools.storage.failures import failing_as_output, refuse_in_child
from parquet_keytools.storage.local_files import (
    Folder,
    FolderIdentity,
    Identity,
    folder_moved,
    identity_of_folder,
    may_give_attributes,
    remove_hadoop_checksums,
    take_attributes,
)
from parquet_keytools.storage.locations import FileLocation, fsspec_of
from parquet_keytools.storage.printable import is_url
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.temporary_files import (
    remove_leftovers,
    remove_object,
    remove_stored_leftovers,
    temporary_name,
)


class TargetExistsError(OutputError):
    """The target is there, and must not be replaced."""


def exists_already(target: FileLocation) -> TargetExistsError:
    """Return the error for a target that is there and must not be replaced."""
    return TargetExistsError(f"{target} exists already.", hint="Use --overwrite to replace it.")


def changed_meanwhile(target: FileLocation) -> ChangedMeanwhileError:
    """Return the error for a target that is no longer what was to be replaced."""
    return ChangedMeanwhileError(f"{target} was changed by another process meanwhile.", hint="Try again.")


class LocalSink:
    """A local file that is written in any order, by any number of threads.

    Args:
        file_descriptor: Of the open file.
        target: What the file will be, for errors.
    """

    takes_any_order = True

    def __init__(self, file_descriptor: int, target: object = "the output") -> None:
        self._file_descriptor = file_descriptor
        self._target = target

    @property
    def file_descriptor(self) -> int:
        """Of the open file."""
        return self._file_descriptor

    def reserve(self, length: int) -> None:
        """Take the space now, where the system can, so that a full disk is noticed before the work is done."""
        if length:
            with failing_as_output(self._target, only_writing=True):
                operating_system.reserve(self._file_descriptor, length)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        with failing_as_output(self._target, only_writing=True):
            while len(view):
                written = operating_system.write_at(self._file_descriptor, view, offset)
                view = view[written:]
                offset += written


class BufferSink:
    """A file in memory that is written in any order.

    Attributes:
        buffer: What was written.
    """

    takes_any_order = True

    def __init__(self) -> None:
        self.buffer = bytearray()

    def reserve(self, length: int) -> None:
        """Take the space."""
        self.buffer = bytearray(length)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write `data` at `offset`."""
        self.buffer[offset : offset + len(data)] = data


class StreamSink:
    """A stream: written in order.

    Attributes:
        length: How much was written, in bytes.
    """

    takes_any_order = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.length = 0

    def reserve(self, length: int) -> None:
        """Nothing: a stream grows."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Append `data`; `offset` must be the end of what was written."""
        if offset != self.length:
            raise OutputError(f"a stream was written at {offset} instead of {self.length}.")
        # A stream may keep what it is given, to upload it later, and whoever calls fills the buffer again.
        self._stream.write(data if isinstance(data, bytes) else bytes(data))
        self.length += len(data)


PLAINTEXT_MODE = 0o600
"""Of outputs that hold decrypted values, where the caller names no other."""

Check = Callable[[], None]
"""Raises if a file is no longer the one that may be replaced."""


_DESCRIPTORS = "/proc/self/fd"
_NO_DESCRIPTORS = not (operating_system.POSIX and hasattr(os, "O_TMPFILE") and Path(_DESCRIPTORS).is_dir())
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.ENOTDIR)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL
_NOT_THE_FILE = operating_system.NOT_A_FILE | {errno.ENOENT}
_MOST_STAYING_OPEN = 50
"""Of files that need not stay open, how many do, each with its folder: macOS gives a process 256 descriptors.

Of files that stay open, a killed process leaves nothing, or files that are not locked any more.
"""

_staying_open: set[int] = set()


class PendingOutput(Protocol):
    """A file that is being written, and is not in its place yet.

    Attributes:
        target: Where it will be.
        folder: Device and inode of its folder; None where there are none.
    """

    target: FileLocation
    folder: FolderIdentity | None

    def open_sink(self) -> contextlib.AbstractContextManager[ByteSink]:
        """Open it for writing."""
        ...

    def open_stream(self) -> pa.NativeFile:
        """Open it for Arrow."""
        ...

    def open_written(self) -> contextlib.AbstractContextManager[ByteSource]:
        """Open what was written, which is not in its place yet."""
        ...

    def sync(self) -> None:
        """Bring the complete file to the disk: what takes long is done before locks are taken."""
        ...

    def commit(self, check: Check | None = None, *, syncs_folder: bool = True) -> None:
        """Put the complete file in its place.

        Args:
            check: Raises if what is there is no longer what may be replaced. A file that another writer puts there
                between this check and the rename is replaced (docs/operations.md).
            syncs_folder: Whether the folder is synced, too. Otherwise the caller does it, with `sync_folder`,
                once for many files.

        Raises:
            OutputError: Something is there and must not be replaced; the place was moved, or takes no more.
            ChangedMeanwhileError: Something came there after the check.
        """
        ...

    def discard(self) -> None:
        """Remove what was written, if it is not in its place; a forked child leaves it to its parent."""
        ...


class _LocalOutput:
    """A local file that is written beside its target and then takes the target's place; see `pending_output`.

    The folder is opened once, and what happens in it is asked for relative to that (not on Windows): a path leads
    elsewhere when somebody who may write to one of its folders puts a link there. The new file has no name until
    it is complete, where the file system can do that (`O_TMPFILE`): nothing is left of it when the process is
    killed.

    Raises:
        OutputError: The folder is another one.
        OSError: It cannot be created.
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
        self._is_locked = False
        self._stays_open = keeps_open or len(_staying_open) < _MOST_STAYING_OPEN
        self._temporary: str | None = None
        self._place: Folder | None = Folder(self._folder_path)
        self._file: int | None = None
        try:
            self.folder: FolderIdentity | None = self._place.identity()
            if folder not in (None, self.folder):
                raise folder_moved(target)
            remove_leftovers(self._place)
            if self._stays_open and not keeps_open:
                _staying_open.add(id(self))
            self._file = self._create(self._place, self._permissions(self._place), anonymous=self._stays_open)
            self._identity = _identity(os.fstat(self._file))
        except BaseException:
            self._close()
            raise
        if not self._stays_open:
            self._close_descriptors()

    @contextlib.contextmanager
    def open_sink(self) -> Iterator[ByteSink]:
        with self._opened() as (_, file):
            yield LocalSink(file, self.target)

    def open_stream(self) -> pa.NativeFile:
        with self._opened() as (_, file):
            again = Path(f"{_DESCRIPTORS}/{file}")
            if again.exists():
                # The same file, whatever has its name by now.
                return pafs.LocalFileSystem().open_output_stream(str(again), compression=None)
            stream = io.FileIO(os.dup(file), "wb")
            share_with_arrow(stream)
            return pa.PythonFile(stream, mode="w")

    @contextlib.contextmanager
    def open_written(self) -> Iterator[ByteSource]:
        with self._opened() as (_, file):
            yield FileSource.of(str(self.target), file)

    def sync(self) -> None:
        with self._opened() as (folder, file), failing_as_output(self.target, only_writing=True):
            self._sync(folder, file)

    def discard(self) -> None:
        if self._owner.is_here:
            self._close()

    def commit(self, check: Check | None = None, *, syncs_folder: bool = True) -> None:
        refuse_in_child(self._owner, self.target)
        with self._opened() as (folder, file), failing_as_output(self.target, only_writing=True):
            self._sync(folder, file)
            if operating_system.POSIX:
                self._put_in_place(folder, file, check)
                if syncs_folder:
                    folder.sync()
        if not operating_system.POSIX:
            # It does not rename files that are open.
            self._close_descriptors()
            with Folder(self._folder_path) as folder, failing_as_output(self.target, only_writing=True):
                self._put_in_place(folder, -1, check)
        self._close()

    def _put_in_place(self, folder: Folder, file: int, check: Check | None) -> None:
        self._require_same_folder()
        if check is not None:
            self._replace_checked(folder, file, check)
        elif self._overwrite:
            remove_hadoop_checksums(folder, self._name)
            self._replace_any(folder, file)
        else:
            self._appear(folder, file)
            remove_hadoop_checksums(folder, self._name)
        found = self._look(folder, self._name)
        if found is None or (found.device, found.inode) != self._identity[:2]:
            raise self._exchanged()

    def _sync(self, folder: Folder, file: int) -> None:
        if not self._is_synced:
            self._set_attributes(folder, file)
            self._identity = _identity(os.fstat(file))
            if self._durable:
                operating_system.sync(file)
            self._is_synced = True

    def _close(self) -> None:
        """Remove what is not in its place, and close what is open."""
        if not operating_system.POSIX:
            # It does not remove files that are open.
            self._close_descriptors()
        with contextlib.suppress(OSError):
            if self._temporary is not None:
                with contextlib.ExitStack() as opened:
                    folder = self._place or opened.enter_context(Folder(self._folder_path))
                    if _identity(folder.look(self._temporary)) == self._identity:
                        folder.unlink(self._temporary)
        self._temporary = None
        self._close_descriptors()
        _staying_open.discard(id(self))

    # --- how it comes to be ---

    def _permissions(self, folder: Folder) -> int:
        """Return the most that others may do with it while it is written."""
        if self._mode is not None or self._like is not None:
            return 0o600
        found = self._replaced(folder)
        return 0o666 if found is None else found.st_mode & 0o666 | 0o600

    def _replaced(self, folder: Folder) -> os.stat_result | None:
        """Return what is there and decides who may use what replaces it."""
        try:
            found = folder.look(self._name)
        except FileNotFoundError:
            return None
        return found if may_give_attributes(found, folder.status()) else None

    def _create(self, folder: Folder, permissions: int, *, anonymous: bool) -> int:
        with failing_as_output(self.target, only_writing=True):
            if sys.platform == "linux" and anonymous and not _NO_DESCRIPTORS:
                try:
                    file = os.open(".", os.O_TMPFILE | os.O_RDWR, permissions, dir_fd=folder.descriptor)
                except OSError as error:
                    if error.errno not in _NO_TMPFILE:
                        raise
                else:
                    self._is_locked = _lock(file)
                    return file
            return self._create_named(folder, permissions)

    def _create_named(self, folder: Folder, permissions: int) -> int:
        """Create it under a temporary name, locked if it stays open and the file system has locks."""
        is_lockable = self._stays_open and operating_system.POSIX
        while True:
            name = temporary_name(self._name, is_locked=is_lockable)
            file = folder.open(name, _CREATE, permissions)
            self._temporary, self._identity = name, _identity(os.fstat(file))
            if not is_lockable:
                return file
            self._is_locked = is_lockable = _lock(file)
            with contextlib.suppress(FileNotFoundError):
                if _identity(folder.look(name)) == self._identity:
                    if self._is_locked:
                        return file
                    folder.unlink(name)
            # There are no locks; or another writer took the file for left over in this moment.
            os.close(file)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Folder, int]]:
        """Yield folder and file; they are opened again where they did not stay open."""
        if self._place is not None and self._file is not None:
            yield self._place, self._file
            return
        assert self._temporary is not None
        with contextlib.ExitStack() as descriptors:
            folder = descriptors.enter_context(Folder(self._folder_path))
            if folder.identity() != self.folder:
                raise folder_moved(self.target)
            try:
                file = folder.open(self._temporary, os.O_RDWR)
            except OSError as error:
                if error.errno not in _NOT_THE_FILE:
                    raise
                raise self._exchanged() from None
            descriptors.callback(os.close, file)
            if _identity(os.fstat(file)) != self._identity:
                raise self._exchanged()
            yield folder, file

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
            # Its owner may not even read it; nobody else may then.
            operating_system.change_mode(file, 0o600)
            return
        try:
            found = os.fstat(old)
            if self._like is not None or may_give_attributes(found, folder.status()):
                take_attributes(file, old, all_attributes=self._like is not None)
        finally:
            os.close(old)

    def _replace_any(self, folder: Folder, file: int) -> None:
        folder.replace(self._give_name(folder, file), self._name)
        self._temporary = None

    def _appear(self, folder: Folder, file: int) -> None:
        """Take a name that nothing has."""
        try:
            if self._temporary is None:
                os.link(f"{_DESCRIPTORS}/{file}", self._name, dst_dir_fd=folder.descriptor, follow_symlinks=True)
            else:
                self._appear_by_link(folder, self._temporary)
        except FileExistsError:
            raise exists_already(self.target) from None
        self._temporary = None

    def _appear_by_link(self, folder: Folder, temporary: str) -> None:
        try:
            folder.link(temporary, self._name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # A file system without links: an empty file holds the place.
            os.close(folder.open(self._name, _CREATE))
            folder.replace(temporary, self._name)
        else:
            folder.unlink(temporary)

    def _replace_checked(self, folder: Folder, file: int, check: Check) -> None:
        """Replace what is there if it passes the check, and is still there just before the rename.

        What another writer puts there between this last look and the rename is lost: no call of the operating
        system that Python has compares and renames in one step.
        """
        found = self._look(folder, self._name)
        check()
        if found is None:
            # A check that passes although nothing is there is about this.
            try:
                self._appear(folder, file)
            except OutputError:
                raise changed_meanwhile(self.target) from None
            return
        self._give_name(folder, file)
        remove_hadoop_checksums(folder, self._name)
        if self._look(folder, self._name) != found:
            raise changed_meanwhile(self.target)
        self._replace_any(folder, file)

    def _give_name(self, folder: Folder, file: int) -> str:
        """Return the temporary name of the file, which gets one if it has none."""
        if self._temporary is None:
            name = temporary_name(self._name, is_locked=self._is_locked)
            os.link(f"{_DESCRIPTORS}/{file}", name, dst_dir_fd=folder.descriptor, follow_symlinks=True)
            self._temporary = name
        return self._temporary

    @staticmethod
    def _look(folder: Folder, name: str) -> Identity | None:
        try:
            return Identity.of(folder.look(name))
        except FileNotFoundError:
            return None

    # --- what is refused ---

    def _require_same_folder(self) -> None:
        try:
            found = identity_of_folder(self._folder_path)
        except FileNotFoundError:
            raise folder_moved(self.target) from None
        if found != self.folder:
            raise folder_moved(self.target)

    def _exchanged(self) -> OutputError:
        return OutputError(
            f"what lies at {self.target} is not the file that was written.",
            hint="Another process writes there: check who may write to this folder.",
        )


class _StoredOutput:
    """A file on any other file system, under a temporary name."""

    def __init__(self, target: FileLocation, *, overwrite: bool) -> None:
        self.target = target
        self.folder: FolderIdentity | None = None
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


def _lock(file: int) -> bool:
    """Lock a new file as long as it is open; return whether the file system has locks and it is locked."""
    try:
        return operating_system.try_lock(file)
    except OSError:
        return False


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file from one of another user, which may get the inode of one that was removed."""
    return found.st_dev, found.st_ino, found.st_uid


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
        target: Where it will be. One that is there and is replaced hands its owner and permissions on, unless
            anybody may have put it there.
        mode: Permissions of the local file, whatever is there.
        like: The file that it is another version of: from that it takes owner, permissions and attributes.
        overwrite: Whether it may replace a file.
        keeps_open: Whether a local file surely stays open until it is in its place. Otherwise it may be closed in
            between, for a process may have only so many open files; then a killed process leaves it for 24 hours.
        folder: Device and inode that the folder of a local file must have; None for any.
        durable: Whether a local file is synced to the disk before it is in its place.

    Raises:
        OutputError: The folder does not exist or is another one, the target is a folder, or is there and must not
            be replaced.
    """
    if is_url(target.path):
        raise OutputError(f"{target} is on a web server, and these are only read.", hint="Write to another place.")
    _check_target(target, overwrite=overwrite)
    if not target.is_local:
        remove_stored_leftovers(target)
        return _StoredOutput(target, overwrite=overwrite)
    like = like if like is not None and like.is_local else None
    return _LocalOutput(
        target, overwrite=overwrite, mode=mode, like=like, keeps_open=keeps_open, folder=folder, durable=durable
    )


@contextlib.contextmanager
def discarded_unless_done(pending: PendingOutput) -> Iterator[PendingOutput]:
    """Discard an output when the block ends, if it was not committed in it.

    Raises:
        StorageFailedError: There is no space for it, or its file system failed.
    """
    try:
        with failing_as_output(pending.target):
            yield pending
    finally:
        pending.discard()


@contextlib.contextmanager
def whole_output(
    target: FileLocation, *, like: FileLocation | None = None, folder: FolderIdentity | None = None
) -> Iterator[PendingOutput]:
    """Write a file so that it appears whole under its name when the block ends, or not at all.

    Args:
        target: As with `pending_output`.
        like: As with `pending_output`.
        folder: As with `pending_output`.

    Raises:
        OutputError: The folder does not exist, the target is a folder, or there is no space for it.
    """
    with discarded_unless_done(pending_output(target, like=like, folder=folder)) as pending:
        yield pending
        pending.commit()


_COPY_AND_DELETE = ("s3", "gcs")
"""Stores that know no renames."""


def _move(location: FileLocation, target: FileLocation) -> None:
    size = location.info().size
    fsspec = fsspec_of(location.filesystem)
    if location.filesystem.type_name in _COPY_AND_DELETE:
        location.filesystem.copy_file(location.path, target.path)
        # Who may not delete has written the object all the same.
        remove_object(location)
    elif fsspec is None:
        location.filesystem.move(location.path, target.path)
    else:
        # Its own move takes names for patterns.
        fsspec.cp_file(location.path, target.path)
        fsspec.rm_file(location.path)
    if target.info().type != pafs.FileType.File or target.info().size != size:
        raise OutputError(f"{target} did not get what was written for it.", hint="Try again.")


def _check_target(target: FileLocation, *, overwrite: bool) -> None:
    kind = target.info().type
    if kind == pafs.FileType.Directory:
        raise OutputError(f"{target} is a folder.", hint="Name a file in it.")
    if kind == pafs.FileType.Unknown:
        raise OutputError(f"{target} is not a regular file.", hint="Name a file.")
    if not overwrite and kind != pafs.FileType.NotFound:
        raise exists_already(target)
    if target.makes_folders:
        Path(target.path).parent.mkdir(parents=True, exist_ok=True)
    elif target.is_local and not Path(target.path).parent.is_dir():
        raise OutputError(f"the folder of {target} does not exist.", hint="Create it first.")


def written_bytes(targets: Iterable[FileLocation]) -> int:
    """Return the length of files that were just put in their places, together, in bytes.

    Raises:
        OutputError: One is no longer there: somebody removed it, or put something in its place.
    """
    size_bytes = 0
    for target in targets:
        info = target.info()
        if info.type != pafs.FileType.File:
            raise OutputError(
                f"{target} was written, and was removed or replaced meanwhile.",
                hint="Look for who did that, then write it again.",
            )
        size_bytes += info.size or 0
    return size_bytes


def sync_folder(target: FileLocation) -> None:
    """Bring to the disk which files are in the folder of a local file.

    Raises:
        StorageFailedError: The file system failed.
    """
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
    """Write a small file whole or not at all; see `whole_output`."""
    with whole_output(target, like=like, folder=folder) as pending, pending.open_sink() as sink:
        sink.write_at(0, data)
