"""pyarrow's own KmsClient interface: what its CryptoFactory calls, answered by us.

Imported when it is used: a pyarrow may be built without encryption, and then the module encryptor does it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import pyarrow.parquet.encryption as pe

from parquet_keytools.arrow.callbacks import called_by_arrow, is_thread_of_arrow
from parquet_keytools.errors import KeyNotAvailableError, KeytoolsError, value_or_raise
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.kms.client import KmsClient, WrapRequest
from parquet_keytools.runtime.endings import share_with_arrow
from parquet_keytools.secret_bytes import SecretBytes

__all__ = ["AnsweringKms", "WrappingKms", "pe"]


READING_CONNECTION = {"kms_instance_id": "DEFAULT", "kms_instance_url": "DEFAULT"}
"""Of `KmsConnectionConfig` for reading: without them Arrow takes them from the file, which may lack them."""


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


Guard = Callable[[str, str, bool], None]
"""Called before Arrow gets a key, with wrapped key, master key id, and whether a thread of Arrow's own asks, which
goes on with what a thread of Python began; raises to refuse."""


@called_by_arrow
class AnsweringKms(pe.KmsClient):  # type: ignore[misc]
    """Answers from keys that are at hand; asks nobody."""

    def __init__(
        self,
        answers: Mapping[tuple[str, str], SecretBytes | KeytoolsError],
        guard: Guard = lambda *_: None,
    ) -> None:
        super().__init__()
        share_with_arrow(self)
        self._answers = answers
        self._guard = guard

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        """Return a KEK, or a DEK with single wrapping."""
        self._guard(wrapped_key, master_key_identifier, is_thread_of_arrow(inspect.currentframe()))
        answer = self._answers.get((wrapped_key, master_key_identifier))
        if answer is None:
            raise KeyNotAvailableError(
                "the file needs a key that it did not need when its footer was verified.",
                hint="The file changed; make new decryption properties for it.",
            )
        return value_or_raise(answer).reveal()
