"""Writing encrypted files and data sets from pyarrow data and from DataFrames of other libraries."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.config.document import list_of_names
from parquet_keytools.encryption.aad import refuse_more_than_ordinals
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files.field_labels import LabelsOfData, labels_of_schema
from parquet_keytools.storage.local_files import failing_as_output, without_leftovers
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import written_bytes
from parquet_keytools.storage.walk import all_files
from parquet_keytools.tables.file_systems import PendingHandler
from parquet_keytools.tables.file_writer import (
    MAX_ROW_GROUP_ROWS,
    EncryptedParquetWriter,
    Engine,
    WriteResult,
    because,
    refusing_beyond_ordinals,
    row_group_rows,
    whole_number,
    without_ours,
)
from parquet_keytools.tables.properties import ArrowEncryptor, arrow_leaf_paths, arrow_limits

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_STREAM_ROWS = 1024 * 1024
_STREAM_BYTES = 128 * 1024 * 1024
"""How many bytes of a stream make a row group, and are in memory at a time."""

_TAKEN = (
    "a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, a list of tables or batches, or "
    "an object with __arrow_c_stream__, such as a pandas or Polars DataFrame or a DuckDB relation"
)

_REFUSED = {
    "file_visitor": "it would reveal statistics of encrypted columns",
    "format": "only Parquet is encrypted",
    "file_options": "the options of the Parquet writer are given as `write_options`",
}


def as_stream(data: Any) -> pa.Table | pa.RecordBatchReader:
    """Return data that `as_dataset_source` takes as a table or as a stream of batches."""
    source = as_dataset_source(data)
    if isinstance(source, (pa.Table, pa.RecordBatchReader)):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, list):
        return pa.concat_tables(map(as_stream, source))
    return source.scanner().to_reader()


def row_groups_of(source: pa.Table | pa.RecordBatchReader, row_group_rows: int | None) -> Iterator[pa.Table]:
    """Yield a table as it is, or a stream as tables of a few row groups: its batches may be small.

    Without `row_group_rows`, a row group of a stream ends after `_STREAM_ROWS` rows or `_STREAM_BYTES`.
    """
    if isinstance(source, pa.Table):
        yield source
        return
    batches: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    is_empty = True
    for batch in source:
        if batch.num_rows == 0:
            continue
        is_empty = False
        batches.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= (row_group_rows or _STREAM_ROWS) or (row_group_rows is None and size_bytes >= _STREAM_BYTES):
            full = pa.Table.from_batches(batches)
            wanted = row_group_rows or rows
            yield full.slice(0, rows // wanted * wanted)
            batches = full.slice(rows // wanted * wanted).to_batches()
            rows, size_bytes = rows % wanted, sum(rest.nbytes for rest in batches)
    if batches or is_empty:
        yield pa.Table.from_batches(batches, source.schema)


def as_dataset_source(data: Any) -> Any:
    """Return data as `pyarrow.dataset.write_dataset` takes it, or raise `TypeError`. Streams stay streams."""
    if isinstance(data, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return data
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

    from parquet_keytools.tables.reading import EncryptedDataset

    if isinstance(data, EncryptedDataset):
        return data.scanner().to_reader()
    if isinstance(data, ds.Dataset):
        return data
    if isinstance(data, ds.Scanner):
        return data.to_reader()
    try:
        if type(data).__module__.partition(".")[0] == "pandas":
            # With the metadata from which pandas makes the same index again.
            return pa.table(data)
        if hasattr(data, "__arrow_c_stream__"):
            return _without_views(pa.RecordBatchReader.from_stream(data))
    except pa.ArrowInvalid as error:
        if "non-struct" not in str(error):
            raise
        raise TypeError(
            f"{type(data).__qualname__} is one column, not a table: give a DataFrame, such as `data.to_frame()`."
        ) from None
    if hasattr(data, "collect") and hasattr(data, "lazy"):
        raise TypeError(f"{type(data).__qualname__} is a query that has not run: give `data.collect()`.")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        parts = [as_dataset_source(part) for part in data]
        if parts and all(isinstance(part, (pa.Table, pa.RecordBatch)) for part in parts):
            return parts
    raise TypeError(f"{type(data).__qualname__} is not tabular data: give {_TAKEN}.")


def _without_views(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return a stream without string views, which Polars gives: Arrow cannot partition or filter them."""
    fields = [field.with_type(_without_view(field.type)) for field in reader.schema]
    schema = pa.schema(fields, metadata=reader.schema.metadata)
    return reader if schema == reader.schema else reader.cast(schema)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_view(field.type)) for field in kind])
    for is_list, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_without_view(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_view(kind.value_type)), kind.list_size)
    return _VIEWS.get(kind, kind)


