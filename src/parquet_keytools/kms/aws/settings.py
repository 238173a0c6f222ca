"""What a configuration may say of AWS KMS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from parquet_keytools.kms.settings import RemoteKmsSettings
from parquet_keytools.kms.transport import mistake_in_url

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
    """A role to be assumed with the credentials that are there."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    role_arn: str = Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/.+$", description="The role's ARN.")
    session_name: str = Field(
        default="parquet-keytools",
        pattern=r"^[A-Za-z0-9_=,.@-]{2,64}$",
        description="CloudTrail records it with each call.",
    )
    external_id: SecretStr | None = Field(
        default=None, description="External id that a role of another account may require; best as `${VARIABLE}`."
    )
    duration_seconds: int = Field(
        default=3600,
        ge=900,
        le=43_200,
        description="How long its credentials are valid; they are renewed before they expire.",
    )
    endpoint_url: str | None = Field(default=None, description="URL of STS, if it is not the public one.")


class AwsSettings(RemoteKmsSettings):
    """Settings of AWS KMS; what is not said comes from where the AWS SDK looks for it."""

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
        default=None, description="PEM file of certificates to trust instead of those of the SDK."
    )
    profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Credentials for tests. Without them the SDK looks for some, as it always does."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    session_token: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    assume_role: AssumeRoleSettings | None = Field(
        default=None, description="A role to assume with these credentials."
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
            if url and (mistake := mistake_in_url(url, "endpoint_url", allow_http=self.allow_http)):
                raise ValueError(mistake)
        return self
