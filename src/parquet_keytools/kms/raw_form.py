"""Keys wrapped as the bare ciphertext of a KMS, as Iceberg stores them in the metadata of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from parquet_keytools import strict_base64
from parquet_keytools.kms.requests import R, UnwrapRequest, WrapRequest, mistake_in_key, mistake_in_wrapped_key
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")


class RawForm(ABC):
    """What a KMS client can do for Iceberg: a raw wrapped key is bound to nothing that only we know.

    | backend | raw form |
    | --- | --- |
    | `aws` | the ciphertext blob of Encrypt without encryption context, as Iceberg's `AwsKeyManagementClient` |
    | `gcp` | the ciphertext of Encrypt without additional authenticated data, as `GcpKeyManagementClient` |
    | `vault` | the ASCII bytes of `vault:v1:...` |
    | `keystore`, `in_memory` | nonce of 12 bytes, AES-GCM ciphertext, tag of 16 bytes, as Iceberg's `UnitestKMS` |
    """

    def wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap a key, and return the bare ciphertext of the KMS, as Iceberg stores it.

        Raises:
            KmsConfigurationError: The backend, or its settings, have no form that Iceberg's own clients read.
            KmsError: Another subclass says why not.
        """
        request = WrapRequest(key, master_key_id)
        request.refuse_other_lengths()
        answer = self._in_raw_form(
            request, lambda: strict_base64.encode(self._wrap_raw(key, master_key_id)), mistake_in_wrapped_key
        )
        return strict_base64.decode(answer)

    def unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap what `wrap_raw` returned, or another program that calls the same KMS. Errors are the same."""
        request = UnwrapRequest(strict_base64.encode(wrapped_key), master_key_id)
        return self._in_raw_form(request, lambda: self._unwrap_raw(wrapped_key, master_key_id), mistake_in_key)

    # --- hooks ---

    def _raw_obstacle(self) -> str:
        """Return why there is no raw form, or nothing: a backend that has one overrides this."""
        return "this backend has no raw form, which Iceberg needs"

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap one key. A backend whose wrapped keys are not base64 of their raw form overrides this."""
        return strict_base64.decode(self._wrap(key, master_key_id))

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap one key. A wrapped key that is not valid raises `WrappedKeyInvalidError`."""
        return self._unwrap(strict_base64.encode(wrapped_key), master_key_id)

    # --- of the client ---

    @abstractmethod
    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        """Wrap one key."""

    @abstractmethod
    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        """Unwrap one key."""

    @abstractmethod
    def _in_raw_form(self, request: R, call: Callable[[], T], mistake_in: Callable[[object], str]) -> T:
        """Make a call with all that the client does for each: checks, counts, audit log and telemetry."""
