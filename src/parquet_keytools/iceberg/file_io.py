"""A FileIO with which unmodified PyIceberg reads encrypted tables.

It decrypts manifest lists, manifests, deletion vectors and Avro files as AGS1 streams, and data files by Parquet
modular encryption. It learns their keys on the way down: from the metadata file, manifest lists and manifests.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs
from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile, load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import EMPTY_DICT, Properties

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.encryption.file_encryption import authenticate_columns
from parquet_keytools.encryption.footer import Footer, FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import Algorithm, ColumnEncryption, FooterMode
from parquet_keytools.encryption.stated_algorithm import check_stated_algorithm
from parquet_keytools.errors import (
    ConfigurationError,
    DecryptionError,
    KeyMaterialError,
    KeyNotAvailableError,
    NotEncryptedError,
    ParquetFormatError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, VerifiedTail, naming_place
from parquet_keytools.format.file_layout import ByteSource, RangedFile
from parquet_keytools.iceberg import ags1
from parquet_keytools.iceberg.claims import (
    MAPPING_PROPERTY,
    TablePlaces,
    check_place,
    mapped_location,
    misplaced_properties,
    store_of,
)
from parquet_keytools.iceberg.key_chain import IcebergKeys, KeyChain
from parquet_keytools.iceberg.manifests import ListedFile, files_in, manifests_in
from parquet_keytools.iceberg.metadata import (
    KEY_ID_PROPERTY,
    StandardKeyMetadata,
    TableEncryption,
    parse_table_metadata,
    read_metadata_file,
)
from parquet_keytools.keys.key_wrapping import DataKeys, FileKeyRetriever, KeyUnwrapper, KmsKeys
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock
from parquet_keytools.storage.locations import ArrowSource, FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, PlainInput

CONFIG_PROPERTY = "keytools.config"
IO_IMPL_PROPERTY = "keytools.io-impl"
PLAINTEXT_TABLES_PROPERTY = "keytools.plaintext-tables"
CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG"

_METADATA_ENDINGS = (".json", ".json.gz")
_VERSION_HINT = "version-hint.text"
_MAX_HINT_BYTES = 4096
_KEPT_TABLES = 128
"""States of tables that are kept for other FileIOs; each FileIO also keeps the states that it uses."""

_ARROW_READS_OF_THE_END = 64 * 1024
"""Bytes that Arrow reads at once from the end of a file, for a footer that is usually far shorter."""


# --- one file, as it is stored and as plaintext ---


def open_as_stored(file_io_of: Callable[[str], FileIO], location: str, mapping: str) -> pa.NativeFile:
    """Open a file as it is stored, with the FileIO for its mapped location."""
    mapped = mapped_location(location, mapping)
    try:
        # A pipe or a device would block, or be read without end.
        is_local = store_of(mapped) == "file"
        if is_local and not stat.S_ISREG(Path(PyArrowFileIO.parse_location(mapped)[2]).stat().st_mode):
            raise ParquetFormatError(
                f"{location[:200]} is not a regular file.",
                hint="Do not trust the file that names it: the metadata file may have been changed.",
            )
        stream = file_io_of(mapped).new_input(mapped).open()
        return stream if isinstance(stream, pa.NativeFile) else pa.PythonFile(stream, mode="r")
    except (ParquetFormatError, ConfigurationError, OSError):
        raise
    except (ValueError, TypeError, AttributeError, ImportError, pa.ArrowException) as error:
        # A scheme that PyIceberg does not know, a library that is not installed, an invalid name.
        failure = f"{type(error).__name__}: {error}"[:300]
    # Outside the handler: the library's error would stay with this one, uncut.
    raise ParquetFormatError(
        f"{location[:200]} cannot be opened ({failure}).",
        hint=f"Check the location, and {MAPPING_PROPERTY}; the metadata file may have been changed.",
    )


def check_length(length: int, key: StandardKeyMetadata, listed_length: int | None, name: str) -> None:
    """Refuse a file with another length than the key chain says, before anything is decrypted."""
    for source, expected in (("its key metadata", key.file_length), ("the manifest", listed_length)):
        if expected is not None and length != expected:
            raise DecryptionError(
                f"the {name} has {length} bytes, and {source} says {expected}: it is another file, or was cut.",
                hint="Do not trust this file; restore it from a backup.",
            )


def read_stream(stored: pa.NativeFile, key: StandardKeyMetadata, listed_length: int | None, name: str) -> bytes:
    """Return the plaintext of an AGS1 stream, and close the file."""
    with stored:
        check_length(stored.size(), key, listed_length, name)
        return ags1.decrypted(stored, key, path=f"the {name}")


def open_data_file(source: ByteSource, key: StandardKeyMetadata, name: str, cache: PageCache) -> PlainFile:
    """Open a Parquet file as plaintext; pages are decrypted when they are read, from the open source."""
    footer, envelope = _open_footer(source, key, name)
    location = _named(name)
    kms_keys = KmsKeys(KeyUnwrapper(None, time.monotonic), 0)
    retriever = FileKeyRetriever(kms_keys, DataKeys(), location)
    opened = OpenedFile(location, footer, VerifiedTail.of(envelope), retriever, kms_keys, {}, {})
    with naming_place(location, footer.columns):
        check_stated_algorithm(source, footer, {})
    return PlainFile(opened, source, "error", cache, gap=_ARROW_READS_OF_THE_END)


def check_data_file(source: ByteSource, key: StandardKeyMetadata, name: str) -> None:
    """Decrypt and check every module of a Parquet file."""
    footer, _ = _open_footer(source, key, name)
    with naming_place(_named(name), footer.columns):
        authenticate_columns(source, footer, {})


def _named(name: str) -> FileLocation:
    """Return a place for errors: the real place is known only to the stream that PyIceberg opened."""
    return FileLocation(pafs.LocalFileSystem(), f"the {name}")


def _open_footer(source: ByteSource, key: StandardKeyMetadata, name: str) -> tuple[Footer, FooterEnvelope]:
    replaced = "Do not trust this file: someone replaced it."
    envelope = read_envelope(source)
    if envelope.mode is FooterMode.UNENCRYPTED:
        raise NotEncryptedError(
            f"the {name} is plaintext, but has the key metadata of an encrypted file.", hint=replaced
        )
    if envelope.mode is not FooterMode.ENCRYPTED_FOOTER or envelope.algorithm is not Algorithm.AES_GCM_V1:
        raise DecryptionError(
            f"the {name} is not encrypted as Iceberg does it, with AES_GCM_V1 and an encrypted footer.",
            hint=replaced,
        )
    if envelope.key_metadata is not None:
        raise KeyMaterialError(
            f"the {name} has key metadata of its own, and Iceberg keeps its key in the manifest.",
            hint="It was not written by Iceberg. Do not trust this file.",
        )
    with naming_place(_named(name)):
        footer = envelope.open(key.encryption_key, key.aad_prefix or None)
    if (
        any(column.encryption is not ColumnEncryption.FOOTER_KEY for column in footer.columns)
        and footer.row_groups
    ):
        raise DecryptionError(
            f"the {name} has columns in plaintext or under keys of their own, and Iceberg has one key for all.",
            hint=replaced,
        )
    return footer, envelope


class UncopiedInput(PlainInput):
    """A plaintext view for Arrow alone, which accepts any buffer; the stored file is closed with the last use."""

    read = RangedFile.read_uncopied  # type: ignore[assignment]


# --- what this process knows about encrypted tables ---


class KnownTable:
    """One state of an encrypted table, and the keys of its files that were read so far.

    `lists` has the snapshot of each manifest list, `files` each manifest and data file, both by location.
    """

    def __init__(self, encryption: TableEncryption, keys: IcebergKeys) -> None:
        self.encryption = encryption
        self.chain = KeyChain(encryption, keys)
        self.lists = {snapshot.manifest_list: snapshot for snapshot in encryption.snapshots}
        self.files: dict[str, ListedFile] = {}
        self._read: set[str] = set()

    def learn(self, read_location: str, files: Iterable[ListedFile]) -> None:
        """Take the files that a manifest list or a manifest names."""
        for file in files:
            # A file that is known to be encrypted never becomes a plaintext file.
            if file.location not in self.files or file.encoded_key is not None:
                self.files[file.location] = file
        self._read.add(read_location)

    def unread(self) -> Iterator[str]:
        """Yield unread manifest lists, the newest first, and after each one the unread manifests."""
        for manifest_list in reversed(self.lists):
            if manifest_list not in self._read:
                yield manifest_list
            files = list(self.files.values())
            yield from (f.location for f in files if f.kind == "manifest" and f.location not in self._read)


class KnownTables:
    """The states of encrypted tables that were read with one configuration, the newest last, and their pages.

    PyIceberg makes one FileIO to read a metadata file and another one for the table, so they share this.
    """

    def __init__(self, keys: IcebergKeys) -> None:
        self.keys = keys
        self.pages = PageCache()
        self._lock = ForkSafeLock()
        self._tables: OrderedDict[str, KnownTable] = OrderedDict()

    def add(self, encryption: TableEncryption) -> KnownTable:
        """Take a state of a table. What was learnt about the same state stays."""
        location = encryption.metadata_location
        with self._lock:
            table = self._tables.pop(location, None)
            if table is None or table.encryption != encryption:
                table = KnownTable(encryption, self.keys)
            self._tables[location] = table
            while len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
            return table

    def newest_first(self) -> list[KnownTable]:
        """Return all states."""
        with self._lock:
            return list(reversed(self._tables.values()))


_of_configurations: dict[Path, tuple[tuple[int, int] | None, KnownTables]] = {}
_lock = ForkSafeLock()


def configuration_file(properties: Properties, *, needed_by: str) -> str:
    """Return the path of the configuration that properties of a catalog or the environment name."""
    found = properties.get(CONFIG_PROPERTY) or os.environ.get(CONFIG_VARIABLE)
    if not found:
        raise ConfigurationError(
            f"{needed_by} needs a configuration, and {CONFIG_PROPERTY!r} is not among the properties.",
            hint=f'Give the catalog {{"{CONFIG_PROPERTY}": "keytools.yaml"}}, or set {CONFIG_VARIABLE}.',
        )
    return found


def known_tables(file: str) -> KnownTables:
    """Return the one object of this process for a configuration file; a changed file is read again."""
    path = expanded(file).absolute()
    # If it is missing, `load_configuration` says so.
    status = path.stat() if path.exists() else None
    identity = status and (status.st_mtime_ns, status.st_size)
    with _lock:
        found = _of_configurations.get(path)
        if found is None or found[0] != identity:
            service = KeyService(load_configuration(path), None, time.monotonic)
            found = _of_configurations[path] = identity, KnownTables(IcebergKeys(service))
        return found[1]


# --- the FileIO ---


class EncryptedFileIO(FileIO):
    """Reads encrypted and plaintext tables, and refuses to write to encrypted tables.

    It takes these properties from the catalog. A table that has one of them itself is refused, since anyone may
    have set it:

    - `keytools.config`: path of the YAML configuration with the KMS; by default `PARQUET_KEYTOOLS_CONFIG`.
    - `keytools.location-mapping`: `from=to`, several with commas: where locations that begin with `from` lie.
    - `keytools.io-impl`: the FileIO beneath; by default PyIceberg chooses it by the location.
    - `keytools.plaintext-tables`: `reject` where every table is encrypted, to refuse a table that lost its keys.
    - `keytools.write-locations`: places outside of the folder of a table at which commits may write.

    Any number of threads may use it. It can be pickled to worker processes; a pickle holds no key.
    """

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self._known = known_tables(configuration_file(properties, needed_by=type(self).__name__))
        self._mapping = properties.get(MAPPING_PROPERTY, "")
        plaintext_tables = properties.get(PLAINTEXT_TABLES_PROPERTY, "allow")
        if plaintext_tables not in ("allow", "reject"):
            raise ConfigurationError(f"{PLAINTEXT_TABLES_PROPERTY} is {plaintext_tables!r}: not allow or reject.")
        self._rejects_plaintext = plaintext_tables == "reject"
        self._beneath: dict[str, FileIO] = {}
        self._tables: dict[str, KnownTable] = {}
        # In a worker process: read when an unknown file is opened, the last one first.
        self._unread_metadata: list[str] = []

    # --- PyIceberg's protocol ---

    def new_input(self, location: str) -> EncryptedInputFile:
        """Return a file to read; its key is looked up when it is opened."""
        return EncryptedInputFile(location, self.stored_input, self.open_plaintext)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write, in a table that is not encrypted.

        Raises:
            NotEncryptedError: It belongs to an encrypted table, where it would be plaintext.
        """
        if self._is_guarded(location):
            raise NotEncryptedError(
                f"{location} belongs to an encrypted table, and PyIceberg would write it in plaintext.",
                hint="Write through the table that `parquet_keytools.iceberg.load_table(catalog, name)` returns.",
            )
        return self.stored_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file.

        Raises:
            PermissionError: An encrypted table was read, and the file is outside of its folder: anyone may have
                put it into the metadata file. PyIceberg's `purge_table` continues after this error.
        """
        text = location if isinstance(location, str) else location.location
        places = [TablePlaces(metadata_location, self.properties) for metadata_location in self._tables]
        if places and not any(place.holds(text) for place in places):
            raise PermissionError(f"{text} is outside of the folder of the table, {places[-1].folder}")
        mapped = mapped_location(text, self._mapping)
        self._storage_of(mapped).delete(mapped)

    def __reduce__(self) -> tuple[Any, ...]:
        # The FileIO of a table that was only loaded has read no file yet: the metadata file is known elsewhere.
        metadata = list(self._tables) or [
            table.encryption.metadata_location
            for table in reversed(self._known.newest_first())
            if table.encryption.properties.items() <= self.properties.items()
        ]
        return _unpickled, (type(self), dict(self.properties), [*metadata, *self._unread_metadata])

    # --- files as they are stored ---

    def stored_input(self, location: str) -> InputFile:
        """Return a file to read, as it is stored."""
        mapped = mapped_location(location, self._mapping)
        return self._storage_of(mapped).new_input(mapped)

    def stored_output(self, location: str) -> OutputFile:
        """Return a file to write, which is stored as it is written."""
        mapped = mapped_location(location, self._mapping)
        return self._storage_of(mapped).new_output(mapped)

    def _storage_of(self, mapped: str) -> FileIO:
        scheme = mapped.partition(":")[0] if ":" in mapped else ""
        beneath = self._beneath.get(scheme)
        if beneath is None:
            properties = {name: value for name, value in self.properties.items() if name != PY_IO_IMPL}
            if io_impl := self.properties.get(IO_IMPL_PROPERTY):
                properties[PY_IO_IMPL] = io_impl
            beneath = self._beneath[scheme] = load_file_io(properties, mapped)
        return beneath

    def _open_stored(self, location: str) -> pa.NativeFile:
        return open_as_stored(self._storage_of, location, self._mapping)

    # --- what is known ---

    @property
    def keys(self) -> IcebergKeys:
        """What wraps and unwraps the KEKs of tables."""
        return self._known.keys

    def table_at(self, metadata_location: str) -> KnownTable | None:
        """Return the state of a table with this metadata file, or None if it is plaintext."""
        if metadata_location not in self._tables:
            self.read_metadata(metadata_location)
        return self._tables.get(metadata_location)

    def read_metadata(self, location: str) -> bytes:
        """Return a metadata file, and learn what it says about the encryption of its table."""
        with self._open_stored(location) as file:
            content = read_metadata_file(file, location)
        encryption = parse_table_metadata(content, location)
        # By these, a changed metadata file would choose our configuration, code or servers.
        for name in misplaced_properties(encryption.properties):
            if encryption.is_encrypted or name.startswith("keytools."):
                raise ConfigurationError(
                    f"{location}: the table has the property {name}, which catalogs alone have.",
                    hint="Do not trust this metadata file if you did not set it; otherwise set it in the catalog.",
                )
        if encryption.is_encrypted:
            self._tables[location] = self._known.add(encryption)
        elif self._rejects_plaintext:
            raise NotEncryptedError(
                f"{location}: the table is not encrypted, and the catalog has encrypted ones alone.",
                hint="If it was encrypted, someone took the keys out of its metadata file: restore it. Otherwise "
                f"set {PLAINTEXT_TABLES_PROPERTY} to allow.",
            )
        return content

    def _is_guarded(self, location: str) -> bool:
        """Return whether anything says that a location belongs to an encrypted table."""
        return (
            self._rejects_plaintext
            or KEY_ID_PROPERTY in self.properties
            or bool(self._tables or self._unread_metadata)
            or any(
                table.encryption.location and location.startswith(f"{table.encryption.location.rstrip('/')}/")
                for table in self._known.newest_first()
            )
        )

    def _find(self, location: str) -> KnownTable | None:
        for table in (*reversed(list(self._tables.values())), *self._known.newest_first()):
            if location in table.lists or location in table.files:
                self._tables[table.encryption.metadata_location] = table
                return table
        return None

    def _search(self, location: str) -> KnownTable | None:
        """Read metadata files and the rest of the tables in use: a worker process has read nothing yet."""
        while self._unread_metadata:
            metadata_location = self._unread_metadata.pop()
            # The metadata file of another table may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                self.read_metadata(metadata_location)
            if (found := self._find(location)) is not None:
                return found
        for table in list(self._tables.values()):
            for unread in table.unread():
                self.read_all(unread)
                if location in table.files:
                    return table
        return None

    # --- reading ---

    def read_all(self, location: str) -> bytes:
        """Return the plaintext of a file."""
        with self.open_plaintext(location) as stream:
            return bytes(stream.read())

    def open_plaintext(self, location: str) -> Any:
        """Open the plaintext of a file; its key must follow from what was read before."""
        # A name does not make a file plaintext: a changed metadata file may give a manifest list any name.
        if location.endswith(_METADATA_ENDINGS):
            try:
                return io.BytesIO(self.read_metadata(location))
            except ParquetFormatError as error:
                if type(error) is not ParquetFormatError:
                    raise
        table = self._find(location)
        if table is None and location.endswith(_VERSION_HINT):
            with self._open_stored(location) as stored:
                hint = bytes(stored.read(_MAX_HINT_BYTES))
            if hint.isascii() and hint.decode().strip().isprintable():
                return io.BytesIO(hint)
        table = table or self._search(location)
        if table is None:
            return self._open_unknown(location)
        snapshot, length = table.lists.get(location), None
        if snapshot is not None:
            check_place(location, table.encryption.metadata_location, self._mapping)
            name = f"manifest list {location} of snapshot {snapshot.snapshot_id}"
            key = table.chain.manifest_list_key(snapshot)
        else:
            file = table.files[location]
            if file.kind != "manifest":
                return self.open_listed(file)
            name, key, length = file.name, file.key_metadata(), file.length
        if key is None:
            raise NotEncryptedError(
                f"the {name} has no key metadata: it is a plaintext file in an encrypted table.",
                hint="It may come from anyone, so it is never read. `parquet-keytools iceberg verify` lists such "
                "files; rewrite the manifests with a writer that encrypts them.",
            )
        content = read_stream(self._open_stored(location), key, length, name)
        table.learn(
            location,
            files_in(content, name) if snapshot is None else manifests_in(content, name, snapshot.snapshot_id),
        )
        return io.BytesIO(content)

    def open_listed(self, file: ListedFile) -> Any:
        """Open the plaintext of a data file or stream."""
        key = file.key_metadata()
        if key is None:
            self._refuse_plaintext(file.name)
            return self._open_stored(file.location)
        stored = self._open_stored(file.location)
        if file.format != "PARQUET":
            return io.BytesIO(read_stream(stored, key, file.length, file.name))
        check_length(stored.size(), key, file.length, file.name)
        source = ArrowSource(f"the {file.name}", stored, stored.size())
        return pa.PythonFile(UncopiedInput(open_data_file(source, key, file.name, self._known.pages)), mode="r")

    def _refuse_plaintext(self, name: str) -> None:
        if self.keys.service.configuration.reading.plaintext_files == "reject":
            raise NotEncryptedError(
                f"the {name} has no key metadata: it is a plaintext file in an encrypted table.",
                hint="`parquet-keytools iceberg verify` lists them all. If that is intended, set "
                "`plaintext_files: allow` under `reading`.",
            )

    def _open_unknown(self, location: str) -> Any:
        stored = self._open_stored(location)
        magic = stored.read(4)
        stored.seek(0)
        if magic in ags1.ENCRYPTED_MAGICS:
            raise KeyNotAvailableError(
                f"{location} is encrypted, and no metadata file that was read here leads to its key.",
                hint="Where the catalog sends the metadata itself, as REST catalogs do, load the table with "
                "`parquet_keytools.iceberg.load_table(catalog, name)`.",
            )
        if self._is_guarded(location):
            self._refuse_plaintext(f"file {location}")
        return stored


class EncryptedInputFile(InputFile):
    """A file of a table that is opened as plaintext; its length is the length of the stored file."""

    def __init__(
        self, location: str, stored_input: Callable[[str], InputFile], open_plaintext: Callable[[str], Any]
    ) -> None:
        super().__init__(location)
        self._stored_input = stored_input
        self._open_plaintext = open_plaintext

    def __len__(self) -> int:
        return len(self._stored_input(self.location))

    def exists(self) -> bool:
        """Return whether the file exists."""
        return self._stored_input(self.location).exists()

    def open(self, seekable: bool = True) -> Any:
        """Open it; see `EncryptedFileIO.open_plaintext`."""
        return self._open_plaintext(self.location)


def _unpickled(kind: type[EncryptedFileIO], properties: dict[str, str], metadata: list[str]) -> EncryptedFileIO:
    """Make a FileIO in a worker process, which reads the metadata files again when it needs them."""
    file_io = kind(properties)
    file_io._unread_metadata += metadata
    return file_io
