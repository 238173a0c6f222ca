"""Create, write and read an encrypted Iceberg table with PyIceberg, and rotate its master key."""

import secrets
import tempfile
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from parquet_keytools.iceberg import create_table, load_table
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file

people = pa.table({"id": [1, 2, 3], "email": ["ada@example.com", "bo@example.com", "cy@example.com"]})

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    keystore.create_key("pii")
    (folder / "keytools.yaml").write_text(
        "version: 1\nkms: {type: keystore, path: keystore.json, passphrase_file: passphrase}\n"
    )
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
        "py-io-impl": "parquet_keytools.iceberg.EncryptedFileIO",
        "keytools.config": str(folder / "keytools.yaml"),
    }
    catalog = load_catalog("lake", **properties)
    catalog.create_namespace("db")
    table = create_table(catalog, "db.people", people.schema, encryption_key="pii")
    table.append(people)
    table.delete("id = 2")
    print(f"ids: {table.scan().to_arrow()['id'].to_pylist()}")

    # PyIceberg itself reads the table; to write it, load it with `load_table`.
    print(
        f"read by PyIceberg: {catalog.load_table('db.people').scan(row_filter='id < 3').to_arrow().num_rows} row"
    )

    keystore.rotate_key("pii")
    # With the key named, a table that lost its keys is refused, and not read as a plaintext table.
    table = load_table(catalog, "db.people", encryption_key="pii")
    print(f"KEKs under the new version: {len(table.rotate())}")
    files = [file for file in (folder / "warehouse").rglob("*") if file.is_file()]
    assert not any(b"example.com" in file.read_bytes() for file in files)
    print(f"{len(files)} files, and none has an address in plaintext")
