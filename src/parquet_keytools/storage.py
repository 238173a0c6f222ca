"""Files on any `pyarrow.fs` file system: read by ranges, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import OutputError, ParquetFormatError
from parquet_keytools.format.byte_ranges import Bytes, ByteSink, ByteSource

PathLike = str | os.PathLike[str]

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class FileLocation:
    """A file or folder on a file system.

    Attributes:
        filesystem: Where it lies.
        path: Its path there.
    """

    filesystem: pafs.FileSystem
    path: str

    @classmethod
    def resolve(cls, path: PathLike | FileLocation, filesystem: Any = None) -> FileLocation:
        """Find a file by path or URI.

        Args:
            path: A path, a URI such as `s3://bucket/key` (then without `filesystem`), or a location.
            filesystem: A `pyarrow.fs` or fsspec file system; None is the local one.
        """
        if isinstance(path, FileLocation):
            return path
        text = os.fspath(path)
        if filesystem is None and _URI.match(text):
            return _of_uri(text)
        if filesystem is None:
            filesystem = pafs.LocalFileSystem()
        elif not isinstance(filesystem, pafs.FileSystem):
            filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
        fsspec = _fsspec_of(filesystem)
        if fsspec is not None:
            # The form in which fsspec lists paths: names that differ would be taken for different files.
            text = str(fsspec._strip_protocol(text))
            if "file" in ([fsspec.protocol] if isinstance(fsspec.protocol, str) else fsspec.protocol):
                filesystem = pafs.LocalFileSystem()
        while isinstance(filesystem, pafs.SubTreeFileSystem):
            text = str(PurePosixPath(filesystem.base_path) / text.lstrip("/"))
            filesystem = filesystem.base_fs
        if isinstance(filesystem, pafs.LocalFileSystem):
            text = str(Path(text).expanduser().absolute())
        return cls(filesystem, filesystem.normalize_path(text))

    @property
    def is_local(self) -> bool:
        """Whether the operating system can open it."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    @property
    def is_in_s3(self) -> bool:
        """Whether it lies in S3, or a store that speaks its protocol, by way of Arrow's own file system."""
        return str(self.filesystem.type_name) == "s3"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    def sibling(self, name: str) -> FileLocation:
        """Return the location of `name` in the same folder."""
        return FileLocation(self.filesystem, str(PurePosixPath(self.path).with_name(name)))

    def child(self, name: str) -> FileLocation:
        """Return the location of `name` in this folder."""
        return FileLocation(self.filesystem, str(PurePosixPath(self.path) / name))

    def info(self) -> pafs.FileInfo:
        """Return what the file system says of it."""
        return self.filesystem.get_file_info(self.path)

    def is_file(self) -> bool:
        """Whether a file is there."""
        return bool(self.info().type == pafs.FileType.File)

    def is_folder(self) -> bool:
        """Whether a folder is there."""
        return bool(self.info().type == pafs.FileType.Directory)

    def is_same_file(self, other: FileLocation) -> bool:
        """Whether both are one file, also by way of links."""
        if self.is_local and other.is_local:
            ours, theirs = Path(self.path), Path(other.path)
            if ours.exists() and theirs.exists():
                return ours.samefile(theirs)
            return ours.resolve() == theirs.resolve()
        return self.filesystem == other.filesystem and self.path == other.path

    def __str__(self) -> str:
        return self.path if self.is_local else f"{self.filesystem.type_name}:{self.path}"


_SMALL_READ_LENGTH = 1024


@dataclass(frozen=True)
class _MappedSource:
    """A local file, mapped: reading it copies nothing."""

    path: str
    view: memoryview
    file_descriptor: int

    @property
    def size_bytes(self) -> int:
        return len(self.view)

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        _check_range(self, offset, length)
        if length <= _SMALL_READ_LENGTH:
            # Copying little is faster than having its page mapped, and lets other threads work meanwhile.
            return os.pread(self.file_descriptor, length, offset)
        return self.view[offset : offset + length]


def _of_uri(uri: str) -> FileLocation:
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:
        # pyarrow quotes the URI, which may hold credentials.
        scheme = uri.partition(":")[0]
        raise ValueError(f"pyarrow does not open this URI of the scheme {scheme!r}") from None
    return FileLocation(filesystem, path)


def _fsspec_of(filesystem: pafs.FileSystem) -> Any:
    """Return the fsspec file system underneath, or None where there is none."""
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    return handler.fs if isinstance(handler, pafs.FSSpecHandler) else None


