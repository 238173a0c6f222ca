"""The leaf columns that Spark writes for a schema, by the names that it gives them in Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from parquet_keytools.config.column_policy import ColumnPath


def leaf_paths(schema: StructType) -> list[ColumnPath]:
    """Return the paths of all leaf columns, in the order of the schema.

    They are those of Spark's writer in its normal form: not with `spark.sql.parquet.writeLegacyFormat`, and
    not with shredded variants. A file with other columns than these is refused when it is written.
    """
    return [path for field in schema.fields for path in _leaves(field.dataType, (field.name,))]


def _leaves(data_type: DataType, path: ColumnPath) -> Iterator[ColumnPath]:
    from pyspark.sql import types

    if isinstance(data_type, types.StructType):
        for field in data_type.fields:
            yield from _leaves(field.dataType, (*path, field.name))
    elif isinstance(data_type, types.ArrayType):
        yield from _leaves(data_type.elementType, (*path, "list", "element"))
    elif isinstance(data_type, types.MapType):
        yield from _leaves(data_type.keyType, (*path, "key_value", "key"))
        yield from _leaves(data_type.valueType, (*path, "key_value", "value"))
    elif isinstance(data_type, types.UserDefinedType):
        yield from _leaves(data_type.sqlType(), path)
    elif isinstance(data_type, types.VariantType):
        yield (*path, "value")
        yield (*path, "metadata")
    else:
        yield path
