"""Write batch by batch with a writer that has the methods of pyarrow.parquet.ParquetWriter."""

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
columns: dict[str, pa.DataType] = {"flight": pa.int64(), "tailnum": pa.string()}
schema = pa.schema(columns)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    with keytools.writer(path, schema) as writer:
        for start in range(0, 30_000, 10_000):
            flights = range(start, start + 10_000)
            writer.write_batch(pa.record_batch([flights, [f"N{flight:05d}" for flight in flights]], schema=schema))

    with pq.ParquetFile(path, decryption_properties=keytools.decryption_properties(path)) as file:
        rows = sum(batch.num_rows for batch in file.iter_batches(columns=["tailnum"]))
        assert keytools.kms is not None  # Only data keys need none.
        print(f"{rows:,} rows in {file.num_row_groups} row groups, {keytools.kms.call_counts['wrap']} wraps")
