"""Tables of a catalog: loaded with their keys, or created."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import overload

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from parquet_keytools.encryption.aes import KEY_LENGTHS_BITS
from parquet_keytools.errors import ConfigurationError, KeyMaterialError, NotEncryptedError
from parquet_keytools.iceberg.claims import PATH_PROPERTIES, PLACES_PROPERTY, TablePlaces
from parquet_keytools.iceberg.encrypted_table import (
    HIDDEN_PARTITIONS,
    EncryptedTable,
    refuse_encryption_properties,
)
from parquet_keytools.iceberg.file_io import CONFIG_PROPERTY, EncryptedFileIO
from parquet_keytools.iceberg.key_chain import master_key_of
from parquet_keytools.iceberg.key_rotation import KeyChanges
from parquet_keytools.iceberg.located_table import catalog_named, table_named
from parquet_keytools.iceberg.metadata import (
    KEY_ID_PROPERTY,
    KEY_LENGTH_PROPERTY,
)
from parquet_keytools.iceberg.pyiceberg_classes import committing
from parquet_keytools.iceberg.written_files import StoredFileIO
from parquet_keytools.secret_bytes import SecretBytes


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
    loaded = table_named(catalog_named(catalog_name, given), table, load_table)
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
