"""What callers give to be written, as Arrow takes it: frames and streams of other libraries included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

_TAKEN = (
    "a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, a list of tables or batches, or "
    "what has __arrow_c_stream__, such as a DataFrame of pandas or Polars or a relation of DuckDB"
)


def as_table(data: Any) -> pa.Table:
    """Return data as a table in memory.

    Args:
        data: A table, or what `as_dataset_source` takes.

    Raises:
        TypeError: It is nothing that Arrow takes.
    """
    source = as_dataset_source(data)
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, pa.RecordBatchReader):
        return source.read_all()
    return pa.concat_tables(map(as_table, source)) if isinstance(source, list) else source.to_table()


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
    if type(data).__module__.partition(".")[0] == "pandas":
        # With the metadata from which pandas makes the same index again.
        return pa.table(data)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        parts = [as_dataset_source(part) for part in data]
        if parts and all(isinstance(part, (pa.Table, pa.RecordBatch)) for part in parts):
            return parts
    raise TypeError(f"{type(data).__qualname__} is no data to be written: give {_TAKEN}.")
