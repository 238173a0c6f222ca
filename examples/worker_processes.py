"""Pickle a Keytools to worker processes: they get its configuration, but no keys and no passphrase."""

import multiprocessing
import pickle
import secrets
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file


def count_rows(keytools: Keytools, path: Path) -> int:
    """Return the number of rows of a file; runs in a worker process."""
    return keytools.read_table(path, columns=["tailnum"]).num_rows


def main(folder: Path) -> None:
    """Write four files, and read each in a worker process."""
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    for master_key_id in ("footer", "pii"):
        keystore.create_key(master_key_id)
    configuration = folder / "flights.yaml"
    configuration.write_text(
        """
        version: 1
        kms: {type: keystore, path: keystore.json, passphrase_file: passphrase}
        tables:
          flights: {footer_key: footer, column_keys: {pii: [tailnum]}, unlisted_columns: plaintext}
        """
    )
    keytools = Keytools.from_yaml(configuration)
    paths = [folder / f"{number}.parquet" for number in range(4)]
    for number, path in enumerate(paths):
        keytools.write_table(pa.table({"tailnum": [f"N{row:05d}" for row in range(1_000 + number)]}), path)

    assert passphrase.read_bytes() not in pickle.dumps(keytools)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(count_rows, [keytools] * len(paths), paths))
    print(f"rows read by worker processes: {rows}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
