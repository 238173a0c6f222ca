"""The Parquet files that a path stands for."""

from __future__ import annotations

from collections.abc import Iterator

from parquet_keytools.folder_files import walk_parquet_files
from parquet_keytools.storage import FileLocation


def rotation_files(path: FileLocation) -> Iterator[FileLocation]:
    """Yield a file, or the Parquet files under a folder, without listing all of them first.

    Raises:
        FileNotFoundError: There is no such file or folder.
    """
    if path.is_folder():
        yield from walk_parquet_files(path)
    elif path.is_file():
        yield path
    else:
        raise FileNotFoundError(f"there is no file or folder {path}")
