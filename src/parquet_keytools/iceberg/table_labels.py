"""Labels of columns of Iceberg tables, whose files are encrypted whole: which key a table may be under."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import pyarrow as pa
from pyiceberg.typedef import Identifier, Properties

from parquet_keytools.config.key_policy import (
    ChosenKey,
    ColumnPath,
    MasterKeyReference,
    resolve_columns,
    resolve_key,
)
from parquet_keytools.config.labels import nearest_first
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files.field_labels import labels_of_schema
from parquet_keytools.tables.properties import arrow_leaf_paths


def refuse_other_key(
    configuration: Configuration,
    identifier: Identifier,
    schema: pa.Schema,
    properties: Properties,
    master_key_id: str,
) -> None:
    """Refuse a table whose key is not the key of its labelled columns.

    A table of the configuration decides about it if its `labels_from` has an entry `iceberg` that names it.

    Args:
        configuration: The configuration.
        identifier: Name of the Iceberg table, with its namespaces.
        schema: Its schema; the doc of a field is in the metadata of the field.
        properties: Its properties.
        master_key_id: Its master key, as `Configuration.master_key_id` returns it.

    Raises:
        ConfigurationError: A column has no label, contradicting labels, or a label with another key.
    """
    for name, table in configuration.tables.items():
        source = table.labels.iceberg
        if source is None or not _is_named(identifier, source.name or name):
            continue
        leaves = arrow_leaf_paths(schema)
        labels = partial(_labels, ".".join(identifier), schema, properties, leaves)
        columns = resolve_columns(configuration, name, leaves, field_labels=labels, is_iceberg=True)
        if master_key_id not in map(configuration.master_key_id, table.labels.iceberg_keys):
            _refuse_other_key(configuration, columns, ".".join(identifier), master_key_id)


def _is_named(identifier: Identifier, name: str) -> bool:
    """Return whether a table has this name, with or without its namespaces. Some catalogs ignore case."""
    return name.casefold() in (".".join(identifier).casefold(), identifier[-1].casefold())


def _labels(
    table: str, schema: pa.Schema, properties: Properties, leaves: list[ColumnPath], field: str
) -> Mapping[ColumnPath, str]:
    """Return the labels in docs of fields, `[class: pii]`, and in properties of the table, `class.email: pii`."""
    found: dict[ColumnPath, str] = {}
    in_doc = re.compile(rf"\[\s*{re.escape(field)}\s*:\s*([^\]]*?)\s*\]", re.IGNORECASE)
    docs = [
        (path, label) for path, doc in labels_of_schema(schema, "doc").items() for label in in_doc.findall(doc)
    ]
    stated = [(name.split("."), label) for name, label in properties.items() if name.startswith(f"{field}.")]
    by_property = [(tuple(column), str(label)) for (_, *column), label in stated]
    for path, label in (*docs, *by_property):
        if found.setdefault(path, label) != label:
            raise ConfigurationError(
                f"the field {'.'.join(path)!r} of {table} has two labels: {found[path]!r} and {label!r}.",
                hint=f"Correct its doc, or the table property {field}.{'.'.join(path)}.",
            )
    there = {path for leaf in leaves for path in nearest_first(leaf)}
    for path, _ in by_property:
        if path not in there:
            raise ConfigurationError(
                f"the table {table} has no column {'.'.join(path)!r}, which a property labels.",
                hint=f"Its column may have another name now: change the property {field}.{'.'.join(path)}.",
            )
    return found


def _refuse_other_key(
    configuration: Configuration,
    columns: Mapping[ColumnPath, ChosenKey],
    table: str,
    master_key_id: str,
) -> None:
    for column, key in columns.items():
        if key.key_name is None or resolve_key(configuration, key.key_name) == MasterKeyReference(master_key_id):
            continue
        why = f"has the label {key.label.text}" if key.label is not None else "is configured"
        raise ConfigurationError(
            f"the table {table} is under the master key {master_key_id!r}, and its column {'.'.join(column)!r} "
            f"{why}, with the key {key.key_name!r}.",
            hint=f"Its files are encrypted whole. Use a table under the key {key.key_name!r}; or, if the key "
            "of this table protects all columns well enough, list it under `keys` of `iceberg:`.",
        )
