"""Key metadata, the bytes that a file carries for a key (spec 4.3), and key material, the JSON of type PKMT1.

Key material describes how a DEK is wrapped; parquet-java and Arrow use the same fields. Internal key material is
the key metadata itself and has `internalStorage: true`; external key material is in a separate file and lacks this
field.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

from parquet_keytools import strict_base64
from parquet_keytools.errors import KeyMaterialError

KEY_MATERIAL_TYPE = "PKMT1"
MAX_KEY_METADATA_BYTES = 65_536
"""Longer key metadata is refused; usual key metadata is less than a tenth of this length."""

KEK_ID_LENGTH_BYTES = 16


@dataclass(frozen=True)
class KeyMaterial:
    """Describes how one DEK is wrapped.

    Attributes:
        wrapped_dek: Single wrapping: the DEK wrapped by the KMS. Double wrapping: base64 of nonce, ciphertext and
            tag of the DEK under the KEK.
        kek_id: 16 random bytes that identify the KEK and are the AAD of the wrapped DEK; None with single
            wrapping.
        wrapped_kek: The KEK wrapped by the KMS; None with single wrapping.
        kms_instance_id: The KMS instance of the writer; informational, for footer keys only.
        kms_instance_url: The KMS URL of the writer; informational, for footer keys only.
    """

    is_footer_key: bool
    master_key_id: str
    wrapped_dek: str
    kek_id: bytes | None = None
    wrapped_kek: str | None = None
    kms_instance_id: str = "DEFAULT"
    kms_instance_url: str = "DEFAULT"

    @property
    def double_wrapping(self) -> bool:
        """Whether a KEK wraps the DEK, and the master key wraps the KEK."""
        return self.wrapped_kek is not None

    @property
    def kms_wrapped_key(self) -> str:
        """The key for the KMS to unwrap: the wrapped KEK with double wrapping, otherwise the wrapped DEK."""
        return self.wrapped_dek if self.wrapped_kek is None else self.wrapped_kek

    def serialise(self, *, internal: bool) -> str:
        """Return the JSON, for key metadata (internal) or for a key material file."""
        fields: dict[str, Any] = {"keyMaterialType": KEY_MATERIAL_TYPE}
        if internal:
            fields["internalStorage"] = True
        fields["isFooterKey"] = self.is_footer_key
        if self.is_footer_key:
            fields["kmsInstanceID"] = self.kms_instance_id
            fields["kmsInstanceURL"] = self.kms_instance_url
        fields["masterKeyID"] = self.master_key_id
        fields["wrappedDEK"] = self.wrapped_dek
        fields["doubleWrapping"] = self.double_wrapping
        if self.kek_id is not None:
            fields["keyEncryptionKeyID"] = base64.b64encode(self.kek_id).decode()
            fields["wrappedKEK"] = self.wrapped_kek
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> KeyMaterial:
        """Parse key material; `KeyMaterialError` names the field that is not valid."""
        fields = parse_object(text, "key material")
        check_type(fields)
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> KeyMaterial:
        """Make key material from the fields of a JSON object, whose type was checked; see `parse`."""
        is_footer_key = take_field(fields, "isFooterKey", bool)
        kek_id, wrapped_kek = None, None
        if take_field(fields, "doubleWrapping", bool):
            kek_id = decode_base64(take_field(fields, "keyEncryptionKeyID", str), "keyEncryptionKeyID")
            wrapped_kek = take_field(fields, "wrappedKEK", str)
        material = cls(
            is_footer_key=is_footer_key,
            master_key_id=take_field(fields, "masterKeyID", str),
            wrapped_dek=take_field(fields, "wrappedDEK", str),
            kek_id=kek_id,
            wrapped_kek=wrapped_kek,
            # Required for footer keys, since Arrow refuses key material without them.
            kms_instance_id=take_field(fields, "kmsInstanceID", str, _MISSING if is_footer_key else "DEFAULT"),
            kms_instance_url=take_field(fields, "kmsInstanceURL", str, _MISSING if is_footer_key else "DEFAULT"),
        )
        if not material.master_key_id or not material.wrapped_dek or material.wrapped_kek == "":
            raise KeyMaterialError("key material: masterKeyID, wrappedDEK and wrappedKEK must not be empty")
        return material


def parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object of bounded size without duplicate fields; errors start with `what`."""
    if len(text) > MAX_KEY_METADATA_BYTES:
        raise KeyMaterialError(f"{what}: longer than {MAX_KEY_METADATA_BYTES} bytes")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        fields = _DECODER.decode(text)
    except KeyMaterialError as error:
        raise KeyMaterialError(f"{what}: {error}") from None
    except (ValueError, RecursionError):
        raise KeyMaterialError(f"{what}: not valid JSON") from None
    if not isinstance(fields, dict):
        raise KeyMaterialError(f"{what}: not a JSON object")
    return fields


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise KeyMaterialError("a field is repeated")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=int)
"""`int` raises an error for NaN and Infinity."""


