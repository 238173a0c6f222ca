"""An Arrow file system that delegates each call to another one; a base class for the tests' file systems."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from parquet_keytools.tables.file_systems import LookingHandler


class DelegatingHandler(LookingHandler):
    """Delegates each call to another file system."""

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder."""
        self.filesystem.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder."""
        self.filesystem.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Delete the contents of a folder."""
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

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for random access."""
        return self.filesystem.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file for writing."""
        return self.filesystem.open_output_stream(path, compression=None)

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Refuse: Parquet files are not appended to."""
        raise NotImplementedError("Parquet files are not appended to")
