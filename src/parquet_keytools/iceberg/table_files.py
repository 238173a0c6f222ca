"""Files of tables: where they lie and how they are opened, whatever a metadata file claims; and as plaintext.

Parquet is plaintext by modular encryption, under one key that Iceberg's key metadata holds; all else is AGS1.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import fs as pafs
from pyiceberg.io import PY_IO_IMPL, FileIO
from pyiceberg.io.fsspec import FsspecFileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import TableProperties

from parquet_keytools.encryption.file_decryptor import decrypt_columns
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    ConfigurationError,
    DecryptionError,
    KeyMaterialError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.files.opened_file import OpenedFile, VerifiedTail, naming_place
from parquet_keytools.format.byte_ranges import ByteSource, RangedFile
from parquet_keytools.iceberg.ags1 import Ags1Reader
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.keys.key_wrapping import DataKeys, FileKeyRetriever, KeyUnwrapper, KmsKeys
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import BufferSink
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile
from parquet_keytools.view.plain_files import PlainInput

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

_CLASSES = (PY_IO_IMPL, TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL)
"""Properties with which PyIceberg imports a class and calls it."""

_ARROW_READS_OF_THE_END = 64 * 1024
"""Bytes at the end of a file that Arrow reads at once, for a footer that is mostly far shorter."""


def is_of_catalogs(name: str) -> bool:
    """Return whether a property says how files are opened, or by whom, which no table may say of itself.

    PyIceberg takes those of a table before those of its catalog, and anybody may have changed a metadata file.
    """
    return name in _CLASSES or name.startswith(("keytools.", *_STORAGE_PREFIXES))


def misplaced_properties(properties: Mapping[str, str]) -> list[str]:
    """Return which properties of an encrypted table only catalogs may have; that it is read by us does no harm."""
    return [n for n, value in properties.items() if is_of_catalogs(n) and (n, value) != (PY_IO_IMPL, _OURS)]


def mapped_location(location: str, mapping: str) -> str:
    """Return where a location lies, by `keytools.location-mapping`; the longest `from` decides."""
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
    expected = store_of(mapped_location(metadata_location, mapping))
    if (store := store_of(location)) != expected:
        raise ParquetFormatError(
            f"it names {location[:200]}, which is in {store!r}, and the metadata file is in {expected!r}.",
            path=metadata_location,
            hint="Do not trust this metadata file. If the table does lie in both, name the location in "
            f"{MAPPING_PROPERTY}.",
        )


def store_of(location: str) -> str:
    """Return the kind of store that a location is in, whichever of its schemes it has."""
    scheme = location.partition(":")[0].lower() if ":" in location.partition("/")[0] else ""
    return _FAMILIES.get(scheme, scheme)


def open_as_stored(file_io_of: Callable[[str], FileIO], location: str, mapping: str) -> pa.NativeFile:
    """Open a file as it is stored, with the FileIO beneath for its mapped location.

    Raises:
        ParquetFormatError: No file system opens such a location, or what lies there is no file.
        OSError: It cannot be opened.
    """
    mapped = mapped_location(location, mapping)
    failure = ""
    try:
        if store_of(mapped) == "file":
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


def check_length(length: int, key: StandardKeyMetadata, listed_length: int | None, name: str) -> None:
    """Refuse a file of another length than the chain says, before a byte of it is decrypted."""
    for source, expected in (("its key metadata", key.file_length), ("the manifest", listed_length)):
        if expected is not None and length != expected:
            raise DecryptionError(
                f"the {name} has {length} bytes, and {source} says {expected}: it is another file, or was cut.",
                hint="Do not trust this file; restore it from a backup.",
            )


def read_stream(stored: pa.NativeFile, key: StandardKeyMetadata, listed_length: int | None, name: str) -> bytes:
    """Return the plaintext of an AGS1 stream, which is closed; errors call it by its name.

    Raises:
        DecryptionError: It has another length, or a block of it does not authenticate.
        NotEncryptedError: It is plaintext.
    """
    check_length(stored.size(), key, listed_length, name)
    with Ags1Reader(stored, key, path=f"the {name}") as reader:
        return reader.read()


def open_data_file(source: ByteSource, key: StandardKeyMetadata, name: str, cache: PageCache) -> PlainFile:
    """Open a Parquet file as plaintext: pages are decrypted when they are read.

    The source stays open as long as the view is read.

    Raises:
        NotEncryptedError: It is plaintext.
        DecryptionError: Its footer does not authenticate, or it is not encrypted as Iceberg encrypts.
        KeytoolsError: Another subclass says what is wrong with it.
    """
    footer, envelope = _open_footer(source, key, name)
    location = _named(name)
    kms_keys = KmsKeys(KeyUnwrapper(None, time.monotonic), 0)
    retriever = FileKeyRetriever(kms_keys, DataKeys(), location)
    opened = OpenedFile(location, footer, VerifiedTail.of(envelope), retriever, kms_keys, {}, {})
    with naming_place(location, footer.columns):
        check_stated_algorithm(source, footer, {})
    return PlainFile(opened, source, "error", cache, gap=_ARROW_READS_OF_THE_END)


def decrypt_data_file(source: ByteSource, key: StandardKeyMetadata, name: str) -> pa.Buffer:
    """Return a Parquet file in plaintext, every module of it checked; errors as `open_data_file`."""
    footer, _ = _open_footer(source, key, name)
    sink = BufferSink()
    with naming_place(_named(name), footer.columns):
        decrypt_columns(source, sink, footer, {})
    return pa.py_buffer(sink.buffer)


def _named(name: str) -> FileLocation:
    """Return a name for errors: of the place itself, all that is known is the stream that PyIceberg opened."""
    return FileLocation(pafs.LocalFileSystem(), f"the {name}")


def _open_footer(source: ByteSource, key: StandardKeyMetadata, name: str) -> tuple[Footer, FooterEnvelope]:
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(
            f"the {name} is plaintext, and it has the key metadata of an encrypted one.",
            hint="Do not trust this file: somebody replaced it.",
        )
    if envelope.mode is not FooterMode.ENCRYPTED_FOOTER or envelope.algorithm is not Algorithm.AES_GCM_V1:
        raise DecryptionError(
            f"the {name} is not encrypted as Iceberg does it, with AES_GCM_V1 and an encrypted footer.",
            hint="Do not trust this file: somebody replaced it.",
        )
    if envelope.key_metadata is not None:
        raise KeyMaterialError(
            f"the {name} has key metadata of its own, and Iceberg has its key in the manifest.",
            hint="Another writer than Iceberg's made it. Do not trust this file.",
        )
    with naming_place(_named(name)):
        footer = envelope.open(key.encryption_key, key.aad_prefix or None)
    if (
        any(column.encryption is not ColumnEncryption.FOOTER_KEY for column in footer.columns)
        and footer.row_groups
    ):
        raise DecryptionError(
            f"the {name} has columns in plaintext or under keys of their own, and Iceberg has one key for all.",
            hint="Do not trust this file: somebody replaced it.",
        )
    return footer, envelope


class UncopiedInput(PlainInput):
    """A plaintext view for Arrow alone, which takes any buffer for the bytes that it reads.

    The stored file is closed when nobody has the view any more.
    """

    read = RangedFile.read_uncopied  # type: ignore[assignment]
