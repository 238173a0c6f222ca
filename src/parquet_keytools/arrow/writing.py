"""Writing encrypted files and data sets with pyarrow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.arrow.encryption_properties import (
    ArrowEncryptor,
    arrow_leaf_paths,
    arrow_limits,
    encryption_configuration,
)
from parquet_keytools.arrow.file_writer import (
    MAX_ROW_GROUP_ROWS,
    EncryptedParquetWriter,
    WriteResult,
    because,
)
from parquet_keytools.arrow.output_filesystem import PendingHandler
from parquet_keytools.arrow.tabular import (
    STREAMED_OPTIONS,
    as_dataset_source,
    as_stream,
    row_groups_of,
    stream_files,
)
from parquet_keytools.storage.failures import failing_as_output
from parquet_keytools.storage.leftovers import without_leftovers
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import written_bytes
from parquet_keytools.storage.walk import all_files

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_log = logging.getLogger(__name__)


def write_table(
    encryptor: ArrowEncryptor,
    data: Any,
    target: FileLocation,
    table_name: str | None,
    options: Mapping[str, Any],
) -> WriteResult:
    """Write one file, whole or not at all; see `Keytools.write_table`."""
    source = as_stream(data)
    row_group_size = options.get("row_group_size")
    options = {name: value for name, value in options.items() if name != "row_group_size"}
    with EncryptedParquetWriter(encryptor, target, source.schema, table_name, options) as writer:
        for table in row_groups_of(source, row_group_size):
            writer.write_table(table, row_group_size)
    assert writer.result is not None
    return writer.result


def write_dataset(
    encryptor: ArrowEncryptor,
    data: Any,
    folder: FileLocation,
    table_name: str | None,
    *,
    partitioning: Any,
    partitioning_flavor: str | None,
    write_options: Mapping[str, Any],
    durable: bool,
    options: Mapping[str, Any],
) -> WriteResult:
    """Write a data set; see `Keytools.write_dataset`."""
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

    keys = encryptor.keys
    schema = options.get("schema")
    if isinstance(data, Iterator) and schema is not None:
        data = pa.RecordBatchReader.from_batches(schema, data)
        options = {name: value for name, value in options.items() if name != "schema"}
    data = as_dataset_source(data)
    if schema is None:
        schema = data[0].schema if isinstance(data, list) else data.schema
    partitioning, partition_names = _partitioning(partitioning, partitioning_flavor, schema)
    if "file_visitor" in options:
        raise TypeError("file_visitor is not supported: it would reveal statistics of encrypted columns")
    if partition_names:
        all_columns = keys.policy(table_name, arrow_leaf_paths(schema, write_options))
        all_columns.check_partition_columns(partition_names)
    schema = pa.schema([field for field in schema if field.name not in partition_names])
    policy = keys.policy(table_name, arrow_leaf_paths(schema, write_options))
    reasons = arrow_limits(policy, write_options)
    if not policy.table.double_wrapping:
        reasons.append("it would call the KMS while it writes a data set with single wrapping")
    if policy.table.key_material == "external":
        reasons.append("its external key material would be there before the files")
    file_format = ds.ParquetFileFormat()
    if reasons:
        # What the KMS refuses, it refuses before Arrow's threads start.
        keys.wrap_keks(policy)
        file_options = file_format.make_write_options(**write_options)
        handler = PendingHandler(folder, keys, policy.table_name, durable=durable)
    else:
        factory = encryptor.primed_factory(policy)
        connection = encryptor.connection_config()
        config = ds.ParquetEncryptionConfig(factory, connection, encryption_configuration(policy))
        file_options = file_format.make_write_options(encryption_config=config, **write_options)
        handler = PendingHandler(folder, None, policy.table_name, durable=durable)
    _log.info(
        "%s is encrypted by %s%s", folder, "the module encryptor" if reasons else "pyarrow", because(reasons)
    )
    if folder.is_local:
        # Arrow would take a folder with nothing but what a killed process left for one that has files.
        for _ in without_leftovers(all_files(folder)):
            pass
    rows: list[int] = []
    options = {**_row_group_options(schema, options), **options}
    try:
        with failing_as_output(folder):
            if reasons and partitioning is None and options.keys() <= STREAMED_OPTIONS:
                rows.append(
                    stream_files(encryptor, policy, handler, folder, as_stream(data), write_options, options)
                )
            else:
                ds.write_dataset(
                    handler.until_failure(data) if isinstance(data, pa.RecordBatchReader) else data,
                    folder.path,
                    format=file_format,
                    filesystem=pafs.PyFileSystem(handler),
                    file_options=file_options,
                    partitioning=partitioning,
                    file_visitor=lambda written: rows.append(written.metadata.num_rows),
                    **options,
                )
            files = handler.commit()
    except BaseException:
        handler.discard()
        raise
    return WriteResult(
        str(folder),
        "module encryptor" if reasons else "pyarrow",
        tuple(reasons),
        len(files),
        sum(rows),
        written_bytes(files),
    )


_ROW_GROUP_BYTES = 64 * 1024 * 1024
_VARIABLE_BYTES = 32
"""What a value without a fixed width is taken to have."""


def _row_group_options(schema: pa.Schema, options: Mapping[str, Any]) -> dict[str, int]:
    """Return how many rows a row group should have: otherwise each batch, however small, would make one."""
    if "min_rows_per_group" in options:
        return {}
    row_bytes = sum(_bytes_of(field.type) for field in schema)
    limits = [options.get(name) for name in ("max_rows_per_group", "max_rows_per_file")]
    most = min([MAX_ROW_GROUP_ROWS, *(limit for limit in limits if limit)])
    return {"min_rows_per_group": min(most, max(_ROW_GROUP_BYTES // max(row_bytes, 1), 1024))}


def _bytes_of(kind: pa.DataType) -> int:
    if kind.num_fields:
        return sum(_bytes_of(kind.field(position).type) for position in range(kind.num_fields))
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return _VARIABLE_BYTES


def _partitioning(
    partitioning: Any, flavor: str | None, schema: pa.Schema
) -> tuple[ds.Partitioning | None, frozenset[str]]:
    """Return the partitioning, hive-style where only names are given, and the names of its fields."""
    import pyarrow.dataset as ds

    if partitioning is None:
        return None, frozenset()
    if isinstance(partitioning, (list, tuple)):
        fields = pa.schema([schema.field(name) for name in partitioning])
        partitioning = ds.partitioning(fields, flavor=flavor or "hive")
    return partitioning, frozenset(partitioning.schema.names)
