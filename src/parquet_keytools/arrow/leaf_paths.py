"""The leaf columns that a pyarrow schema has in Parquet."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools.format.file_layout import leaf_columns, read_footer_bytes
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.storage import BufferSource

_NAMING_OPTIONS = ("flavor", "use_compliant_nested_type", "version", "store_schema")
"""Options of a Parquet writer that can change the names of leaf columns."""


def leaf_paths(schema: pa.Schema, write_options: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    """Return the paths of the leaf columns in the order of their ordinals.

    Args:
        schema: Of the table.
        write_options: What the table will be written with; some options change names.
    """
    options = {name: value for name, value in (write_options or {}).items() if name in _NAMING_OPTIONS}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, **options):
        pass
    footer = read_footer_bytes(BufferSource("schema", sink.getvalue()))
    metadata, _ = FileMetaData.read(footer.data)
    return [leaf.path for leaf in leaf_columns(metadata.schema)]
