"""Key-value metadata of a file of which some columns cannot be read: nothing in it may be of their values.

Writers put there the box around all places of a geometry, the categories of a column, the ends of an index.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow as pa

from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.format.partial_footers import ARROW_SCHEMA_KEY
from parquet_keytools.format.schema_key_values import SPARK_SCHEMA_KEY, VisibleKeyValues, schema_alone
from parquet_keytools.format.structs import KeyValue

_PANDAS_FIELDS = ("index_columns", "column_indexes", "columns", "creator", "pandas_version")
"""Not `attributes` and what pandas may add: they may hold values."""

_ONLY_SCHEMA = VisibleKeyValues()


def shown_key_values(
    opened: OpenedFile, shown: Collection[str], nullable: Collection[str] = frozenset()
) -> dict[str, str | None]:
    """Return what becomes of entries of a file's key-value metadata: the new value, or None to leave one out.

    Where columns cannot be read, only what is known to hold nothing of them stays: what says the schema, and what
    pandas and GeoParquet say of other columns.

    Args:
        opened: The file.
        shown: Names of the top-level columns that readers see.
        nullable: Those of them that may be null, whatever the file says.
    """
    entries = opened.footer.metadata.key_value_metadata or []
    if not opened.denied:
        return {
            entry.key: _arrow_schema(entry.value or "", shown, nullable, frozenset())
            for entry in entries
            if entry.key == ARROW_SCHEMA_KEY
        }
    denied = opened.denied_top_level
    return {
        entry.key: None if entry.value is None else _shown(entry.key, entry.value, shown, nullable, denied)
        for entry in entries
    }


def _shown(
    key: str, value: str, shown: Collection[str], nullable: Collection[str], denied: frozenset[str]
) -> str | None:
    """Return what is shown of a value; None for nothing."""
    try:
        if key == ARROW_SCHEMA_KEY:
            return _arrow_schema(value, shown, nullable, denied)
        if key in _OF_COLUMNS:
            of_others = _OF_COLUMNS[key](json.loads(value), shown, denied)
            return None if of_others is None else json.dumps(of_others)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if key == SPARK_SCHEMA_KEY:
        return None  # It has all columns, as the file has them.
    entry = KeyValue()
    entry.key, entry.value = key, value
    alone = _ONLY_SCHEMA.shown(entry)
    return None if alone is None else alone.value


def _arrow_schema(
    value: str, shown: Collection[str], nullable: Collection[str], denied: frozenset[str]
) -> str | None:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except (pa.ArrowException, ValueError):
        return None
    fields = []
    for field in schema:
        if field.name in shown:
            alone = _without_metadata(field) if field.name in denied else field
            if alone is None:
                return None
            fields.append(alone.with_nullable(alone.nullable or alone.name in nullable))
    metadata = schema.metadata
    if denied and metadata:
        metadata = _metadata_of_schema(metadata, shown, denied)
    return base64.b64encode(pa.schema(fields, metadata).serialize()).decode()


def _without_metadata(field: pa.Field) -> pa.Field | None:
    """Return a field without metadata of its own and of those below it; None where that fails."""
    if field.metadata is None and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
        return field  # It has nothing but its name, and wide tables have thousands of such fields.
    message = schema_alone(pa.schema([field]).serialize().to_pybytes())
    return None if message is None else pa.ipc.read_schema(pa.py_buffer(message)).field(0)


def _metadata_of_schema(
    metadata: Mapping[bytes, bytes], shown: Collection[str], denied: frozenset[str]
) -> dict[str, str]:
    """Return what is shown of the metadata of Arrow's schema, which has the same entries as the file."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key != ARROW_SCHEMA_KEY.encode():
            kept = _shown(key.decode(), value.decode(), shown, frozenset(), denied)
            if kept is not None:
                found[key.decode()] = kept
    return found


def _pandas(known: Any, shown: Collection[str], denied: frozenset[str]) -> Any:
    kept = {name: known[name] for name in _PANDAS_FIELDS if name in known}
    kept["index_columns"] = [
        index for index in known["index_columns"] if not isinstance(index, str) or index in shown
    ]
    kept["columns"] = columns = []
    for column in known["columns"]:
        names = {column["name"], column["field_name"]}
        if column["field_name"] in shown:
            columns.append({**column, "metadata": None} if names & denied else column)
    return kept


def _geo(known: Any, shown: Collection[str], denied: frozenset[str]) -> Any:
    """Return what GeoParquet says of other columns; None where there is no other geometry."""
    columns = {name: dict(column) for name, column in known["columns"].items() if name in set(shown) - denied}
    if not columns:
        return None
    for column in columns.values():
        if _names_denied(column.get("covering"), denied):
            del column["covering"]
    primary = known["primary_column"]
    return {
        "version": known["version"],
        "primary_column": primary if primary in columns else next(iter(columns)),
        "columns": columns,
    }


def _names_denied(value: Any, denied: frozenset[str]) -> bool:
    if isinstance(value, dict):
        return any(_names_denied(item, denied) for item in value.values())
    if isinstance(value, list):
        return any(_names_denied(item, denied) for item in value)
    return isinstance(value, str) and value in denied


_OF_COLUMNS: Mapping[str, Callable[[Any, Collection[str], frozenset[str]], Any]] = {
    "pandas": _pandas,
    "geo": _geo,
}
"""Key -> what makes of its JSON what is of columns that can be read."""
