"""Write a KMS client of your own, with four methods. Here it is passed in; a package can offer it as a plug-in.

    [project.entry-points."parquet_keytools.kms"]
    acme = "acme_kms:AcmeKms"

Then a configuration says `kms: {type: acme, ...}`. `parquet_keytools.kms.contract_tests` tests such a client.
"""

import tempfile
from pathlib import Path
from typing import Self

import pyarrow as pa
from cryptography.fernet import Fernet, InvalidToken

from parquet_keytools import Keytools, SecretBytes, parse_configuration
from parquet_keytools.errors import MasterKeyNotFoundError, WrappedKeyInvalidError
from parquet_keytools.kms.client import KmsSettings, MasterKeyDescription, SingleKeyKmsClient


class AcmeKms(SingleKeyKmsClient):
    """Stands in for a client of a remote KMS; its master keys are in-memory Fernet keys."""

    backend = "acme"

    def __init__(self) -> None:
        super().__init__()
        self._master_keys = {name: Fernet(Fernet.generate_key()) for name in ("footer", "pii")}

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Create a client from the settings under `kms`."""
        return cls()

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return self._master_key(master_key_id).encrypt(key.reveal()).decode()

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        try:
            return SecretBytes(self._master_key(master_key_id).decrypt(wrapped_key))
        except InvalidToken:
            raise WrappedKeyInvalidError from None

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        self._master_key(master_key_id)
        return MasterKeyDescription(master_key_id, enabled=True)

    def _master_key(self, master_key_id: str) -> Fernet:
        if master_key_id not in self._master_keys:
            raise MasterKeyNotFoundError
        return self._master_keys[master_key_id]


configuration = parse_configuration(
    {
        "version": 1,
        "kms": {"type": "in_memory", "keys": {}},  # replaced by the client that is passed in
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"]},
                "unlisted_columns": "plaintext",
            }
        },
    }
)
kms = AcmeKms()
keytools = Keytools(configuration, kms=kms)
table = pa.table({"flight": [1545, 1714, 1141], "tailnum": ["N14228", "N24211", "N619AA"]})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "flights.parquet"
    keytools.write_table(table, path)
    assert keytools.read_table(path).equals(table)
    print(f"{kms.backend}: {dict(kms.call_counts)}")
