"""Files of tables as they are stored: where they lie, and how they are opened, whatever a metadata file claims."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import fs as pafs
from pyiceberg.io import PY_IO_IMPL, FileIO
from pyiceberg.io.fsspec import FsspecFileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from parquet_keytools.errors import ConfigurationError, ParquetFormatError
from parquet_keytools.storage.locations import FileLocation

MAPPING_PROPERTY = "keytools.location-mapping"

_FAMILIES = {
    "": "file",
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "abfss": "abfs",
    "wasb": "abfs",
    "wasbs": "abfs",
    "viewfs": "hdfs",
}
"""Schemes that name the same store as another one."""


_OURS = "parquet_keytools.iceberg.EncryptedFileIO"
_STORAGE_PREFIXES = ("s3.", "gcs.", "adls.", "hdfs.", "hf.", "client.")
"""Of properties of PyIceberg's FileIO: endpoints, and credentials that are sent to them."""


def is_of_catalogs(name: str) -> bool:
    """Return whether a property says how files are opened, or by whom, which no table may say of itself.

    PyIceberg takes those of a table before those of its catalog, and anybody may have changed a metadata file.
    """
    return name == PY_IO_IMPL or name.startswith(("keytools.", *_STORAGE_PREFIXES))


def misplaced_properties(properties: Mapping[str, str]) -> list[str]:
    """Return which properties of an encrypted table only catalogs may have; that it is read by us does no harm."""
    return [n for n, value in properties.items() if is_of_catalogs(n) and (n, value) != (PY_IO_IMPL, _OURS)]


def mapped_location(location: str, mapping: str) -> str:
    """Return where a location lies, by the property `keytools.location-mapping`; the longest `from` decides.

    Raises:
        ConfigurationError: The property is not valid.
    """
    begin, replacement = _mapped_beginning(location, mapping)
    return replacement + location[len(begin) :]


def _mapped_beginning(location: str, mapping: str) -> tuple[str, str]:
    if not mapping:
        return "", ""
    pairs = [pair.split("=", 1) for pair in mapping.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ConfigurationError(
            f"{MAPPING_PROPERTY} is not `from=to`, several with commas between them.", hint="Write both locations."
        )
    return max(
        ((begin, to) for begin, to in pairs if location.startswith(begin)),
        key=lambda pair: len(pair[0]),
        default=("", ""),
    )


def check_place(location: str, metadata_location: str, mapping: str) -> None:
    """Refuse a location that a metadata file claims, if it is in another kind of store than the file itself.

    Nothing authenticates the file: whoever changed it would let us send requests wherever they like.

    Raises:
        ParquetFormatError: It is. One that `keytools.location-mapping` names is not refused.
    """
    if _mapped_beginning(location, mapping)[0]:
        return
    expected = _store(mapped_location(metadata_location, mapping))
    if (store := _store(location)) != expected:
        raise ParquetFormatError(
            f"it names {location[:200]}, which is in {store!r}, and the metadata file is in {expected!r}.",
            path=metadata_location,
            hint="Do not trust this metadata file. If the table does lie in both, name the location in "
            f"{MAPPING_PROPERTY}.",
        )


def _store(location: str) -> str:
    scheme = location.partition(":")[0].lower() if ":" in location.partition("/")[0] else ""
    return _FAMILIES.get(scheme, scheme)


def open_as_stored(file_io_of: Callable[[str], FileIO], location: str, mapping: str) -> pa.NativeFile:
    """Open a file as it is stored.

    Args:
        file_io_of: The FileIO beneath, for a mapped location.
        location: Where it lies.
        mapping: The property `keytools.location-mapping`.

    Raises:
        ParquetFormatError: No file system opens such a location, or what lies there is no file.
        OSError: It cannot be opened.
    """
    mapped = mapped_location(location, mapping)
    failure = ""
    try:
        if _store(mapped) == "file":
            _check_regular(PyArrowFileIO.parse_location(mapped)[2], location)
        stream = file_io_of(mapped).new_input(mapped).open()
        return stream if isinstance(stream, pa.NativeFile) else pa.PythonFile(stream, mode="r")
    except (ParquetFormatError, ConfigurationError, OSError):
        raise
    except (ValueError, TypeError, AttributeError, ImportError, pa.ArrowException) as error:
        # A scheme that PyIceberg does not know, a library that is not installed, a name that no file has.
        failure = f"{type(error).__name__}: {error}"[:300]
    raise ParquetFormatError(
        f"{location[:200]} cannot be opened ({failure}).",
        hint=f"Check the location, and {MAPPING_PROPERTY}; the metadata file may have been changed.",
    )


def _check_regular(path: str, location: str) -> None:
    """Refuse a pipe or a device, which would be waited for or read without end."""
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ParquetFormatError(
            f"{location[:200]} is a folder or a device, and no file.",
            hint="Do not trust what names it: the metadata file may have been changed.",
        )


def stored_location(file_io: FileIO, mapped: str) -> FileLocation | None:
    """Return file system and path of a mapped location, or None where the FileIO does not show them."""
    scheme, netloc, path = PyArrowFileIO.parse_location(mapped)
    if isinstance(file_io, PyArrowFileIO):
        return FileLocation(file_io.fs_by_scheme(scheme, netloc), path)
    if isinstance(file_io, FsspecFileIO):
        return FileLocation(pafs.PyFileSystem(pafs.FSSpecHandler(file_io.get_fs(scheme))), path)
    return None
