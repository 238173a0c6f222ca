"""Serve encrypted files over HTTP, for an engine that knows neither Python's file systems nor encryption."""

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import chdb
import pyarrow as pa

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
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
    table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})
    Keytools.from_yaml(configuration).write_table(table, folder / "flights.parquet")

    command = [sys.executable, "-m", "parquet_keytools", "serve", folder / "flights.parquet", "--json"]
    server = subprocess.Popen(
        [*command, "--config", configuration], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    lines = iter(server.stdout.readline, "}\n")
    url = json.loads("".join(lines) + "}")["url"]
    # ClickHouse, in this process:
    query = f"select tailnum from url('{url}flights.parquet', 'Parquet') where flight < 1500"
    print(f"ClickHouse reads {str(chdb.query(query)).strip()}")
    server.terminate()
    print(f"the server ended with status {server.wait()}")
    server.stdout.close()
