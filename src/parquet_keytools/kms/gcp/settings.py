"""What a configuration may say of Google Cloud KMS, and how master keys are named there.

Resource names are `projects/*/locations/*/keyRings/*/cryptoKeys/*`, and versions below them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from parquet_keytools.kms.settings import RemoteKmsSettings, bytes_of_context
from parquet_keytools.kms.transport import is_loopback

_ENDPOINT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_EMAIL = r"^[^@\s]+@[^@\s]+$"
_MAX_AAD_LENGTH = 65_536

_ID = r"[A-Za-z0-9_-]{1,63}"
# Projects of a domain are named `example.com:project`.
_KEY_RING = re.compile(rf"projects/[a-z0-9][a-z0-9.:-]{{0,127}}/locations/[a-z0-9-]{{1,63}}/keyRings/{_ID}")
_CRYPTO_KEY = re.compile(rf"{_KEY_RING.pattern}/cryptoKeys/{_ID}")
_CRYPTO_KEY_VERSION = re.compile(rf"({_CRYPTO_KEY.pattern})/cryptoKeyVersions/([1-9][0-9]{{0,8}})")
_SHORT_NAME = re.compile(_ID)
_FORM = "projects/PROJECT/locations/LOCATION/keyRings/KEY_RING/cryptoKeys/KEY"


class GcpSettings(RemoteKmsSettings):
    """Settings of Cloud KMS; relative paths start at the configuration's folder."""

    type: Literal["gcp"] = "gcp"
    project: str | None = Field(default=None, description="Project of the key ring.")
    location: str | None = Field(default=None, description="Location of the key ring.")
    key_ring: str | None = Field(
        default=None, description="Key ring of the master keys that are named by their short names."
    )
    endpoint: str = Field(
        default="cloudkms.googleapis.com", description="Host of Cloud KMS, with a port where it is not 443."
    )
    credentials_file: Path | None = Field(
        default=None,
        description="A service account key, or what gcloud made for a user or for workload identity federation. "
        "Without it, application default credentials.",
    )
    impersonate_service_account: str | None = Field(
        default=None, pattern=_EMAIL, description="Email of a service account to act as."
    )
    impersonation_delegates: tuple[str, ...] = Field(
        default=(), description="Service accounts in between, each of which may act as the next."
    )
    quota_project: str | None = Field(default=None, description="Project whose quota is used.")
    additional_authenticated_data: str | dict[str, str] | None = Field(
        default=None,
        description="Bound to each wrapped key, as a text or a mapping. Not secret; unwrapping needs the same.",
    )
    insecure: bool = Field(
        default=False, description="Without TLS and credentials, for tests; to this machine only."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        key_ring_name(self.project, self.location, self.key_ring)
        parts = _ENDPOINT.fullmatch(self.endpoint)
        if parts is None:
            raise ValueError("endpoint is a host, with or without a port; it has no https:// before it")
        if self.insecure and not is_loopback(parts[1]):
            raise ValueError("insecure is for tests with an endpoint on this machine, such as 127.0.0.1:8080")
        if self.insecure and (self.credentials_file or self.impersonate_service_account):
            raise ValueError("credentials would be sent without TLS: leave out insecure, or the credentials")
        if self.impersonation_delegates and not self.impersonate_service_account:
            raise ValueError("impersonation_delegates needs impersonate_service_account")
        if len(self.aad()) > _MAX_AAD_LENGTH:
            raise ValueError(f"additional_authenticated_data has more than {_MAX_AAD_LENGTH} bytes")
        return self

    def aad(self) -> bytes:
        """Return the additional authenticated data as Cloud KMS gets it."""
        return bytes_of_context(self.additional_authenticated_data)


class InvalidKeyNameError(ValueError):
    """A master key identifier that Cloud KMS cannot have."""

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
