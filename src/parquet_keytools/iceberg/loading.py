"""Tables of a catalog: loaded with their keys, made, or only found, with nothing decrypted yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from parquet_keytools.config.loader import load_configuration, parse_configuration
from parquet_keytools.encryption.aes import KEY_LENGTHS_BITS
from parquet_keytools.errors import ConfigurationError, KeyMaterialError, KeytoolsError, NotEncryptedError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.catalog_commits import KeyChanges, committing
from parquet_keytools.iceberg.claims import PATH_PROPERTIES, PLACES_PROPERTY, TablePlaces
from parquet_keytools.iceberg.encrypted_table import (
    HIDDEN_PARTITIONS,
    EncryptedTable,
    refuse_encryption_properties,
)
from parquet_keytools.iceberg.file_io import CONFIG_PROPERTY, EncryptedFileIO
from parquet_keytools.iceberg.key_chain import master_key_of
from parquet_keytools.iceberg.metadata import (
    KEY_ID_PROPERTY,
    KEY_LENGTH_PROPERTY,
    TableEncryption,
    parse_table_metadata,
    read_metadata_file,
)
from parquet_keytools.iceberg.table_files import MAPPING_PROPERTY, mapped_location, open_as_stored, stored_location
from parquet_keytools.iceberg.written_files import StoredFileIO
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation

Loaded = TypeVar("Loaded")


@overload
def load_table(catalog: Catalog, identifier: str | Identifier) -> Table: ...


@overload
def load_table(catalog: Catalog, identifier: str | Identifier, *, encryption_key: str) -> EncryptedTable: ...


def load_table(
    catalog: Catalog, identifier: str | Identifier, *, encryption_key: str | None = None
) -> Table | EncryptedTable:
    """Load a table, and learn its keys from its metadata file.

    PyIceberg reads this file itself with most catalogs. A REST catalog sends its content, of which PyIceberg keeps
    no keys; so the file is read here. A table that is encrypted is an `EncryptedTable`, which can be written.

    Args:
        catalog: Any catalog of PyIceberg whose `py-io-impl` is `parquet_keytools.iceberg.EncryptedFileIO`.
        identifier: Name of the table.
        encryption_key: The master key that it must be under: its name in the configuration, or its identifier in
            the KMS. Nothing authenticates a metadata file: without this, a table whose keys somebody took out of
            it, with files of theirs, is loaded as a plaintext table. None takes what the file says.

    Raises:
        ConfigurationError: The catalog has another FileIO.
        NotEncryptedError: The table is not encrypted, and should be.
        KeyMaterialError: It is under another master key.
        KeytoolsError: Another subclass says what is wrong with the metadata file.
    """
    table = catalog.load_table(identifier)
    reader = _ours(catalog, table.io)
    if table.metadata_location not in reader.tables:
        reader.read_metadata(table.metadata_location)
    known = reader.tables.get(table.metadata_location)
    if encryption_key is not None:
        if known is None:
            raise NotEncryptedError(
                f"{table.metadata_location}: the table is not encrypted, and should be under {encryption_key!r}.",
                hint="Somebody may have taken the keys out of its metadata file: restore it from a backup.",
            )
        expected = reader.keys.master_key_id(encryption_key)
        found = {master_key_of(known.encryption), *(kek.encrypted_by_id for kek in known.encryption.keks)}
        if set(map(reader.keys.master_key_id, found)) != {expected}:
            raise KeyMaterialError(
                f"the table is under the master key {sorted(found)[0]!r}, and should be under {expected!r}.",
                path=table.metadata_location,
                hint="Somebody may have put another table in its place: restore its metadata file from a backup.",
            )
    return EncryptedTable(table) if known is not None else table


def _ours(catalog: Catalog, file_io: FileIO) -> EncryptedFileIO:
    if not isinstance(file_io, EncryptedFileIO):
        raise ConfigurationError(
            f"the catalog {catalog.name!r} has another FileIO than ours.",
            hint="Set its property py-io-impl to parquet_keytools.iceberg.EncryptedFileIO.",
        )
    return file_io


def load_table_to_write(
    catalog_name: str, table: str, config: Path | None = None, properties: Mapping[str, str] = EMPTY_DICT
) -> EncryptedTable:
    """Load an encrypted table of a catalog that PyIceberg knows by its name.

    The configuration is by default the one that the properties of the catalog name.

    Raises:
        NotEncryptedError: The table is not encrypted.
        ConfigurationError: There is no such catalog, or no such table.
        KeytoolsError: Another subclass says what is wrong with the configuration or the metadata file.
    """
    given = {PY_IO_IMPL: "parquet_keytools.iceberg.EncryptedFileIO", **properties}
    if config is not None:
        given[CONFIG_PROPERTY] = str(config)
    loaded = _table_named(_catalog_named(catalog_name, given), table, load_table)
    if not isinstance(loaded, EncryptedTable):
        raise NotEncryptedError(f"the table {table} is not encrypted.", hint="It has no keys.")
    return loaded


def create_table(
    catalog: Catalog,
    identifier: str | Identifier,
    schema: Schema | pa.Schema,
    *,
    encryption_key: str,
    data_key_length_bits: int = 128,
    location: str | None = None,
    partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
    sort_order: SortOrder = UNSORTED_SORT_ORDER,
    properties: Properties = EMPTY_DICT,
) -> EncryptedTable:
    """Make a new encrypted table, of format version 3.

    Args:
        catalog: Any catalog of PyIceberg whose `py-io-impl` is `parquet_keytools.iceberg.EncryptedFileIO`.
        identifier: Name of the table.
        schema: Its columns.
        encryption_key: The master key: its name in the configuration, or its identifier in the KMS. The table has
            the identifier, so that other engines find the key.
        data_key_length_bits: Length of KEKs and DEKs: 128, 192 or 256.
        location: Where it lies; by default below the warehouse.
        partition_spec: How it is partitioned.
        sort_order: How rows are sorted.
        properties: Its other properties.

    Raises:
        ConfigurationError: The catalog has another FileIO, or the length is no length of an AES key.
        KmsError: The KMS does not wrap keys with the master key; no table was made then.
    """
    if data_key_length_bits not in KEY_LENGTHS_BITS:
        raise ConfigurationError(f"a key of {data_key_length_bits} bits is no AES key: 128, 192 or 256 bits.")
    refuse_encryption_properties(properties)
    _refuse_unlisted_places(catalog, location, properties)
    # What could not be loaded afterwards is not made.
    reader = _ours(catalog, load_file_io(dict(catalog.properties)))
    master_key_id = reader.keys.master_key_id(encryption_key)
    # Whether the KMS has this key, and lets it be used, is found out before there is a table.
    reader.keys.wrap_kek(SecretBytes.random(data_key_length_bits), master_key_id)
    committing(catalog, StoredFileIO(reader, None), KeyChanges()).create_table(
        identifier,
        schema,
        location,
        partition_spec,
        sort_order,
        {
            # For writers of others; our own hides values whatever the properties say.
            **HIDDEN_PARTITIONS,
            **properties,
            TableProperties.FORMAT_VERSION: "3",
            KEY_ID_PROPERTY: master_key_id,
            KEY_LENGTH_PROPERTY: str(data_key_length_bits // 8),
        },
    )
    return load_table(catalog, identifier, encryption_key=encryption_key)


def _refuse_unlisted_places(catalog: Catalog, location: str | None, properties: Properties) -> None:
    """Refuse a table that could not be written once it is loaded."""
    places = TablePlaces(f"{location.rstrip('/')}/metadata/new" if location else "", catalog.properties)
    for name in PATH_PROPERTIES:
        if name in properties and not places.holds(f"{str(properties[name]).rstrip('/')}/file"):
            raise ConfigurationError(
                f"the property {name} is {properties[name]!r}, which the catalog does not list.",
                hint=f"Name the place in the property {PLACES_PROPERTY} of the catalog, or leave {name} out.",
            )


@dataclass(frozen=True)
class LocatedTable:
    """A table, and how its files are opened; without a configuration, its service has an empty one."""

    encryption: TableEncryption
    service: KeyService
    file_io: FileIO
    mapping: str
    places: TablePlaces

    def open_stored(self, location: str) -> pa.NativeFile:
        """Open a file as it is stored."""
        return open_as_stored(lambda _: self.file_io, location, self.mapping)

    def path_of(self, location: str) -> str:
        """Return the path of a location on its file system."""
        mapped = mapped_location(location, self.mapping)
        try:
            return PyArrowFileIO.parse_location(mapped)[2]
        except ValueError:
            return mapped

    def folder(self) -> FileLocation | None:
        """Return the folder of the table: that of the folder `metadata` with its metadata file, or None.

        The location in the file is not taken: whoever changed it could let us list anything.
        """
        folder, _, _ = self.encryption.metadata_location.rpartition("/")
        above, _, name = folder.rpartition("/")
        if name != "metadata" or not above:
            return None
        return stored_location(self.file_io, mapped_location(above, self.mapping))


def _catalog_named(name: str, properties: Mapping[str, str]) -> Catalog:
    """Return a catalog that PyIceberg knows; its errors are no context of ours, for they may hold anything."""
    try:
        return load_catalog(name, **properties)
    except (KeytoolsError, OSError):
        raise
    except ValueError as error:
        text, hint = f"PyIceberg has no catalog {name!r}: {error}.", "Describe it in .pyiceberg.yaml."
    except Exception as error:
        text = f"the catalog {name!r} cannot be used ({_in_short(error)})."
        hint = "Check its properties in .pyiceberg.yaml."
    raise ConfigurationError(text, hint=hint)


def _table_named(catalog: Catalog, name: str, load: Callable[[Catalog, str], Loaded]) -> Loaded:
    """Return a table of a catalog, by a function that loads it; errors are as those of `_catalog_named`."""
    try:
        return load(catalog, name)
    except (KeytoolsError, OSError):
        raise
    except (NoSuchTableError, NoSuchNamespaceError):
        text = f"the catalog {catalog.name!r} has no table {name!r}."
    except Exception as error:
        text = f"the catalog {catalog.name!r} does not load the table {name!r} ({_in_short(error)})."
    raise ConfigurationError(text, hint="Name it with its namespace: db.people.")


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def located_table(
    table: str,
    config: Path | None = None,
    catalog_name: str | None = None,
    properties: Mapping[str, str] = EMPTY_DICT,
) -> LocatedTable:
    """Find a table, by the location of its metadata file or its name in a catalog, and read that file.

    The configuration is by default the one that the properties name, of the catalog or given ones. Without any,
    no key can be unwrapped.

    Raises:
        KeytoolsError: The configuration or the metadata file is wrong.
        OSError: A file cannot be read.
    """
    given = dict(properties)
    if catalog_name is not None:
        if config is not None:
            given.setdefault(CONFIG_PROPERTY, str(config))
        catalog = _catalog_named(catalog_name, given)
        loaded = _table_named(catalog, table, lambda catalog, name: catalog.load_table(name))
        # Of ours, those of the catalog hold: a table's own may be anybody's.
        of_storage = {n: v for n, v in loaded.io.properties.items() if not n.startswith("keytools.")}
        ours = {n: v for n, v in catalog.properties.items() if n.startswith("keytools.")}
        table, given = loaded.metadata_location, {**of_storage, **ours, **given}
    elif "://" not in table and not table.startswith("file:"):
        table = str(expanded(table).absolute())
    if config is None and CONFIG_PROPERTY in given:
        config = Path(given[CONFIG_PROPERTY])
    configuration = load_configuration(config) if config is not None else parse_configuration({"version": 1})
    service = KeyService(configuration, None, time.monotonic)
    beneath = {name: value for name, value in given.items() if name != PY_IO_IMPL}
    mapping = given.get(MAPPING_PROPERTY, "")
    file_io = load_file_io(beneath, mapped_location(table, mapping))
    with open_as_stored(lambda _: file_io, table, mapping) as file:
        encryption = parse_table_metadata(read_metadata_file(file, table), table)
    return LocatedTable(encryption, service, file_io, mapping, TablePlaces(table, given))
