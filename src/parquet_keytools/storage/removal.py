"""Files removed by descriptor of their folder: a path may lead elsewhere by now."""

from __future__ import annotations

import errno
import os
from pathlib import Path, PurePosixPath

from parquet_keytools.errors import OutputError
from parquet_keytools.storage.leftovers import open_folder
from parquet_keytools.storage.local_files import FolderIdentity, folder_moved, identity_of_folder
from parquet_keytools.storage.locations import FileLocation

_FOLDER_AND_NO_LINK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_beneath(base: FileLocation, folder: FolderIdentity, location: FileLocation) -> None:
    """Remove a local file from a data set; what a link leads to is not removed.

    Raises:
        OutputError: The base is another folder, or a folder between it and the file is a link.
        FileNotFoundError: There is no such file.
        OSError: The file system failed.
    """
    *folders, name = PurePosixPath(location.path).relative_to(base.path).parts
    descriptor = open_folder(base.path)
    try:
        if identity_of_folder(descriptor) != folder:
            raise folder_moved(location)
        for part in folders:
            try:
                inner = os.open(part, _FOLDER_AND_NO_LINK, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise OutputError(
                    f"{location} is not removed: {part!r} is a link.", hint="Remove what is in it by hand."
                ) from None
            os.close(descriptor)
            descriptor = inner
        os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def remove_from_folder(location: FileLocation, folder: FolderIdentity | None) -> None:
    """Remove a file, if its folder is still the same one.

    Args:
        location: The file.
        folder: Device and inode of its folder; None where there are none.

    Raises:
        OutputError: The folder is another one: what has this name there is another file.
        FileNotFoundError: There is no such file.
        OSError: The file system failed.
    """
    if folder is None or not location.is_local:
        location.filesystem.delete_file(location.path)
        return
    descriptor = open_folder(str(Path(location.path).parent))
    try:
        if identity_of_folder(descriptor) != folder:
            raise folder_moved(location)
        os.unlink(Path(location.path).name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
