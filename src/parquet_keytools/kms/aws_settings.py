"""What a configuration may say of AWS KMS."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from parquet_keytools.kms.remote_client import RemoteKmsSettings

_MAX_CONTEXT_LENGTH = 8_192


def _checked_context(context: dict[str, str]) -> dict[str, str]:
    if any(not name for name in context):
        raise ValueError("a name in the encryption context may not be empty")
    if any(name.lower().startswith("aws:") for name in context):
        raise ValueError("names in the encryption context may not start with `aws:`, which is AWS's own")
    if sum(len(name) + len(value) for name, value in context.items()) > _MAX_CONTEXT_LENGTH:
        raise ValueError(f"the encryption context may not have more than {_MAX_CONTEXT_LENGTH} characters")
    return context


EncryptionContext = Annotated[dict[str, str], AfterValidator(_checked_context)]


class AssumeRoleSettings(BaseModel):
    """A role to be assumed with the credentials that are there.

    Attributes:
        role_arn: The role.
        session_name: Stands in CloudTrail with each call.
        external_id: What a role of another account may ask for.
        duration_seconds: How long its credentials are valid; they are renewed before they expire.
        endpoint_url: Of STS, where it is not AWS's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    role_arn: str = Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/.+$", description="The role's ARN.")
    session_name: str = Field(
        default="parquet-keytools",
        pattern=r"^[A-Za-z0-9_=,.@-]{2,64}$",
        description="Stands in CloudTrail with each call.",
    )
    external_id: SecretStr | None = Field(
        default=None, description="What a role of another account may ask for; best as `${VARIABLE}`."
    )
    duration_seconds: int = Field(
        default=3600,
        ge=900,
        le=43_200,
        description="How long its credentials are valid; they are renewed before they expire.",
    )
    endpoint_url: str | None = Field(default=None, description="URL of STS, where it is not AWS's own.")


class AwsSettings(RemoteKmsSettings):
    """Settings of AWS KMS; what is not said comes from where the AWS SDK looks for it.

    Attributes:
        region: Of the KMS.
        endpoint_url: Of the KMS, where it is not AWS's own, such as that of a VPC endpoint.
        allow_http: Whether an endpoint of another machine may be reached without TLS.
        use_fips_endpoint: Whether to use AWS's FIPS endpoints.
        ca_bundle: Certificates to be trusted in place of the SDK's own.
        profile: Of the AWS configuration files.
        access_key_id: Credentials for tests. Where there are none, the SDK looks for them.
        secret_access_key: See `access_key_id`.
        session_token: See `access_key_id`.
        assume_role: A role to be assumed with these credentials.
        encryption_context: Bound to each wrapped key, and written to CloudTrail in plaintext.
    """

    type: Literal["aws"] = "aws"
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z0-9]+)+$", description="Region of the KMS, such as eu-west-1."
    )
    endpoint_url: str | None = Field(
        default=None, description="URL of the KMS, where it is not AWS's own, such as that of a VPC endpoint."
    )
    allow_http: bool = Field(
        default=False, description="Whether an endpoint on another machine may be reached without TLS."
    )
    use_fips_endpoint: bool = Field(default=False, description="Whether to use AWS's FIPS endpoints.")
    ca_bundle: Path | None = Field(
        default=None, description="PEM file of the certificates to be trusted in place of the SDK's own."
    )
    profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Credentials for tests. Without them the SDK looks for some, as it always does."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    session_token: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    assume_role: AssumeRoleSettings | None = Field(
        default=None, description="A role to be assumed with these credentials."
    )
    encryption_context: EncryptionContext = Field(
        default_factory=dict,
        description="Bound to each wrapped key, needed to unwrap it, and written to CloudTrail in plaintext.",
        json_schema_extra={"default": {}},
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("give either profile or access_key_id")
        if self.use_fips_endpoint and self.endpoint_url is not None:
            raise ValueError("give either endpoint_url or use_fips_endpoint")
        for url in (self.endpoint_url, self.assume_role and self.assume_role.endpoint_url):
            mistake = url and mistake_in_endpoint(url, allow_http=self.allow_http)
            if mistake:
                raise ValueError(mistake)
        return self


def mistake_in_endpoint(url: str, *, allow_http: bool) -> str | None:
    """Return why a URL may not be used as an endpoint, or None. It is not quoted: it may hold a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "endpoint_url is not a URL"
    if parts.scheme not in ("http", "https") or not host:
        return "endpoint_url is not a URL that starts with https://"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "endpoint_url is scheme, host and port, without user, query or fragment"
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        return "endpoint_url starts with http://, so keys would cross the network in plaintext: use https://"
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
