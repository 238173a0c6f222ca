"""Query encrypted files with DataFusion: as a data set, which gets its columns and filters."""

import tempfile
from pathlib import Path

import pyarrow as pa
from datafusion import SessionContext

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
    context = SessionContext()
    context.register_dataset("flights", keytools.dataset(folder))
    print(context.sql("select tailnum from flights where flight < 1500").to_pydict())
