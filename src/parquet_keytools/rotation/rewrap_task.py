"""A wrapped key that shall be wrapped anew, and what it became."""

from __future__ import annotations

from dataclasses import dataclass

from parquet_keytools.keys.kek import Kek
from parquet_keytools.secret_bytes import SecretBytes


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A wrapped key, and the master key that wrapped it, as the KMS knows it."""

    master_key_id: str
    wrapped_key: str


@dataclass(frozen=True, slots=True)
class RewrapTask:
    """A wrapped key that shall be wrapped anew.

    Attributes:
        old: The wrapped key.
        new_master_key_id: The master key whose current version shall wrap it.
        is_kek: Whether it is a KEK: then the wrapped DEK proves what it unwraps to, else it is compared.
    """

    old: WrappedKey
    new_master_key_id: str
    is_kek: bool


@dataclass(frozen=True)
class Rewrapped:
    """What a wrapped key became.

    Attributes:
        wrapped_key: The new one.
        new_master_key_id: The master key that wrapped it.
        key: What the KMS unwraps it to.
        new_kek: The fresh KEK that took the place of the old one; None where the key is the same.
        old_key: With a fresh KEK the old one, else the same as `key`.
        was_there: Whether an earlier run did it: the wrapped key is that of the new KMS already.
    """

    wrapped_key: str
    new_master_key_id: str
    key: SecretBytes
    new_kek: Kek | None
    old_key: SecretBytes
    was_there: bool = False
