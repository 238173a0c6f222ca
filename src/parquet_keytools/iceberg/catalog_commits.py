"""Commits whose metadata file keeps `encryption-keys` and the `key-id` of snapshots, which PyIceberg 0.12 drops.

Catalogs that write the metadata file themselves write it as the file before plus what changed, so that any field
which PyIceberg does not know survives. A REST catalog gets `add-encryption-key` updates, and writes the file.
How a catalog is made to do so is in `pyiceberg_classes`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO
from pyiceberg.table import CommitTableResponse, Table, TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.typedef import IcebergBaseModel

from parquet_keytools.errors import OutputError
from parquet_keytools.iceberg.claims import TablePlaces
from parquet_keytools.iceberg.key_rotation import KeyChanges
from parquet_keytools.iceberg.metadata import MAX_METADATA_BYTES, read_document

_log = logging.getLogger(__name__)

_KEYS, _KEY_ID = "encryption-keys", "key-id"
_HASH = "metadata_hash"


class MetadataFiles:
    """The metadata files of one commit through a catalog that writes them itself: SQL, Hive, Glue, DynamoDB.

    Args:
        storage: Reads and writes them.
        changes: What the commit changes of the keys.
    """

    def __init__(self, storage: FileIO, changes: KeyChanges) -> None:
        self.storage = storage
        self._changes = changes
        self._written: list[str] = []

    def write(self, metadata: TableMetadata, location: str) -> None:
        """Write one as the file before it plus what changed.

        Raises:
            OutputError: It cannot be written, or would lose keys of snapshots.
            CommitFailedException: Another commit changed the same keys.
        """
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
        # Refused here, where the metadata file that the catalog loaded for this commit leads elsewhere.
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
        """Remove the metadata file of this commit: the catalog refers to another one."""
        for location in self._written:
            with contextlib.suppress(Exception):
                self.storage.delete(location)
        self._written.clear()

    def has_refused(self, catalog: Catalog, table: Table, error: Exception) -> bool:
        """Return whether it is certain that a commit failed: the catalog has another file."""
        if not is_refusal(catalog, error):
            return False
        try:
            current = catalog.load_table(table.name())
        except Exception:
            return False
        return current.metadata_location not in self._written

    def delete_dropped(
        self, before: TableMetadata, response: CommitTableResponse, properties: Mapping[str, str]
    ) -> None:
        """Delete what dropped out of the metadata log, as PyIceberg does after a commit if the table asks for it.

        Anybody may have put anything into the log. What is deleted is a metadata file of this very table, which
        lies in the folder of the new one.
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
                is_ours = places.has_metadata(dropped) and self._is_of_table(dropped, after)
                if is_ours:
                    self.storage.delete(dropped)
            if not is_ours:
                _log.warning("the metadata log names %s, which is not deleted: it may be another table's", dropped)

    def _is_of_table(self, location: str, metadata: TableMetadata) -> bool:
        with self.storage.new_input(location).open() as file:
            content = file.read(MAX_METADATA_BYTES + 1)
        return read_document(content, location).get("table-uuid") == str(metadata.table_uuid)


def refuse_hashed(parameters: Mapping[str, str] | None) -> None:
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
