"""Write and read with pyarrow.parquet; parquet-keytools only makes the properties."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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
    path = Path(folder) / "flights.parquet"

    # Encryption properties are for one file: make new ones for each file.
    properties = keytools.encryption_properties("flights", table.schema, path)
    pq.write_table(table, path, encryption_properties=properties)

    found = pq.read_table(path, columns=["tailnum"], decryption_properties=keytools.decryption_properties(path))
    assert found.equals(table.select(["tailnum"]))
    print(f"{path.name}: {found.num_rows} values of tailnum read with pyarrow.parquet.read_table")

    try:
        pq.read_table(path)
    except OSError as error:
        print(f"without decryption properties: {error}")
