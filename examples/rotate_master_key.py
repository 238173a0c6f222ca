"""Rotate a master key: re-wrap the keys of files under its new version, and disable the old version."""

import secrets
import tempfile
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file

table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    for master_key_id in ("footer", "pii"):
        keystore.create_key(master_key_id)
    (folder / "flights.yaml").write_text(
        """
        version: 1
        kms: {type: keystore, path: keystore.json, passphrase_file: passphrase}
        tables:
          flights: {footer_key: footer, column_keys: {pii: [tailnum]}, unlisted_columns: plaintext}
        """
    )
    keytools = Keytools.from_yaml(folder / "flights.yaml")
    flights = folder / "flights"
    flights.mkdir()
    for year in (2012, 2013):
        keytools.write_table(table, flights / f"{year}.parquet")

    keystore.rotate_key("pii")
    planned = keytools.rotate(flights, dry_run=True)
    print(f"{len(planned.files)} files, for which the KMS is asked for {planned.expected_kms_calls.total} keys")

    report = keytools.rotate(flights)
    assert report.succeeded, report.failures
    for file in report.files:
        for key in file.keys:
            print(f"{Path(file.path).name}: {key.master_key_id} {key.version} -> {key.new_version}; {file.how}")

    keystore.set_enabled("pii", False, version=1)
    keytools.clear_caches()
    assert keytools.read_table(flights / "2012.parquet").equals(table)
    print("version 1 of pii is disabled, and all is read")
