"""pyarrow with its own CryptoFactory and a KMS client of a few lines."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pyarrow import fs as pafs

from engines.ours import deks_of
from engines.policy import EncryptedFile, Policy
from engines.sample import MASTER_KEYS, column_keys, sample, write_options


class FewLinesKms(pe.KmsClient):
    """Wraps as parquet-java's in-memory test KMS does."""

    def __init__(self, config: pe.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        nonce = secrets.token_bytes(12)
        key = AESGCM(MASTER_KEYS[master_key_identifier])
        return base64.b64encode(nonce + key.encrypt(nonce, key_bytes, master_key_identifier.encode()))

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        wrapped = base64.b64decode(wrapped_key)
        key = AESGCM(MASTER_KEYS[master_key_identifier])
        return key.decrypt(wrapped[:12], wrapped[12:], master_key_identifier.encode())


class PlainPyarrow:
    """pyarrow without parquet-keytools."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample."""
        path = folder / "file.parquet"
        configuration = pe.EncryptionConfiguration(
            "footer",
            column_keys=column_keys(policy) or None,
            uniform_encryption=not policy.column_keys,
            encryption_algorithm=policy.algorithm,
            plaintext_footer=policy.plaintext_footer,
            double_wrapping=policy.double_wrapping,
            internal_key_material=policy.key_material == "internal",
            data_key_length_bits=policy.length_bits,
        )
        properties = pe.CryptoFactory(FewLinesKms).file_encryption_properties(
            pe.KmsConnectionConfig(), configuration, str(path), pafs.LocalFileSystem()
        )
        pq.write_table(sample(policy), path, encryption_properties=properties, **write_options(policy))
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file: with the KMS, or with the footer's DEK, the only key that pyarrow accepts."""
        if file.policy.data_keys:
            deks = deks_of(file)
            prefix = None if deks.aad_prefix is None else deks.aad_prefix.encode()
            properties = pe.create_decryption_properties(deks.footer, aad_prefix=prefix)
        else:
            properties = pe.CryptoFactory(FewLinesKms).file_decryption_properties(
                pe.KmsConnectionConfig(), pe.DecryptionConfiguration(), str(file.path), pafs.LocalFileSystem()
            )
        return pq.read_table(file.path, decryption_properties=properties, page_checksum_verification=True)
