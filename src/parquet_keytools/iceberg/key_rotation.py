"""Changes of the `encryption-keys` of a table, and their form in metadata files and commits to REST catalogs.

This file does not know how a metadata file is written, or through which catalog.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.exceptions import CommitFailedException

from parquet_keytools.iceberg.key_chain import KeyChain, as_json, is_young
from parquet_keytools.iceberg.metadata import EncryptionKey

_KEYS, _KEY_ID = "encryption-keys", "key-id"


@dataclass(frozen=True)
class KeyChanges:
    """What a commit changes about the keys of a table.

    Attributes:
        added: New entries; entries that the table already has are not added again.
        snapshot_keys: Snapshot id -> `key-id` of its manifest list key.
        replaced: Expected entries, and their replacements with the same `key-id`.
        removed: The `key-id` of each entry that is no longer needed.
    """

    added: Sequence[EncryptionKey] = ()
    snapshot_keys: dict[int, str] = field(default_factory=dict)
    replaced: Sequence[tuple[EncryptionKey, EncryptionKey]] = ()
    removed: Sequence[str] = ()

    def apply(self, document: dict[str, Any]) -> None:
        """Change a metadata file; `CommitFailedException` if an entry to replace, or a needed KEK, is gone."""
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


def rotation(chain: KeyChain) -> KeyChanges:
    """Return the re-wrapping of all KEKs under the current version of their master key; errors of the KMS."""
    return KeyChanges(replaced=[(kek, chain.rewrapped(kek)) for kek in chain.table.keks])


def removal(chain: KeyChain) -> KeyChanges:
    """Return the removal of the entries that no snapshot needs, except KEKs that new snapshots may use."""
    now_ms = time.time() * 1000
    young = {kek.key_id for kek in chain.table.keks if is_young(kek, now_ms)}
    return KeyChanges(removed=[key_id for key_id in chain.table.unneeded_keys if key_id not in young])
