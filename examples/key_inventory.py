"""List which files and columns depend on a master key, before you disable or destroy it."""

import tempfile
from collections import defaultdict
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools

keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii", "times"]},
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"], "times": ["dep_time"]},
                "unlisted_columns": "plaintext",
            },
            "routes": {"footer_key": "footer", "unlisted_columns": "footer_key"},
        },
    }
)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    flights = pa.table({"tailnum": ["N14228"], "dep_time": [517]})
    keytools.write_table(flights, folder / "flights.parquet", table_name="flights")
    keytools.write_table(pa.table({"origin": ["EWR"]}), folder / "routes.parquet", table_name="routes")

    depends = defaultdict(set)
    for file in keytools.key_inventory(folder):
        assert file.unknown is None, file.unknown
        for use in file.uses:
            depends[use.master_key_id].add(use.column or "the footer")
    for master_key_id, what in sorted(depends.items()):
        print(f"{master_key_id}: {', '.join(sorted(what))}")

    # Files for which this is unknown are included, too.
    needing = [Path(file.path).name for file in keytools.files_using("pii", folder)]
    print(f"these need pii: {', '.join(needing)}")
