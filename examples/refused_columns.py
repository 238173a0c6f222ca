"""Read without permission for a master key: get one clear error, or the table without its columns."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError
from parquet_keytools.kms.in_memory import InMemoryKms

document = {
    "version": 1,
    "kms": {"type": "in_memory", "keys": ["footer", "pii"]},
    "tables": {
        "flights": {"footer_key": "footer", "column_keys": {"pii": ["tailnum"]}, "unlisted_columns": "plaintext"}
    },
}
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})
kms = InMemoryKms({"footer": None, "pii": None})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    Keytools(parse_configuration(document), kms=kms).write_table(table, path)

    kms.deny("pii")  # as a KMS does for a user without permission
    reader = Keytools(parse_configuration(document), kms=kms)
    try:
        reader.read_table(path)
    except ColumnAccessDeniedError as error:
        print(f"{type(error).__name__} for {', '.join(error.columns)}: {error}")
    print(f"what may be read is read: {reader.read_table(path, columns=['flight']).column_names}")

    # With plain pyarrow, name in `columns` what you will read.
    properties = reader.decryption_properties(path, columns=["flight"])
    found = pq.read_table(path, columns=["flight"], decryption_properties=properties)
    assert found.equals(table.select(["flight"]))

    hiding = Keytools(parse_configuration(document | {"reading": {"denied_columns": "hide"}}), kms=kms)
    print(f"denied_columns: hide gives {hiding.read_table(path).column_names}")
