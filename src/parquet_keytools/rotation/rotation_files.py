"""The Parquet files that a path stands for."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from parquet_keytools.folder_files import walk_parquet_files
from parquet_keytools.storage import FileLocation


def rotation_files(path: FileLocation) -> Iterator[FileLocation]:
    """Yield a file, or the Parquet files under a folder, without listing all of them first.

    Raises:
        FileNotFoundError: There is no such file or folder.
        OSError: A name is not valid UTF-8, as Arrow needs it; the files of other folders may have come before.
    """
    if path.is_folder():
        try:
            yield from walk_parquet_files(path)
        except UnicodeDecodeError as error:
            name = bytes(error.object).decode("utf-8", "backslashreplace")
            raise OSError(errno.EILSEQ, "this name is not valid UTF-8: rename the file", name) from None
    elif path.is_file():
        yield path
    else:
        raise FileNotFoundError(f"there is no file or folder {path}")
