"""AES in the two modes that Parquet uses, on memory that the caller owns (spec 4.1).

Ciphers work on views and write into views, so that a page is never copied just to be enciphered. Both release
the interpreter lock while they work on a large page.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from parquet_keytools.errors import FormatLimitError
from parquet_keytools.format.byte_ranges import Bytes
from parquet_keytools.secret_bytes import SecretBytes

__all__ = ["KEY_LENGTHS_BITS", "NONCE_LENGTH", "TAG_LENGTH", "AesCtr", "AesGcm", "InvalidTag"]

NONCE_LENGTH = 12
TAG_LENGTH = 16
KEY_LENGTHS_BITS = (128, 192, 256)

_INITIAL_COUNTER = b"\x00\x00\x00\x01"


def _check_length(dek: SecretBytes) -> None:
    if dek.length_bits not in KEY_LENGTHS_BITS:
        raise FormatLimitError(f"a key of {dek.length_bits} bits is not an AES key (128, 192 or 256 bits).")


def _copied_into(cipher: Callable[[Bytes, Bytes, Bytes], bytes]) -> Callable[[Bytes, Bytes, Bytes, Bytes], int]:
    """Return `encrypt` or `decrypt` of a cipher as `encrypt_into` or `decrypt_into`."""

    def into(nonce: Bytes, data: Bytes, aad: Bytes, out: Bytes) -> int:
        result = cipher(nonce, data, aad)
        # Raises ValueError where the lengths differ.
        memoryview(out)[:] = result
        return len(result)

    return into


class AesGcm:
    """AES-GCM under one key, for any number of threads (NIST SP 800-38D, spec 4.1.1).

    Attributes:
        encrypt: `(nonce, plaintext, aad)`; returns the ciphertext and the tag.
        decrypt: `(nonce, ciphertext and tag, aad)`; returns the plaintext. Raises `InvalidTag`.
        encrypt_into: `(nonce, plaintext, aad, out)`; `out` has the length of the plaintext and of the tag.
        decrypt_into: `(nonce, ciphertext and tag, aad, out)`; `out` has the length of the plaintext. Raises
            `InvalidTag`, and `out` is worth nothing then.
    """

    __slots__ = ("decrypt", "decrypt_into", "encrypt", "encrypt_into")

    encrypt: Callable[[Bytes, Bytes, Bytes], bytes]
    decrypt: Callable[[Bytes, Bytes, Bytes], bytes]
    encrypt_into: Callable[[Bytes, Bytes, Bytes, Bytes], int]
    decrypt_into: Callable[[Bytes, Bytes, Bytes, Bytes], int]

    def __init__(self, dek: SecretBytes) -> None:
        _check_length(dek)
        cipher = AESGCM(dek.reveal())
        # The bound methods themselves: pages are many, and a call in between costs as much as a small page.
        self.encrypt = cipher.encrypt
        self.decrypt = cipher.decrypt
        # From cryptography 48 on; before, each result is copied.
        if hasattr(cipher, "encrypt_into"):
            self.encrypt_into = cipher.encrypt_into
            self.decrypt_into = cipher.decrypt_into
        else:
            self.encrypt_into = _copied_into(cipher.encrypt)
            self.decrypt_into = _copied_into(cipher.decrypt)

    def tag(self, nonce: Bytes, data: Bytes, aad: bytes) -> bytes:
        """Return the tag alone, of 16 bytes, which is all that a signature keeps (spec 5.5)."""
        return self.encrypt(nonce, data, aad)[-TAG_LENGTH:]


class AesCtr:
    """AES-CTR under one key, for one thread (NIST SP 800-38A, spec 4.1.2).

    The initial counter block is the nonce and then 31 bits of 0 and one of 1. Decrypting is encrypting.
    """

    __slots__ = ("_context",)

    def __init__(self, dek: SecretBytes) -> None:
        _check_length(dek)
        block = bytes(NONCE_LENGTH) + _INITIAL_COUNTER
        self._context = Cipher(algorithms.AES(dek.reveal()), modes.CTR(block)).encryptor()

    def apply_into(self, nonce: Bytes, data: Bytes, aad: Bytes, out: Bytes) -> None:
        """Encrypt or decrypt `data` into `out`, which has its length. No AAD is authenticated."""
        del aad  # Only there so that both modes are called in the same way.
        self._context.reset_nonce(bytes(nonce) + _INITIAL_COUNTER)
        self._context.update_into(data, out)
