"""Key bytes that give nothing away by accident."""

from __future__ import annotations

import hmac
import secrets
from typing import NoReturn, final


@final
class SecretBytes:
    """Key bytes whose repr, str, format, pickle and JSON show nothing of them.

    The bytes come out through `reveal` only, so that a search for that word finds every place that sees them.
    Python cannot promise to erase memory, and this class does not pretend to.
    """

    __slots__ = ("_value",)
    _value: bytes

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        # By way of a view: `bytes(5)` would be a key of five zeros.
        object.__setattr__(self, "_value", bytes(memoryview(value)))

    @classmethod
    def random(cls, length_bits: int) -> SecretBytes:
        """Return a fresh key of `length_bits` bits from the operating system's random generator."""
        return cls(secrets.token_bytes(length_bits // 8))

    def reveal(self) -> bytes:
        """Return the bytes themselves. Keep the result in as few places, and for as short, as can be."""
        return self._value

    @property
    def length_bits(self) -> int:
        """Length of the key in bits."""
        return len(self._value) * 8

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretBytes) and hmac.compare_digest(self._value, other._value)

    # A hash would be a fingerprint of the key that outlives it.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<SecretBytes, {self.length_bits} bits>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("SecretBytes cannot be changed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("SecretBytes cannot be pickled: a key must not leave the process")
