"""Write pandas frames, as one file or a folder, and read them, through a file system that encrypts."""

import tempfile
from pathlib import Path

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
                # A new column is an error, and is not written in plaintext.
                "unlisted_columns": "error",
                "plaintext_columns": ["flight", "month"],
            }
        },
    }
)
frame = pd.DataFrame({"month": [1, 1, 2], "flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})
filesystem = keytools.filesystem()

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    frame.to_parquet(path, filesystem=filesystem)
    found = pd.read_parquet(path, filesystem=filesystem)
    pd.testing.assert_frame_equal(found, frame)
    print(f"a frame of {len(found)} rows and the columns {', '.join(found.columns)}")

    # Each file has its own keys.
    frame.to_parquet(Path(folder) / "by_month", partition_cols=["month"], filesystem=filesystem)
    print(f"{keytools.read_table(Path(folder) / 'by_month').num_rows} rows in a folder")
