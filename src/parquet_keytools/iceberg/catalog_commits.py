"""Commits whose metadata file keeps `encryption-keys` and the `key-id` of snapshots, which PyIceberg 0.12 drops.

PyIceberg is not changed for other tables: a commit goes through a copy of the catalog, of a class of its own.
Catalogs that write the metadata file themselves write it as the file before plus what changed, so that any field
which PyIceberg does not know survives. A REST catalog gets `add-encryption-key` updates, and writes the file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO
from pyiceberg.table import CommitTableResponse, TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.typedef import IcebergBaseModel

from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.key_chain import as_json
from parquet_keytools.iceberg.metadata import MAX_METADATA_BYTES, EncryptionKey, read_document

_log = logging.getLogger(__name__)

_KEYS, _KEY_ID = "encryption-keys", "key-id"
_HASH = "metadata_hash"


@dataclass(frozen=True)
class KeyChanges:
    """What a commit changes of the keys of a table.

    Attributes:
        added: Entries that are new; those that the table has already are not added again.
        snapshot_keys: Snapshot id -> `key-id` of its manifest list key.
        replaced: Entries that are expected, and what they become; of the same `key-id`.
        removed: The `key-id` of entries that nothing needs.
    """

    added: Sequence[EncryptionKey] = ()
    snapshot_keys: dict[int, str] = field(default_factory=dict)
    replaced: Sequence[tuple[EncryptionKey, EncryptionKey]] = ()
    removed: Sequence[str] = ()

    def apply(self, document: dict[str, Any]) -> None:
        """Change a metadata file; `CommitFailedException` where what is to be replaced, or a KEK, is gone."""
        entries = list(document.get(_KEYS) or [])
        for old, new in self.replaced:
            found = (entry for entry in entries if as_json(old).items() <= entry.items())
            if (entry := next(found, None)) is None:
                raise CommitFailedException(f"the KEK {old.key_id!r} was changed by another commit")
            entries[entries.index(entry)] = {**entry, **as_json(new)}
        known = {entry.get(_KEY_ID) for entry in entries}
        entries += [as_json(entry) for entry in self.added if entry.key_id not in known]
        entries = [entry for entry in entries if entry.get(_KEY_ID) not in self.removed]
        left = {entry.get(_KEY_ID) for entry in entries}
        lost = (known - left) | {entry.encrypted_by_id for entry in self.added if entry.timestamp is None} - left
        if lost & {entry.get("encrypted-by-id") for entry in entries}:
            raise CommitFailedException("another commit changed which KEKs there are")
        if entries or self.removed:
            document[_KEYS] = entries
        for snapshot in document.get("snapshots") or []:
            key_id = self.snapshot_keys.get(snapshot["snapshot-id"])
            if key_id is not None:
                snapshot[_KEY_ID] = key_id

    def apply_to_request(self, request: dict[str, Any]) -> None:
        """Change the request of a commit to a REST catalog."""
        updates: list[dict[str, Any]] = []
        for old, new in self.replaced:
            updates.append({"action": "remove-encryption-key", _KEY_ID: old.key_id})
            updates.append({"action": "add-encryption-key", "encryption-key": as_json(new)})
        updates += [{"action": "add-encryption-key", "encryption-key": as_json(entry)} for entry in self.added]
        updates += [{"action": "remove-encryption-key", _KEY_ID: key_id} for key_id in self.removed]
        for update in request["updates"]:
            if update.get("action") == "add-snapshot":
                key_id = self.snapshot_keys.get(update["snapshot"]["snapshot-id"])
                if key_id is not None:
                    update["snapshot"][_KEY_ID] = key_id
        # Keys first: the snapshots name them.
        request["updates"] = updates + request["updates"]


def committing(catalog: Catalog, storage: FileIO, changes: KeyChanges) -> Catalog:
    """Return a copy of a catalog for one commit, or for the creation of one table."""
    copied = copy.copy(catalog)
    if isinstance(copied, RestCatalog):
        copied._session = _Session(copied._session, changes)  # type: ignore[assignment]
        return copied
    # Its methods are looked up in the class: the copy gets a class that has ours before those of the catalog.
    copied.__class__ = type(f"Encrypted{type(catalog).__name__}", (_FileCommit, type(catalog)), {})
    copied.__dict__["_keytools_commit"] = _Commit(storage, changes)
    return copied


@dataclass
class _Commit:
    storage: FileIO
    changes: KeyChanges
    written: list[str] = field(default_factory=list)


class _FileCommit(Catalog):
    """A catalog that writes metadata files itself: SQL, Hive, Glue, DynamoDB."""

    _keytools_commit: _Commit

    def _load_file_io(self, properties: Any = None, location: str | None = None) -> FileIO:
        return self._keytools_commit.storage

    def _write_metadata(self, metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:
        commit = self._keytools_commit
        document = dumped(metadata)
        keys_before: dict[int, str] = {}
        if metadata.metadata_log:
            location = metadata.metadata_log[-1].metadata_file
            with commit.storage.new_input(location).open() as file:
                before = read_document(file.read(), location)
            document = merged(before, document)
            keys_before = _snapshot_keys(before)
        commit.changes.apply(document)
        if lost := _without_key(document, keys_before):
            raise OutputError(f"the commit would lose the keys of snapshots: {sorted(lost)}.")
        # Refused here, where the metadata file that the catalog loaded for this commit leads elsewhere.
        output = commit.storage.new_output(metadata_path)
        commit.written.append(metadata_path)
        try:
            with output.create() as stream:
                stream.write(json.dumps(document).encode())
        except Exception as error:
            self._remove_written()
            failure = f"the metadata file could not be written ({type(error).__name__})"
            raise OutputError(f"{metadata_path}: {failure}.") from error

    # The name by which Glue's catalog calls it for managed storage.
    _write_metadata_no_exist_check = _write_metadata

    # What the catalogs of Hive and Glue call with their own entry of a table, before they write.
    def _convert_hive_into_iceberg(self, table: Any) -> Any:
        _refuse_hashed(table.parameters)
        return super()._convert_hive_into_iceberg(table)  # type: ignore[misc]

    def _convert_glue_to_iceberg(self, glue_table: Any) -> Any:
        _refuse_hashed(glue_table.get("Parameters"))
        return super()._convert_glue_to_iceberg(glue_table)  # type: ignore[misc]

    def create_table(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().create_table(*arguments, **named)  # type: ignore[safe-super]
        except TableAlreadyExistsError:
            self._remove_written()
            raise

    def commit_table(self, table: Any, requirements: Any, updates: Any) -> Any:
        try:
            response = super().commit_table(table, requirements, updates)  # type: ignore[safe-super]
        except CommitFailedException:
            self._remove_written()
            raise
        except KeytoolsError:
            raise
        except Exception as error:
            if not self._has_refused(table, error):
                raise
            self._remove_written()
            raise OutputError(f"the catalog did not take the commit ({type(error).__name__}).") from error
        self._delete_dropped_metadata(table.metadata, response)
        return response

    def _delete_dropped_metadata(self, before: TableMetadata, response: CommitTableResponse) -> None:
        """Delete what dropped out of the metadata log, as PyIceberg does after a commit if the table asks for it.

        Anybody may have put anything into the log. What is deleted is a metadata file of this very table, which
        lies in the folder of the new one.
        """
        after, location = response.metadata, response.metadata_location
        if after.properties.get(TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED, "").lower() != "true":
            return
        places = TablePlaces(location, self.properties)
        kept = [location, *(entry.metadata_file for entry in after.metadata_log)]
        for dropped in {entry.metadata_file for entry in before.metadata_log}:
            if any(places.is_same(dropped, other) for other in kept):
                continue
            is_ours = False
            with contextlib.suppress(Exception):
                is_ours = places.has_metadata(dropped) and self._is_of_table(dropped, after)
                if is_ours:
                    self._keytools_commit.storage.delete(dropped)
            if not is_ours:
                _log.warning("the metadata log names %s, which is not deleted: it may be another table's", dropped)

    def _is_of_table(self, location: str, metadata: TableMetadata) -> bool:
        with self._keytools_commit.storage.new_input(location).open() as file:
            content = file.read(MAX_METADATA_BYTES + 1)
        return read_document(content, location).get("table-uuid") == str(metadata.table_uuid)

    def _has_refused(self, table: Any, error: Exception) -> bool:
        """Return whether it is certain that a commit failed: the database has another file."""
        if not is_refusal(self, error):
            return False
        try:
            current = self.load_table(table.name())
        except Exception:
            return False
        return current.metadata_location not in self._keytools_commit.written

    def _remove_written(self) -> None:
        """Remove the metadata file of this commit: the catalog refers to another one."""
        commit = self._keytools_commit
        for location in commit.written:
            with contextlib.suppress(Exception):
                commit.storage.delete(location)
        commit.written.clear()


def _refuse_hashed(parameters: Mapping[str, str] | None) -> None:
    """Refuse a commit to a table whose hash in the catalog only Java renews: it would refuse the table then."""
    if _HASH in (parameters or {}):
        raise OutputError(
            f"the catalog has a hash of the table's metadata, {_HASH}, which only Iceberg's Java library renews: "
            "it would take the table for one that somebody changed after this commit.",
            hint="Write this table with Java alone, or put it into a REST catalog.",
        )


def is_refusal(catalog: Catalog, error: Exception) -> bool:
    """Return whether an error of a commit is a definite no, as far as the catalog shows no such commit.

    A database that is still connected rolled the commit back, and a server refused it by its status. A connection
    that was lost says nothing: the commit may still come.
    """
    if isinstance(catalog, RestCatalog):
        return isinstance(error, (BadRequestError, UnauthorizedError, ForbiddenError, NoSuchTableError))
    # Only SQL catalogs have an engine, that of SQLAlchemy.
    return hasattr(catalog, "engine") and not getattr(error, "connection_invalidated", False)


class _Session:
    """The HTTP session of a REST catalog, which adds to a commit what PyIceberg's models cannot hold."""

    def __init__(self, session: Any, changes: KeyChanges) -> None:
        self._session = session
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def post(self, url: str, data: bytes | None = None, **named: Any) -> Any:
        """Send a request; one with updates is that of a commit."""
        request = json.loads(data) if data is not None else None
        if isinstance(request, dict) and "updates" in request:
            self._changes.apply_to_request(request)
            data = json.dumps(request).encode()
        return self._session.post(url, data=data, **named)


