"""Use write_table and read_table, which also support settings that pyarrow alone does not."""

import tempfile
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools

table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})
base = {"footer_key": "footer", "column_keys": {"pii": ["tailnum"]}, "unlisted_columns": "plaintext"}
keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
        "tables": {
            "flights": base,
            # An AAD prefix binds a file to its name. pyarrow does not support it together with KMS keys.
            "named_flights": base | {"aad_prefix": "{table_name}/{file_name}", "data_key_length_bits": 256},
        },
    }
)

with tempfile.TemporaryDirectory() as folder:
    for table_name in ("flights", "named_flights"):
        path = Path(folder) / f"{table_name}.parquet"
        result = keytools.write_table(table, path, table_name=table_name, compression="zstd")
        assert keytools.read_table(path, table_name=table_name).equals(table)
        because = f" (pyarrow: {'; '.join(result.reasons)})" if result.reasons else ""
        print(f"{table_name}: {result.size_bytes:,} bytes, encrypted by {result.engine}{because}")

    found = keytools.read_table(
        path, table_name=table_name, columns=["flight"], filters=[("tailnum", "=", "N24211")]
    )
    print(f"the flight of N24211 is {found.column('flight')[0]}")
