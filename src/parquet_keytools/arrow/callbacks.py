"""File systems that Arrow calls: one that passes everything on, and a folder in memory."""

from __future__ import annotations

import io
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.runtime.endings import share_with_arrow


class DelegatingHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    """Passes every call on to another file system."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self.filesystem = filesystem
        share_with_arrow(self)

    def get_type_name(self) -> str:
        """Return the name of the file system underneath."""
        return str(self.filesystem.type_name)

    def normalize_path(self, path: str) -> str:
        """Return the path in its usual form."""
        return str(self.filesystem.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return what is known of some paths."""
        return list(self.filesystem.get_file_info(paths))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return what is known of the files of a folder."""
        return list(self.filesystem.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder."""
        self.filesystem.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder."""
        self.filesystem.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Delete what is in a folder."""
        self.filesystem.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Refuse to empty a whole file system."""
        raise PermissionError("the contents of a whole file system are not deleted")

    def delete_file(self, path: str) -> None:
        """Delete a file."""
        self.filesystem.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Move a file."""
        self.filesystem.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file."""
        self.filesystem.copy_file(src, dest)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading in order."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading by ranges."""
        return self.filesystem.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file for writing."""
        return self.filesystem.open_output_stream(path, compression=None)

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Refuse: Parquet files are not appended to."""
        raise NotImplementedError("Parquet files are not appended to")


class MaterialFolder(DelegatingHandler):
    """A folder in memory for key material: Arrow reads and writes it here instead of beside its file.

    So an existing key material file is not touched before the new Parquet file is complete, and a reader sees
    the key material that was there when the keys were unwrapped.

    Attributes:
        contents: Name of a file -> bytes; there is only one folder.
    """

    def __init__(self) -> None:
        super().__init__(pafs.LocalFileSystem())
        self.contents: dict[str, bytes] = {}

    def get_type_name(self) -> str:
        """Return a name of its own."""
        return "key-material"

    def normalize_path(self, path: str) -> str:
        """Return the path as it is: a local file system refuses names with a colon that may be URIs."""
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Say which of the paths are there."""
        return [
            pafs.FileInfo(path, pafs.FileType.File, size=len(self.contents[_name(path)]))
            if _name(path) in self.contents
            else pafs.FileInfo(path, pafs.FileType.NotFound)
            for path in paths
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open key material."""
        if _name(path) not in self.contents:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.contents[_name(path)])

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open key material for writing; it is there once it is closed."""
        return pa.PythonFile(_MaterialFile(self, _name(path)), mode="w")

    def move(self, src: str, dest: str) -> None:
        """Rename key material."""
        self.contents[_name(dest)] = self.contents.pop(_name(src))

    def delete_file(self, path: str) -> None:
        """Delete key material."""
        del self.contents[_name(path)]


def _name(path: str) -> str:
    return PurePosixPath(path).name


class _MaterialFile(io.BytesIO):
    def __init__(self, folder: MaterialFolder, name: str) -> None:
        super().__init__()
        self._folder = folder
        self._name = name
        share_with_arrow(self)

    def close(self) -> None:
        if not self.closed:
            self._folder.contents[self._name] = self.getvalue()
        super().close()
