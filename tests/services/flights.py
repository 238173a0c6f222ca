"""The flights that the Spark tests use."""

from __future__ import annotations

from functools import cache

import pyarrow as pa

from parquet_keytools.demo import read_flights


@cache
def every_nth_flight(step: int) -> pa.Table:
    flights = read_flights()
    return flights.take(pa.array(range(0, flights.num_rows, step)))
