"""Everything that uses PyIceberg's protected classes and methods; no other file does (ADR 10).

PyIceberg 0.12 reads tables of format version 3 but does not write them, and it drops the fields of a metadata file
that it does not know. The subclasses here add what encrypted tables need: subclasses of tables and transactions,
of the producers of snapshots, of the writers of manifests, and of catalogs for one commit.

PyIceberg decides which files a snapshot keeps, adds and drops, and what conflicts with another commit. The code
here encrypts manifests and manifest lists. PyIceberg keeps entries of manifests in the form of version 2; what
version 3 adds, mainly row ids, is restored here from the manifests that the entries came from.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, cast

from pyiceberg.avro.codecs import AVRO_CODEC_KEY
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError, ValidationException
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestListWriterV2,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata, TableMetadataV3
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
    UpdatesAndRequirements,
)
from pyiceberg.table.update.snapshot import (
    UpdateSnapshot,
    _DeleteFiles,
    _FastAppendFiles,
    _MergeAppendFiles,
    _OverwriteFiles,
    _SnapshotProducer,
)
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from parquet_keytools.errors import FormatLimitError
from parquet_keytools.iceberg.claims import counter_problems, refuse
from parquet_keytools.iceberg.key_chain import KeyChanges
from parquet_keytools.iceberg.manifests import counters_of_list, row_ids_of_list, row_ids_of_manifest
from parquet_keytools.iceberg.metadata import StandardKeyMetadata
from parquet_keytools.iceberg.written_files import MetadataFiles, WritingFileIO, dumped, refuse_hashed

_VERSION: Literal[3] = 3


_ENTRY_FILE = 4
_FILE_COLUMN_SIZES, _FILE_KEY_METADATA, _FILE_SPLIT_OFFSETS, _FILE_FIRST_ROW_ID = 6, 12, 13, 16
_MANIFEST_KEY_METADATA, _MANIFEST_FIRST_ROW_ID = 14, 15


# --- tables and transactions ---


class CommittingTable(Table):
    """A table that commits by a public method."""

    @abstractmethod
    def commit_updates(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]) -> None:
        """Commit updates of the table."""

    def _do_commit(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...]) -> None:
        self.commit_updates(updates, requirements)


class ProducingTransaction(Transaction):
    """A transaction, over a copy of the table, whose snapshots `io` encrypts.

    `add_snapshot_key` takes the id of each snapshot, and the key of its manifest list.
    """

    def __init__(
        self, table: Table, io: WritingFileIO, add_snapshot_key: Callable[[int, StandardKeyMetadata], None]
    ) -> None:
        super().__init__(table)
        self._writing_io = io
        self.add_snapshot_key = add_snapshot_key

    @property
    def snapshot_ids(self) -> list[int]:
        """The ids of the snapshots so far."""
        return [producer.snapshot_id for producer in self._snapshot_producers]

    def new_metadata_location(self, name: str) -> str:
        """Return the location of a new manifest or manifest list."""
        return self._table.location_provider().new_metadata_location(name)

    def update_snapshot(
        self, snapshot_properties: dict[str, str] = EMPTY_DICT, branch: str | None = MAIN_BRANCH
    ) -> _EncryptedUpdateSnapshot:
        """Return the maker of a snapshot."""
        return _EncryptedUpdateSnapshot(
            self, io=self._writing_io, branch=branch, snapshot_properties=snapshot_properties
        )


# --- writers of manifests and manifest lists ---


class _ManifestWriterV3(ManifestWriterV2):
    """Writes an encrypted manifest of data files."""

    def __init__(self, producer: _EncryptedProducer, spec: PartitionSpec, location: str) -> None:
        output = producer._io.new_output(location)
        super().__init__(spec, producer.schema(), output, producer.snapshot_id, producer._compression)
        self._producer = producer
        self._spec_id = spec.spec_id

    @property
    def version(self) -> Literal[3]:
        return _VERSION

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        # The records are already in the form of version 3.
        schema = self._with_partition(_VERSION)
        return AvroOutputFile[ManifestEntry](
            output_file=self._output_file,
            file_schema=schema,
            record_schema=schema,
            schema_name="manifest_entry",
            metadata=self._meta,
        )

    def prepare_entry(self, entry: ManifestEntry) -> ManifestEntry:
        written = entry.data_file
        if written.spec_id != self._spec_id:
            # When it repeats a commit, PyIceberg would take partition values of one field for another's.
            raise ValidationException(
                f"the partition spec changed from {written.spec_id} to {self._spec_id} after {written.file_path} "
                "was written. Nothing was committed: write the rows again."
            )
        entry = super().prepare_entry(entry)
        file = entry.data_file
        if file.content is not DataFileContent.DATA:
            raise FormatLimitError(f"{file.file_path}: delete files are kept in the manifests that have them.")
        if not file.key_metadata:
            # The manifest of a file that is already in the table has its key; otherwise it must be written here.
            self._producer._io.key_metadata(file.file_path)
        first_row_id = None
        if entry.status is not ManifestEntryStatus.ADDED:
            first_row_id = self._producer.first_row_id(file.file_path)
        values = [file[i] for i in range(_FILE_FIRST_ROW_ID)]
        complete = DataFile(*values, first_row_id, None, None, None)
        return ManifestEntry(*(entry[i] for i in range(_ENTRY_FILE)), complete)

    def to_manifest_file(self) -> ManifestFile:
        manifest = super().to_manifest_file()
        key_metadata = self._producer._io.key_metadata(manifest.manifest_path)
        manifest[_MANIFEST_KEY_METADATA] = key_metadata.encode().reveal()
        assert manifest.manifest_length == key_metadata.file_length
        return manifest


class _ManifestListWriterV3(ManifestListWriterV2):
    """Writes an encrypted manifest list, and assigns first row ids to manifests that have none.

    `next_row_id` is the first row id of the snapshot, then the first one after the rows of the list.
    """

    def __init__(self, producer: _EncryptedProducer, metadata: TableMetadataV3, location: str) -> None:
        row_ids = producer.row_ids_of_manifests()
        super().__init__(
            producer._io.new_output(location),
            producer.snapshot_id,
            producer._parent_snapshot_id,
            metadata.next_sequence_number(),
            producer._compression,
        )
        self._format_version = _VERSION
        self.next_row_id = metadata.next_row_id or 0
        self._meta = {
            **self._meta,
            "format-version": str(_VERSION),
            "first-row-id": str(self.next_row_id),
            AVRO_CODEC_KEY: producer._compression,
        }
        self._first_row_ids = row_ids

    def __enter__(self) -> _ManifestListWriterV3:
        schema = MANIFEST_LIST_FILE_SCHEMAS[_VERSION]
        self._writer = AvroOutputFile[ManifestFile](
            output_file=self._output_file,
            record_schema=schema,
            file_schema=schema,
            schema_name="manifest_file",
            metadata=self._meta,
        )
        self._writer.__enter__()
        return self

    def prepare_manifest(self, manifest_file: ManifestFile) -> ManifestFile:
        values = [manifest_file[i] for i in range(_MANIFEST_FIRST_ROW_ID)]
        prepared: ManifestFile = super().prepare_manifest(ManifestFile(*values, None))
        first_row_id = self._first_row_ids.get(manifest_file.manifest_path)
        if first_row_id is None and manifest_file.content is ManifestContent.DATA:
            first_row_id = self.next_row_id
            self.next_row_id += (manifest_file.existing_rows_count or 0) + (manifest_file.added_rows_count or 0)
        prepared[_MANIFEST_FIRST_ROW_ID] = first_row_id
        return prepared


def _check_partition_types(spec: PartitionSpec, schema: Schema) -> None:
    """Refuse partition values that PyIceberg writes into manifests but cannot read (`FormatLimitError`).

    Avro names a type once, and PyIceberg names it in each of several fields.
    """
    conversion = AvroSchemaConversion()
    names: set[str] = set()
    for field in spec.partition_type(schema).fields:
        is_readable = False
        with contextlib.suppress(ValueError, TypeError, LookupError):
            in_avro = cast("dict[str, Any]", conversion.iceberg_to_avro(Schema(field)))
            conversion.avro_to_iceberg(in_avro)
            kinds = in_avro["fields"][0]["type"]
            named = {kind["name"] for kind in [*kinds, kinds] if isinstance(kind, dict) and "name" in kind}
            is_readable = names.isdisjoint(named)
            names |= named
        if not is_readable:
            raise FormatLimitError(
                f"the table is partitioned by {field.name!r}, of type {field.field_type}, which PyIceberg cannot "
                "read in manifests, or not beside another field of this type: nothing could read the table after "
                "this commit.",
                hint="Partition by another transform, such as day or bucket, or remove this partition field.",
            )


# --- producers of snapshots ---


class _EncryptedProducer(_SnapshotProducer[Any]):
    """The common part of all producers of an encrypted table; comes after PyIceberg's class among the bases."""

    _transaction: ProducingTransaction
    _io: WritingFileIO

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        metadata = self._transaction.table_metadata
        # Before any file is written.
        _check_partition_types(metadata.spec(), metadata.schema())
        self._lock = threading.Lock()
        self._file_row_ids: dict[str, int | None] | None = None

    def append_data_file(self, data_file: DataFile) -> Any:
        """Take a data file that this table wrote; others may be plaintext, and are refused."""
        key_metadata = self._io.key_metadata(data_file.file_path)
        # PyIceberg measured the plaintext file.
        data_file[_FILE_COLUMN_SIZES] = data_file[_FILE_SPLIT_OFFSETS] = None
        data_file[_FILE_KEY_METADATA] = key_metadata.encode().reveal()
        data_file.spec_id = self._transaction.table_metadata.default_spec_id
        assert data_file.file_size_in_bytes == key_metadata.file_length
        return super().append_data_file(data_file)

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        _check_partition_types(spec, self.schema())
        name = f"{self.commit_uuid}-m{next(self._manifest_num_counter)}.avro"
        location = self._transaction.new_metadata_location(name)
        self._written_manifests.append(location)
        return _ManifestWriterV3(self, spec, location)

    def _commit(self) -> UpdatesAndRequirements:
        metadata = self._transaction.table_metadata
        assert isinstance(metadata, TableMetadataV3)
        head = metadata.refs.get(self._target_branch) if self._target_branch is not None else None
        self._refuse_used_numbers(metadata)
        manifests = self._manifests()
        first_row_id = metadata.next_row_id or 0
        name = f"snap-{self._snapshot_id}-0-{self.commit_uuid}.avro"
        location = self._transaction.new_metadata_location(name)
        self._written_manifest_lists.append(location)
        with _ManifestListWriterV3(self, metadata, location) as writer:
            writer.add_manifests(manifests)
        self._transaction.add_snapshot_key(self._snapshot_id, self._io.key_metadata(location))
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": self._snapshot_id,
                "parent-snapshot-id": self._parent_snapshot_id,
                "manifest-list": location,
                "sequence-number": metadata.next_sequence_number(),
                "summary": self._summary(self.snapshot_properties),
                "schema-id": metadata.current_schema_id,
                "first-row-id": first_row_id,
                "added-rows": writer.next_row_id - first_row_id,
            }
        )
        added = AddSnapshotUpdate(snapshot=snapshot)
        if self._target_branch is None:
            return (added,), ()
        moved = SetSnapshotRefUpdate.model_validate(
            {"ref-name": self._target_branch, "type": SnapshotRefType.BRANCH, "snapshot-id": self._snapshot_id}
        )
        expected = AssertRefSnapshotId.model_validate(
            {"ref": self._target_branch, "snapshot-id": head.snapshot_id if head else None}
        )
        return (added, moved), (expected,)

    def _refuse_used_numbers(self, metadata: TableMetadataV3) -> None:
        """Refuse numbers that manifests of the parent snapshot already have (`ParquetFormatError`)."""
        if (parent := self._parent()) is not None:
            counters = counters_of_list(self._read(parent.manifest_list), f"manifest list {parent.manifest_list}")
            refuse(counter_problems(dumped(metadata), counters), parent.manifest_list)

    def _refresh_for_retry(self) -> None:
        super()._refresh_for_retry()
        self._file_row_ids = None

    def _parent(self) -> Snapshot | None:
        parent_id = self._parent_snapshot_id
        return None if parent_id is None else self._transaction.table_metadata.snapshot_by_id(parent_id)

    def _read(self, location: str) -> bytes:
        with self._io.new_input(location).open() as file:
            return bytes(file.read())

    def row_ids_of_manifests(self) -> dict[str, int | None]:
        """Return the first row id of each manifest of the parent snapshot."""
        if (parent := self._parent()) is None:
            return {}
        return row_ids_of_list(self._read(parent.manifest_list), f"manifest list {parent.manifest_list}")

    def first_row_id(self, location: str) -> int | None:
        """Return the first row id of a data file of the parent snapshot."""
        # Needed only where a manifest is rewritten: an append reads no manifest.
        with self._lock:
            if self._file_row_ids is None:
                row_ids: dict[str, int | None] = {}
                for manifest, row_id in self.row_ids_of_manifests().items():
                    content = self._read(manifest)
                    row_ids |= row_ids_of_manifest(content, f"manifest {manifest}", row_id)
                # Only when all are read: after a failure, the next commit reads them again.
                self._file_row_ids = row_ids
            return self._file_row_ids.get(location)


