"""Files and folders on any `pyarrow.fs` file system, and how files are read by ranges."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pickle
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Never

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import Bytes, ByteSource, FileSource, check_range, shortened
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.presentation import expanded, install_hint, is_url, shown_url

PathLike = str | os.PathLike[str]

PathOrPaths = PathLike | Sequence[PathLike]
"""A file, a folder, a glob such as `data/year=*/*.parquet`, or a list of these."""

OBJECT_STORES = ("s3", "gcs", "abfs")
"""File systems of Arrow without folders; their paths begin with a bucket, without a slash."""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_GLOB = re.compile(r"[*?[]")


@dataclass(frozen=True)
class FileLocation:
    """A file or folder on a file system.

    Attributes:
        filesystem: Its file system.
        path: Its path there.
        only: Paths or globs that select entries of this folder; empty for the whole folder, and for a file.
        makes_folders: Whether writing a local file creates its folders (`auto_mkdir` of fsspec).
    """

    filesystem: pafs.FileSystem
    path: str
    only: tuple[str, ...] = ()
    makes_folders: bool = False

    @classmethod
    def resolve(cls, path: PathLike | FileLocation, filesystem: Any = None) -> FileLocation:
        """Find a file by path or URI.

        Args:
            path: A path, a URI such as `s3://bucket/key` (then without `filesystem`), or a location.
            filesystem: A `pyarrow.fs` or fsspec file system, or the URI of a folder, at which paths begin; None
                for the local file system.

        Raises:
            ValueError: It is a URI that neither pyarrow nor fsspec opens.
        """
        if isinstance(path, FileLocation):
            return path
        text = os.fspath(path)
        if filesystem is None and is_url(text):
            # Imported here because it takes time.
            from parquet_keytools.storage.http_files import HttpHandler

            return cls(pafs.PyFileSystem(HttpHandler()), text)
        if filesystem is None and _URI.match(text):
            return _of_uri(text)
        filesystem = arrow_filesystem(filesystem)
        while isinstance(filesystem, pafs.SubTreeFileSystem):
            # As pyarrow forms it.
            base, text = filesystem.base_path, text.lstrip("/")
            if base.strip("/"):
                base = f"{base.rstrip('/')}/" if text else base.rstrip("/")
            text, filesystem = base + text, filesystem.base_fs
        makes_folders = False
        fsspec = fsspec_of(filesystem)
        if fsspec is not None:
            # The form in which fsspec lists paths: other forms would be taken for different files.
            text = str(fsspec._strip_protocol(text))
            if _is_local(fsspec):
                filesystem = pafs.LocalFileSystem()
                makes_folders = bool(fsspec.auto_mkdir)
        if isinstance(filesystem, pafs.LocalFileSystem):
            text = str(expanded(text).absolute())
        return cls(filesystem, filesystem.normalize_path(text), makes_folders=makes_folders)

    @classmethod
    def resolve_all(cls, paths: PathOrPaths | FileLocation, filesystem: Any = None) -> FileLocation:
        """Find a file, a folder, the matches of a glob, or a list of files, folders and globs.

        The name of an existing file or folder is never a glob. `*` and `?` stand for parts of one name, `**` for
        any number of folders.

        Args:
            paths: Paths or URIs, all on one file system.
            filesystem: As with `resolve`.

        Returns:
            The file or folder; or the folder that contains all of them, with their paths in `only`.

        Raises:
            TypeError: It is neither a path nor a list of paths.
            ValueError: The list is empty, or its paths lie on several file systems; or as with `resolve`.
        """
        if isinstance(paths, (str, os.PathLike, FileLocation)):
            return cls.resolve(paths, filesystem)._as_glob()
        found = [cls.resolve(path, filesystem)._as_glob() for path in paths]
        if not found:
            raise ValueError("the list of files is empty")
        if any(location.filesystem != found[0].filesystem for location in found):
            raise ValueError("the files of a list lie on one file system")
        names = [f"{location.path}/{name}" for location in found for name in location.only] + [
            location.path for location in found if not location.only
        ]
        folders = [name.partition("?")[0].split("/")[:-1] for name in names]
        # The common folder of all is the common folder of the first and the last.
        ends = zip(min(folders), max(folders), strict=False)
        common = [name for name, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends)]
        # Scheme and host of an address are not a folder.
        folder = "" if is_url(names[0]) and len(common) < 3 else "/".join(common)
        if not folder and names[0].startswith("/"):
            folder = "/"
        skipped = len(folder) + 1 if folder not in ("", "/") else len(folder)
        return cls(found[0].filesystem, folder, tuple(dict.fromkeys(name[skipped:] for name in names)))

    def _as_glob(self) -> FileLocation:
        """Split a glob into its leading folder and the rest; return anything else as it is."""
        if self.only or is_url(self.path) or not _GLOB.search(self.path):
            return self
        if self.info().type != pafs.FileType.NotFound:
            return self
        parts = self.path.split("/")
        first = next(number for number, part in enumerate(parts) if _GLOB.search(part))
        folder = "/".join(parts[:first]) or ("/" if self.path.startswith("/") else "")
        return FileLocation(self.filesystem, folder, ("/".join(parts[first:]),))

    def __reduce__(self) -> tuple[Any, ...]:
        # Files of one file system share one connection when they are unpickled.
        return _restored, (pickle.dumps(self.filesystem), self.path, self.only, self.makes_folders)

    @property
    def is_local(self) -> bool:
        """Whether the operating system can open it."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    @property
    def is_for_all_processes(self) -> bool:
        """Whether other processes certainly see the same files: file systems of Python may be in memory."""
        return not isinstance(self.filesystem, pafs.PyFileSystem) and self.filesystem.type_name != "mock"

    @property
    def is_in_s3(self) -> bool:
        """Whether it is in S3, or a compatible store, through Arrow's own file system."""
        return str(self.filesystem.type_name) == "s3"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return (
            self.path.partition("?")[0].rpartition("/")[2] if is_url(self.path) else PurePosixPath(self.path).name
        )

    def sibling(self, name: str) -> FileLocation:
        """Return the location of `name` in the same folder."""
        if is_url(self.path):
            address, _, query = self.path.partition("?")
            return FileLocation(self.filesystem, f"{address.rpartition('/')[0]}/{name}{query and '?'}{query}")
        return replace(self, path=str(PurePosixPath(self.path).with_name(name)), only=())

    def below(self, path: str) -> FileLocation:
        """Return the location of a path within this folder, or of an address, which has no folder."""
        return replace(self, path=f"{self.path.rstrip('/')}/{path}" if self.path else path, only=())

    def path_within(self, folder: FileLocation) -> str:
        """Return the path of a file relative to a folder, without the signature of an address."""
        path = self.path.partition("?")[0] if is_url(self.path) else self.path
        return path[len(folder.path) :].lstrip("/")

    def info(self) -> pafs.FileInfo:
        """Return its type, size and time."""
        if self.only and (not self.path or is_url(self.path)):
            # It is never listed.
            return pafs.FileInfo(self.path, pafs.FileType.Directory)
        if self.is_local:
            try:
                return self.filesystem.get_file_info(self.path)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                # Nothing can have this name: the name of key material is longer than the name of its file.
                return pafs.FileInfo(self.path, pafs.FileType.NotFound)
        return self.filesystem.get_file_info(self.path)

    def size_bytes(self) -> int:
        """Return the length of a file in bytes; 0 if the file system does not know it.

        Raises:
            FileNotFoundError: There is no such file.
        """
        info = self.info()
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"there is no file {self}")
        return info.size or 0

    def is_file(self) -> bool:
        """Whether a file is there."""
        return bool(self.info().type == pafs.FileType.File)

    def is_folder(self) -> bool:
        """Whether a folder is there."""
        return bool(self.info().type == pafs.FileType.Directory)

    def is_same_file(self, other: FileLocation) -> bool:
        """Whether both are the same file, also through links."""
        if self.is_local and other.is_local:
            with contextlib.suppress(OSError):
                return Path(self.path).samefile(other.path)
            # Not `resolve`, which raises for links that lead to themselves.
            return os.path.realpath(self.path) == os.path.realpath(other.path)
        return self.filesystem == other.filesystem and self.path == other.path

    def __str__(self) -> str:
        if is_url(self.path):
            return shown_url(self.path)
        place = self.path if self.is_local else f"{self.filesystem.type_name}:{self.path}"
        more = f" and {len(self.only) - 1} more" if len(self.only) > 1 else ""
        return f"{place.rstrip('/')}/{self.only[0]}{more}" if self.only else place


