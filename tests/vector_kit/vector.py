"""The definition of a vector, and the keys that all vectors use."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from vector_kit.plain_file import plain_bytes, take_apart
from vector_kit.sealed_file import FOOTER_KEY, Hooks, Recipe, Sealer

MASTER_KEYS = {"footer": b"master-key-footr", "column": b"master-key-colum"}
"""Identifier -> master key; it wraps with AES-GCM, with the identifier as AAD, like parquet-java's test KMS."""

AAD_PREFIX = "kit"


def data_key(name: str, length_bits: int = 128) -> bytes:
    """Return the data key of a name; `k2` has 256 bits."""
    length_bits = 256 if name.startswith("k2") else length_bits
    return hashlib.sha256(f"vector kit {name}".encode()).digest()[: length_bits // 8]


def base_columns(suffix: str = "") -> dict[int, tuple[bytes, bytes | None] | str]:
    """Return the usual columns: `id` under k1, `name` under k2, `price` under the footer's key."""
    return {
        0: (data_key(f"k1{suffix}"), f"k1{suffix}".encode()),
        1: (data_key(f"k2{suffix}"), f"k2{suffix}".encode()),
        2: FOOTER_KEY,
    }


def recipe(seed: int, suffix: str = "", **changes: Any) -> Recipe:
    """Return the usual recipe with changes; hooks may be given by their names."""
    hooks = {name: changes.pop(name) for name in list(changes) if name in Hooks.__dataclass_fields__}
    settings: dict[str, Any] = {
        "footer_key": data_key(f"kf{suffix}"),
        "footer_key_metadata": f"kf{suffix}".encode(),
        "columns": base_columns(suffix),
        "hooks": Hooks(**hooks),
    }
    return Recipe(seed=seed, **(settings | changes))


@dataclass(frozen=True)
class SealedFile:
    """A file of a vector."""

    recipe: Recipe
    plain: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> bytes:
        """Return its bytes."""
        return Sealer(take_apart(plain_bytes(**self.plain)), self.recipe).seal()


@dataclass(frozen=True)
class Vector:
    """A file, or a folder of files, and the expected findings.

    Attributes:
        name: The name of the file or folder.
        title: What is special about it.
        files: Name -> its bytes, or a function that makes them.
        broken: Ids of the broken rules; empty for a good vector.
        rule: The rule that it demonstrates; None for a good vector.
        expected: Expectations beyond the specification: `aad_prefix`, `table`, `invocation_limit`, `parts`,
            `plaintext_files`, `keys_without_metadata`.
        is_folder: Whether the folder is to be checked as a data set.
        features: The features of the file.
    """

    name: str
    title: str
    files: Mapping[str, SealedFile | bytes]
    broken: frozenset[str] = frozenset()
    rule: str | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    is_folder: bool = False
    features: tuple[str, ...] = ()

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of all its files."""
        return {
            name: content.make() if isinstance(content, SealedFile) else content
            for name, content in self.files.items()
        }


def key_material(
    seed: int,
    dek: bytes,
    *,
    is_footer_key: bool,
    kek_length_bits: int | None = 256,
    master_key_id: str | None = None,
    wrong_kek: bool = False,
    internal: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Return key material of type PKMT1 (spec 4.3), made with fixed nonces.

    Args:
        seed: Of nonces and the KEK.
        dek: The key to wrap.
        is_footer_key: The material's `isFooterKey`.
        kek_length_bits: With double wrapping; None wraps the DEK with the master key.
        master_key_id: The master key.
        wrong_kek: Whether the stored KEK differs from the KEK that wrapped the DEK.
        internal: Whether it goes into the Parquet file.
        changes: Fields to set.
    """
    generator = random.Random(seed)
    master_key_id = master_key_id or ("footer" if is_footer_key else "column")

    def wrap(key: bytes, plaintext: bytes, aad: bytes) -> str:
        nonce = generator.randbytes(12)
        return base64.b64encode(nonce + AESGCM(key).encrypt(nonce, plaintext, aad)).decode()

    def wrap_with_master_key(key: bytes) -> str:
        return wrap(MASTER_KEYS[master_key_id], key, master_key_id.encode())

    fields: dict[str, Any] = {"keyMaterialType": "PKMT1"}
    if internal:
        fields["internalStorage"] = True
    fields["isFooterKey"] = is_footer_key
    if is_footer_key:
        fields |= {"kmsInstanceID": "DEFAULT", "kmsInstanceURL": "DEFAULT"}
    fields |= {"masterKeyID": master_key_id, "doubleWrapping": kek_length_bits is not None}
    if kek_length_bits is None:
        fields["wrappedDEK"] = wrap_with_master_key(dek)
    else:
        kek, kek_id = generator.randbytes(kek_length_bits // 8), generator.randbytes(16)
        fields["wrappedDEK"] = wrap(generator.randbytes(len(kek)) if wrong_kek else kek, dek, kek_id)
        fields["keyEncryptionKeyID"] = base64.b64encode(kek_id).decode()
        fields["wrappedKEK"] = wrap_with_master_key(kek)
    return fields | changes


def as_metadata(fields: Mapping[str, Any]) -> bytes:
    """Return key material as key metadata."""
    return json.dumps(fields, separators=(",", ":")).encode()


def reference(name: str) -> bytes:
    """Return key metadata that refers to external key material."""
    return as_metadata({"keyMaterialType": "PKMT1", "internalStorage": False, "keyReference": name})
