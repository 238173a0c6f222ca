"""Encrypted tables: created, loaded with their keys, written, and committed."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.io import PY_IO_IMPL, FileIO, load_file_io
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata, TableMetadataV3
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    RemovePropertiesUpdate,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from parquet_keytools.config.key_policy import ColumnPath, MasterKeyReference, resolve_columns, resolve_key
from parquet_keytools.config.labels import nearest_first
from parquet_keytools.config.settings import Configuration
from parquet_keytools.encryption.module_cipher import KEY_LENGTHS_BITS
from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    NotEncryptedError,
    OutputError,
)
from parquet_keytools.files.field_labels import labels_of_schema
from parquet_keytools.iceberg.claims import (
    PATH_PROPERTIES,
    PLACES_PROPERTY,
    TablePlaces,
    counter_problems,
    is_of_catalogs,
    refuse,
)
from parquet_keytools.iceberg.file_io import CONFIG_PROPERTY, EncryptedFileIO, KnownTable
from parquet_keytools.iceberg.key_chain import (
    KeyChain,
    KeyChanges,
    NewKeys,
    key_length_bits,
    master_key_of,
    removal,
    rotation,
)
from parquet_keytools.iceberg.manifests import counters_of_list, counters_of_manifest, manifests_in
from parquet_keytools.iceberg.metadata import (
    KEY_ID_PROPERTY,
    KEY_LENGTH_PROPERTY,
    EncryptionKey,
    StandardKeyMetadata,
)
from parquet_keytools.iceberg.pyiceberg_classes import CommittingTable, ProducingTransaction, committing
from parquet_keytools.iceberg.table_audit import table_of_catalog
from parquet_keytools.iceberg.written_files import StoredFileIO, WritingFileIO, dumped
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.tables.properties import arrow_leaf_paths

HIDDEN_PARTITIONS = {
    TableProperties.OBJECT_STORE_ENABLED: "true",
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: "false",
}
"""Without these, names of data files would show the values that rows are partitioned by, now or later."""

_PATIENCE = {TableProperties.COMMIT_NUM_RETRIES: "100", TableProperties.COMMIT_MAX_RETRY_WAIT_MS: "200"}
"""Defaults for tables that set none: PyIceberg's 4 retries are too few for several writers."""

_KEY_CHANGE_ATTEMPTS = 10

_WITH_COLUMNS = (
    AddSnapshotUpdate, AddSchemaUpdate, SetCurrentSchemaUpdate, SetPropertiesUpdate, RemovePropertiesUpdate
)  # fmt: skip
"""Updates that bring rows, columns or labels."""


