"""Read and write encrypted files with Dask, through file systems that decrypt and encrypt."""

import tempfile
from pathlib import Path

import dask.dataframe as dd
import pandas as pd

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

with tempfile.TemporaryDirectory() as folder:
    for month in (1, 2, 3):
        flights = pd.DataFrame({"month": month, "tailnum": [f"N{number:05d}" for number in range(1_000)]})
        keytools.write_table(flights, Path(folder) / f"{month}.parquet")

    # Threads share the in-memory keys of a `Keytools`; worker processes need a KMS that they can reach.
    frame = dd.read_parquet("*.parquet", filesystem=keytools.view(folder), filters=[("month", ">", 1)])
    print(f"{frame.tailnum.nunique().compute(scheduler='threads'):,} aircraft in {frame.npartitions} files")
