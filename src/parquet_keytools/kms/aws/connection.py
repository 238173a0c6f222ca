"""The settings of AWS KMS, and its connection: sessions, clients, roles, and filters for the SDK's log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import boto3
import botocore.session
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError
from pydantic import AfterValidator, Field, SecretStr, model_validator

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.aws.errors import EXPIRED_CREDENTIALS, code_of
from parquet_keytools.kms.contract import RemoteKmsSettings, StrictSettings
from parquet_keytools.kms.transport import SdkLogs, check_certificates, mistake_in_url
from parquet_keytools.runtime.fork_safety import OwnerProcess, PerProcess
from parquet_keytools.runtime.presentation import expanded

_MAX_CONTEXT_LENGTH = 8_192


def _checked_context(context: dict[str, str]) -> dict[str, str]:
    if any(not name for name in context):
        raise ValueError("a name in the encryption context may not be empty")
    if any(name.lower().startswith("aws:") for name in context):
        raise ValueError("names in the encryption context may not start with `aws:`, which AWS reserves")
    if sum(len(name) + len(value) for name, value in context.items()) > _MAX_CONTEXT_LENGTH:
        raise ValueError(f"the encryption context may not have more than {_MAX_CONTEXT_LENGTH} characters")
    return context


EncryptionContext = Annotated[dict[str, str], AfterValidator(_checked_context)]


class AssumeRoleSettings(StrictSettings):
    """A role to assume with the other credentials."""

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
        description="Lifetime of its credentials; they are renewed before they expire.",
    )
    endpoint_url: str | None = Field(default=None, description="URL of STS, if it is not the public endpoint.")


class AwsSettings(RemoteKmsSettings):
    """Settings of AWS KMS; for missing settings, the AWS SDK searches its usual places."""

    type: Literal["aws"] = "aws"
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z0-9]+)+$", description="Region of the KMS, such as eu-west-1."
    )
    endpoint_url: str | None = Field(
        default=None, description="URL of the KMS, if it is not the public endpoint: for example a VPC endpoint."
    )
    allow_http: bool = Field(default=False, description="Allow an endpoint on another machine without TLS.")
    use_fips_endpoint: bool = Field(default=False, description="Use AWS's FIPS endpoints.")
    ca_bundle: Path | None = Field(
        default=None, description="PEM file of certificates to trust instead of the SDK's certificates."
    )
    profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Credentials for tests. Without them, the SDK searches its usual places."
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


# --- the connection ---


_log = logging.getLogger(__name__)

_sdk_logs = SdkLogs("boto3", "botocore")

_SHARE_OF_CONNECTING = 0.4
"""Of the timeout of one attempt; the rest is for the answer."""

_deadline_of_call: ContextVar[float | None] = ContextVar("deadline_of_call", default=None)
"""The deadline of the current call; None outside of calls of this package."""


class AwsConnection:
    """Sends requests with a boto3 client, which it makes for the first request of each process.

    Args:
        client: A boto3 client for KMS, used with its own timeouts and retries.
    """

    def __init__(self, settings: AwsSettings, folder: Path, session: Any = None, client: Any = None) -> None:
        self._settings = settings
        self._folder = folder
        self._session = session
        self._given_client = client
        self._owner = OwnerProcess()
        self._clients: PerProcess[Any] = PerProcess(self._make_client)

    @property
    def region(self) -> str | None:
        """The region of the KMS, if it is known without a client."""
        source = self._session if self._given_client is None else self._given_client.meta
        region: str | None = getattr(source, "region_name", None)
        return self._settings.region or region

    @property
    def address(self) -> str:
        """The address of the KMS, if it is known without a client."""
        region = f"region {self.region}" if self.region else ""
        return ", ".join(filter(None, [self._settings.endpoint_url, region]))

    def call(self, method: str, seconds: float, **parameters: Any) -> dict[str, Any]:
        """Send one request.

        If the KMS says that the credentials have expired, they are read or requested once more: a clock may be
        wrong, or they were revoked.

        Args:
            method: Method of the boto3 client.
            seconds: Timeout.
            parameters: Parameters of the method. `KeyId` and similar parameters can be functions of the region.
        """
        token = _deadline_of_call.set(time.monotonic() + seconds)
        try:
            with _sdk_logs.silenced():
                return self._sent(method, parameters)
        finally:
            _deadline_of_call.reset(token)

    def close(self) -> None:
        """Close the client's connections, unless the caller made it."""
        client = self._clients.take()
        if client is not None and self._given_client is None:
            client.close()

    def _sent(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        client = self._clients.get()
        try:
            return self._send(client, method, parameters)
        except ClientError as error:
            if self._given_client is not None or code_of(error) not in EXPIRED_CREDENTIALS:
                raise
        if self._clients.get() is client:
            self._clients.take()
        return self._send(self._clients.get(), method, parameters)

    def _send(self, client: Any, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        region = client.meta.region_name
        given = {name: value(region) if callable(value) else value for name, value in parameters.items()}
        answer: dict[str, Any] = getattr(client, method)(**given)
        return answer

    def _make_client(self) -> Any:
        client = self._given_client
        if client is None:
            session = self._session or _base_session(self._settings)
            if self._settings.assume_role is not None:
                session = self._session_in_role(session)
            client = self._opened(session.client, "kms", self._settings.endpoint_url)
        elif not self._owner.is_here:
            # A forked child drops its copies of the parent's connections, and opens its own.
            client.close()
        _sdk_logs.add_filters()
        return self._checked(client)

    def _session_in_role(self, base: Any) -> Any:
        """Return a session with the role's credentials, which it renews before they expire."""
        role = self._settings.assume_role
        assert role is not None
        source = base.get_credentials()
        if source is None:
            raise NoCredentialsError

        def make_client(service: str, **credentials: Any) -> Any:
            return self._checked(self._opened(base.client, service, role.endpoint_url, **credentials))

        arguments = {"RoleSessionName": role.session_name, "DurationSeconds": role.duration_seconds}
        if role.external_id is not None:
            arguments["ExternalId"] = role.external_id.get_secret_value()
        fetcher = AssumeRoleCredentialFetcher(make_client, source, role.role_arn, extra_args=arguments)

        def fetch() -> dict[str, Any]:
            # The SDK lets one thread after the other request them, and each would wait again for a silent STS.
            if _seconds_left() <= 0:
                raise ReadTimeoutError(endpoint_url="STS")
            credentials: dict[str, Any] = fetcher.fetch_credentials()
            return credentials

        session = botocore.session.Session(profile=self._profile)
        providers = CredentialResolver([_RoleProvider(fetch)])
        session.register_component("credential_provider", providers)
        return boto3.Session(botocore_session=session, region_name=self._settings.region or base.region_name)

    def _opened(self, make: Callable[..., Any], service: str, endpoint_url: str | None, **credentials: str) -> Any:
        """Return a client of the SDK with the limits of the settings."""
        self._check_sdk_settings(service, endpoint_url)
        options = self._client_options() | credentials
        client = make(service, endpoint_url=endpoint_url, **options)
        if client.meta.endpoint_url.startswith("http:") and not self._settings.allow_http:
            # The endpoint is on this machine. A proxy of the environment is not, and would see plaintext keys.
            client.close()
            options["config"] = options["config"].merge(Config(proxies={}))
            client = make(service, endpoint_url=endpoint_url, **options)
        client.meta.events.register(f"before-call.{service}", _set_read_timeout)
        return client

    def _client_options(self) -> dict[str, Any]:
        limits = self._settings
        connect_timeout = limits.call_timeout_seconds * _SHARE_OF_CONNECTING
        config = Config(  # type: ignore[call-arg, unused-ignore]  # the stubs do not have all
            connect_timeout=connect_timeout,
            read_timeout=limits.call_timeout_seconds - connect_timeout,
            max_pool_connections=limits.max_concurrent_calls,
            # Only RemoteKmsClient retries: two policies on top of each other would multiply the attempts.
            retries={"total_max_attempts": 1, "mode": "standard"},
            tcp_keepalive=True,
            use_fips_endpoint=limits.use_fips_endpoint or None,
            # Otherwise, an endpoint of the environment would override the FIPS endpoint.
            ignore_configured_endpoint_urls=limits.use_fips_endpoint or None,
            # For CloudTrail. The SDK's own user agent takes a tenth of the time of each call.
            user_agent=f"parquet-keytools Boto3/{boto3.__version__} Botocore/{botocore.__version__}",
        )
        return {"region_name": limits.region, "verify": self._ca_bundle, "config": config}

    @property
    def _ca_bundle(self) -> str | None:
        bundle = self._settings.ca_bundle
        return None if bundle is None else str(self._folder / expanded(bundle))

    @property
    def _profile(self) -> str | None:
        """The profile whose certificates and endpoints the SDK uses."""
        if self._session is not None and self._session.profile_name != "default":
            return str(self._session.profile_name)
        return self._settings.profile

    def _check_sdk_settings(self, service: str, endpoint_url: str | None) -> None:
        """Check the settings of TLS and the endpoint in the environment and the AWS configuration files."""
        sdk = botocore.session.Session(profile=self._profile)
        bundles = [self._ca_bundle, sdk.get_config_variable("ca_bundle"), os.environ.get("REQUESTS_CA_BUNDLE")]
        if "" in bundles:
            # Some versions of the SDK then verify no certificates.
            detail = "AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, or ca_bundle in the AWS configuration files, is empty"
            hint = "Unset it, or name a file of certificates."
            raise KmsConfigurationError(detail, operation="connect", hint=hint)
        bundle = next(filter(None, bundles), None)
        if bundle is not None:
            check_certificates(bundle)
        if endpoint_url is None and not self._settings.use_fips_endpoint:
            configured = ConfiguredEndpointProvider(sdk.full_config, sdk.get_scoped_config(), service).provide()
            if configured is not None and not sdk.get_config_variable("ignore_configured_endpoint_urls"):
                _log.warning("aws: the environment or the AWS configuration files set the endpoint of %s", service)

    def _checked(self, client: Any) -> Any:
        """Return a client after a check of its endpoint, which the environment or a profile may have set."""
        url = client.meta.endpoint_url
        mistake = mistake_in_url(url, "endpoint_url", allow_http=self._settings.allow_http)
        if mistake:
            hint = "The environment or the AWS configuration files may have set it; `allow_http` allows it."
            raise KmsConfigurationError(mistake, operation="connect", hint=hint)
        return client


class _RoleProvider(CredentialProvider):
    """Provides the credentials of a role, which are requested when the first request is signed."""

    METHOD = "parquet-keytools-assume-role"

    def __init__(self, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._fetch = fetch

    def load(self) -> Any:
        return DeferredRefreshableCredentials(self._fetch, "assume-role")


def _base_session(settings: AwsSettings) -> boto3.Session:
    def text(secret: Any) -> str | None:
        return None if secret is None else secret.get_secret_value()

    return boto3.Session(
        aws_access_key_id=text(settings.access_key_id),
        aws_secret_access_key=text(settings.secret_access_key),
        aws_session_token=text(settings.session_token),
        region_name=settings.region,
        profile_name=settings.profile,
    )


def _set_read_timeout(context: dict[str, Any], **_: Any) -> None:
    """Limit a request to the time left. Older versions of botocore have one timeout for all requests."""
    if _deadline_of_call.get() is not None:
        context["read_timeout"] = max(_seconds_left() * (1 - _SHARE_OF_CONNECTING), 0.001)


def _seconds_left() -> float:
    deadline = _deadline_of_call.get()
    return float("inf") if deadline is None else deadline - time.monotonic()
