"""The tree that `serve` and `mount` show: the plaintext view of a file or folder."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath

from parquet_keytools.cli.options import location_of
from parquet_keytools.errors import NoParquetFilesError
from parquet_keytools.keytools import Keytools
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.storage.locations import FileLocation

KMS_SECONDS = 15.0
"""Engines wait about half a minute for an answer, and then do not see why there is none."""


def viewed_tree(keytools: Keytools, path: str, table: str | None) -> tuple[ServedTree, str]:
    """Return a tree, and the key of its first file.

    Raises:
        FileNotFoundError: There is no such file or folder.
        NoParquetFilesError: It has no files.
    """
    location = location_of(path, "PATH")
    kind = location.info().type.name
    if kind == "NotFound":
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", path)
    only = location.name if kind == "File" else None
    if only is not None:
        location = FileLocation(location.filesystem, str(PurePosixPath(location.path).parent))
    view = keytools.view(location, table_name=table)
    local = Path(location.path) if location.is_local else None
    tree = ServedTree(view, "", local_folder=local, only=only)
    first = next(tree.keys(""), None)
    if first is None:
        raise NoParquetFilesError(path=path)
    return tree, first