def _restored(filesystem: bytes, path: str, only: tuple[str, ...], makes_folders: bool) -> FileLocation:
    return FileLocation(_unpickled(filesystem), path, only, makes_folders)


@functools.lru_cache(maxsize=16)
def _unpickled(filesystem: bytes) -> pafs.FileSystem:
    return pickle.loads(filesystem)  # noqa: S301 - part of a pickle that is being read


def arrow_filesystem(filesystem: Any) -> pafs.FileSystem:
    """Return the file system of an argument `filesystem`: of pyarrow, fsspec, a folder's URI, or None (local)."""
    if filesystem is None:
        return pafs.LocalFileSystem()
    if isinstance(filesystem, pafs.FileSystem):
        return filesystem
    if isinstance(filesystem, str):
        if not (_URI.match(filesystem) or filesystem.startswith("/")):
            raise ValueError(f"filesystem={filesystem!r} is neither a file system nor the URI of a folder")
        folder = FileLocation.resolve(filesystem)
        if not folder.is_folder():
            raise ValueError(f"the URI of a file system must name a folder, and {folder} is not one")
        return pafs.SubTreeFileSystem(folder.path, folder.filesystem)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


class PartialHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    """A file system for Arrow that has some operations, and refuses all others."""

    refusal = "files of a data set are only read"

    def _refuse(self, *_: Any) -> Never:
        raise OSError(errno.EROFS, self.refusal)

    _refused: Any = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refused
    move = copy_file = open_output_stream = open_append_stream = _refused
    get_file_info_selector = open_input_file = _refused

    def normalize_path(self, path: str) -> str:
        """Return a path as it is."""
        return path

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading in order."""
        return self.open_input_file(path)


def _is_local(filesystem: Any) -> bool:
    """Return whether this is fsspec's local file system; a subclass may put files elsewhere."""
    from fsspec.implementations.local import LocalFileSystem

    return type(filesystem) is LocalFileSystem