class EncryptedTable(CommittingTable):
    """An encrypted table, with all methods of PyIceberg's tables; everything it writes is encrypted.

    A commit that conflicts with another commit is repeated. A failed commit leaves the table as it was. Its files
    are removed, unless the catalog raised an error and might still take the commit.

    Args:
        table: A table that was loaded with `EncryptedFileIO`.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config
        )
        self._new_keys = NewKeys(self.reader.keys)
        self._snapshot_keys: dict[int, tuple[EncryptionKey, ...]] = {}
        self.is_sent = False

    @property
    def reader(self) -> EncryptedFileIO:
        """Decrypts the files of the table."""
        assert isinstance(self.io, EncryptedFileIO)
        return self.io

    def transaction(self) -> EncryptedTransaction:
        """Return a transaction, which commits several changes as one.

        Raises:
            NotEncryptedError: The table has no master key.
            KeyMaterialError: Its KEKs are under another master key than its property names, or its format version
                is not 3.
            ConfigurationError: Its property `encryption.data-key-length` is not valid.
        """
        return EncryptedTransaction(self)

    def refresh(self) -> Table:
        """Load the current state of the table."""
        fresh = self.catalog.load_table(self.name())
        self._refuse_other_table(fresh.metadata)
        self._take(fresh)
        return self

    def _refuse_other_table(self, metadata: TableMetadata) -> None:
        if metadata.table_uuid != self.metadata.table_uuid:
            raise ValueError(
                f"the catalog has another table under this name: its UUID is {metadata.table_uuid}, and was "
                f"{self.metadata.table_uuid}. Load the table again."
            )

    def _take(self, fresh: Table) -> None:
        self.io = fresh.io
        self.metadata = fresh.metadata
        self.metadata_location = fresh.metadata_location
        self.config = fresh.config

    def known(self) -> KnownTable:
        """Return what the metadata file says about the keys; `NotEncryptedError` if it has none any more."""
        known = self.reader.table_at(self.metadata_location)
        if known is None:
            raise NotEncryptedError(
                f"{self.metadata_location}: the table was encrypted, and its metadata file has no keys any more.",
                hint="A writer that does not know encryption may have made this file; use the one before it.",
            )
        return known

    def scan(self, *arguments: Any, **named: Any) -> DataScan:
        """Return a scan, as PyIceberg's tables do."""
        # After a commit, the keys of its snapshots are read from the metadata file.
        self.known()
        return super().scan(*arguments, **named)

    # --- keys ---

    def rotate(self) -> tuple[str, ...]:
        """Re-wrap the KEKs under the current version of their master key, as one commit; return their `key-id`.

        No other file is rewritten, and `encryption.key-id` does not change.

        Raises:
            OutputError: Other commits came first again and again, or the metadata file could not be written.
            KmsError: The KMS does not wrap or unwrap a KEK; the table is as it was.
        """
        return self._change_keys(rotation)

    def remove_unneeded_keys(self) -> tuple[str, ...]:
        """Remove the entries of `encryption-keys` that no snapshot needs, as one commit; return their `key-id`.

        Expired snapshots leave such entries. KEKs that new snapshots may be encrypted under stay. Earlier metadata
        files keep their entries.

        Raises:
            OutputError: Other commits came first again and again, or the metadata file could not be written.
        """
        return self._change_keys(removal)

    def _change_keys(self, changes_of: Callable[[KeyChain], KeyChanges]) -> tuple[str, ...]:
        """Commit changes of keys, made from the current state in each attempt; return the `key-id` of each."""
        for _ in range(_KEY_CHANGE_ATTEMPTS):
            chain = self.known().chain
            # The property stays the same: a commit without an update would not be sent.
            same = SetPropertiesUpdate(updates={KEY_ID_PROPERTY: master_key_of(chain.table)})
            changes = changes_of(chain)
            changed = (*(kek.key_id for kek, _ in changes.replaced), *changes.removed)
            if not changed:
                return ()
            with contextlib.suppress(CommitFailedException):
                self._commit(changes, (same,), ())
                return changed
            self.refresh()
        raise OutputError(
            f"other commits changed the table {_KEY_CHANGE_ATTEMPTS} times while its keys were changed.",
            hint="It is as they left it. Try again.",
        )

    # --- commits ---

    @property
    def _places(self) -> TablePlaces:
        return TablePlaces(self.metadata_location, self.catalog.properties)

    def _refuse_false_claims(self, of_files: Counter[str] | None = None) -> None:
        """Refuse to commit if the metadata file was changed to do harm (`ParquetFormatError`)."""
        document = dumped(self.metadata)
        refuse(self._places.problems(document), self.metadata_location)
        refuse(counter_problems(document, of_files), self.metadata_location)

    def _counters_of_files(self) -> Counter[str]:
        """Return the highest numbers in all authentic manifests of the table."""
        found = Counter[str]()
        seen: set[str] = set()
        for snapshot in self.known().encryption.snapshots:
            if snapshot.key_id is None:
                continue
            name = f"manifest list {snapshot.manifest_list}"
            content = self.reader.read_all(snapshot.manifest_list)
            found |= counters_of_list(content, name)
            for manifest in manifests_in(content, name, snapshot.snapshot_id):
                if manifest.encoded_key is not None and manifest.location not in seen:
                    found |= counters_of_manifest(self.reader.read_all(manifest.location), manifest.name)
                    seen.add(manifest.location)
        return found

    def _refuse_other_key(self, updates: tuple[TableUpdate, ...]) -> None:
        """Refuse rows, columns and labels that the key of the table does not protect as labels say."""
        keys = self.reader.keys
        configuration = keys.service.configuration
        has_labels = any(table.labels.iceberg for table in configuration.tables.values())
        if has_labels and any(isinstance(update, _WITH_COLUMNS) for update in updates):
            metadata = update_table_metadata(self.metadata, updates)
            refuse_other_key(
                configuration,
                self.name(),
                metadata.schema().as_arrow(),
                metadata.properties,
                keys.master_key_id(master_key_of(self.known().encryption)),
            )

    def commit_updates(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]) -> None:
        """Commit updates; `NotEncryptedError` if they add a snapshot that this table did not write."""
        self.is_sent = False
        snapshots = [update.snapshot.snapshot_id for update in updates if isinstance(update, AddSnapshotUpdate)]
        if not self._snapshot_keys.keys() >= set(snapshots):
            raise NotEncryptedError(
                "a snapshot would be added whose manifests have no keys.",
                hint="Use `table.transaction()`, `append`, `overwrite` or `delete` of this table.",
            )
        self._refuse_other_key(updates)
        keys = {snapshot: self._snapshot_keys[snapshot] for snapshot in snapshots}
        added = {entry.key_id: entry for entries in keys.values() for entry in entries}
        key_ids = {snapshot: entries[-1].key_id for snapshot, entries in keys.items()}
        self._commit(KeyChanges(list(added.values()), key_ids), updates, requirements)

    def _commit(
        self, changes: KeyChanges, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]
    ) -> None:
        """Commit updates, and what they change about the keys."""
        # Numbers of new columns and partition fields follow the counters in the metadata file.
        gives_numbers = any(isinstance(update, AddSchemaUpdate | AddPartitionSpecUpdate) for update in updates)
        self._refuse_false_claims(self._counters_of_files() if gives_numbers else None)
        catalog = committing(self.catalog, StoredFileIO(self.reader, self._places), changes)
        self.is_sent = True
        response = catalog.commit_table(self, requirements, updates)
        self._refuse_other_table(response.metadata)
        self.metadata, self.metadata_location = response.metadata, response.metadata_location
        encryption = self.known().encryption
        for snapshot_id, key_id in changes.snapshot_keys.items():
            snapshot = encryption.snapshot(snapshot_id)
            if key_id not in encryption.keys or (snapshot is not None and snapshot.key_id != key_id):
                raise KeyMaterialError(
                    f"the catalog took snapshot {snapshot_id}, and dropped its key: it cannot be read.",
                    path=self.metadata_location,
                    hint="This catalog does not support encrypted tables. Roll the table back by one snapshot, "
                    "and write it through another catalog.",
                )


