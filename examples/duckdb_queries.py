"""Query encrypted files with DuckDB: through a view, which shows plain Parquet, and as a data set."""

import tempfile
from pathlib import Path

import duckdb

from parquet_keytools import Keytools

keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"]},
                "unlisted_columns": "plaintext",
            }
        },
    }
)

with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
    for month in (1, 2):
        flights = connection.sql(f"select {month} as month, 'N' || range as tailnum from range(1000)")
        keytools.write_table(flights, Path(folder) / f"{month}.parquet")

    connection.register_filesystem(keytools.view(folder))
    counts = connection.sql("select month, count(*) from 'keytools://*.parquet' group by month order by month")
    print(f"flights in each month: {counts.fetchall()}")

    connection.register("flights", keytools.dataset(folder))
    print(connection.sql("select tailnum from flights where month = 2 order by tailnum limit 1").fetchall())
