"""Key encryption keys: what stands between a master key and many DEKs (double wrapping)."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import KEK_ID_LENGTH_BYTES, decode_base64
from parquet_keytools.secret_bytes import SecretBytes

_NONCE_LENGTH_BYTES = 12
_TAG_LENGTH_BYTES = 16


@dataclass(frozen=True)
class Kek:
    """A KEK: wraps DEKs with AES-GCM; its id is the AAD, as in parquet-java and Arrow."""

    kek_id: bytes
    key: SecretBytes

    @classmethod
    def generate(cls, length_bits: int) -> Kek:
        """Return a fresh KEK of `length_bits` bits with a random id."""
        return cls(secrets.token_bytes(KEK_ID_LENGTH_BYTES), SecretBytes.random(length_bits))

    def wrap_dek(self, dek: SecretBytes) -> str:
        """Return base64 of nonce, ciphertext and tag."""
        nonce = secrets.token_bytes(_NONCE_LENGTH_BYTES)
        ciphertext = AESGCM(self.key.reveal()).encrypt(nonce, dek.reveal(), self.kek_id)
        return base64.b64encode(nonce + ciphertext).decode()

    def unwrap_dek(self, wrapped_dek: str) -> SecretBytes:
        """Return the DEK.

        Raises:
            KeyMaterialError: It was not wrapped by this KEK, or was damaged.
        """
        buffer = decode_base64(wrapped_dek, "wrappedDEK")
        if len(buffer) <= _NONCE_LENGTH_BYTES + _TAG_LENGTH_BYTES:
            raise KeyMaterialError("wrappedDEK: too short")
        nonce, ciphertext = buffer[:_NONCE_LENGTH_BYTES], buffer[_NONCE_LENGTH_BYTES:]
        try:
            dek = SecretBytes(AESGCM(self.key.reveal()).decrypt(nonce, ciphertext, self.kek_id))
        except InvalidTag:
            raise KeyMaterialError(
                "wrappedDEK: does not belong to its KEK, or is damaged",
                hint="Restore the key material of the file, if it was altered.",
            ) from None
        if dek.length_bits not in (128, 192, 256):
            raise KeyMaterialError(f"wrappedDEK: holds a key of {dek.length_bits} bits")
        return dek
