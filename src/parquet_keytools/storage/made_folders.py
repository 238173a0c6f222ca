"""Folders that a write makes for its files, removed again if it fails: their names may be values of columns."""

from __future__ import annotations

import contextlib
import os
from pathlib import PurePosixPath
from typing import Any

from pyarrow import fs as pafs

from parquet_keytools.storage.locations import OBJECT_STORES, fsspec_of


class MadeFolders:
    """Creates folders of one file system, and remembers which were not there."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem
        self._made: dict[str, None] = {}

    def create(self, path: str, *, recursive: bool) -> None:
        """Create a folder, and with `recursive` those that it lies in; in an object store nothing is done.

        Raises:
            OSError: It cannot be created.
        """
        if self._filesystem.type_name in OBJECT_STORES:
            return
        missing = []
        for folder in map(str, (PurePosixPath(path), *PurePosixPath(path).parents)):
            if folder in ("", "/", ".") or self._filesystem.get_file_info(folder).type != pafs.FileType.NotFound:
                break
            missing.append(folder)
        if path not in ("", "/", "."):
            self._filesystem.create_dir(path, recursive=recursive)
        self._made.update(dict.fromkeys(reversed(missing)))

    def remove_empty(self, below: str | None = None) -> None:
        """Remove the folders that were created, or those that a file would lie in, if they are empty."""
        above = None if below is None else {str(folder) for folder in PurePosixPath(below).parents}
        for folder in reversed(self._made.copy()):
            if above is None or folder in above:
                with contextlib.suppress(Exception):  # It is not empty, or gone, or another program's link.
                    self._remove(folder)
                    del self._made[folder]

    def _remove(self, folder: str) -> None:
        """Remove a folder, but never what is in it."""
        fsspec: Any = fsspec_of(self._filesystem)
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            os.rmdir(folder)  # noqa: PTH106 - one call for each of many
        elif fsspec is not None and not fsspec.ls(folder):
            fsspec.rmdir(folder)
