"""A table of PyIceberg that writes encrypted: append, overwrite, delete; and its commits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import DataScan, Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata, TableMetadataV3
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import EMPTY_DICT, Properties

from parquet_keytools.errors import (
    ConfigurationError,
    KeyMaterialError,
    KeytoolsError,
    NotEncryptedError,
)
from parquet_keytools.iceberg.catalog_commits import dumped, is_refusal
from parquet_keytools.iceberg.claims import PATH_PROPERTIES, Counters, TablePlaces, counter_problems, refuse
from parquet_keytools.iceberg.file_io import EncryptedFileIO
from parquet_keytools.iceberg.key_chain import NewKeys, key_length_bits, master_key_of
from parquet_keytools.iceberg.key_rotation import KeyChanges, remove_unneeded_keys, rotate
from parquet_keytools.iceberg.known_tables import KnownTable
from parquet_keytools.iceberg.manifests import counters_of_list, counters_of_manifest, manifests_in
from parquet_keytools.iceberg.metadata import KEY_ID_PROPERTY, EncryptionKey, StandardKeyMetadata
from parquet_keytools.iceberg.pyiceberg_classes import CommittingTable, ProducingTransaction, committing
from parquet_keytools.iceberg.table_files import is_of_catalogs
from parquet_keytools.iceberg.written_files import StoredFileIO, WritingFileIO

_log = logging.getLogger(__name__)

HIDDEN_PARTITIONS = {
    TableProperties.OBJECT_STORE_ENABLED: "true",
    TableProperties.WRITE_OBJECT_STORE_PARTITIONED_PATHS: "false",
}
"""The names of data files would show the values that rows are partitioned by, or will be once."""

_PATIENCE = {TableProperties.COMMIT_NUM_RETRIES: "100", TableProperties.COMMIT_MAX_RETRY_WAIT_MS: "200"}
"""Where the table does not say it: 4 retries are few for several writers; who waits long comes second again."""


def as_written(metadata: TableMetadata) -> TableMetadata:
    """Return metadata for PyIceberg's writers, with the properties that hold for encrypted tables; never stored.

    Whatever a table says, names of files show no values of partitions.
    """
    properties = {**_PATIENCE, **metadata.properties, **HIDDEN_PARTITIONS}
    return metadata.model_copy(update={"properties": properties})


class EncryptedTable(CommittingTable):
    """An encrypted table, with all that PyIceberg's tables do; what it writes is encrypted.

    A commit that conflicts with another one is repeated. A commit that fails leaves the table as it was, and
    removes the files that were written for it; where its outcome is unknown, they stay.
    """

    def __init__(self, table: Table) -> None:
        """Take a table that was loaded with `EncryptedFileIO`, whose metadata file was read."""
        super().__init__(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config
        )
        self._new_keys = NewKeys(self.reader.keys)

    @property
    def reader(self) -> EncryptedFileIO:
        """What decrypts the files of the table."""
        assert isinstance(self.io, EncryptedFileIO)
        return self.io

    def transaction(self) -> EncryptedTransaction:
        """Return a transaction, which commits several changes as one.

        Raises:
            NotEncryptedError: The table has no master key.
            KeyMaterialError: Its KEKs are under another master key than its property names, or it has another
                format version than 3.
            ConfigurationError: Its property `encryption.data-key-length` is not valid.
        """
        return EncryptedTransaction(self)

    def refresh(self) -> Table:
        """Load the current state of the table."""
        fresh = self.catalog.load_table(self.name())
        self._refuse_other_table(fresh.metadata)
        self.take(fresh)
        return self

    def _refuse_other_table(self, metadata: TableMetadata) -> None:
        if metadata.table_uuid != self.metadata.table_uuid:
            raise ValueError(
                f"the catalog has another table under this name: its UUID is {metadata.table_uuid}, and was "
                f"{self.metadata.table_uuid}. Load the table again."
            )

    def take(self, fresh: Table) -> None:
        """Become another state of the same table."""
        self.io = fresh.io
        self.metadata = fresh.metadata
        self.metadata_location = fresh.metadata_location
        self.config = fresh.config

    def known(self) -> KnownTable:
        """Return what the metadata file says of the keys.

        Raises:
            NotEncryptedError: It says that the table is not encrypted any more.
        """
        if self.metadata_location not in self.reader.tables:
            self.reader.read_metadata(self.metadata_location)
        known = self.reader.tables.get(self.metadata_location)
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

    def working_copy(self) -> WorkingTable:
        """Return a copy for one transaction; errors are those of `transaction`."""
        encryption = self.known().encryption
        if not isinstance(self.metadata, TableMetadataV3):
            raise KeyMaterialError(
                f"the table has format version {self.metadata.format_version}, and encrypted ones have version 3.",
                path=self.metadata_location,
                hint="If `parquet_keytools.iceberg.create_table` made it, somebody changed this file: restore it.",
            )
        master_key_of(encryption)
        self._refuse_false_claims()
        files = WritingFileIO(self.reader, key_length_bits(encryption), self.places)
        return WorkingTable(self, files, self._new_keys)

    @property
    def places(self) -> TablePlaces:
        """Where commits may write: the folder of the table, and what the catalog names."""
        return TablePlaces(self.metadata_location, self.catalog.properties)

    def _refuse_false_claims(self, of_files: Counters | None = None) -> None:
        """Refuse to commit where the metadata file was changed for harm (`ParquetFormatError`)."""
        document = dumped(self.metadata)
        refuse(self.places.problems(document), self.metadata_location)
        refuse(counter_problems(document, of_files), self.metadata_location)

    def _counters_of_files(self) -> Counters:
        """Return the highest numbers in all authentic manifests of the table."""
        found = Counters()
        seen: set[str] = set()
        for snapshot in self.known().encryption.snapshots:
            if snapshot.key_id is None:
                continue
            name = f"manifest list {snapshot.manifest_list}"
            content = self.reader.read_all(snapshot.manifest_list)
            found |= counters_of_list(content, name)
            for manifest in manifests_in(content, name, snapshot.snapshot_id, authentic=True):
                if manifest.encoded_key is not None and manifest.location not in seen:
                    found |= counters_of_manifest(self.reader.read_all(manifest.location), manifest.name)
                    seen.add(manifest.location)
        return found

    def rotate(self) -> tuple[str, ...]:
        """Re-wrap the KEKs under the current version of their master key, as one commit; return their `key-id`.

        No file is written again, and `encryption.key-id` stays what it is.

        Raises:
            OutputError: Other commits were first, again and again, or the metadata file could not be written.
            KmsError: The KMS does not wrap or unwrap a KEK; the table is as it was.
        """
        return rotate(self)

    def remove_unneeded_keys(self) -> tuple[str, ...]:
        """Remove the entries of `encryption-keys` that no snapshot needs, as one commit; return their `key-id`.

        Expired snapshots leave them. A KEK that new snapshots may be encrypted under stays. Metadata files before
        this commit keep theirs.

        Raises:
            OutputError: Other commits were first, again and again, or the metadata file could not be written.
        """
        return remove_unneeded_keys(self)

    def commit_key_changes(self, changes: KeyChanges) -> None:
        """Commit changes of keys alone; errors as with `commit_keys`."""
        # The property stays the same: a commit without an update would be none.
        same = SetPropertiesUpdate(updates={KEY_ID_PROPERTY: master_key_of(self.known().encryption)})
        self.commit_keys(changes, (same,), ())

    def commit_keys(
        self, changes: KeyChanges, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]
    ) -> None:
        """Commit updates, and what they change of the keys.

        Raises:
            CommitFailedException: Another commit was first.
            OutputError: The catalog did not take it, or its metadata file could not be written.
            KeyMaterialError: The catalog took the commit, and lost keys of it.
        """
        # Numbers for new columns and partition fields follow those that the metadata file states.
        gives_numbers = any(isinstance(update, AddSchemaUpdate | AddPartitionSpecUpdate) for update in updates)
        self._refuse_false_claims(self._counters_of_files() if gives_numbers else None)
        catalog = committing(self.catalog, StoredFileIO(self.reader, self.places), changes)
        response = catalog.commit_table(self, requirements, updates)
        self._refuse_other_table(response.metadata)
        self.metadata, self.metadata_location = response.metadata, response.metadata_location
        encryption = self.known().encryption
        for snapshot_id, key_id in changes.snapshot_keys.items():
            snapshot = encryption.snapshot(snapshot_id)
            if key_id not in encryption.keys or (snapshot is not None and snapshot.key_id != key_id):
                raise KeyMaterialError(
                    f"the catalog took snapshot {snapshot_id}, and dropped its key: nobody can read it.",
                    path=self.metadata_location,
                    hint="This catalog does not support encrypted tables. Roll the table back by one snapshot, "
                    "and write it through another catalog.",
                )

    def commit_updates(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]) -> None:
        """Commit updates that add no snapshot."""
        if any(isinstance(update, AddSnapshotUpdate) for update in updates):
            raise NotEncryptedError(
                "a snapshot would be added whose manifests have no keys.",
                hint="Use `table.transaction()`, `append`, `overwrite` or `delete` of this table.",
            )
        self.commit_keys(KeyChanges(), updates, requirements)


class WorkingTable(EncryptedTable):
    """A table within one transaction: it writes, and collects the keys of what it writes.

    Its `stored_metadata` is the metadata as the catalog has it.
    """

    io: WritingFileIO
    stored_metadata: TableMetadata

    def __init__(self, table: EncryptedTable, io: WritingFileIO, new_keys: NewKeys) -> None:
        super().__init__(table)
        self.io = io
        self._new_keys = new_keys
        self._snapshot_keys: dict[int, tuple[EncryptionKey, ...]] = {}

    @property
    def metadata(self) -> TableMetadata:
        """What PyIceberg's writers go by: see `as_written`."""
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: TableMetadata) -> None:
        self.stored_metadata = metadata
        self._metadata = as_written(metadata)

    @property
    def reader(self) -> EncryptedFileIO:
        """What decrypts the files that were written elsewhere."""
        return self.io.reader if isinstance(self.io, WritingFileIO) else super().reader

    def take(self, fresh: Table) -> None:
        """Become another state of the same table; what was written stays known."""
        io = self.io
        super().take(fresh)
        assert isinstance(fresh.io, EncryptedFileIO)
        io.reader = fresh.io
        self.io = io

    def add_snapshot_key(self, snapshot_id: int, key_metadata: StandardKeyMetadata) -> None:
        """Take the key of a manifest list, for the commit of its snapshot; a later one replaces it."""
        known = self.known()
        self._snapshot_keys[snapshot_id] = self._new_keys.entries_for(known.encryption, known.chain, key_metadata)

    def commit_updates(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]) -> None:
        """Commit updates, with the keys of the snapshots that they add."""
        snapshots = [update.snapshot.snapshot_id for update in updates if isinstance(update, AddSnapshotUpdate)]
        keys = {snapshot: self._snapshot_keys[snapshot] for snapshot in snapshots}
        added = {entry.key_id: entry for entries in keys.values() for entry in entries}
        key_ids = {snapshot: entries[-1].key_id for snapshot, entries in keys.items()}
        self.commit_keys(KeyChanges(list(added.values()), key_ids), updates, requirements)


