"""Key metadata of Iceberg (StandardKeyMetadata): the key of one file, its AAD prefix and its length.

It is one byte of version and then Avro binary without a header: `encryption_key` bytes, `aad_prefix`
union[null, bytes], `file_length` union[null, long]. It holds the DEK itself: whatever carries it is encrypted.
"""

from __future__ import annotations

from dataclasses import dataclass

from parquet_keytools.encryption.aes import KEY_LENGTHS_BITS
from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.secret_bytes import SecretBytes

VERSION = 1
AAD_PREFIX_LENGTH = 16
"""Bytes of the AAD prefix of each file that is written; those that are read may have any length."""

_MAX_LENGTH = 1 << 16
_MAX_LONG = (1 << 63) - 1
_MAX_VARINT_LENGTH = 10
_NULL, _PRESENT = 0, 1


@dataclass(frozen=True)
class StandardKeyMetadata:
    """What opens one file of an encrypted table.

    Attributes:
        encryption_key: The DEK: 16, 24 or 32 bytes.
        aad_prefix: Begins the AAD of each block or module; empty where there is none.
        file_length: Bytes of the encrypted file, or None where the writer did not say.
    """

    encryption_key: SecretBytes
    aad_prefix: bytes = b""
    file_length: int | None = None

    @classmethod
    def fresh(cls, length_bits: int) -> StandardKeyMetadata:
        """Return a random DEK of `length_bits` bits, and a random AAD prefix, for a file that is to be written."""
        return cls(SecretBytes.random(length_bits), SecretBytes.random(AAD_PREFIX_LENGTH * 8).reveal())

    def encode(self) -> SecretBytes:
        """Return the bytes: they are as secret as the key in them."""
        key = self.encryption_key.reveal()
        encoded = bytearray((VERSION,))
        encoded += _encode_long(len(key)) + key
        if self.aad_prefix:
            encoded += _encode_long(_PRESENT) + _encode_long(len(self.aad_prefix)) + self.aad_prefix
        else:
            encoded += _encode_long(_NULL)
        if self.file_length is None:
            encoded += _encode_long(_NULL)
        else:
            encoded += _encode_long(_PRESENT) + _encode_long(self.file_length)
        return SecretBytes(encoded)

    @classmethod
    def decode(cls, encoded: SecretBytes, what: str) -> StandardKeyMetadata:
        """Return what the bytes say.

        Args:
            encoded: The bytes.
            what: Whose key metadata it is, for the error.

        Raises:
            KeyMaterialError: They are not key metadata of version 1, to the last byte. The error quotes none.
        """
        # What an exception's context holds would go into logs: nothing is raised from within a handler here.
        return _Decoder(encoded.reveal(), what).decode()


class _Decoder:
    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._position = 0

    def decode(self) -> StandardKeyMetadata:
        if not self._data or len(self._data) > _MAX_LENGTH:
            raise self._error(f"it has {len(self._data)} bytes")
        version = self._data[0]
        if version != VERSION:
            raise self._error(
                f"it has version {version}, and only version {VERSION} is known",
                hint="A newer Iceberg wrote it, or it is that of another kind of encryption.",
            )
        self._position = 1
        key = SecretBytes(self._bytes("encryption_key"))
        if key.length_bits not in KEY_LENGTHS_BITS:
            raise self._error(f"its key has {key.length_bits} bits, not 128, 192 or 256")
        aad_prefix = self._bytes("aad_prefix") if self._is_present("aad_prefix") else b""
        file_length = self._long("file_length") if self._is_present("file_length") else None
        if file_length is not None and file_length < 0:
            raise self._error("its file_length is negative")
        if self._position != len(self._data):
            raise self._error(f"{len(self._data) - self._position} bytes follow its last field")
        return StandardKeyMetadata(key, aad_prefix, file_length)

    def _bytes(self, field: str) -> bytes:
        length = self._long(field)
        if not 0 <= length <= len(self._data) - self._position:
            raise self._error(f"its {field} does not end within it")
        self._position += length
        return self._data[self._position - length : self._position]

    def _is_present(self, field: str) -> bool:
        branch = self._long(field)
        if branch not in (_NULL, _PRESENT):
            raise self._error(f"its {field} is neither null nor a value")
        return branch == _PRESENT

    def _long(self, field: str) -> int:
        value = 0
        for index in range(_MAX_VARINT_LENGTH):
            if self._position == len(self._data):
                raise self._error(f"it ends within its {field}")
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                # One spelling for each number: bytes that were altered never mean the same.
                if (index and not byte) or value >> 64:
                    break
                return (value >> 1) ^ -(value & 1)
        raise self._error(f"its {field} has a number that Avro does not write")

    def _error(self, reason: str, *, hint: str = "") -> KeyMaterialError:
        return KeyMaterialError(
            f"the key metadata of {self._what} is not valid: {reason}.",
            hint=hint or "Do not trust this file; restore it, or the metadata that names it, from a backup.",
        )


def _encode_long(value: int) -> bytes:
    if not 0 <= value <= _MAX_LONG:
        raise ValueError(f"{value} is not a length")
    encoded = bytearray()
    rest = value << 1
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)
