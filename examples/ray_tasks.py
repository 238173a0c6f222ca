"""Read encrypted files in Ray tasks: each worker requests the keys from the KMS, with its own identity."""

import secrets
import tempfile
from pathlib import Path

import pyarrow as pa
import ray

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file


@ray.remote
def count_rows(keytools: Keytools, path: Path) -> int:
    """Return the number of rows of a file; runs in a worker."""
    return keytools.read_table(path, columns=["tailnum"]).num_rows


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    for master_key_id in ("footer", "pii"):
        keystore.create_key(master_key_id)
    keytools = Keytools.from_mapping(
        {
            "version": 1,
            "kms": {
                "type": "keystore",
                "path": str(folder / "keystore.json"),
                "passphrase_file": str(passphrase),
            },
            "tables": {
                "flights": {
                    "footer_key": "footer",
                    "column_keys": {"pii": ["tailnum"]},
                    "unlisted_columns": "plaintext",
                }
            },
        }
    )
    (folder / "flights").mkdir()
    for month in (1, 2):
        table = pa.table({"month": [month] * 500, "tailnum": [f"N{number:05d}" for number in range(500)]})
        keytools.write_table(table, folder / "flights" / f"{month}.parquet")

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    counts = ray.get([count_rows.remote(keytools, path) for path in sorted((folder / "flights").iterdir())])
    print(f"flights in each file: {counts}")
    ray.shutdown()
