"""Manifests and manifest lists of format version 3, which PyIceberg 0.12 reads and does not write.

PyIceberg keeps entries in memory as version 2 has them. What version 3 adds, row ids above all, is put back here
from the files that the entries were read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pyiceberg.avro.codecs import AVRO_CODEC_KEY, AvroCompressionCodec
from pyiceberg.avro.file import AvroFile, AvroOutputFile
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestListWriterV2,
    ManifestWriterV2,
    PartitionFieldSummary,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema

from parquet_keytools.errors import FormatLimitError
from parquet_keytools.iceberg.written_files import WritingFileIO

VERSION: Literal[3] = 3

_ENTRY_FILE = 4
_FILE_FIRST_ROW_ID = 16
_MANIFEST_KEY_METADATA, _MANIFEST_FIRST_ROW_ID = 14, 15


class ManifestWriterV3(ManifestWriterV2):
    """Writes an encrypted manifest of data files."""

    def __init__(
        self,
        spec: PartitionSpec,
        schema: Schema,
        io: WritingFileIO,
        location: str,
        snapshot_id: int,
        compression: AvroCompressionCodec,
        first_row_id_of: Callable[[str], int | None],
    ) -> None:
        """Prepare a manifest.

        Args:
            spec: Partition spec of its files.
            schema: Schema of the table.
            io: Encrypts it.
            location: Where it goes.
            snapshot_id: The snapshot that adds it.
            compression: Codec of its Avro blocks.
            first_row_id_of: Location of a data file that the table has -> its first row id.
        """
        super().__init__(spec, schema, io.new_output(location), snapshot_id, compression)
        self._io = io
        self._first_row_id_of = first_row_id_of

    @property
    def version(self) -> Literal[3]:
        """The version of the format."""
        return VERSION

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        """Return the Avro file; its records are those of version 3 already."""
        schema = self._with_partition(VERSION)
        return AvroOutputFile[ManifestEntry](
            output_file=self._output_file,
            file_schema=schema,
            record_schema=schema,
            schema_name="manifest_entry",
            metadata=self._meta,
        )

    def prepare_entry(self, entry: ManifestEntry) -> ManifestEntry:
        """Return an entry as version 3 has it, of a file that has a key."""
        entry = super().prepare_entry(entry)
        file = entry.data_file
        if file.content is not DataFileContent.DATA:
            raise FormatLimitError(f"{file.file_path}: delete files are kept in the manifests that have them.")
        if not file.key_metadata:
            # The key of a file that is here already comes from its manifest; without one it is plaintext.
            self._io.key_metadata(file.file_path)
        first_row_id = None if entry.status is ManifestEntryStatus.ADDED else self._first_row_id_of(file.file_path)
        values = [file[i] for i in range(_FILE_FIRST_ROW_ID)]
        complete = DataFile(*values, first_row_id, None, None, None)
        return ManifestEntry(*(entry[i] for i in range(_ENTRY_FILE)), complete)

    def to_manifest_file(self) -> ManifestFile:
        """Return what a manifest list says of the manifest, its key metadata included."""
        manifest = super().to_manifest_file()
        key_metadata = self._io.key_metadata(manifest.manifest_path)
        manifest[_MANIFEST_KEY_METADATA] = key_metadata.encode().reveal()
        assert manifest.manifest_length == key_metadata.file_length
        return manifest


class ManifestListWriterV3(ManifestListWriterV2):
    """Writes an encrypted manifest list, and assigns first row ids to the manifests that have none.

    Attributes:
        next_row_id: The first row id that no manifest of the list has taken.
    """

    def __init__(
        self,
        io: WritingFileIO,
        location: str,
        snapshot_id: int,
        parent_snapshot_id: int | None,
        sequence_number: int,
        compression: AvroCompressionCodec,
        next_row_id: int,
        first_row_ids: dict[str, int | None],
    ) -> None:
        """Prepare a manifest list.

        Args:
            io: Encrypts it.
            location: Where it goes.
            snapshot_id: Its snapshot.
            parent_snapshot_id: The snapshot before, or None.
            sequence_number: Of the snapshot.
            compression: Codec of its Avro blocks.
            next_row_id: First row id of the snapshot.
            first_row_ids: Location of each manifest of the snapshot before -> its first row id.
        """
        super().__init__(io.new_output(location), snapshot_id, parent_snapshot_id, sequence_number, compression)
        self._format_version = VERSION
        self._meta = {
            **self._meta,
            "format-version": str(VERSION),
            "first-row-id": str(next_row_id),
            AVRO_CODEC_KEY: compression,
        }
        self.next_row_id = next_row_id
        self._first_row_ids = first_row_ids

    def __enter__(self) -> ManifestListWriterV3:
        schema = MANIFEST_LIST_FILE_SCHEMAS[VERSION]
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
        """Return the entry of a manifest as version 3 has it."""
        values = [manifest_file[i] for i in range(_MANIFEST_FIRST_ROW_ID)]
        prepared: ManifestFile = super().prepare_manifest(ManifestFile(*values, None))
        first_row_id = self._first_row_ids.get(manifest_file.manifest_path)
        if first_row_id is None and manifest_file.content is ManifestContent.DATA:
            first_row_id = self.next_row_id
            self.next_row_id += (manifest_file.existing_rows_count or 0) + (manifest_file.added_rows_count or 0)
        prepared[_MANIFEST_FIRST_ROW_ID] = first_row_id
        return prepared


def read_manifests(io: FileIO, manifest_list: str) -> Iterator[ManifestFile]:
    """Yield the manifests of a manifest list, as version 3 has them; `first_row_id` is their last field."""
    with AvroFile[ManifestFile](
        io.new_input(manifest_list),
        MANIFEST_LIST_FILE_SCHEMAS[VERSION],
        read_types={-1: ManifestFile, 508: PartitionFieldSummary},
        read_enums={517: ManifestContent},
    ) as reader:
        yield from reader


def read_first_row_ids(io: FileIO, manifest: ManifestFile) -> Iterator[tuple[str, int | None]]:
    """Yield location and first row id of each live data file of a manifest that `read_manifests` returned.

    A file without one inherits it: that of the manifest, and then the rows of the files before that have none.
    """
    next_row_id = manifest[_MANIFEST_FIRST_ROW_ID]
    with AvroFile[ManifestEntry](
        io.new_input(manifest.manifest_path),
        MANIFEST_ENTRY_SCHEMAS[VERSION],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        for entry in reader:
            if entry.status is ManifestEntryStatus.DELETED:
                continue
            file = entry.data_file
            first_row_id = file[_FILE_FIRST_ROW_ID]
            if first_row_id is None and next_row_id is not None:
                first_row_id = next_row_id
                next_row_id += file.record_count
            yield file.file_path, first_row_id


def first_row_id_of_manifest(manifest: ManifestFile) -> int | None:
    """Return the first row id of a manifest that `read_manifests` returned."""
    found: int | None = manifest[_MANIFEST_FIRST_ROW_ID]
    return found
