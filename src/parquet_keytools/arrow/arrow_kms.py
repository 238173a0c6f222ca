"""pyarrow's own KmsClient interface: what its CryptoFactory calls, answered by us.

Imported when it is used: a pyarrow may be built without encryption, and then the module encryptor does it all.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow.parquet.encryption as pe

from parquet_keytools.errors import KeyNotAvailableError, KeytoolsError, value_or_raise
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.kms.client import KmsClient, WrapRequest
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.secret_bytes import SecretBytes

__all__ = ["AnsweringKms", "WrappingKms", "pe"]


class WrappingKms(pe.KmsClient):  # type: ignore[misc]
    """Passes wraps on to the KMS; called on the thread that makes the encryption properties."""

    def __init__(self, kms: KmsClient) -> None:
        super().__init__()
        share_with_arrow(self)
        self._kms = kms

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        """Wrap a KEK, or a DEK with single wrapping."""
        key = SecretBytes(key_bytes)
        # Some tools print the variables of a traceback.
        del key_bytes
        request = WrapRequest(key, decode_master_key_id(master_key_identifier))
        return value_or_raise(self._kms.wrap_many([request])[0])


class AnsweringKms(pe.KmsClient):  # type: ignore[misc]
    """Answers from keys that were unwrapped before; makes no KMS call."""

    def __init__(self, answers: Mapping[tuple[str, str], SecretBytes | KeytoolsError]) -> None:
        super().__init__()
        share_with_arrow(self)
        self._answers = answers

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        """Return a KEK, or a DEK with single wrapping."""
        answer = self._answers.get((wrapped_key, master_key_identifier))
        if answer is None:
            raise KeyNotAvailableError(
                "the file needs a key that was not unwrapped when its decryption properties were made.",
                hint="Name all columns that are read or filtered in decryption_properties(path, columns=[...]).",
            )
        return value_or_raise(answer).reveal()
