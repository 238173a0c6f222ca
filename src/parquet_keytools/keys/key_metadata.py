"""Key metadata: the bytes that a file carries for a key, in the kinds of spec 4.3."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.key_material import (
    KEY_MATERIAL_TYPE,
    MAX_KEY_METADATA_BYTES,
    KeyMaterial,
    check_type,
    parse_object,
    take_field,
)

_REFERENCE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class KeyReference:
    """Points to key material in the key material file beside the Parquet file."""

    reference: str

    def serialise(self) -> bytes:
        """Return the key metadata."""
        fields = {
            "keyMaterialType": KEY_MATERIAL_TYPE,
            "internalStorage": False,
            "keyReference": self.reference,
        }
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True)
class DataKeyId:
    """Names a data key that the caller manages."""

    name: str

    def serialise(self) -> bytes:
        """Return the key metadata."""
        return self.name.encode()


KeyMetadata = KeyMaterial | KeyReference | DataKeyId
"""What key metadata can be; empty key metadata is None."""


def parse_key_metadata(key_metadata: bytes | None) -> KeyMetadata | None:
    """Tell what key metadata is.

    Returns:
        Key material, a reference to it, the id of a data key, or None where there is no key metadata.

    Raises:
        KeyMaterialError: It starts like JSON and is not valid key material, or is not text.
    """
    if not key_metadata:
        return None
    if len(key_metadata) > MAX_KEY_METADATA_BYTES:
        raise KeyMaterialError(f"key metadata: longer than {MAX_KEY_METADATA_BYTES} bytes")
    if not key_metadata.lstrip().startswith(b"{"):
        return _parse_data_key_id(key_metadata)
    fields = parse_object(key_metadata, "key metadata")
    check_type(fields)
    if take_field(fields, "internalStorage", bool):
        return KeyMaterial.from_fields(fields)
    reference = take_field(fields, "keyReference", str)
    if not _REFERENCE.fullmatch(reference):
        # A reference is looked up in a JSON object only; still, nothing that looks like a path passes.
        raise KeyMaterialError("keyReference: not a plain name")
    return KeyReference(reference)


def _parse_data_key_id(key_metadata: bytes) -> DataKeyId:
    try:
        return DataKeyId(key_metadata.decode("utf-8"))
    except UnicodeDecodeError:
        raise KeyMaterialError("key metadata: neither JSON nor the id of a data key in UTF-8") from None
