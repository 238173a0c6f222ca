"""Rotation of the KEKs of a table: which of its `encryption-keys` change, and how a metadata file has them then.

This does not know how a metadata file is written, or through which catalog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyiceberg.exceptions import CommitFailedException

from parquet_keytools.errors import OutputError
from parquet_keytools.iceberg.file_io import EncryptedFileIO
from parquet_keytools.iceberg.key_chain import as_json, is_young, master_key_of, rewrapped
from parquet_keytools.iceberg.known_tables import KnownTable
from parquet_keytools.iceberg.metadata import EncryptionKey

_ATTEMPTS = 10
_KEYS, _KEY_ID = "encryption-keys", "key-id"


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


class KeyedTable(Protocol):
    """A table whose keys can be changed."""

    @property
    def reader(self) -> EncryptedFileIO:
        """What decrypts the files of the table."""
        ...

    def known(self) -> KnownTable:
        """Return what the metadata file says of the keys."""
        ...

    def refresh(self) -> Any:
        """Load the current state of the table."""
        ...

    def commit_key_changes(self, changes: KeyChanges) -> None:
        """Commit changes of keys alone; `CommitFailedException` where another commit was first."""
        ...


def rotate(table: KeyedTable) -> tuple[str, ...]:
    """Re-wrap the KEKs of a table under the current version of their master key; return their `key-id`.

    Raises:
        OutputError: Other commits were first, again and again, or the metadata file could not be written.
        KmsError: The KMS does not wrap or unwrap a KEK; the table is as it was.
    """
    return _change_keys(
        table,
        lambda known: KeyChanges(
            replaced=[(kek, rewrapped(table.reader.keys, known.chain, kek)) for kek in known.encryption.keks]
        ),
    )


def remove_unneeded_keys(table: KeyedTable) -> tuple[str, ...]:
    """Remove the entries of `encryption-keys` that no snapshot needs; return their `key-id`.

    Raises:
        OutputError: Other commits were first, again and again, or the metadata file could not be written.
    """

    def changes(known: KnownTable) -> KeyChanges:
        encryption, now_ms = known.encryption, time.time() * 1000
        young = {kek.key_id for kek in encryption.keks if is_young(kek, now_ms)}
        return KeyChanges(removed=[key_id for key_id in encryption.unneeded_keys if key_id not in young])

    return _change_keys(table, changes)


def _change_keys(table: KeyedTable, changes_of: Callable[[KnownTable], KeyChanges]) -> tuple[str, ...]:
    """Commit changes of keys, made from the current state each time; return the `key-id` of each."""
    for _ in range(_ATTEMPTS):
        known = table.known()
        master_key_of(known.encryption)
        changes = changes_of(known)
        changed = (*(kek.key_id for kek, _ in changes.replaced), *changes.removed)
        if not changed:
            return ()
        try:
            table.commit_key_changes(changes)
        except CommitFailedException:
            table.refresh()
            continue
        return changed
    raise OutputError(
        f"other commits changed the table {_ATTEMPTS} times while its keys were changed.",
        hint="It is as they left it. Try again.",
    )
