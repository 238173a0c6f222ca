"""Create, rotate and disable master keys in a keystore file. The command line does the same."""

import secrets
import tempfile
from pathlib import Path

import pyarrow as pa

from parquet_keytools import Keytools, KeytoolsError
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
    keytools.write_table(table, folder / "old.parquet")

    version = keystore.rotate_key("pii")
    keytools.clear_caches()  # or wait for `cache_lifetime_seconds`: new files then get KEKs under the new version
    keytools.write_table(table, folder / "new.parquet")
    assert keytools.read_table(folder / "old.parquet").equals(keytools.read_table(folder / "new.parquet"))
    print(f"version {version} of pii wraps, version 1 still unwraps")

    keystore.set_enabled("pii", False, version=1)
    keytools.clear_caches()
    assert keytools.read_table(folder / "new.parquet").equals(table)
    try:
        keytools.read_table(folder / "old.parquet")
    except KeytoolsError as error:
        print(f"version 1 is disabled: {error}")