def _of_uri(uri: str) -> FileLocation:
    with contextlib.suppress(pa.ArrowInvalid):
        return FileLocation(*pafs.FileSystem.from_uri(uri))
    # The errors of pyarrow and fsspec quote the URI, which may hold credentials.
    scheme = uri.partition(":")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ValueError(
            f"pyarrow does not open URIs of the scheme {scheme!r}, and fsspec is missing. {install_hint('fsspec')}"
        ) from None
    try:
        filesystem, path = url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"fsspec lacks a package for URIs of the scheme {scheme!r}: {error}") from None
    except Exception:
        raise ValueError(f"neither pyarrow nor fsspec opens this URI of the scheme {scheme!r}") from None
    if _is_local(filesystem):
        # fsspec takes the host as a folder of the current folder; pyarrow opens all URIs without one.
        raise ValueError(f"a URI of the scheme {scheme!r} names no host: write three slashes, {scheme}:///folder")
    return FileLocation.resolve(path, filesystem)


def fsspec_of(filesystem: pafs.FileSystem) -> Any:
    """Return the underlying fsspec file system; None if there is none."""
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    return handler.fs if isinstance(handler, pafs.FSSpecHandler) else None


def real_location(location: FileLocation) -> FileLocation:
    """Return the target of a link: the target is replaced, and the link stays."""
    if not location.is_local:
        return location
    return FileLocation(location.filesystem, with_slashes(os.path.realpath(location.path)))


def with_slashes(path: str) -> str:
    """Return a path in Arrow's form: with slashes on Windows, too."""
    return path.replace("\\", "/") if sys.platform == "win32" else path


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
        check_range(self, offset, length)
        # Arrow's buffers have signed bytes.
        return memoryview(self.buffer).cast("B")[offset : offset + length]


@dataclass(frozen=True)
class ArrowSource:
    """An open pyarrow file."""

    path: str
    file: pa.NativeFile
    size_bytes: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Read one range with one request."""
        check_range(self, offset, length)
        try:
            data: bytes = self.file.read_at(length, offset)
        except OSError as error:
            kind = type(error)
            if error.errno is not None or kind.__module__ != "builtins" or self.path in str(error):
                raise
            # Errors of store clients often do not name the file.
            raise kind(f"{self.path}: {error or 'it could not be read'}") from error.__cause__
        if len(data) != length:
            raise shortened(self.path)
        return data


@contextlib.contextmanager
def open_source(location: FileLocation) -> Iterator[ByteSource]:
    """Open a file for reading by ranges; refuse what is not a regular file."""
    if not location.is_local:
        with location.filesystem.open_input_file(location.path) as file:
            yield ArrowSource(str(location), file, file.size())
        return
    _refuse_irregular(location)
    # Not `open`, which makes a dozen system calls.
    descriptor = operating_system.open_file(location.path, os.O_RDONLY, follow_link=True)
    try:
        yield FileSource.of(str(location), descriptor)
    finally:
        os.close(descriptor)


def _refuse_irregular(location: FileLocation) -> None:
    """Refuse folders, pipes, sockets and devices unopened, because opening a pipe waits for its other end."""
    mode = os.stat(location.path).st_mode  # noqa: PTH116 - no object for each of a million files
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), location.path)
    if not stat.S_ISREG(mode):
        raise ParquetFormatError(
            "it is not a regular file.",
            path=str(location),
            hint="Parquet is read from its end: write it to a file.",
        )


def ends_with(source: ByteSource, offset: int, data: bytes) -> bool:
    """Return whether a file ends with these bytes, from an offset on."""
    return source.size_bytes == offset + len(data) and bytes(source.read_at(offset, len(data))) == data


def read_whole(location: FileLocation, max_bytes: int) -> bytes:
    """Read a small, regular file of at most `max_bytes`."""
    if location.is_local:
        _refuse_irregular(location)
    with location.filesystem.open_input_file(location.path) as file:
        if file.size() > max_bytes:
            raise ParquetFormatError(f"longer than {max_bytes} bytes", path=str(location))
        data: bytes = file.readall()
        return data
