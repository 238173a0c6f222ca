"""Resource names of Cloud KMS: `projects/*/locations/*/keyRings/*/cryptoKeys/*`, and versions below them."""

from __future__ import annotations

import re

_ID = r"[A-Za-z0-9_-]{1,63}"
# Projects of a domain are named `example.com:project`.
_KEY_RING = re.compile(rf"projects/[a-z0-9][a-z0-9.:-]{{0,127}}/locations/[a-z0-9-]{{1,63}}/keyRings/{_ID}")
_CRYPTO_KEY = re.compile(rf"{_KEY_RING.pattern}/cryptoKeys/{_ID}")
_CRYPTO_KEY_VERSION = re.compile(rf"({_CRYPTO_KEY.pattern})/cryptoKeyVersions/([1-9][0-9]{{0,8}})")
_SHORT_NAME = re.compile(_ID)
_FORM = "projects/PROJECT/locations/LOCATION/keyRings/KEY_RING/cryptoKeys/KEY"


class InvalidKeyNameError(ValueError):
    """A master key identifier that Cloud KMS cannot have.

    Attributes:
        hint: What to write in its place.
    """

    def __init__(self, detail: str, hint: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint


def key_ring_name(project: str | None, location: str | None, key_ring: str | None) -> str | None:
    """Return the resource name of a key ring, or None where parts of it are not given.

    Raises:
        ValueError: A part is not valid.
    """
    if not (project and location and key_ring):
        return None
    name = f"projects/{project}/locations/{location}/keyRings/{key_ring}"
    if not _KEY_RING.fullmatch(name):
        raise ValueError("project, location and key_ring do not make the name of a key ring")
    return name


def crypto_key_name(master_key_id: str, key_ring: str | None) -> str:
    """Return the resource name of a master key, given its resource name or its name in the key ring.

    Raises:
        InvalidKeyNameError: It is neither.
    """
    if _CRYPTO_KEY.fullmatch(master_key_id):
        return master_key_id
    if version := _CRYPTO_KEY_VERSION.fullmatch(master_key_id):
        raise InvalidKeyNameError(
            "this names one version of the key", f"Name the key: {version[1]}. Cloud KMS finds the version."
        )
    if not _SHORT_NAME.fullmatch(master_key_id):
        raise InvalidKeyNameError("this is not the name of a key in Cloud KMS", f"Its form is {_FORM}.")
    if key_ring is None:
        raise InvalidKeyNameError(
            "a short name needs a key ring",
            f"Set project, location and key_ring under kms, or write it in full: {_FORM}.",
        )
    return f"{key_ring}/cryptoKeys/{master_key_id}"


def version_of(version_name: str, key_name: str) -> str | None:
    """Return the number of a version of a key, or None where a name is not that of a version of this key."""
    parts = _CRYPTO_KEY_VERSION.fullmatch(version_name)
    return parts[2] if parts and parts[1] == key_name else None
