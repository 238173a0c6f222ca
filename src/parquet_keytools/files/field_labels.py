"""Labels in the metadata of Arrow and Spark fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from parquet_keytools.config.labels import ColumnPath, FieldLabels
from parquet_keytools.encryption.footer import Footer
from parquet_keytools.errors import ConfigurationError, ParquetFormatError
from parquet_keytools.format.partial_footers import ARROW_SCHEMA_KEY, SPARK_SCHEMA_KEY


def labels_of_footer(footer: Footer) -> FieldLabels:
    """Return the labels that a Parquet file carries, in the schemas that Arrow and Spark keep in its footer."""
    return partial(_in_footer, footer)


def _in_footer(footer: Footer, field: str) -> Mapping[ColumnPath, str]:
    found: dict[ColumnPath, str] = {}
    for entry in footer.metadata.key_value_metadata or []:
        try:
            if entry.key == SPARK_SCHEMA_KEY:
                read = labels_of_spark(json.loads(entry.value or ""), field)
            elif entry.key == ARROW_SCHEMA_KEY:
                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(entry.value or "")))
                read = labels_of_schema(schema, field)
            else:
                continue
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # A label that cannot be read must not leave its column in plaintext.
            raise ParquetFormatError(
                f"the schema under {entry.key!r} in its metadata is not valid, and may hold labels of columns",
                path=footer.path,
            ) from None
        for path, label in read.items():
            _add(found, path, label)
    return found


def _add(found: dict[ColumnPath, str], path: ColumnPath, label: str) -> None:
    """Add a label; refuse two of one field, of which one could protect less."""
    if found.setdefault(path, label) != label:
        raise ConfigurationError(
            f"the field {'.'.join(path)!r} has two labels: {found[path]!r} and {label!r}.",
            hint="Correct the metadata of the field, in Arrow's schema and in Spark's.",
        )


def labels_of_spark(schema: Any, field: str) -> Mapping[ColumnPath, str]:
    """Return the labels in the JSON form of a Spark schema: path of a field -> label."""
    found: dict[ColumnPath, str] = {}

    def look(data_type: Any, path: ColumnPath) -> None:
        if not isinstance(data_type, dict):
            return
        for child in data_type.get("fields") or []:
            below = (*path, str(child["name"]))
            label = (child.get("metadata") or {}).get(field)
            if label is not None:
                _add(found, below, str(label))
            look(child.get("type"), below)
        look(data_type.get("sqlType"), path)
        look(data_type.get("elementType"), path)
        look(data_type.get("keyType"), (*path, "key"))
        look(data_type.get("valueType"), (*path, "value"))

    look(schema, ())
    return found


def labels_of_schema(schema: pa.Schema, field: str) -> Mapping[ColumnPath, str]:
    """Return the labels in the metadata of the fields of a `pyarrow.Schema`: path of a field -> label."""
    found: dict[ColumnPath, str] = {}
    key = field.encode()

    def look(one: pa.Field, path: ColumnPath) -> None:
        label = (one.metadata or {}).get(key)
        if label is not None:
            _add(found, path, label.decode("utf-8", "replace"))
        look_into(one.type, path)

    def look_into(data_type: pa.DataType, path: ColumnPath) -> None:
        if pa.types.is_struct(data_type):
            for position in range(data_type.num_fields):
                child = data_type.field(position)
                look(child, (*path, child.name))
        elif pa.types.is_map(data_type):
            look(data_type.key_field, (*path, "key"))
            look(data_type.item_field, (*path, "value"))
        elif hasattr(data_type, "value_field"):
            look(data_type.value_field, path)
        elif isinstance(data_type, pa.BaseExtensionType):
            look_into(data_type.storage_type, path)
        elif pa.types.is_dictionary(data_type) or pa.types.is_run_end_encoded(data_type):
            look_into(data_type.value_type, path)

    for one in schema:
        look(one, (one.name,))
    return found
