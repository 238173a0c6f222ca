"""A footer without what it must not show in plaintext (spec 5.5)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from parquet_keytools.errors import VisibleMetadataError
from parquet_keytools.format.partial_footers import (
    hidden_chunk_fields,
    shown_footer,
    shown_metadata,
    shown_row_group,
)
from parquet_keytools.format.schema_key_values import SCHEMA_KEYS
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, FileMetaData, KeyValue, RowGroup

_log = logging.getLogger(__name__)

_INDEXES = (
    (ColumnChunk.offset_index_offset.field_id, ColumnChunk.offset_index_length.field_id),
    (ColumnChunk.column_index_offset.field_id, ColumnChunk.column_index_length.field_id),
)

_MOST_NAMED = 20
"""How many hidden things a message names."""


@dataclass(frozen=True)
class VisibleKeyValues:
    """Which key-value metadata of the file a plaintext footer shows, beside what says the schema only.

    Attributes:
        kept: Keys whose values are shown as they are.
        refuses: Whether a file is refused that has more than may be shown; else the rest is dropped.
    """

    kept: frozenset[str] = frozenset()
    refuses: bool = False

    def shown(self, entry: KeyValue) -> KeyValue | None:
        """Return what may be shown of an entry; None for nothing."""
        key, value = entry.key, entry.value
        if key in self.kept:
            return entry
        cleaner = SCHEMA_KEYS.get(key)
        if cleaner is None or value is None:
            return None
        cleaned = cleaner(value)
        if cleaned is None:
            return None
        shown = KeyValue()
        shown.key, shown.value = key, cleaned
        return shown

    def hides(self, entry: KeyValue) -> bool:
        """Return whether an entry has anything that may not be shown."""
        shown = self.shown(entry)
        return shown is None or shown.value != entry.value


class PlaintextFooterMaker:
    """Makes the parts of a plaintext footer, and keeps account of what is not shown and is nowhere else.

    Args:
        key_values: Which key-value metadata is shown.
        encrypted: Ordinals of the encrypted columns. Where there are none, everything is shown.
    """

    def __init__(self, key_values: VisibleKeyValues, encrypted: Collection[int]) -> None:
        self._key_values = key_values
        self._encrypted = frozenset(encrypted)
        self._lost: dict[str, None] = {}

    def protect_chunk(self, chunk: ColumnChunk, metadata: ColumnMetaData) -> None:
        """Set in the chunk of an encrypted column what is shown of its metadata, and remove fields not known."""
        for field_id in hidden_chunk_fields(chunk.struct):
            del chunk.struct.fields[field_id]
            self._lost[f"field {field_id} of a column chunk"] = None
        for offset_id, length_id in _INDEXES:
            if length_id not in chunk.struct.fields:
                chunk.struct.fields.pop(offset_id, None)  # Nobody can read an index without its length.
        # All of it is in the encrypted metadata.
        chunk.meta_data, _ = shown_metadata(metadata)

    def footer(self, metadata: FileMetaData, row_groups: list[RowGroup], path: str) -> FileMetaData:
        """Return a footer with these row groups that shows what it may.

        Raises:
            VisibleMetadataError: Something would be lost, and that is to be refused.
        """
        new = metadata.shallow_copy()
        new.row_groups = row_groups
        if not self._encrypted:
            return new
        entries = self._entries(metadata)
        shown_groups = []
        for row_group in row_groups:
            shown_group, hidden = shown_row_group(row_group, self._encrypted)
            self._lost.update(dict.fromkeys(hidden))
            shown_groups.append(shown_group)
        new, hidden = shown_footer(new)
        self._lost.update(dict.fromkeys(hidden))
        new.row_groups = shown_groups
        if new.key_value_metadata is not None:
            new.key_value_metadata = entries or None
        self._report(path)
        return new

    def _entries(self, metadata: FileMetaData) -> list[KeyValue]:
        entries = []
        for entry in metadata.key_value_metadata or ():
            shown = self._key_values.shown(entry)
            if self._key_values.hides(entry):
                part = "" if shown is None else "parts of "
                self._lost[f"{part}the value of key {entry.key[:80]!r}"] = None
            if shown is not None:
                entries.append(shown)
        return entries

    def _report(self, path: str) -> None:
        if not self._lost:
            return
        named = list(self._lost)
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        text = f"{', '.join(named[:_MOST_NAMED])}{more}"
        if self._key_values.refuses:
            raise VisibleMetadataError(
                f"{path}: a plaintext footer would show what may hold values of encrypted columns: {text}.",
                hint="List keys that hold none under `plaintext_footer_keys`, drop the rest by "
                "`plaintext_footer_key_values: drop`, or encrypt the footer.",
            )
        _log.warning(
            "%s: left out of the plaintext footer, for it may hold values of encrypted columns: %s", path, text
        )
