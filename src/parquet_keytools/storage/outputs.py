"""Files written whole or not at all: the one way in which this package puts a file in its place."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import OutputError
from parquet_keytools.format.byte_ranges import Bytes, ByteSink, ByteSource, FileSource
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.runtime.fork_safety import OwnerProcess
from parquet_keytools.storage.failures import failing_as_output, refuse_in_child
from parquet_keytools.storage.local_files import Folder, FolderIdentity
from parquet_keytools.storage.local_output import LocalFile, exists_already
from parquet_keytools.storage.locations import FileLocation, fsspec_of
from parquet_keytools.storage.printable import is_url
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.temporary_files import remove_object, remove_stored_leftovers, temporary_name


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
            check: Raises if what is there is no longer what may be replaced. What comes there later is not
                replaced either, as far as the file system can tell (docs/operations.md says how far).
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
    """A local file; see `LocalFile`."""

    def __init__(self, target: FileLocation, file: LocalFile, *, overwrite: bool) -> None:
        self.target = target
        self.folder: FolderIdentity | None = file.folder
        self._owner = OwnerProcess()
        self._file = file
        self._overwrite = overwrite

    @contextlib.contextmanager
    def open_sink(self) -> Iterator[ByteSink]:
        with self._file.opened() as descriptor:
            yield LocalSink(descriptor, self.target)

    def open_stream(self) -> pa.NativeFile:
        with self._file.opened() as descriptor:
            again = Path(f"/proc/self/fd/{descriptor}")
            if again.exists():
                # The same file, whatever has its name by now.
                return pafs.LocalFileSystem().open_output_stream(str(again), compression=None)
            file = io.FileIO(os.dup(descriptor), "wb")
            share_with_arrow(file)
            return pa.PythonFile(file, mode="w")

    @contextlib.contextmanager
    def open_written(self) -> Iterator[ByteSource]:
        with self._file.opened() as descriptor:
            yield FileSource.of(str(self.target), descriptor)

    def sync(self) -> None:
        self._file.sync()

    def commit(self, check: Check | None = None, *, syncs_folder: bool = True) -> None:
        refuse_in_child(self._owner, self.target)
        self._file.replace(overwrite=self._overwrite, check=check, syncs_folder=syncs_folder)

    def discard(self) -> None:
        if self._owner.is_here:
            self._file.close()


class _StoredOutput:
    """A file on any other file system, under a temporary name."""

    def __init__(self, target: FileLocation, *, overwrite: bool) -> None:
        self.target = target
        self.folder: FolderIdentity | None = None
        self.location = target.sibling(temporary_name(target.name))
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
        keeps_open: Whether a local file stays open until it is in its place. What stays open leaves nothing behind
            when the process is killed; a process may have only so many open files.
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
    file = LocalFile(target, mode=mode, like=like, keeps_open=keeps_open, folder=folder, durable=durable)
    return _LocalOutput(target, file, overwrite=overwrite)


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
