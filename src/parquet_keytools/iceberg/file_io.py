"""A FileIO with which unmodified PyIceberg reads encrypted tables.

It decrypts manifest lists, manifests, deletion vectors and Avro files as AGS1 streams, and data files by Parquet
modular encryption. Their keys it learns on the way down: from the metadata file, the manifest list, the manifests.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile, load_file_io
from pyiceberg.typedef import EMPTY_DICT, Properties

from parquet_keytools.errors import ConfigurationError, KeyNotAvailableError, NotEncryptedError, ParquetFormatError
from parquet_keytools.iceberg.ags1 import Ags1Reader
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.key_chain import IcebergKeys
from parquet_keytools.iceberg.known_tables import KnownTable, known_tables
from parquet_keytools.iceberg.manifests import ListedFile, manifests_in, read_plaintext
from parquet_keytools.iceberg.metadata import (
    KEY_ID_PROPERTY,
    StandardKeyMetadata,
    TableEncryption,
    parse_table_metadata,
    read_metadata_file,
)
from parquet_keytools.iceberg.table_files import (
    MAPPING_PROPERTY,
    UncopiedInput,
    check_length,
    check_place,
    mapped_location,
    misplaced_properties,
    open_as_stored,
    open_data_file,
    read_stream,
)
from parquet_keytools.storage.sources import ArrowSource

CONFIG_PROPERTY = "keytools.config"
IO_IMPL_PROPERTY = "keytools.io-impl"
PLAINTEXT_TABLES_PROPERTY = "keytools.plaintext-tables"
CONFIG_VARIABLE = "PARQUET_KEYTOOLS_CONFIG"

_ENCRYPTED_MAGICS = (b"AGS1", b"PARE")
_METADATA_ENDINGS = (".json", ".json.gz")
_VERSION_HINT = "version-hint.text"
_MAX_HINT_BYTES = 4096


class EncryptedFileIO(FileIO):
    """Reads encrypted and plaintext tables, and refuses to write to encrypted ones.

    Properties of the catalog; a table that has such properties itself is refused, for anybody may have set them:

    - `keytools.config`: path of the YAML configuration with the KMS; by default `PARQUET_KEYTOOLS_CONFIG`.
    - `keytools.location-mapping`: `from=to`, several with commas: where locations that begin with `from` lie.
    - `keytools.io-impl`: the FileIO beneath; by default the one that PyIceberg takes for the location.
    - `keytools.plaintext-tables`: `reject` where each table is encrypted, so that none that lost its keys is read.
    - `keytools.write-locations`: places outside of the folder of a table at which commits may write.

    It may be used from any number of threads, and pickled to worker processes; a pickle holds no key.
    """

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        configuration_file = properties.get(CONFIG_PROPERTY) or os.environ.get(CONFIG_VARIABLE)
        if not configuration_file:
            raise ConfigurationError(
                f"EncryptedFileIO needs a configuration, and {CONFIG_PROPERTY!r} is not among the properties.",
                hint=f'Give the catalog {{"{CONFIG_PROPERTY}": "keytools.yaml"}}, or set {CONFIG_VARIABLE}.',
            )
        self._known = known_tables(configuration_file)
        self._mapping = properties.get(MAPPING_PROPERTY, "")
        plaintext_tables = properties.get(PLAINTEXT_TABLES_PROPERTY, "allow")
        if plaintext_tables not in ("allow", "reject"):
            raise ConfigurationError(f"{PLAINTEXT_TABLES_PROPERTY} is {plaintext_tables!r}: not allow or reject.")
        self._rejects_plaintext = plaintext_tables == "reject"
        self._beneath: dict[str, FileIO] = {}
        self._tables: dict[str, KnownTable] = {}
        self._unread_metadata: list[str] = []

    # --- the protocol of PyIceberg ---

    def new_input(self, location: str) -> EncryptedInputFile:
        """Return a file to read; what it needs to be decrypted is looked for when it is opened."""
        return EncryptedInputFile(location, self.stored_input, self.open_plaintext)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write, of a table that is not encrypted.

        Raises:
            NotEncryptedError: It belongs to an encrypted table, and would be plaintext in it.
        """
        if self.is_guarded(location):
            raise NotEncryptedError(
                f"{location} belongs to an encrypted table, and PyIceberg would write it in plaintext.",
                hint="Write through the table that `parquet_keytools.iceberg.load_table(catalog, name)` returns.",
            )
        return self.storage(location).new_output(self.mapped(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file.

        Raises:
            PermissionError: An encrypted table was read, and the file lies outside of its folder: anybody may have
                put it into the metadata file. PyIceberg's `purge_table` goes on after this error.
        """
        text = location if isinstance(location, str) else location.location
        places = [TablePlaces(metadata_location, self.properties) for metadata_location in self._tables]
        if places and not any(place.holds(text) for place in places):
            raise PermissionError(f"{text} is outside of the folder of the table, {places[-1].folder}")
        self.storage(text).delete(self.mapped(text))

    def __reduce__(self) -> tuple[Any, ...]:
        # The FileIO of a table that was only loaded has seen no file yet: others know its metadata file.
        metadata = list(self._tables) or self._known.metadata_locations(self.properties)
        return _unpickled, (type(self), dict(self.properties), [*metadata, *self._unread_metadata])

    # --- what lies beneath ---

    def mapped(self, location: str) -> str:
        """Return where a location really lies."""
        return mapped_location(location, self._mapping)

    def storage(self, location: str) -> FileIO:
        """Return the FileIO that reads and writes the bytes of a location as they are."""
        return self._storage_of(self.mapped(location))

    def stored_input(self, location: str) -> InputFile:
        """Return a file to read, as it is stored."""
        return self.storage(location).new_input(self.mapped(location))

    def _storage_of(self, mapped: str) -> FileIO:
        scheme = mapped.partition(":")[0] if ":" in mapped else ""
        beneath = self._beneath.get(scheme)
        if beneath is None:
            properties = {name: value for name, value in self.properties.items() if name != PY_IO_IMPL}
            if io_impl := self.properties.get(IO_IMPL_PROPERTY):
                properties[PY_IO_IMPL] = io_impl
            beneath = self._beneath[scheme] = load_file_io(properties, mapped)
        return beneath

    def open_stored(self, location: str) -> pa.NativeFile:
        """Open a file as it is stored."""
        return open_as_stored(self._storage_of, location, self._mapping)

    # --- what is known ---

    @property
    def tables(self) -> Mapping[str, KnownTable]:
        """The states of encrypted tables that were used here, by location of their metadata file."""
        return self._tables

    @property
    def keys(self) -> IcebergKeys:
        """What unwraps the KEKs of tables."""
        return self._known.keys

    def is_guarded(self, location: str) -> bool:
        """Return whether a location belongs to an encrypted table, as far as anything says so."""
        return (
            self._rejects_plaintext
            or KEY_ID_PROPERTY in self.properties
            or bool(self._tables or self._unread_metadata)
            or self._known.holding(location) is not None
        )

    def read_metadata(self, location: str) -> bytes:
        """Return a metadata file, and learn what it says of the encryption of its table.

        Raises:
            ParquetFormatError: It is no metadata file.
            KeyMaterialError: Its `encryption-keys` are not what the format says.
            NotEncryptedError: The table is not encrypted, and `keytools.plaintext-tables` rejects it.
            ConfigurationError: It sets properties that only the catalog may have.
        """
        with self.open_stored(location) as file:
            content = read_metadata_file(file, location)
        encryption = parse_table_metadata(content, location)
        _check_properties(encryption)
        if encryption.is_encrypted:
            table = self._known.add(encryption)
            self._tables[location] = table
        elif self._rejects_plaintext:
            raise NotEncryptedError(
                f"{location}: the table is not encrypted, and the catalog has encrypted ones alone.",
                hint="If it was encrypted, somebody took the keys out of its metadata file: restore it. Else set "
                f"{PLAINTEXT_TABLES_PROPERTY} to allow.",
            )
        return content

    def _find(self, location: str) -> KnownTable | None:
        for table in reversed(list(self._tables.values())):
            if table.snapshot_of(location) is not None or table.file_at(location) is not None:
                return table
        found = self._known.with_file(location)
        if found is not None:
            self._tables[found.encryption.metadata_location] = found
        return found

    def expect_metadata(self, locations: list[str]) -> None:
        """Take metadata files that are read once a file is opened that nothing else knows, the likeliest last."""
        self._unread_metadata += locations

    def _search(self, location: str) -> KnownTable | None:
        """Read metadata files, and the rest of the tables in use: in a worker process nothing was read yet."""
        while self._unread_metadata:
            metadata_location = self._unread_metadata.pop()
            # That of another table may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                self.read_metadata(metadata_location)
            if (found := self._find(location)) is not None:
                return found
        for table in list(self._tables.values()):
            for manifest_list in table.unread(manifests=False):
                self.read_all(manifest_list)
                for manifest in table.unread(manifests=True):
                    self.read_all(manifest)
                if table.file_at(location) is not None:
                    return table
        return None

    def read_all(self, location: str) -> bytes:
        """Return the plaintext of a file."""
        with self.open_plaintext(location) as stream:
            return bytes(stream.read())

    # --- reading ---

    def open_plaintext(self, location: str) -> Any:
        """Open a file as PyIceberg shall see it.

        Raises:
            NotEncryptedError: A plaintext file lies in an encrypted table.
            KeyNotAvailableError: It is encrypted, and nothing that was read says with which key.
            KeytoolsError: Another subclass says which link of the key chain is broken.
        """
        # A name makes nothing plaintext: whoever changes a metadata file names the manifest lists in it.
        if location.endswith(_METADATA_ENDINGS):
            try:
                return io.BytesIO(self.read_metadata(location))
            except ParquetFormatError as error:
                if type(error) is not ParquetFormatError:
                    raise
        table = self._find(location)
        if table is None and location.endswith(_VERSION_HINT):
            with self.open_stored(location) as stored:
                hint = bytes(stored.read(_MAX_HINT_BYTES))
            if hint.isascii() and hint.decode().strip().isprintable():
                return io.BytesIO(hint)
        if table is None:
            table = self._search(location)
        if table is None:
            return self._open_unknown(location)
        snapshot = table.snapshot_of(location)
        if snapshot is not None:
            check_place(location, table.encryption.metadata_location, self._mapping)
            name = f"manifest list {location} of snapshot {snapshot.snapshot_id}"
            list_key = table.chain.manifest_list_key(snapshot)
            content = self._read_stream(location, list_key, None, name)
            manifests = manifests_in(content, name, snapshot.snapshot_id, authentic=list_key is not None)
            table.learn(location, manifests)
            return io.BytesIO(content)
        file = table.file_at(location)
        assert file is not None
        if file.kind == "manifest":
            key = file.key_metadata()
            content = self._read_stream(location, key, file.length, file.name)
            table.learn_later(location, content, authentic=key is not None)
            return io.BytesIO(content)
        return self._open_data(file)

    def _read_stream(
        self, location: str, key: StandardKeyMetadata | None, listed_length: int | None, name: str
    ) -> bytes:
        with self.open_stored(location) as stored:
            if key is None:
                self._refuse_plaintext(name)
                return read_plaintext(stored)
            return read_stream(stored, key, listed_length, name)

    def _open_data(self, file: ListedFile) -> Any:
        key = file.key_metadata()
        if key is None:
            self._refuse_plaintext(file.name)
            return self.open_stored(file.location)
        stored = self.open_stored(file.location)
        check_length(stored.size(), key, file.length, file.name)
        if file.format != "PARQUET":
            return Ags1Reader(stored, key, path=f"the {file.name}")
        source = ArrowSource(f"the {file.name}", stored, stored.size())
        return pa.PythonFile(UncopiedInput(open_data_file(source, key, file.name, self._known.pages)), mode="r")

    def _refuse_plaintext(self, name: str) -> None:
        if self._known.keys.service.configuration.reading.plaintext_files == "reject":
            raise NotEncryptedError(
                f"the {name} has no key metadata: it is a plaintext file in an encrypted table.",
                hint="`parquet-keytools iceberg verify` lists them all. If that is intended, set "
                "`plaintext_files: allow` under `reading`.",
            )

    def _open_unknown(self, location: str) -> Any:
        stored = self.open_stored(location)
        magic = stored.read(4)
        stored.seek(0)
        if magic in _ENCRYPTED_MAGICS:
            raise KeyNotAvailableError(
                f"{location} is encrypted, and no metadata file that was read here leads to its key.",
                hint="Where the catalog sends the metadata itself, as REST catalogs do, load the table with "
                "`parquet_keytools.iceberg.load_table(catalog, name)`.",
            )
        if self.is_guarded(location):
            self._refuse_plaintext(f"file {location}")
        return stored


class EncryptedInputFile(InputFile):
    """A file of a table, opened as plaintext; its length is that of the stored file."""

    def __init__(
        self, location: str, stored_input: Callable[[str], InputFile], open_plaintext: Callable[[str], Any]
    ) -> None:
        super().__init__(location)
        self._stored_input = stored_input
        self._open_plaintext = open_plaintext

    def __len__(self) -> int:
        return len(self._stored_input(self.location))

    def exists(self) -> bool:
        """Return whether the file is there."""
        return self._stored_input(self.location).exists()

    def open(self, seekable: bool = True) -> Any:
        """Open it; see `EncryptedFileIO.open_plaintext`."""
        return self._open_plaintext(self.location)


def _check_properties(encryption: TableEncryption) -> None:
    """Refuse properties with which a changed metadata file would choose our configuration, code or servers."""
    names = [
        name
        for name in misplaced_properties(encryption.properties)
        if encryption.is_encrypted or name.startswith("keytools.")
    ]
    if names:
        raise ConfigurationError(
            f"{encryption.metadata_location}: the table has the property {names[0]}, which catalogs alone have.",
            hint="Do not trust this metadata file if you did not set it; else set it in the catalog.",
        )


def _unpickled(kind: type[EncryptedFileIO], properties: dict[str, str], metadata: list[str]) -> EncryptedFileIO:
    """Make a FileIO in a worker process, which reads the metadata files again when it needs them."""
    file_io = kind(properties)
    file_io.expect_metadata(metadata)
    return file_io
