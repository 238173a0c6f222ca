"""What a commit writes: data files and manifests, encrypted, and metadata files, which keep the keys.

PyIceberg 0.12 drops `encryption-keys` and the `key-id` of snapshots. So for catalogs that write metadata files
themselves, a metadata file is written as the file before plus what changed. A REST catalog writes the file and
gets `add-encryption-key` updates. `pyiceberg_classes` connects this with catalogs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pyiceberg.io import FileIO, InputFile, OutputFile, OutputStream
from pyiceberg.table import CommitTableResponse, TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.typedef import IcebergBaseModel

from parquet_keytools.encryption.file_encryption import FileEncryption, encrypt_source
from parquet_keytools.errors import NotEncryptedError, OutputError
from parquet_keytools.iceberg import ags1
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.file_io import EncryptedFileIO, EncryptedInputFile
from parquet_keytools.iceberg.key_chain import KeyChanges
from parquet_keytools.iceberg.manifests import ListedFile
from parquet_keytools.iceberg.metadata import MAX_METADATA_BYTES, StandardKeyMetadata, read_document
from parquet_keytools.runtime.threads_and_forks import share_with_arrow
from parquet_keytools.storage.locations import BufferSource
from parquet_keytools.storage.outputs import StreamSink

_log = logging.getLogger(__name__)

_KEYS, _KEY_ID = "encryption-keys", "key-id"
_HASH = "metadata_hash"
_IDENTITIES = ("snapshot-id", "schema-id", "spec-id", "order-id")
"""Fields that identify an element of a list, whose other fields may change."""


# --- data files and manifests ---


class StoredFileIO(FileIO):
    """Reads and writes files of a table as they are stored: metadata files in plaintext, and ciphertext.

    `places` are where it may write and delete; None for a new table, which lies where its creator says.
    """

    def __init__(self, reader: EncryptedFileIO, places: TablePlaces | None) -> None:
        super().__init__(reader.properties)
        self._reader = reader
        self._places = places

    def new_input(self, location: str) -> InputFile:
        """Return a file to read."""
        return self._reader.stored_input(location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write; a location outside of the places of the table is refused."""
        if self._places is not None:
            self._places.check(location)
        return self._reader.stored_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; a location outside of the places of the table is refused."""
        if self._places is not None:
            self._places.check(location if isinstance(location, str) else location.location)
        self._reader.delete(location)


class WritingFileIO(FileIO):
    """Reads like another FileIO, and encrypts what it writes: `.avro` as AGS1, `.parquet` as Parquet."""

    def __init__(self, reader: EncryptedFileIO, length_bits: int, places: TablePlaces) -> None:
        super().__init__(reader.properties)
        self.reader = reader
        self.storage = StoredFileIO(reader, places)
        self._length_bits = length_bits
        self._written: dict[str, StandardKeyMetadata] = {}
        self._begun: set[str] = set()

    def new_input(self, location: str) -> InputFile:
        """Return a file to read, decrypted."""
        if location not in self._written:
            return self.reader.new_input(location)
        return EncryptedInputFile(location, self.storage.new_input, self._open_written)

    def _open_written(self, location: str) -> Any:
        key_metadata = self._written[location]
        length = key_metadata.file_length or 0
        format_ = "AVRO" if location.endswith(".avro") else "PARQUET"
        file = ListedFile(location, "file", format_, length, is_live=True, encoded_key=key_metadata.encode())
        return self.reader.open_listed(file)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write, encrypted; `OutputError` for a kind of file that cannot be encrypted."""
        if not location.endswith((".avro", ".parquet")):
            raise OutputError(
                f"{location}: a file of this kind would be written in plaintext into an encrypted table.",
                hint="Write data files in Parquet; statistics files are not supported.",
            )
        self._begun.add(location)
        return _EncryptedOutput(
            location, self.storage.new_output(location), self._length_bits, self._written.__setitem__
        )

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file."""
        self.storage.delete(location)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process only reads, and learns the keys again: a pickle holds none.
        return self.reader.__reduce__()

    def key_metadata(self, location: str) -> StandardKeyMetadata:
        """Return the key metadata of a file; `NotEncryptedError` if it was not written here."""
        metadata = self._written.get(location)
        if metadata is None:
            raise NotEncryptedError(
                f"{location}: the file was not written by this table, and would be a plaintext file in "
                "an encrypted table.",
                hint="Read the file, and append its rows.",
            )
        return metadata

    def remove_begun(self) -> None:
        """Delete the files that were begun, whether or not they were finished."""
        while self._begun:
            location = self._begun.pop()
            try:
                self.delete(location)
            except FileNotFoundError:
                pass
            except Exception:
                _log.warning("a file of a commit that failed could not be removed: %s", location)

    def keep_begun(self) -> None:
        """Keep the files that were begun: they belong to the table now."""
        self._begun.clear()


class _EncryptedOutput(OutputFile):
    def __init__(
        self,
        location: str,
        file: OutputFile,
        length_bits: int,
        finished: Callable[[str, StandardKeyMetadata], None],
    ) -> None:
        super().__init__(location)
        self._file = file
        self._length_bits = length_bits
        self._finished = finished

    def __len__(self) -> int:
        return len(self._file)

    def exists(self) -> bool:
        return self._file.exists()

    def to_input_file(self) -> InputFile:
        return self._file.to_input_file()

    def create(self, overwrite: bool = False) -> OutputStream:
        # A key for each stream: an output that is created twice never encrypts two files under one key.
        metadata = StandardKeyMetadata.fresh(self._length_bits)
        return _EncryptedStream(self.location, self._file.create(overwrite=overwrite), metadata, self._finished)


class _EncryptedStream(io.BytesIO):
    """Takes a plaintext file in memory, and writes it encrypted when it is closed.

    `finished` is called with the location and the key metadata of a complete file.
    """

    def __init__(
        self,
        location: str,
        stream: OutputStream,
        metadata: StandardKeyMetadata,
        finished: Callable[[str, StandardKeyMetadata], None],
    ) -> None:
        super().__init__()
        self._location = location
        self._sink = StreamSink(stream)
        self._stream = stream
        self._metadata = metadata
        self._finished = finished
        share_with_arrow(self)

    def close(self) -> None:
        if self.closed:
            return
        plaintext = self.getvalue()
        super().close()
        try:
            self._encrypt(plaintext)
        finally:
            self._stream.close()
        self._finished(self._location, replace(self._metadata, file_length=self._sink.length))

    def _encrypt(self, plaintext: bytes) -> None:
        metadata, sink = self._metadata, self._sink
        if self._location.endswith(".avro"):
            for part in ags1.encrypted(plaintext, metadata):
                sink.write_at(sink.length, part)
            return
        encryption = FileEncryption(
            metadata.encryption_key, aad_prefix=metadata.aad_prefix, store_aad_prefix=False
        )
        # A file that a failure left incomplete is not Parquet, and nothing of it is written.
        encrypt_source(BufferSource(self._location, plaintext), sink, encryption)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            super().close()
            self._stream.close()

    def __del__(self) -> None:
        # io.BytesIO would call `close`, and a file that was not closed is not complete.
        pass


# --- metadata files ---


class MetadataFiles:
    """The metadata files of one commit, through a catalog that writes them itself: SQL, Hive, Glue, DynamoDB."""

    def __init__(self, storage: FileIO, changes: KeyChanges) -> None:
        self.storage = storage
        self._changes = changes
        self._written: list[str] = []

    def write(self, metadata: TableMetadata, location: str) -> None:
        """Write a metadata file: the file before it plus what changed."""
        document = dumped(metadata)
        keys_before: dict[int, str] = {}
        if metadata.metadata_log:
            location_before = metadata.metadata_log[-1].metadata_file
            with self.storage.new_input(location_before).open() as file:
                before = read_document(file.read(), location_before)
            document = merged(before, document)
            keys_before = _snapshot_keys(before)
        self._changes.apply(document)
        if lost := _without_key(document, keys_before):
            raise OutputError(f"the commit would lose the keys of snapshots: {sorted(lost)}.")
        # Refused here if the metadata file that the catalog loaded for this commit leads elsewhere.
        output = self.storage.new_output(location)
        self._written.append(location)
        try:
            with output.create() as stream:
                stream.write(json.dumps(document).encode())
        except Exception as error:
            self.remove_written()
            failure = f"the metadata file could not be written ({type(error).__name__})"
            raise OutputError(f"{location}: {failure}.") from error

    def remove_written(self) -> None:
        """Remove the metadata file of this commit, which the catalog does not use."""
        for location in self._written:
            with contextlib.suppress(Exception):
                self.storage.delete(location)
        self._written.clear()

    def delete_dropped(
        self, before: TableMetadata, response: CommitTableResponse, properties: Mapping[str, str]
    ) -> None:
        """Delete metadata files that dropped out of the metadata log, as PyIceberg does if the table asks for it.

        Anyone may have put anything into the log. Only metadata files of this very table are deleted, in the
        folder of the new metadata file.
        """
        after, location = response.metadata, response.metadata_location
        if after.properties.get(TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED, "").lower() != "true":
            return
        places = TablePlaces(location, properties)
        kept = [location, *(entry.metadata_file for entry in after.metadata_log)]
        for dropped in {entry.metadata_file for entry in before.metadata_log}:
            if any(places.is_same(dropped, other) for other in kept):
                continue
            is_ours = False
            with contextlib.suppress(Exception):
                if places.has_metadata(dropped):
                    with self.storage.new_input(dropped).open() as file:
                        document = read_document(file.read(MAX_METADATA_BYTES + 1), dropped)
                    is_ours = document.get("table-uuid") == str(after.table_uuid)
                if is_ours:
                    self.storage.delete(dropped)
            if not is_ours:
                _log.warning("the metadata log names %s, which is not deleted: it may be another table's", dropped)


def refuse_hashed(parameters: Mapping[str, str] | None) -> None:
    """Refuse a commit if the catalog has a hash of the metadata, which only Java renews (`OutputError`)."""
    if _HASH in (parameters or {}):
        raise OutputError(
            f"the catalog has a hash of the table's metadata, {_HASH}, which only Iceberg's Java library renews: "
            "after this commit, Java would take the table for a changed one, and refuse it.",
            hint="Write this table with Java alone, or put it into a REST catalog.",
        )


def _snapshot_keys(document: dict[str, Any]) -> dict[int, str]:
    return {s["snapshot-id"]: s[_KEY_ID] for s in document.get("snapshots") or [] if s.get(_KEY_ID)}


def _without_key(document: dict[str, Any], keys_before: dict[int, str]) -> set[int]:
    """Return the snapshots whose key changed, or is not among the entries."""
    keys = _snapshot_keys(document)
    entries = {entry.get(_KEY_ID) for entry in document.get(_KEYS) or []}
    left = {snapshot["snapshot-id"] for snapshot in document.get("snapshots") or []}
    changed = {snapshot for snapshot, key_id in keys_before.items() if keys.get(snapshot) != key_id}
    return (changed & left) | {snapshot for snapshot, key_id in keys.items() if key_id not in entries}


def dumped(metadata: TableMetadata) -> dict[str, Any]:
    """Return what PyIceberg would write; its own model of version 3 refuses to be written."""
    document: dict[str, Any] = json.loads(IcebergBaseModel.model_dump_json(metadata))
    document.setdefault("next-row-id", 0)
    return document


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a metadata file with what changed, as PyIceberg would write it, and everything else as it was."""
    known = dumped(TableMetadataUtil.parse_obj(copy.deepcopy(before)))
    result: dict[str, Any] = _merged(before, known, after)
    return result


def _merged(raw: Any, known: Any, wanted: Any) -> Any:
    """Return `wanted` with the parts of `raw` that PyIceberg, which sees `known` of it, does not know."""
    if known == wanted:
        return raw
    if isinstance(raw, dict) and isinstance(known, dict) and isinstance(wanted, dict):
        unknown = {name: value for name, value in raw.items() if name not in known}
        return unknown | {
            name: _merged(raw.get(name, value), known.get(name), value) for name, value in wanted.items()
        }
    if isinstance(raw, list) and isinstance(known, list) and isinstance(wanted, list):
        pairs = list(zip(raw, known, strict=False))
        return [_merged(*_counterpart(pairs, element), element) for element in wanted]
    return wanted


def _counterpart(pairs: list[tuple[Any, Any]], element: Any) -> tuple[Any, Any]:
    """Return the earlier state of a list element, raw and known, or a pair of None if it is new."""
    for raw, known in pairs:
        if known == element:
            return raw, known
    name = next((n for n in _IDENTITIES if isinstance(element, dict) and n in element), None)
    for raw, known in pairs:
        if name is not None and isinstance(known, dict) and known.get(name) == element[name]:
            return raw, known
    return None, None