def _as_written(metadata: TableMetadata) -> TableMetadata:
    """Return metadata for PyIceberg's writers, with properties that all encrypted tables have; never stored."""
    # Whatever a table says, names of files and summaries of snapshots show no values of partitions.
    no_summaries = {TableProperties.WRITE_PARTITION_SUMMARY_LIMIT: "0"}
    properties = {**_PATIENCE, **metadata.properties, **HIDDEN_PARTITIONS, **no_summaries}
    return metadata.model_copy(update={"properties": properties})


class _WorkingTable(EncryptedTable):
    """The copy of a table in one transaction: it writes, and collects the keys of what it writes.

    `stored_metadata` is the metadata in the catalog; PyIceberg's writers see what `_as_written` returns.
    """

    io: WritingFileIO
    stored_metadata: TableMetadata

    def __init__(self, table: EncryptedTable) -> None:
        encryption = table.known().encryption
        if not isinstance(table.metadata, TableMetadataV3):
            raise KeyMaterialError(
                f"the table has format version {table.metadata.format_version}, and encrypted tables have 3.",
                path=table.metadata_location,
                hint="If `parquet_keytools.iceberg.create_table` made it, this file was changed: restore it.",
            )
        master_key_of(encryption)
        table._refuse_false_claims()
        super().__init__(table)
        self.io = WritingFileIO(table.reader, key_length_bits(encryption), table._places)
        self._new_keys = table._new_keys

    @property
    def metadata(self) -> TableMetadata:
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: TableMetadata) -> None:
        self.stored_metadata = metadata
        self._metadata = _as_written(metadata)

    @property
    def reader(self) -> EncryptedFileIO:
        return self.io.reader if isinstance(self.io, WritingFileIO) else super().reader

    def _take(self, fresh: Table) -> None:
        io = self.io
        super()._take(fresh)
        assert isinstance(fresh.io, EncryptedFileIO)
        io.reader = fresh.io
        self.io = io

    def add_snapshot_key(self, snapshot_id: int, key_metadata: StandardKeyMetadata) -> None:
        self._snapshot_keys[snapshot_id] = self._new_keys.entries_for(self.known().chain, key_metadata)


