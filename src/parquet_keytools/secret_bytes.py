"""Key bytes that are not shown by accident."""

from __future__ import annotations

import hmac
import secrets
from typing import NoReturn, final


@final
class SecretBytes:
    """Key bytes that repr, str and format do not show, and that pickle and JSON refuse.

    Only `reveal` returns the bytes, so a search for that word finds every use. The bytes are not erased from
    memory, since Python cannot guarantee that.
    """

    __slots__ = ("_value",)
    _value: bytes

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        # memoryview refuses an int: `bytes(5)` would be a key of five zero bytes.
        object.__setattr__(self, "_value", bytes(memoryview(value)))

    @classmethod
    def random(cls, length_bits: int) -> SecretBytes:
        """Return a new key of `length_bits` bits from the random generator of the operating system."""
        return cls(secrets.token_bytes(length_bits // 8))

    def reveal(self) -> bytes:
        """Return the bytes. Keep the result in few places and for a short time."""
        return self._value

    @property
    def length_bits(self) -> int:
        """Length of the key in bits."""
        return len(self._value) * 8

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretBytes) and hmac.compare_digest(self._value, other._value)

    # Not hashable: a hash would be a fingerprint that outlives the key.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SecretBytes, {self.length_bits} bits>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("SecretBytes cannot be changed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecretBytes cannot be pickled: a key must not leave the process")
