"""Key material whose wrapped key was wrapped anew: the same JSON with other values, proven to lead to its DEK."""

from __future__ import annotations

import json
from dataclasses import dataclass

from parquet_keytools.errors import KeyMaterialError
from parquet_keytools.keys.kek import Kek
from parquet_keytools.keys.key_material import KeyMaterial, parse_object
from parquet_keytools.keys.key_unwrapper import decode_master_key_id, encode_master_key_id
from parquet_keytools.rotation.rewrap_task import Rewrapped
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.strict_base64 import encode


@dataclass(frozen=True)
class KmsInstance:
    """What footer key material says of the KMS, for people.

    Attributes:
        instance_id: As the configuration names it.
        instance_url: Likewise.
    """

    instance_id: str = "DEFAULT"
    instance_url: str = "DEFAULT"


@dataclass(frozen=True)
class NewMaterial:
    """New key material.

    Attributes:
        text: The JSON.
        dek: The DEK that it leads to, by way of what the KMS unwrapped.
    """

    text: str
    dek: SecretBytes


def new_material(
    text: str | bytes, material: KeyMaterial, rewrapped: Rewrapped, instance: KmsInstance | None
) -> NewMaterial:
    """Return key material with its wrapped key replaced; fields that we do not know stay.

    Args:
        text: The JSON as it is.
        material: The same, parsed.
        rewrapped: What takes the place of its wrapped key.
        instance: The KMS that the footer's key material shall name; None leaves that as it is.

    Raises:
        KeyMaterialError: What the KMS unwrapped is not the KEK of the wrapped DEK.
    """
    fields = parse_object(text, "key material")
    fields["masterKeyID"] = _in_the_same_form(material.master_key_id, rewrapped.new_master_key_id)
    if material.kek_id is None:
        fields["wrappedDEK"] = rewrapped.wrapped_key
        dek = rewrapped.key
    elif rewrapped.new_kek is None:
        fields["wrappedKEK"] = rewrapped.wrapped_key
        # AES-GCM proves it: only the KEK that wrapped the DEK unwraps it.
        dek = Kek(material.kek_id, rewrapped.key).unwrap_dek(material.wrapped_dek)
    else:
        kek = rewrapped.new_kek
        dek = Kek(material.kek_id, rewrapped.old_key).unwrap_dek(material.wrapped_dek)
        fields["keyEncryptionKeyID"] = encode(kek.kek_id)
        fields["wrappedKEK"] = rewrapped.wrapped_key
        fields["wrappedDEK"] = kek.wrap_dek(dek)
        if Kek(kek.kek_id, rewrapped.key).unwrap_dek(fields["wrappedDEK"]) != dek:
            raise KeyMaterialError("wrappedDEK: the new KEK does not lead to the same DEK")
    if instance is not None and material.is_footer_key:
        fields["kmsInstanceID"] = instance.instance_id
        fields["kmsInstanceURL"] = instance.instance_url
    return NewMaterial(json.dumps(fields, separators=(",", ":")), dek)


def _in_the_same_form(stored: str, new_master_key_id: str) -> str:
    """Return a master key id percent-encoded if the one before it was: so the file's readers expect it."""
    was_encoded = decode_master_key_id(stored) != stored
    if decode_master_key_id(stored) == new_master_key_id:
        return stored
    return encode_master_key_id(new_master_key_id) if was_encoded else new_master_key_id