def _snapshot_keys(document: dict[str, Any]) -> dict[int, str]:
    return {s["snapshot-id"]: s[_KEY_ID] for s in document.get("snapshots") or [] if s.get(_KEY_ID)}


def _without_key(document: dict[str, Any], keys_before: dict[int, str]) -> set[int]:
    """Return the snapshots whose key is not what it was, or is not among the entries."""
    keys = _snapshot_keys(document)
    entries = {entry.get(_KEY_ID) for entry in document.get(_KEYS) or []}
    left = {snapshot["snapshot-id"] for snapshot in document.get("snapshots") or []}
    changed = {snapshot for snapshot, key_id in keys_before.items() if keys.get(snapshot) != key_id}
    return (changed & left) | {snapshot for snapshot, key_id in keys.items() if key_id not in entries}


def dumped(metadata: TableMetadata) -> dict[str, Any]:
    """Return what PyIceberg would write; its model of version 3 refuses to be written, for what it would drop."""
    document: dict[str, Any] = json.loads(IcebergBaseModel.model_dump_json(metadata))
    document.setdefault("next-row-id", 0)
    return document


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a metadata file with what changed, as PyIceberg would write it, and with all else as it was."""
    known = dumped(TableMetadataUtil.parse_obj(copy.deepcopy(before)))
    result: dict[str, Any] = _merged(before, known, after)
    return result


def _merged(raw: Any, known: Any, wanted: Any) -> Any:
    """Return what is wanted in the place of `raw`, of which PyIceberg knows no more than `known`."""
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
    """Return what an element of a list was before, raw and known, or nothing where it is new."""
    for raw, known in pairs:
        if known == element:
            return raw, known
    for name in _IDENTITIES:
        if isinstance(element, dict) and name in element:
            for raw, known in pairs:
                if isinstance(known, dict) and known.get(name) == element[name]:
                    return raw, known
            break
    return None, None


_IDENTITIES = ("snapshot-id", "schema-id", "spec-id", "order-id")
"""Fields that say which element of a list one is; what it was before may have other fields."""
