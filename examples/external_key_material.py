"""Keep key material in a JSON file beside each Parquet file."""

import json
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools
from parquet_keytools.errors import KeyMaterialError

keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"]},
                "unlisted_columns": "plaintext",
                "key_material": "external",
            }
        },
    }
)
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as name:
    path = Path(name) / "flights.parquet"
    keytools.write_table(table, path)
    assert keytools.read_table(path).equals(table)
    (material_path,) = Path(name).glob("_KEY_MATERIAL_FOR_*.json")
    for reference, text in json.loads(material_path.read_text()).items():
        material = json.loads(text)
        print(f"{material_path.name}: {reference} is wrapped under {material['masterKeyID']}")

    # The two files belong together: copy, move and delete both.
    copy = Path(name) / "copy.parquet"
    shutil.copyfile(path, copy)
    try:
        keytools.read_table(copy)
    except KeyMaterialError as error:
        print(f"without its key material: {error.hint}")