class EncryptedTransaction(ProducingTransaction):
    """Changes of an encrypted table that are committed as one."""

    def __init__(self, table: EncryptedTable) -> None:
        self._original = table
        self._seen = table.metadata_location
        self._working = _WorkingTable(table)
        super().__init__(self._working, self._working.io, self._working.add_snapshot_key)

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata with the changes so far, for PyIceberg's writers."""
        if self._original.metadata_location != self._seen and not self.snapshot_ids:
            # The caller refreshed the table, or committed to it: PyIceberg's transactions see that, too. Snapshots
            # that were made before stay as they are, until the commit repeats them.
            self._working._take(self._original)
            self._seen = self._original.metadata_location
        return _as_written(super().table_metadata)

    def set_properties(self, properties: Properties = EMPTY_DICT, **named: Any) -> Transaction:
        """Set properties of the table, except for its encryption, which never changes."""
        given = {**properties, **named}
        _refuse_encryption_properties(given)
        for name in PATH_PROPERTIES:
            if name in given:
                self._working._places.check(f"{str(given[name]).rstrip('/')}/file")
        return super().set_properties(properties, **named)

    def remove_properties(self, *removals: str) -> Transaction:
        """Remove properties of the table, except for its encryption, which never changes."""
        _refuse_encryption_properties(removals)
        return super().remove_properties(*removals)

    def __exit__(self, exctype: Any, excinst: Any, exctb: Any) -> None:
        if exctype is not None:
            self._working.io.remove_begun()
        super().__exit__(exctype, excinst, exctb)

    def commit_transaction(self) -> Table:
        """Commit, and repeat the commit if another one came first.

        After an error of the catalog, the files stay: the commit may have succeeded.
        """
        table, original = self._working, self._original
        try:
            super().commit_transaction()
        except Exception as error:
            # After any other error of the catalog, the commit might still arrive.
            if not table.is_sent or isinstance(error, CommitFailedException | ValidationException | OutputError):
                table.io.remove_begun()
            raise
        table.io.keep_begun()
        original.metadata, original.metadata_location = table.stored_metadata, table.metadata_location
        original.io = table.reader
        return original


# --- tables of a catalog ---


@overload
def load_table(catalog: Catalog, identifier: str | Identifier) -> Table: ...


@overload
def load_table(catalog: Catalog, identifier: str | Identifier, *, encryption_key: str) -> EncryptedTable: ...


def load_table(
    catalog: Catalog, identifier: str | Identifier, *, encryption_key: str | None = None
) -> Table | EncryptedTable:
    """Load a table, and learn its keys from its metadata file; an encrypted table is an `EncryptedTable`.

    A REST catalog sends the content of the metadata file, and PyIceberg drops the keys in it. So the file is read
    here.

    Args:
        catalog: Any catalog of PyIceberg whose `py-io-impl` is `parquet_keytools.iceberg.EncryptedFileIO`.
        identifier: Name of the table.
        encryption_key: The master key that the table must be under: its name in the configuration, or its
            identifier in the KMS. A metadata file is not authenticated: without this argument, a table whose keys
            were removed from it, together with forged plaintext files, loads as a plaintext table. None accepts
            what the file says.

    Raises:
        ConfigurationError: The catalog has another FileIO.
        NotEncryptedError: The table is not encrypted, and should be.
        KeyMaterialError: It is under another master key.
        KeytoolsError: Another subclass says what is wrong with the metadata file.
    """
    table = catalog.load_table(identifier)
    reader = _ours(catalog, table.io)
    known = reader.table_at(table.metadata_location)
    if encryption_key is not None:
        if known is None:
            raise NotEncryptedError(
                f"{table.metadata_location}: the table is not encrypted, and should be under {encryption_key!r}.",
                hint="Someone may have taken the keys out of its metadata file: restore it from a backup.",
            )
        expected = reader.keys.master_key_id(encryption_key)
        found = {master_key_of(known.encryption), *(kek.encrypted_by_id for kek in known.encryption.keks)}
        if set(map(reader.keys.master_key_id, found)) != {expected}:
            raise KeyMaterialError(
                f"the table is under the master key {sorted(found)[0]!r}, and should be under {expected!r}.",
                path=table.metadata_location,
                hint="Someone may have put another table in its place: restore its metadata file from a backup.",
            )
    return EncryptedTable(table) if known is not None else table