def check_type(fields: dict[str, Any]) -> None:
    """Raise `KeyMaterialError` unless the type of the key material is PKMT1."""
    key_material_type = take_field(fields, "keyMaterialType", str)
    if key_material_type != KEY_MATERIAL_TYPE:
        raise KeyMaterialError(f"keyMaterialType: {key_material_type[:32]!r} is not {KEY_MATERIAL_TYPE!r}")


_MISSING: Any = object()


def take_field(fields: dict[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    """Return a field of type `kind`, or the default if the field is missing."""
    value = fields.get(name, default)
    if value is _MISSING:
        raise KeyMaterialError(f"{name}: is missing")
    if not isinstance(value, kind):
        raise KeyMaterialError(f"{name}: is not a {'boolean' if kind is bool else 'string'}")
    if (
        isinstance(value, str)
        and not value.isascii()
        and any("\ud800" <= character <= "\udfff" for character in value)
    ):
        # JSON escapes can encode a lone surrogate, which Arrow's parser refuses.
        raise KeyMaterialError(f"{name}: is not valid Unicode")
    return value


def decode_base64(text: str, name: str) -> bytes:
    """Decode strict base64 of the field `name`."""
    try:
        return strict_base64.decode(text)
    except ValueError:
        raise KeyMaterialError(f"{name}: is not base64") from None


_REFERENCE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class KeyReference:
    """Refers to key material in the key material file beside the Parquet file."""

    reference: str

    def serialise(self) -> bytes:
        """Return the key metadata."""
        fields = {"keyMaterialType": KEY_MATERIAL_TYPE, "internalStorage": False, "keyReference": self.reference}
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True)
class DataKeyId:
    """The id of a data key that the caller manages."""

    name: str

    def serialise(self) -> bytes:
        """Return the key metadata."""
        return self.name.encode()


KeyMetadata = KeyMaterial | KeyReference | DataKeyId
"""Parsed key metadata; empty key metadata is None."""


def parse_key_metadata(key_metadata: bytes | None) -> KeyMetadata | None:
    """Parse key metadata; None without any.

    Raises:
        KeyMaterialError: The key metadata starts like JSON but is not valid key material, is too long, or is not
            UTF-8.
    """
    if not key_metadata:
        return None
    if len(key_metadata) > MAX_KEY_METADATA_BYTES:
        raise KeyMaterialError(f"key metadata: longer than {MAX_KEY_METADATA_BYTES} bytes")
    if not key_metadata.lstrip().startswith(b"{"):
        try:
            return DataKeyId(key_metadata.decode("utf-8"))
        except UnicodeDecodeError:
            raise KeyMaterialError("key metadata: neither JSON nor the id of a data key in UTF-8") from None
    fields = parse_object(key_metadata, "key metadata")
    check_type(fields)
    if take_field(fields, "internalStorage", bool):
        return KeyMaterial.from_fields(fields)
    reference = take_field(fields, "keyReference", str)
    if not _REFERENCE.fullmatch(reference):
        # A reference is only looked up in a JSON object; text that looks like a path is refused as a precaution.
        raise KeyMaterialError("keyReference: not a plain name")
    return KeyReference(reference)