class _EncryptedFastAppend(_FastAppendFiles, _EncryptedProducer):
    pass


class _EncryptedMergeAppend(_MergeAppendFiles, _EncryptedProducer):
    pass


class _EncryptedOverwrite(_OverwriteFiles, _EncryptedProducer):
    pass


class _EncryptedDelete(_DeleteFiles, _EncryptedProducer):
    pass


class _EncryptedUpdateSnapshot(UpdateSnapshot):
    def _arguments(self, operation: Operation) -> dict[str, Any]:
        return {
            "operation": operation,
            "transaction": self._transaction,
            "io": self._io,
            "branch": self._branch,
            "snapshot_properties": self._snapshot_properties,
        }

    def fast_append(self) -> _FastAppendFiles:
        return _EncryptedFastAppend(**self._arguments(Operation.APPEND))

    def merge_append(self) -> _MergeAppendFiles:
        return _EncryptedMergeAppend(**self._arguments(Operation.APPEND))

    def overwrite(self, commit_uuid: uuid.UUID | None = None) -> _OverwriteFiles:
        has_rows = self._transaction.table_metadata.snapshot_by_name(name=self._branch) is not None
        operation = Operation.OVERWRITE if has_rows else Operation.APPEND
        return _EncryptedOverwrite(commit_uuid=commit_uuid, **self._arguments(operation))

    def delete(self) -> _DeleteFiles:
        return _EncryptedDelete(**self._arguments(Operation.DELETE))