@dataclass(frozen=True)
class BufferSource:
    """A file in memory."""

    path: str
    buffer: Bytes | pa.Buffer

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return len(self.buffer)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return a range, without a copy."""
        _check_range(self, offset, length)
        # Arrow's buffers say that their bytes are signed.
        return memoryview(self.buffer).cast("B")[offset : offset + length]


@dataclass(frozen=True)
class ArrowSource:
    """An open pyarrow file."""

    path: str
    file: pa.NativeFile
    size_bytes: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Read one range with one request."""
        _check_range(self, offset, length)
        data: bytes = self.file.read_at(length, offset)
        if len(data) != length:
            raise ParquetFormatError("the file ends early; it changed while it was read", path=self.path)
        return data


def _check_range(source: ByteSource, offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > source.size_bytes:
        raise ParquetFormatError(
            f"bytes {offset} to {offset + length} are outside of the file of {source.size_bytes} bytes",
            path=source.path,
        )


@contextlib.contextmanager
def open_source(location: FileLocation) -> Iterator[ByteSource]:
    """Open a file for reading by ranges.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ParquetFormatError: It is not a regular file.
    """
    if not location.is_local:
        with location.filesystem.open_input_file(location.path) as file:
            yield ArrowSource(str(location), file, file.size())
        return
    _refuse_irregular(location)
    with Path(location.path).open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield _MappedSource(str(location), memoryview(b""), file.fileno())
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            yield _MappedSource(str(location), memoryview(mapped), file.fileno())
        finally:
            # Views into the map may still live in a traceback; the map goes with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()


def _refuse_irregular(location: FileLocation) -> None:
    """Refuse what is no file to read by ranges, before it is opened: to open a pipe waits for its other end.

    Raises:
        ParquetFormatError: It is a pipe, a socket or a device.
    """
    mode = Path(location.path).stat().st_mode
    # That a folder cannot be read, the operating system says itself.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ParquetFormatError(
            "it is not a regular file.",
            path=str(location),
            hint="Parquet is read from its end: write it to a file.",
        )


class LocalSink:
    """A local file that is written in any order, by any number of threads."""

    takes_any_order = True

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor

    @property
    def file_descriptor(self) -> int:
        """Of the open file."""
        return self._file_descriptor

    def reserve(self, length: int) -> None:
        """Take the space now, so that a full disk is noticed before the work is done."""
        if length:
            os.posix_fallocate(self._file_descriptor, 0, length)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._file_descriptor, view, offset)
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
    """A stream: written in order."""

    takes_any_order = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._offset = 0

    def reserve(self, length: int) -> None:
        """Nothing: a stream grows."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Append `data`; `offset` must be the end of what was written."""
        if offset != self._offset:
            raise OutputError(f"a stream was written at {offset} instead of {self._offset}.")
        self._stream.write(data)
        self._offset += len(data)


