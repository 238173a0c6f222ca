"""Read and write on any pyarrow.fs or fsspec file system, or with URIs; key material goes to the same place."""

import tempfile
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

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
    # A file system whose root is a folder. Use `pyarrow.fs.S3FileSystem` and others in the same way.
    filesystem = fs.SubTreeFileSystem(folder, fs.LocalFileSystem())
    keytools.write_table(table, "flights.parquet", filesystem=filesystem)
    assert keytools.read_table("flights.parquet", filesystem=filesystem).equals(table)
    print(f"on a file system: {[info.path for info in filesystem.get_file_info(fs.FileSelector(''))]}")

    uri = (Path(folder) / "flights.parquet").as_uri()
    assert uri.startswith("file://")
    assert keytools.read_table(uri).equals(table)
    print("by a file:// URI: the same")