class EncryptedTransaction(ProducingTransaction):
    """Changes of an encrypted table that are committed as one."""

    def __init__(self, table: EncryptedTable) -> None:
        self._working = table.working_copy()
        super().__init__(self._working, self._working.io)
        self._original = table
        self._seen = table.metadata_location

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata with the changes so far, for PyIceberg's writers: see `as_written`."""
        if self._original.metadata_location != self._seen and not self.snapshot_ids:
            # The caller refreshed the table, or committed to it: PyIceberg's transactions see that, too. Snapshots
            # that were made before stay as they are, until the commit repeats them.
            self._working.take(self._original)
            self._seen = self._original.metadata_location
        return as_written(super().table_metadata)

    def add_snapshot_key(self, snapshot_id: int, key_metadata: StandardKeyMetadata) -> None:
        """Take the key of the manifest list of a snapshot of this transaction."""
        self._working.add_snapshot_key(snapshot_id, key_metadata)

    def set_properties(self, properties: Properties = EMPTY_DICT, **kwargs: Any) -> Transaction:
        """Set properties of the table; those of its encryption never change."""
        given = {**properties, **kwargs}
        refuse_encryption_properties(given)
        for name in PATH_PROPERTIES:
            if name in given:
                self._working.places.check(f"{str(given[name]).rstrip('/')}/file")
        return super().set_properties(properties, **kwargs)

    def remove_properties(self, *removals: str) -> Transaction:
        """Remove properties of the table; those of its encryption never change."""
        refuse_encryption_properties(removals)
        return super().remove_properties(*removals)

    def __exit__(self, exctype: Any, excinst: Any, exctb: Any) -> None:
        if exctype is not None:
            self._remove_files()
        super().__exit__(exctype, excinst, exctb)

    def commit_transaction(self) -> Table:
        """Commit, and repeat it where another commit was first.

        Raises:
            CommitFailedException: Others were first, again and again.
            ValidationException: What another commit did conflicts with this one.
            OutputError: The commit failed otherwise; the table is as it was.
        """
        table, original = self._working, self._original
        snapshots = self.snapshot_ids
        try:
            super().commit_transaction()
        except (CommitFailedException, ValidationException):
            self._remove_files()
            raise
        except KeytoolsError:
            # Nothing was committed, but where a catalog lost keys.
            if not self._has_landed(snapshots):
                self._remove_files()
            raise
        except Exception as error:
            has_landed = self._has_landed(snapshots)
            if not has_landed:
                # Where the outcome is unknown, the files stay: the table may have them.
                if has_landed is not None and is_refusal(table.catalog, error):
                    self._remove_files()
                raise
        table.io.keep_begun()
        original.metadata, original.metadata_location = table.stored_metadata, table.metadata_location
        original.io = table.reader
        return original

    def _has_landed(self, snapshots: list[int]) -> bool | None:
        """Return whether the table has the snapshots of this transaction, or None where it cannot be loaded."""
        try:
            self._working.refresh()
        except Exception:
            return None
        return bool(snapshots) and all(
            self._working.metadata.snapshot_by_id(snapshot) is not None for snapshot in snapshots
        )

    def _remove_files(self) -> None:
        for location in self._working.io.take_begun():
            try:
                self._working.io.delete(location)
            except FileNotFoundError:
                pass
            except Exception:
                _log.warning("a file of a commit that failed could not be removed: %s", location)


def refuse_encryption_properties(names: Iterable[str]) -> None:
    """Raise `ConfigurationError` if a caller sets properties of the encryption, or those of catalogs."""
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
