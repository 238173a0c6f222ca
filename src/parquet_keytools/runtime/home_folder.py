"""Paths that begin with `~`, as people and configurations write them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with a home folder in place of the `~` or `~user` that it begins with.

    As with a shell, `~name` is a name like any other where there is no such user.

    Raises:
        FileNotFoundError: This user has no home folder, as in some containers.
    """
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.parts[0] != "~":
            return path
        raise FileNotFoundError(
            errno.ENOENT, "this user has no home folder: set HOME, or write the whole path", str(path)
        ) from None
