"""Scrypt is slow on purpose: a test process caches the key for each passphrase and salt."""

from __future__ import annotations

from functools import cache
from typing import Any

from cryptography.hazmat.primitives.kdf import scrypt

_ORIGINAL = scrypt.Scrypt


class RememberedScrypt:
    """Replaces `Scrypt`."""

    def __init__(self, salt: bytes, length: int, n: int, r: int, p: int) -> None:
        self._parameters = (salt, length, n, r, p)

    def derive(self, key_material: bytes) -> bytes:
        return _derive(bytes(key_material), *self._parameters)


@cache
def _derive(key_material: bytes, *parameters: Any) -> bytes:
    derived: bytes = _ORIGINAL(*parameters).derive(key_material)
    return derived


def install() -> None:
    """Install the replacement. Call it before the package is imported, which imports the class."""
    scrypt.Scrypt = RememberedScrypt  # type: ignore[assignment, misc]
