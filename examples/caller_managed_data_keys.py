"""Use data keys of your own, without a KMS: the file contains only the ids of its keys."""

import base64
import os
import tempfile
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError

# A data key encrypts all files that name it: replace it from time to time, and keep old ones for reading.
data_keys = {name: base64.b64encode(os.urandom(16)).decode() for name in ("kf-2026", "kc-2026")}
document = {
    "version": 1,
    "data_keys": data_keys,
    "tables": {
        "flights": {
            "footer_key": "kf-2026",
            "column_keys": {"kc-2026": ["tailnum"]},
            "unlisted_columns": "plaintext",
        }
    },
}
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    keytools = Keytools.from_mapping(document)
    result = keytools.write_table(table, path)
    assert keytools.read_table(path).equals(table)
    print(f"encrypted by {result.engine} with the data keys {', '.join(data_keys)}")

    # A reader needs no table in its configuration, only keys.
    reader = Keytools.from_mapping({"version": 1, "data_keys": {"kf-2026": data_keys["kf-2026"]}})
    print(f"with the footer's key alone: {reader.read_table(path, columns=['flight']).column_names}")
    try:
        reader.read_table(path)
    except ColumnAccessDeniedError as error:
        print(f"and {error}")
