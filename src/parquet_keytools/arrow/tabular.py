"""What callers give to be written, as Arrow takes it: frames and streams of other libraries included.

A data set without partitions goes through the module encryptor: row group by row group, one file after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from parquet_keytools.arrow.encryption_properties import ArrowEncryptor
from parquet_keytools.arrow.file_writer import MAX_ROW_GROUP_ROWS, ModuleEncryptedFile
from parquet_keytools.arrow.output_filesystem import PendingHandler
from parquet_keytools.files.key_service import TablePolicy
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.walk import all_files

_STREAM_ROWS = 1024 * 1024
_STREAM_BYTES = 128 * 1024 * 1024
"""How many bytes of a stream make a row group: what is held in memory at a time."""

_TAKEN = (
    "a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, a list of tables or batches, or "
    "what has __arrow_c_stream__, such as a DataFrame of pandas or Polars or a relation of DuckDB"
)

STREAMED_OPTIONS = frozenset(
    {
        "basename_template",
        "create_dir",
        "max_open_files",
        "max_partitions",
        "max_rows_per_file",
        "max_rows_per_group",
        "min_rows_per_group",
        "preserve_order",
        "use_threads",
    }
)
"""Options of `pyarrow.dataset.write_dataset` that mean something or nothing where there is one file at a time."""


def as_stream(data: Any) -> pa.Table | pa.RecordBatchReader:
    """Return data as a table, or as a stream of batches that are made as they are taken.

    Args:
        data: A table, or what `as_dataset_source` takes.

    Raises:
        TypeError: It is nothing that Arrow takes.
    """
    source = as_dataset_source(data)
    if isinstance(source, (pa.Table, pa.RecordBatchReader)):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, list):
        return pa.concat_tables(map(as_stream, source))
    return source.scanner().to_reader()


def row_groups_of(source: pa.Table | pa.RecordBatchReader, row_group_rows: int | None) -> Iterator[pa.Table]:
    """Yield the data of a few row groups at a time: batches of a stream may be small.

    Args:
        source: A table, which comes as it is, or a stream.
        row_group_rows: How many rows a row group has at most; None for as many as pyarrow's, or as `_STREAM_BYTES`
            of data have.
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
    """Return data as `pyarrow.dataset.write_dataset` takes it; streams stay streams.

    Args:
        data: What `write_table` and `write_dataset` get. Batches that are given one by one are collected.

    Raises:
        TypeError: It is nothing that Arrow takes.
    """
    if isinstance(data, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return data
    # Not earlier: it imports pandas, where it is installed.
    import pyarrow.dataset as ds

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
            f"{type(data).__qualname__} is one column, and no table: give a DataFrame, such as `data.to_frame()`."
        ) from None
    if hasattr(data, "collect") and hasattr(data, "lazy"):
        raise TypeError(f"{type(data).__qualname__} is a query that did not run: give `data.collect()`.")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        parts = [as_dataset_source(part) for part in data]
        if parts and all(isinstance(part, (pa.Table, pa.RecordBatch)) for part in parts):
            return parts
    raise TypeError(f"{type(data).__qualname__} is no data to be written: give {_TAKEN}.")


def _without_views(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return a stream without views of strings, such as Polars gives: Arrow cannot partition or filter these."""
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


def stream_files(
    encryptor: ArrowEncryptor,
    policy: TablePolicy,
    handler: PendingHandler,
    folder: FileLocation,
    source: pa.Table | pa.RecordBatchReader,
    write_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> int:
    """Write the files of a data set, for `PendingHandler.commit` to put in their places.

    No more than one row group is held.

    Args:
        encryptor: Makes the keys.
        policy: What the table asks for.
        handler: Has the outputs.
        folder: Of the data set; it must hold no files.
        source: The data.
        write_options: Of the Parquet writer.
        options: Some of `STREAMED_OPTIONS`.

    Returns:
        How many rows were written.

    Raises:
        pyarrow.ArrowInvalid: The folder holds files.
    """
    template = options.get("basename_template", "part-{i}.parquet")
    if "{i}" not in template:
        raise ValueError("basename_template did not contain '{i}'")
    if next(all_files(folder), None) is not None:
        raise pa.ArrowInvalid(
            f"Could not write to {folder.path} as the directory is not empty and existing_data_behavior is error"
        )
    if options.get("create_dir", True):
        handler.create_dir(folder.path, recursive=True)
    group_rows = min(options.get("max_rows_per_group") or MAX_ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS)
    group_rows = max(min(options["min_rows_per_group"] or group_rows, group_rows), 1)
    total = 0
    files = _by_files(source, group_rows, options.get("max_rows_per_file") or 0)
    for number, tables in enumerate(files):
        pending = handler.begin(folder.child(template.format(i=number)).path)
        file = ModuleEncryptedFile(encryptor, policy, pending, source.schema, write_options)
        try:
            for table in tables:
                file.write(table, group_rows)
                total += table.num_rows
            handler.complete(file.finish())
        except BaseException:
            file.abandon()
            raise
    return total


def _by_files(
    source: pa.Table | pa.RecordBatchReader, group_rows: int, file_rows: int
) -> Iterator[Iterator[pa.Table]]:
    """Yield the tables of one file after the other; each is to be read to its end."""
    tables = iter(row_groups_of(source, group_rows))
    rest: pa.Table | None = next(tables, None)
    if rest is None or not rest.num_rows:
        return  # As pyarrow does.

    def one_file() -> Iterator[pa.Table]:
        nonlocal rest
        room = file_rows
        while rest is not None:
            if not file_rows or rest.num_rows <= room:
                room -= rest.num_rows
                yield rest
                rest = next(tables, None)
                if file_rows and not room:
                    return
            else:
                head, rest = rest.slice(0, room), rest.slice(room)
                yield head
                return

    while rest is not None:
        yield one_file()