@dataclass(frozen=True)
class PendingOutput:
    """A file that is being written under a temporary name.

    Attributes:
        location: Its temporary location.
        target: Where it will be.
        permissions: What others may do with it while it is written; the umask takes away from that.
        kept_permissions: Those of the local file whose place it takes; None where there is none.
    """

    location: FileLocation
    target: FileLocation
    permissions: int = 0o666
    kept_permissions: int | None = None

    @classmethod
    def beside(cls, target: FileLocation, as_private_as: FileLocation | None = None) -> PendingOutput:
        """Choose a temporary name beside the target.

        Names that start with a dot are passed over by Arrow's and Spark's data sets.

        Args:
            target: Where the file will be. A local one that is there keeps its permissions.
            as_private_as: A file; where it is local, a new target gives nobody but its owner more permissions.
        """
        location = target.sibling(f".{target.name}.{secrets.token_hex(6)}.tmp")
        kept = _permissions_of(target)
        limit = kept if kept is not None or as_private_as is None else _permissions_of(as_private_as)
        permissions = 0o666 if limit is None else limit & 0o666 | _OWNER_READS_AND_WRITES
        return cls(location, target, permissions, kept)

    @contextlib.contextmanager
    def open_sink(self) -> Iterator[ByteSink]:
        """Open the temporary file for writing."""
        if self.location.is_local:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file_descriptor = os.open(self.location.path, flags, self.permissions)
            try:
                yield LocalSink(file_descriptor)
            finally:
                os.close(file_descriptor)
        else:
            with self.location.filesystem.open_output_stream(self.location.path, compression=None) as stream:
                yield StreamSink(stream)

    def commit(self) -> None:
        """Put the complete file in its place."""
        if not self.target.is_local:
            _move(self.location, self.target)
            return
        _sync(self.location.path)
        if self.kept_permissions is not None:
            Path(self.location.path).chmod(self.kept_permissions)
        _remove_hadoop_checksums(Path(self.target.path))
        Path(self.location.path).replace(self.target.path)
        _sync(str(Path(self.target.path).parent))

    def discard(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self.location.filesystem.delete_file(self.location.path)


_OWNER_READS_AND_WRITES = 0o600


def _permissions_of(location: FileLocation) -> int | None:
    """Return the permissions of a local file; None where there is none."""
    if not location.is_local:
        return None
    try:
        return stat.S_IMODE(Path(location.path).stat().st_mode) & 0o777
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def whole_output(target: FileLocation, *, as_private_as: FileLocation | None = None) -> Iterator[PendingOutput]:
    """Write a file so that it appears whole under its name, or not at all.

    The file is written under a temporary name beside the target, synced, and then takes the target's place.

    Args:
        target: Where it will be; permissions of a local file that is there are kept.
        as_private_as: See `PendingOutput.beside`.

    Raises:
        OutputError: The folder does not exist, the target is a folder, or there is no space for it.
    """
    _check_target(target)
    with committed(PendingOutput.beside(target, as_private_as), target) as pending:
        yield pending


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What only writing can fail with."""


@contextlib.contextmanager
def committed(pending: PendingOutput, target: FileLocation) -> Iterator[PendingOutput]:
    """Commit an output when the block ends, and discard it if that fails.

    Raises:
        OutputError: There is no space for it.
    """
    try:
        yield pending
        pending.commit()
    except BaseException as error:
        pending.discard()
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            reason = os.strerror(error.errno).lower()
            raise OutputError(
                f"{target} cannot be written: {reason}.", hint="Make space, then try again."
            ) from None
        raise


def _move(location: FileLocation, target: FileLocation) -> None:
    size = location.info().size
    fsspec = _fsspec_of(location.filesystem)
    if fsspec is None:
        location.filesystem.move(location.path, target.path)
    else:
        # Its own move takes names for patterns.
        fsspec.cp_file(location.path, target.path)
        fsspec.rm_file(location.path)
    if target.info().type != pafs.FileType.File or target.info().size != size:
        raise OutputError(f"{target} did not get what was written for it.", hint="Try again.")


@contextlib.contextmanager
def exclusive_folder(target: FileLocation) -> Iterator[None]:
    """Keep others who use this out of the folder of a local file, while several files are replaced together."""
    if not target.is_local:
        yield
        return
    file_descriptor = os.open(Path(target.path).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file_descriptor)


def written_meanwhile(target: FileLocation) -> OutputError:
    """Return the error for a target that was not there when its replacement was begun."""
    return OutputError(f"{target} was written by another process meanwhile.", hint="Try again.")


_HADOOP_CHECKSUMS_MAGIC = b"crc\x00"


def _remove_hadoop_checksums(target: Path) -> None:
    """Remove the checksums that Hadoop keeps beside a local file: Spark would refuse what takes the file's place.

    Before it does so, for without checksums Hadoop reads both the old file and the new one.
    """
    checksums = target.with_name(f".{target.name}.crc")
    with contextlib.suppress(FileNotFoundError):
        with checksums.open("rb") as file:
            is_hadoops = file.read(len(_HADOOP_CHECKSUMS_MAGIC)) == _HADOOP_CHECKSUMS_MAGIC
        if is_hadoops:
            checksums.unlink()


def _sync(path: str) -> None:
    file_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def _check_target(target: FileLocation) -> None:
    if target.info().type == pafs.FileType.Directory:
        raise OutputError(f"{target} is a folder.", hint="Name a file in it.")
    if target.is_local and not Path(target.path).parent.is_dir():
        raise OutputError(f"the folder of {target} does not exist.", hint="Create it first.")


def write_whole(target: FileLocation, data: bytes) -> None:
    """Write a small file whole or not at all."""
    with whole_output(target) as pending, pending.open_sink() as sink:
        sink.write_at(0, data)


def read_whole(location: FileLocation, max_bytes: int) -> bytes:
    """Read a small file.

    Raises:
        FileNotFoundError: There is no such file.
        ParquetFormatError: It has more than `max_bytes` bytes, or is not a regular file.
    """
    if location.is_local:
        _refuse_irregular(location)
    with location.filesystem.open_input_file(location.path) as file:
        if file.size() > max_bytes:
            raise ParquetFormatError(f"longer than {max_bytes} bytes", path=str(location))
        data: bytes = file.readall()
        return data
