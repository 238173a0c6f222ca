"""What a configuration may say of Google Cloud KMS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from parquet_keytools.kms.gcp_connection import is_loopback
from parquet_keytools.kms.gcp_names import key_ring_name
from parquet_keytools.kms.remote_client import RemoteKmsSettings

_ENDPOINT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_EMAIL = r"^[^@\s]+@[^@\s]+$"
_MAX_AAD_LENGTH = 65_536


class GcpSettings(RemoteKmsSettings):
    """Settings of Cloud KMS; relative paths start at the configuration's folder.

    Attributes:
        project: With location and key_ring, where master keys are that are named by their short names.
        location: Of the key ring.
        key_ring: Its short name.
        endpoint: Host of Cloud KMS, with a port where it is not 443.
        credentials_file: A service account key, or what gcloud made for a user or for workload identity
            federation. Without it, application default credentials.
        impersonate_service_account: Email of a service account to act as.
        impersonation_delegates: Service accounts in between, each of which may act as the next.
        quota_project: Project whose quota is used.
        additional_authenticated_data: Bound to each wrapped key: a text, or a mapping, of which the JSON with
            sorted keys and without spaces is used. It is not secret, and unwrapping needs the same.
        insecure: Without TLS and without credentials, for tests; to this machine only.
    """

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
        if not _ENDPOINT.fullmatch(self.endpoint):
            raise ValueError("endpoint is a host, with or without a port; it has no https:// before it")
        if self.insecure and not is_loopback(self.endpoint):
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
        value = self.additional_authenticated_data or ""
        if not isinstance(value, str):
            value = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return value.encode("utf-8")