def load_table_to_write(
    catalog_name: str, table: str, config: Path | None = None, properties: Mapping[str, str] = EMPTY_DICT
) -> EncryptedTable:
    """Load an encrypted table of a catalog that PyIceberg knows by name.

    Without `config`, the properties of the catalog name the configuration.
    """
    given = {PY_IO_IMPL: "parquet_keytools.iceberg.EncryptedFileIO", **properties}
    if config is not None:
        given[CONFIG_PROPERTY] = str(config)
    loaded = table_of_catalog(catalog_name, given, table, load_table)
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
    """Create an encrypted table, of format version 3.

    Args:
        catalog: Any catalog of PyIceberg whose `py-io-impl` is `parquet_keytools.iceberg.EncryptedFileIO`.
        identifier: Name of the table.
        schema: Its columns.
        encryption_key: The master key: its name in the configuration, or its identifier in the KMS. The table
            stores the identifier, so that other engines find the key.
        data_key_length_bits: Length of KEKs and DEKs: 128, 192 or 256.
        location: Where the table lies; by default below the warehouse.
        partition_spec: How it is partitioned.
        sort_order: How rows are sorted.
        properties: Its other properties.

    Raises:
        ConfigurationError: The catalog has another FileIO, AES has no keys of this length, the key is a template
            such as `tenant-{tenant}`, or labels of columns want another key.
        KmsError: The KMS does not wrap keys with the master key; no table was created.
    """
    if data_key_length_bits not in KEY_LENGTHS_BITS:
        raise ConfigurationError(f"AES has no keys of {data_key_length_bits} bits: 128, 192 or 256 bits.")
    _refuse_encryption_properties(properties)
    places = TablePlaces(f"{location.rstrip('/')}/metadata/new" if location else "", catalog.properties)
    for name in PATH_PROPERTIES:
        if name in properties and not places.holds(f"{str(properties[name]).rstrip('/')}/file"):
            raise ConfigurationError(
                f"the property {name} is {properties[name]!r}, which the catalog does not list.",
                hint=f"Name the place in the property {PLACES_PROPERTY} of the catalog, or leave {name} out.",
            )
    # A table that could not be loaded afterwards is not created.
    reader = _ours(catalog, load_file_io(dict(catalog.properties)))
    master_key_id = reader.keys.master_key_id(encryption_key)
    refuse_other_key(
        reader.keys.service.configuration,
        Catalog.identifier_to_tuple(identifier),
        schema.as_arrow() if isinstance(schema, Schema) else schema,
        properties,
        master_key_id,
    )
    # Nor is a table whose master key the KMS does not have, or does not let us use.
    reader.keys.wrap_kek(SecretBytes.random(data_key_length_bits), master_key_id)
    committing(catalog, StoredFileIO(reader, None), KeyChanges()).create_table(
        identifier,
        schema,
        location,
        partition_spec,
        sort_order,
        {
            # For other writers: ours hides values whatever the properties say.
            **HIDDEN_PARTITIONS,
            **properties,
            TableProperties.FORMAT_VERSION: "3",
            KEY_ID_PROPERTY: reader.keys.id_in_table(master_key_id),
            KEY_LENGTH_PROPERTY: str(data_key_length_bits // 8),
        },
    )
    return load_table(catalog, identifier, encryption_key=encryption_key)


def _ours(catalog: Catalog, file_io: FileIO) -> EncryptedFileIO:
    if not isinstance(file_io, EncryptedFileIO):
        raise ConfigurationError(
            f"the FileIO of the catalog {catalog.name!r} is not ours.",
            hint="Set its property py-io-impl to parquet_keytools.iceberg.EncryptedFileIO.",
        )
    return file_io


def _refuse_encryption_properties(names: Iterable[str]) -> None:
    """Refuse properties of the encryption, and properties that only catalogs may have (`ConfigurationError`)."""
    names = sorted(names)
    if others := [name for name in names if is_of_catalogs(name)]:
        raise ConfigurationError(
            f"no table has the property {others[0]}, which catalogs alone have.", hint="Set it in the catalog."
        )
    if changed := [name for name in names if name.startswith("encryption.")]:
        raise ConfigurationError(
            f"the table property {changed[0]} never changes in the life of a table.",
            hint="Copy the rows into a new table with another master key.",
        )


# --- labels of columns ---


def refuse_other_key(
    configuration: Configuration,
    identifier: Identifier,
    schema: pa.Schema,
    properties: Properties,
    master_key_id: str,
) -> None:
    """Refuse a table whose key is not the key of its labelled columns: its files are encrypted whole.

    A table of the configuration decides about it if its `labels_from` has an entry `iceberg` that names it.
    """
    for name, table in configuration.tables.items():
        source = table.labels.iceberg
        # With or without its namespaces; some catalogs ignore case.
        names = ".".join(identifier).casefold(), identifier[-1].casefold()
        if source is None or (source.name or name).casefold() not in names:
            continue
        leaves = arrow_leaf_paths(schema)
        labels = partial(_labels, ".".join(identifier), schema, properties, leaves)
        columns = resolve_columns(configuration, name, leaves, field_labels=labels, is_iceberg=True)
        if master_key_id in map(configuration.master_key_id, table.labels.iceberg_keys):
            continue
        for column, key in columns.items():
            if key.key_name is None:
                continue
            if resolve_key(configuration, key.key_name) != MasterKeyReference(master_key_id):
                why = f"has the label {key.label.text}" if key.label is not None else "is configured"
                raise ConfigurationError(
                    f"the table {'.'.join(identifier)} is under the master key {master_key_id!r}, and its column "
                    f"{'.'.join(column)!r} {why}, with the key {key.key_name!r}.",
                    hint=f"Its files are encrypted whole. Use a table under the key {key.key_name!r}; or, if the "
                    "key of this table protects all columns well enough, list it under `keys` of `iceberg:`.",
                )


def _labels(
    table: str, schema: pa.Schema, properties: Properties, leaves: list[ColumnPath], field: str
) -> Mapping[ColumnPath, str]:
    """Return the labels in docs of fields, `[class: pii]`, and in properties of the table, `class.email: pii`."""
    found: dict[ColumnPath, str] = {}
    in_doc = re.compile(rf"\[\s*{re.escape(field)}\s*:\s*([^\]]*?)\s*\]", re.IGNORECASE)
    docs = [
        (path, label) for path, doc in labels_of_schema(schema, "doc").items() for label in in_doc.findall(doc)
    ]
    stated = [(name.split("."), label) for name, label in properties.items() if name.startswith(f"{field}.")]
    by_property = [(tuple(column), str(label)) for (_, *column), label in stated]
    for path, label in (*docs, *by_property):
        if found.setdefault(path, label) != label:
            raise ConfigurationError(
                f"the field {'.'.join(path)!r} of {table} has two labels: {found[path]!r} and {label!r}.",
                hint=f"Correct its doc, or the table property {field}.{'.'.join(path)}.",
            )
    there = {path for leaf in leaves for path in nearest_first(leaf)}
    for path, _ in by_property:
        if path not in there:
            raise ConfigurationError(
                f"the table {table} has no column {'.'.join(path)!r}, which a property labels.",
                hint=f"Its column may have another name now: change the property {field}.{'.'.join(path)}.",
            )
    return found
