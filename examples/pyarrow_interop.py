"""Exchange files with pyarrow's own CryptoFactory, in both directions, with the same master keys."""

import base64
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import Keytools

MASTER_KEYS = {name: os.urandom(32) for name in ("footer", "pii")}


class PlainKms(pe.KmsClient):
    """A KMS client as in pyarrow's documentation; it wraps as the in_memory KMS does."""

    def __init__(self, config: pe.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        """Wrap a KEK."""
        nonce = os.urandom(12)
        master_key = AESGCM(MASTER_KEYS[master_key_identifier])
        return base64.b64encode(nonce + master_key.encrypt(nonce, key_bytes, master_key_identifier.encode()))

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        """Unwrap a KEK."""
        data = base64.b64decode(wrapped_key)
        master_key = AESGCM(MASTER_KEYS[master_key_identifier])
        return master_key.decrypt(data[:12], data[12:], master_key_identifier.encode())


factory = pe.CryptoFactory(PlainKms)
connection = pe.KmsConnectionConfig()
keytools = Keytools.from_mapping(
    {
        "version": 1,
        "kms": {
            "type": "in_memory",
            "keys": {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()},
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
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as folder:
    ours, theirs = Path(folder) / "ours.parquet", Path(folder) / "theirs.parquet"

    keytools.write_table(table, ours)
    properties = factory.file_decryption_properties(connection)
    assert pq.read_table(ours, decryption_properties=properties).equals(table)
    print("pyarrow's CryptoFactory reads our file")

    configuration = pe.EncryptionConfiguration("footer", column_keys={"pii": ["tailnum"]})
    properties = factory.file_encryption_properties(connection, configuration)
    pq.write_table(table, theirs, encryption_properties=properties)
    assert keytools.read_table(theirs).equals(table)
    print("we read a file of pyarrow's CryptoFactory")
