"""Folders that a write makes for its files, removed again if it fails: their names may be values of columns."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import PurePosixPath
from typing import Any

from pyarrow import fs as pafs

from parquet_keytools.storage.locations import OBJECT_STORES, fsspec_of

_TOP = ("", "/", ".")


class MadeFolders:
    """Creates folders of one file system, and remembers which were missing."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem
        self._made: dict[str, None] = {}
        self._promised: set[str] = set()

    def create(self, path: str, *, recursive: bool) -> None:
        """Create a folder, and with `recursive` its missing parents; in an object store nothing is done.

        Raises:
            OSError: It cannot be created.
        """
        if self._filesystem.type_name in OBJECT_STORES or path in _TOP:
            return
        missing = self._missing(path)
        self._filesystem.create_dir(path, recursive=recursive)
        self._made.update(dict.fromkeys(reversed(missing)))

    def promise(self, path: str, *, recursive: bool) -> None:
        """Create a folder as `create` does, but a partition folder (`name=value`) only with its first file.

        After a refused write, threads of an engine may create the folders of further partitions, without a file
        whose end would remove them.

        Raises:
            OSError: It cannot be created.
        """
        missing = [] if self._filesystem.type_name in OBJECT_STORES else self._missing(path)
        if not any("=" in PurePosixPath(folder).name for folder in missing):
            self.create(path, recursive=recursive)
        elif recursive or len(missing) == 1 or missing[1] in self._promised:
            self._promised.update(missing)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def is_promised(self, path: str) -> bool:
        """Return whether a folder will be created with its first file."""
        return path in self._promised and self._is_missing(path)

    def begin(self, path: str) -> None:
        """Create the promised folders of a file.

        Raises:
            OSError: One cannot be created.
        """
        folder = str(PurePosixPath(path).parent)
        if folder in self._promised:
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
        return list(itertools.takewhile(self._is_missing, _with_parents(path)))

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