_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


_log = logging.getLogger(__name__)


def write_table(
    encryptor: ArrowEncryptor,
    data: Any,
    target: FileLocation,
    table_name: str | None,
    options: Mapping[str, Any],
    *,
    overwrite: bool = True,
    key_values: Mapping[str, str] | None = None,
) -> WriteResult:
    """Write one file, whole or not at all; see `Keytools.write_table`."""
    # `chunk_size` is pyarrow's other name for it.
    row_group_size = row_group_rows(options.get("chunk_size", options.get("row_group_size")))
    options = {name: value for name, value in options.items() if name not in ("row_group_size", "chunk_size")}
    source = as_stream(data)
    _labels_of_data(encryptor, table_name, source.schema, data)
    with EncryptedParquetWriter(
        encryptor, target, source.schema, table_name, options, overwrite=overwrite, key_values=key_values
    ) as writer:
        for table in row_groups_of(source, row_group_size):
            writer.write_table(table, row_group_size)
    assert writer.result is not None
    return writer.result


def _labels_of_data(
    encryptor: ArrowEncryptor, table_name: str | None, schema: pa.Schema, data: Any
) -> LabelsOfData:
    """Return the labels of a schema; refuse a `pyarrow.dataset.Dataset` with a file that has others.

    The schema of a data set usually is the schema of its first file.

    Raises:
        ConfigurationError: A field of a file has another label; or the data set is filtered, and hides its files.
    """
    _, table = encryptor.keys.configuration.select_table(table_name)
    labels = LabelsOfData(table.labels.field, schema)
    if table.labels.field is not None and hasattr(data, "get_fragments"):
        fragments_of = getattr(data, "unfiltered_fragments", data.get_fragments)
        try:
            fragments = fragments_of()
        except ValueError:
            raise ConfigurationError(
                "labels in the files of a filtered data set cannot be seen.",
                hint="Make it with a schema that has all labels, and give `dataset.scanner(filter=...)`.",
            ) from None
        for fragment in fragments:
            labels.refuse_others(fragment.physical_schema)
    return labels


def write_dataset(
    encryptor: ArrowEncryptor,
    data: Any,
    folder: FileLocation,
    table_name: str | None,
    *,
    partitioning: Any,
    partitioning_flavor: str | None,
    write_options: Mapping[str, Any],
    overwrite: bool,
    durable: bool,
    options: Mapping[str, Any],
    key_values: Mapping[str, str] | None = None,
) -> WriteResult:
    """Write a data set; see `Keytools.write_dataset`."""
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

    keys = encryptor.keys
    parameters = inspect.signature(ds.write_dataset).parameters
    # pyarrow ignores arguments that are None and that are None by default.
    options = {
        name: value
        for name, value in options.items()
        if value is not None or name not in parameters or parameters[name].default is not None
    }
    if options.get("format") == "parquet":
        del options["format"]
    for name in _REFUSED.keys() & options.keys():
        raise TypeError(f"{name} is not supported: {_REFUSED[name]}")
    if not overwrite and options.get("existing_data_behavior") == "delete_matching":
        raise ValueError("overwrite=False and existing_data_behavior='delete_matching' contradict each other.")
    options |= _row_limits(options)
    write_options = without_ours(write_options)
    schema = options.get("schema")
    if isinstance(data, Iterator) and schema is not None:
        data = pa.RecordBatchReader.from_batches(schema, data)
        options = {name: value for name, value in options.items() if name != "schema"}
    given, data = data, as_dataset_source(data)
    if schema is None:
        schema = data[0].schema if isinstance(data, list) else data.schema
    partitioning, partition_names = _partitioning(partitioning, partitioning_flavor, schema)
    if partition_names:
        leaves = arrow_leaf_paths(schema, write_options)
        all_columns = keys.policy(table_name, leaves, partial(labels_of_schema, schema))
        all_columns.check_partition_columns(partition_names)
    labels = _labels_of_data(encryptor, table_name, schema, given)
    for part in data if isinstance(data, list) else ():
        labels.refuse_others(part.schema)
    schema = pa.schema([field for field in schema if field.name not in partition_names])
    paths = arrow_leaf_paths(schema, write_options)
    refuse_more_than_ordinals(folder, columns=len(paths))
    policy = keys.policy(table_name, paths, partial(labels_of_schema, schema), key_values)
    policy.refuse_folder_names(partition_names)
    reasons = arrow_limits(policy, write_options)
    if not policy.table.double_wrapping:
        reasons.append("it would call the KMS while it writes a data set with single wrapping")
    # Errors of the KMS are raised here, before Arrow's threads start.
    if reasons:
        keys.wrap_keks(policy)
        encryption = None
    else:
        encryption = ds.ParquetEncryptionConfig(*encryptor.data_set_configuration(policy))
    file_options = ds.ParquetFileFormat().make_write_options(encryption_config=encryption, **write_options)
    handler = PendingHandler(
        folder,
        keys if reasons else None,
        policy.table_name,
        overwrite=overwrite,
        durable=durable,
        key_values=key_values,
    )
    engine: Engine = "module encryptor" if reasons else "pyarrow"
    _log.info("%s is encrypted by %s%s", folder, engine, because(reasons))
    if folder.is_local:
        # What a killed process left would look to Arrow like a data set that exists.
        for _ in without_leftovers(all_files(folder)):
            pass
    rows: list[int] = []
    row_groups = [0]

    def count(written: Any) -> None:
        rows.append(written.metadata.num_rows)
        row_groups.append(written.metadata.num_row_groups)

    options = {**_row_group_options(len(paths), options), **options}
    try:
        with failing_as_output(folder), refusing_beyond_ordinals(folder):
            ds.write_dataset(
                handler.until_failure(data) if isinstance(data, pa.RecordBatchReader) else data,
                folder.path,
                format="parquet",
                filesystem=pafs.PyFileSystem(handler),
                file_options=file_options,
                partitioning=partitioning,
                file_visitor=count,
                **options,
            )
            refuse_more_than_ordinals(folder, row_groups=max(row_groups))
            files = handler.commit()
    except BaseException:
        handler.discard()
        raise
    size = written_bytes(files)
    plaintext = policy.plaintext_columns
    return WriteResult(str(folder), engine, tuple(reasons), len(files), sum(rows), size, plaintext)


