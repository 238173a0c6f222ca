"""Scan encrypted files with Polars: lazily over a pyarrow data set, which gets its columns and filters."""

import tempfile
from pathlib import Path

import polars as pl
import pyarrow as pa

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
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as folder:
    keytools.write_table(table, Path(folder) / "flights.parquet")

    scan = pl.scan_pyarrow_dataset(keytools.dataset(folder))
    found = scan.filter(pl.col("flight") > 1500).select("tailnum").collect()
    print(f"flights above 1500: {', '.join(found['tailnum'])}")

    # Polars reads file objects, too; it reads all their bytes.
    with keytools.open(Path(folder) / "flights.parquet") as file:
        assert pl.read_parquet(file).equals(pl.from_arrow(table))
