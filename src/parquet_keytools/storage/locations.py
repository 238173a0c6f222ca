"""Where files and folders lie, on any `pyarrow.fs` file system."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

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
        fsspec = fsspec_of(filesystem)
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


def _of_uri(uri: str) -> FileLocation:
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:
        # pyarrow quotes the URI, which may hold credentials.
        scheme = uri.partition(":")[0]
        raise ValueError(f"pyarrow does not open this URI of the scheme {scheme!r}") from None
    return FileLocation(filesystem, path)


def fsspec_of(filesystem: pafs.FileSystem) -> Any:
    """Return the fsspec file system underneath, or None where there is none."""
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    return handler.fs if isinstance(handler, pafs.FSSpecHandler) else None


def key_material_location(parquet_file: FileLocation) -> FileLocation:
    """Return where the key material of a Parquet file lies."""
    return parquet_file.sibling(f"_KEY_MATERIAL_FOR_{parquet_file.name}.json")


def real_location(location: FileLocation) -> FileLocation:
    """Return the file that a link leads to: replaced is the file, and the link stays."""
    if not location.is_local:
        return location
    return FileLocation(location.filesystem, os.path.realpath(location.path))


def folder_path(location: FileLocation) -> str:
    """Return the path of the folder that a file lies in."""
    return str(PurePosixPath(real_location(location).path).parent)
