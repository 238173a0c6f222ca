"""One wrapped key of a file, wherever its key material lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.keys.key_unwrapper import decode_master_key_id
from parquet_keytools.rotation.rewrap_task import WrappedKey


@dataclass(frozen=True)
class HeldKey:
    """A wrapped key of a file.

    Attributes:
        material: The key material.
        text: The same as it lies in the file: key metadata, or an entry of the key material file.
        reference: Its name in the key material file; None where it is internal.
    """

    material: KeyMaterial = field(repr=False)
    text: str | bytes = field(repr=False)
    reference: str | None

    @property
    def wrapped_key(self) -> WrappedKey:
        """What the KMS wrapped: the KEK, or with single wrapping the DEK."""
        return WrappedKey(decode_master_key_id(self.material.master_key_id), self.material.kms_wrapped_key)
