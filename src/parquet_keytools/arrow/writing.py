"""Writing encrypted files and data sets with pyarrow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from parquet_keytools.arrow.encryption_properties import (
    ArrowEncryptor,
    arrow_leaf_paths,
    arrow_limits,
    encryption_configuration,
)
from parquet_keytools.arrow.output_filesystem import PendingHandler
from parquet_keytools.arrow.tabular import as_dataset_source, as_table
from parquet_keytools.files.conversion import encrypt_pending
from parquet_keytools.files.replacement import NewKeyMaterial, put_in_place
from parquet_keytools.storage.failures import failing_as_output
from parquet_keytools.storage.leftovers import without_leftovers
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import discarded_unless_done, pending_output
from parquet_keytools.storage.sources import BufferSource
from parquet_keytools.storage.walk import all_files

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteResult:
    """What was written.

    Attributes:
        path: The file, or the folder of the data set.
        engine: What encrypted it.
        reasons: Why pyarrow could not, a phrase each; empty where it did.
        files: How many files were written.
        rows: How many rows.
        size_bytes: Length of all files together.
    """

    path: str
    engine: Literal["pyarrow", "module encryptor"]
    reasons: tuple[str, ...]
    files: int
    rows: int
    size_bytes: int


def write_table(
    encryptor: ArrowEncryptor,
    data: Any,
    target: FileLocation,
    table_name: str | None,
    options: Mapping[str, Any],
) -> WriteResult:
    """Write one file, whole or not at all; see `Keytools.write_table`."""
    if "encryption_properties" in options:
        raise TypeError("write_table makes the encryption properties itself")
    if "metadata_collector" in options:
        raise TypeError("metadata_collector is not supported: it would reveal statistics of encrypted columns")
    table = as_table(data)
    policy = encryptor.keys.policy(table_name, arrow_leaf_paths(table.schema, options))
    reasons = arrow_limits(policy, options)
    if policy.table.key_material == "external" and target.info().type != pafs.FileType.NotFound:
        # Two files cannot be replaced at once; the module encryptor writes key material that fits both the
        # old and the new Parquet file.
        reasons.append("its external key material cannot replace that of a file that is there")
    with discarded_unless_done(pending_output(target)) as pending:
        if reasons:
            buffer = pa.BufferOutputStream()
            pq.write_table(table, buffer, **options)
            source = BufferSource(str(target), buffer.getvalue())
            new = encrypt_pending(encryptor.keys, policy.table_name, source, pending)
        else:
            encryption = encryptor.encryption(policy, target.name)
            with pending.open_stream() as stream:
                pq.write_table(table, stream, encryption_properties=encryption.properties, **options)
            new = NewKeyMaterial(target, encryption.key_materials)
        put_in_place(pending, new)
    engine: Literal["pyarrow", "module encryptor"] = "module encryptor" if reasons else "pyarrow"
    result = WriteResult(str(target), engine, tuple(reasons), 1, table.num_rows, target.info().size)
    _log.info("%s was encrypted by %s%s", target, result.engine, _because(reasons))
    return result


def write_dataset(
    encryptor: ArrowEncryptor,
    data: Any,
    folder: FileLocation,
    table_name: str | None,
    *,
    partitioning: Any,
    partitioning_flavor: str | None,
    write_options: Mapping[str, Any],
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
        handler = PendingHandler(folder, keys, policy.table_name)
    else:
        factory = encryptor.primed_factory(policy)
        connection = encryptor.connection_config()
        config = ds.ParquetEncryptionConfig(factory, connection, encryption_configuration(policy))
        file_options = file_format.make_write_options(encryption_config=config, **write_options)
        handler = PendingHandler(folder, None, policy.table_name)
    _log.info(
        "%s is encrypted by %s%s", folder, "the module encryptor" if reasons else "pyarrow", _because(reasons)
    )
    if folder.is_local:
        # Arrow would take a folder with nothing but what a killed process left for one that has files.
        for _ in without_leftovers(all_files(folder)):
            pass
    rows: list[int] = []
    try:
        with failing_as_output(folder):
            ds.write_dataset(
                data,
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
        sum(info.size for info in folder.filesystem.get_file_info([file.path for file in files])),
    )


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


def _because(reasons: list[str]) -> str:
    return f", because pyarrow does not support this: {'; '.join(reasons)}" if reasons else ""