# --- catalogs ---


def committing(catalog: Catalog, storage: FileIO, changes: KeyChanges) -> Catalog:
    """Return a catalog for one commit, or for the creation of one table, with the state of another catalog."""
    if isinstance(catalog, RestCatalog):
        copied = copy.copy(catalog)
        copied._session = _Session(catalog._session, changes)  # type: ignore[assignment]
        return copied
    made = object.__new__(_committing_class(type(catalog)))
    # They share connections and caches: a catalog in memory exists nowhere else.
    made.__dict__.update(catalog.__dict__, metadata_files=MetadataFiles(storage, changes))
    return made


@cache
def _committing_class(catalog_class: type[Catalog]) -> type[_CommittingCatalog]:
    return type(f"Committing{catalog_class.__name__}", (_CommittingCatalog, catalog_class), {})


class _CommittingCatalog(Catalog):
    """A catalog that writes metadata files itself, with the keys; comes before PyIceberg's class in the bases."""

    metadata_files: MetadataFiles

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        return self.metadata_files.storage

    def _write_metadata(self, metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:
        self.metadata_files.write(metadata, metadata_path)

    # Glue's catalog calls it by this name for managed storage.
    _write_metadata_no_exist_check = _write_metadata

    # The catalogs of Hive and Glue call these with their own entry of a table, before they write.
    def _convert_hive_into_iceberg(self, table: Any) -> Any:
        refuse_hashed(table.parameters)
        return super()._convert_hive_into_iceberg(table)  # type: ignore[misc]

    def _convert_glue_to_iceberg(self, glue_table: Any) -> Any:
        refuse_hashed(glue_table.get("Parameters"))
        return super()._convert_glue_to_iceberg(glue_table)  # type: ignore[misc]

    def create_table(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().create_table(*arguments, **named)  # type: ignore[safe-super]
        except TableAlreadyExistsError:
            self.metadata_files.remove_written()
            raise

    def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
        try:
            response = super().commit_table(table, requirements, updates)  # type: ignore[safe-super]
        except CommitFailedException:
            self.metadata_files.remove_written()
            raise
        self.metadata_files.delete_dropped(table.metadata, response, self.properties)
        return response


class _Session:
    """The HTTP session of a REST catalog, which adds keys to commits: PyIceberg's models cannot hold them."""

    def __init__(self, session: Any, changes: KeyChanges) -> None:
        self._session = session
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def post(self, url: str, data: bytes | None = None, **named: Any) -> Any:
        request = json.loads(data) if data is not None else None
        if isinstance(request, dict) and "updates" in request:
            self._changes.apply_to_request(request)
            data = json.dumps(request).encode()
        return self._session.post(url, data=data, **named)
