"""Write a partitioned data set of encrypted files, filter it, and read it in batches."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

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
table = pa.table(
    {
        "month": [month for month in range(1, 13) for _ in range(1_000)],
        "distance": list(range(12_000)),
        "tailnum": [f"N{number:05d}" for number in range(12_000)],
    }
)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / "flights"
    keytools.write_dataset(table, folder, table_name="flights", partitioning=["month"])
    assert keytools.kms is not None  # Only data keys need none.
    print(f"{len(list(folder.rglob('*.parquet')))} files, {keytools.kms.call_counts['wrap']} wraps")

    dataset = keytools.dataset(folder)
    in_march = dataset.to_table(columns=["tailnum"], filter=ds.field("month") == 3)
    assert in_march.num_rows == 1_000
    longest = max(pc.max(batch.column("distance")).as_py() for batch in dataset.to_batches(batch_size=500))
    print(f"March has {in_march.num_rows:,} flights, the longest of the year is {longest:,} miles")
    print(f"{keytools.kms.call_counts['unwrap']} unwraps for all files")