_ROW_GROUP_BYTES = 64 * 1024 * 1024
_VALUE_BYTES = 16
"""Assumed length of a value."""


def _row_limits(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the limits of rows that a caller gave: pyarrow takes some negative numbers for large numbers."""
    least = {"max_rows_per_file": 0, "max_rows_per_group": 1, "min_rows_per_group": 0}
    limits = {name: whole_number(name, options[name], least=least[name]) for name in least.keys() & options.keys()}
    file_rows = limits.get("max_rows_per_file") or None
    if file_rows is not None:
        limits.setdefault("max_rows_per_group", min(file_rows, MAX_ROW_GROUP_ROWS))
    group_rows = limits.get("max_rows_per_group", MAX_ROW_GROUP_ROWS)
    if file_rows is not None and group_rows > file_rows:
        raise ValueError(f"max_rows_per_group is {group_rows}, more than max_rows_per_file, {file_rows}.")
    if limits.get("min_rows_per_group", 0) > group_rows:
        raise ValueError(
            f"min_rows_per_group is {limits['min_rows_per_group']}, more than max_rows_per_group, {group_rows}."
        )
    return limits


def _row_group_options(column_count: int, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the fewest rows of a row group: by default, pyarrow makes a row group of each batch."""
    if "min_rows_per_group" in options:
        return {}
    limits = [options.get(name) for name in ("max_rows_per_group", "max_rows_per_file")]
    most = min([MAX_ROW_GROUP_ROWS, *(limit for limit in limits if limit)])
    return {"min_rows_per_group": min(most, max(_ROW_GROUP_BYTES // (_VALUE_BYTES * max(column_count, 1)), 1024))}


def _partitioning(
    partitioning: Any, flavor: str | None, schema: pa.Schema
) -> tuple[ds.Partitioning | None, frozenset[str]]:
    """Return the partitioning, hive-style where only names are given, and the names of its fields."""
    import pyarrow.dataset as ds

    if partitioning is None:
        return None, frozenset()
    if not isinstance(partitioning, (list, tuple, str, bytes)) and not hasattr(partitioning, "schema"):
        raise TypeError(
            f"{partitioning!r} is not a partitioning for writing: give a list of names of columns, or a pyarrow "
            "partitioning with a schema."
        )
    if isinstance(partitioning, (list, tuple, str, bytes)):
        partitioning = list_of_names("partitioning", partitioning)
        fields = pa.schema([schema.field(name) for name in partitioning])
        partitioning = ds.partitioning(fields, flavor=flavor or "hive")
    return partitioning, frozenset(partitioning.schema.names)
