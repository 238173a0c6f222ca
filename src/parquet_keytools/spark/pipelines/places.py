"""Where data sets lie, as text that every node understands."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.storage import FileLocation

OBJECT_STORES = ("s3", "gcs", "abfs")
"""Types of file systems that have no folders to create, no locks, and no replacement in one step with a check."""

_HADOOP_S3 = re.compile(r"s3[an]:", re.IGNORECASE)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def place_of(path: str | os.PathLike[str]) -> str:
    """Return a path or URI as it goes to executors.

    Raises:
        ConfigurationError: There are credentials in it: tasks are sent as they are, and Spark may log them.
    """
    text = os.fspath(path)
    if not _URI.match(text):
        return str(Path(text).expanduser().absolute())
    if ":" in urlsplit(text).netloc.rpartition("@")[0]:
        raise ConfigurationError(
            "there are credentials in the URI, which must not be sent to Spark's executors.",
            hint="Give every node its own: an instance profile, environment variables or files.",
        )
    return _HADOOP_S3.sub("s3:", text)


def location_of(place: str) -> FileLocation:
    """Return where a place is, with the credentials of this node.

    Raises:
        ConfigurationError: pyarrow knows no such URI.
    """
    try:
        return FileLocation.resolve(place)
    except (ValueError, NotImplementedError):
        scheme = place.partition(":")[0]
        raise ConfigurationError(f"pyarrow cannot open this URI of the scheme {scheme!r}.") from None


def is_object_store(location: FileLocation) -> bool:
    """Return whether a location is in an object store."""
    return location.filesystem.type_name in OBJECT_STORES


def file_at(root: FileLocation, name: str) -> FileLocation:
    """Return a file of a data set; without a name, the one that the place itself is."""
    return root.child(name) if name else root
