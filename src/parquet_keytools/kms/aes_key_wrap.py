"""Wraps a key with another key by AES-GCM, like parquet-java's `KeyToolUtilities.encryptKeyLocally`."""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools import strict_base64
from parquet_keytools.secret_bytes import SecretBytes

_NONCE_LENGTH = 12
ADDED_LENGTH = _NONCE_LENGTH + 16
"""Of nonce and tag, in bytes."""


def wrap_key(wrapping_key: SecretBytes, key: SecretBytes, aad: bytes) -> str:
    """Return base64 of nonce (12 bytes), ciphertext and tag (16 bytes)."""
    return wrap_by(AESGCM(wrapping_key.reveal()), key, aad)


def wrap_by(cipher: AESGCM, key: SecretBytes, aad: bytes) -> str:
    """Wrap a key like `wrap_key`, with the cipher of the wrapping key."""
    nonce = secrets.token_bytes(_NONCE_LENGTH)
    return strict_base64.encode(nonce + cipher.encrypt(nonce, key.reveal(), aad))


def unwrap_key(wrapping_key: SecretBytes, wrapped_key: str, aad: bytes) -> SecretBytes:
    """Return the key that `wrap_key` wrapped; raise `InvalidTag` for any other text."""
    return unwrap_bytes(AESGCM(wrapping_key.reveal()), strict_base64.decode_or_empty(wrapped_key), aad)


def unwrap_bytes(cipher: AESGCM, data: bytes, aad: bytes) -> SecretBytes:
    """Return the key in nonce, ciphertext and tag; raise `InvalidTag` if another key or AAD wrapped it."""
    if len(data) < ADDED_LENGTH:
        raise InvalidTag
    return SecretBytes(cipher.decrypt(data[:_NONCE_LENGTH], data[_NONCE_LENGTH:], aad))
