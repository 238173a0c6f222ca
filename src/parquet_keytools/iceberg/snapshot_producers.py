"""How PyIceberg's append, overwrite and delete make snapshots of an encrypted table.

PyIceberg decides which files a snapshot keeps, adds and drops, and what conflicts with another commit. Here
manifests and manifest lists are encrypted, and get their keys.
"""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, ManifestFile, ManifestWriter
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table.metadata import TableMetadataV3
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    SetSnapshotRefUpdate,
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

from parquet_keytools.iceberg.manifest_writers import (
    ManifestListWriterV3,
    ManifestWriterV3,
    first_row_id_of_manifest,
    read_first_row_ids,
    read_manifests,
)
from parquet_keytools.iceberg.written_files import WritingFileIO

if TYPE_CHECKING:
    from parquet_keytools.iceberg.encrypted_table import EncryptedTransaction

_FILE_COLUMN_SIZES, _FILE_KEY_METADATA, _FILE_SPLIT_OFFSETS = 6, 12, 13


class _EncryptedProducer(_SnapshotProducer[Any]):
    """What all producers of an encrypted table share; it stands behind PyIceberg's own class among the bases."""

    _transaction: EncryptedTransaction
    _io: WritingFileIO

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._lock = threading.Lock()
        self._file_row_ids: dict[str, int | None] | None = None

    def append_data_file(self, data_file: DataFile) -> Any:
        """Take a data file that this table wrote.

        Raises:
            NotEncryptedError: Somebody else wrote it: it may be plaintext.
        """
        key_metadata = self._io.key_metadata(data_file.file_path)
        properties = pe.create_decryption_properties(
            footer_key=key_metadata.encryption_key.reveal(), aad_prefix=key_metadata.aad_prefix
        )
        with self._io.storage.new_input(data_file.file_path).open() as file:
            metadata = pq.read_metadata(file, decryption_properties=properties)
        table = self._transaction.table_metadata
        # Offsets and sizes are those of the plaintext file, which the encrypted one does not share.
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=metadata,
            stats_columns=compute_statistics_plan(table.schema(), table.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(table.schema()),
        )
        data_file[_FILE_COLUMN_SIZES] = statistics.column_sizes
        data_file[_FILE_SPLIT_OFFSETS] = statistics.split_offsets
        data_file[_FILE_KEY_METADATA] = key_metadata.encode().reveal()
        assert data_file.file_size_in_bytes == key_metadata.file_length
        return super().append_data_file(data_file)

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        """Return a writer of an encrypted manifest."""
        name = f"{self.commit_uuid}-m{next(self._manifest_num_counter)}.avro"
        location = self._transaction.location_provider().new_metadata_location(name)
        self._written_manifests.append(location)
        return ManifestWriterV3(
            spec, self.schema(), self._io, location, self._snapshot_id, self._compression, self._first_row_id
        )

    def _commit(self) -> UpdatesAndRequirements:
        metadata = self._transaction.table_metadata
        assert isinstance(metadata, TableMetadataV3)
        head = metadata.refs.get(self._target_branch) if self._target_branch is not None else None
        manifests = self._manifests()
        first_row_id = metadata.next_row_id or 0
        name = f"snap-{self._snapshot_id}-0-{self.commit_uuid}.avro"
        location = self._transaction.location_provider().new_metadata_location(name)
        self._written_manifest_lists.append(location)
        with ManifestListWriterV3(
            self._io,
            location,
            self._snapshot_id,
            self._parent_snapshot_id,
            metadata.next_sequence_number(),
            self._compression,
            first_row_id,
            {m.manifest_path: first_row_id_of_manifest(m) for m in self._parent_manifests()},
        ) as writer:
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

    def _refresh_for_retry(self) -> None:
        super()._refresh_for_retry()
        self._file_row_ids = None

    def _parent_manifests(self) -> list[ManifestFile]:
        if self._parent_snapshot_id is None:
            return []
        parent = self._transaction.table_metadata.snapshot_by_id(self._parent_snapshot_id)
        return list(read_manifests(self._io, parent.manifest_list)) if parent is not None else []

    def _first_row_id(self, location: str) -> int | None:
        # Only where a manifest is written again: for appends, no manifest is read.
        with self._lock:
            if self._file_row_ids is None:
                self._file_row_ids = {
                    path: first_row_id
                    for manifest in self._parent_manifests()
                    for path, first_row_id in read_first_row_ids(self._io, manifest)
                }
            return self._file_row_ids.get(location)


class _EncryptedFastAppend(_FastAppendFiles, _EncryptedProducer):
    pass


class _EncryptedMergeAppend(_MergeAppendFiles, _EncryptedProducer):
    pass


class _EncryptedOverwrite(_OverwriteFiles, _EncryptedProducer):
    pass


class _EncryptedDelete(_DeleteFiles, _EncryptedProducer):
    pass


class EncryptedUpdateSnapshot(UpdateSnapshot):
    """Makes the producers of snapshots of an encrypted table."""

    def _arguments(self, operation: Operation) -> dict[str, Any]:
        return {
            "operation": operation,
            "transaction": self._transaction,
            "io": self._io,
            "branch": self._branch,
            "snapshot_properties": self._snapshot_properties,
        }

    def fast_append(self) -> _FastAppendFiles:
        """Return an append that keeps all manifests as they are."""
        return _EncryptedFastAppend(**self._arguments(Operation.APPEND))

    def merge_append(self) -> _MergeAppendFiles:
        """Return an append that merges small manifests."""
        return _EncryptedMergeAppend(**self._arguments(Operation.APPEND))

    def overwrite(self, commit_uuid: uuid.UUID | None = None) -> _OverwriteFiles:
        """Return a snapshot that replaces files."""
        has_rows = self._transaction.table_metadata.snapshot_by_name(name=self._branch) is not None
        operation = Operation.OVERWRITE if has_rows else Operation.APPEND
        return _EncryptedOverwrite(commit_uuid=commit_uuid, **self._arguments(operation))

    def delete(self) -> _DeleteFiles:
        """Return a snapshot that drops files."""
        return _EncryptedDelete(**self._arguments(Operation.DELETE))
