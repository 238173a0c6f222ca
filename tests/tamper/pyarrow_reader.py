"""Reads files with pyarrow alone, in a separate process: some attacks crash it.

    python pyarrow_reader.py FIRST_NUMBER FILE ...

prints for each file `{"file": ..., "outcome": ..., "error": ...}`; the data is compared with a table that starts
with FIRST_NUMBER.
"""

from __future__ import annotations

import base64
import json
import sys

import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from attacks import CHANGED, MASTER_KEYS, REFUSED, RIGHT, table
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pyarrow import fs as pafs


class FewLinesKms(pe.KmsClient):
    """Unwraps as parquet-java's in-memory test KMS does."""

    def __init__(self, config: pe.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        raise NotImplementedError

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        wrapped = base64.b64decode(wrapped_key)
        key = AESGCM(MASTER_KEYS[master_key_identifier])
        return key.decrypt(wrapped[:12], wrapped[12:], master_key_identifier.encode())


def main(first: int, paths: list[str]) -> None:
    factory = pe.CryptoFactory(FewLinesKms)
    for path in paths:
        try:
            properties = factory.file_decryption_properties(
                pe.KmsConnectionConfig(), pe.DecryptionConfiguration(), path, pafs.LocalFileSystem()
            )
            found = pq.read_table(path, decryption_properties=properties)
            outcome, error = (RIGHT if found.equals(table(first)) else CHANGED), ""
        except Exception as exception:
            outcome, error = REFUSED, type(exception).__name__
        print(json.dumps({"file": path, "outcome": outcome, "error": error}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
