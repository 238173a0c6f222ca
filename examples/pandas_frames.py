"""Read and write with pandas, which passes encryption and decryption properties to pyarrow."""

import tempfile
from pathlib import Path

import pandas as pd
import pyarrow as pa

from parquet_keytools import Keytools

keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
        "tables": {"flights": {"footer_key": "footer", "column_keys": {"pii": ["tailnum"]}}},
    }
)
frame = pd.DataFrame({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    schema = pa.Schema.from_pandas(frame)
    frame.to_parquet(path, encryption_properties=keytools.encryption_properties("flights", schema, path))

    found = pd.read_parquet(path, decryption_properties=keytools.decryption_properties(path))
    pd.testing.assert_frame_equal(found, frame)
    print(f"a frame of {len(found)} rows and the columns {', '.join(found.columns)}")
