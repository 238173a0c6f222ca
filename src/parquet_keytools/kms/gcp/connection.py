"""The settings of Google Cloud KMS, its credentials, a gRPC channel that is safe with forks, and errors."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import google.auth
import grpc
from google.api_core.exceptions import GoogleAPICallError, Unauthenticated
from google.auth import identity_pool, impersonated_credentials
from google.auth.credentials import TokenState
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.cloud.kms_v1 import KeyManagementServiceClient
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account
from pydantic import Field, model_validator

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.remote_client import RemoteKmsSettings, bytes_of_context
from parquet_keytools.kms.transport import REFUSED, SILENT, SdkLogs, is_loopback
from parquet_keytools.runtime.threads_and_forks import CallGate, ForkSafeLock

_ENDPOINT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_EMAIL = r"^[^@\s]+@[^@\s]+$"
_MAX_AAD_LENGTH = 65_536

NAME = r"[A-Za-z0-9_-]{1,63}"
# Projects of a domain are named `example.com:project`.
KEY_RING = re.compile(rf"projects/[a-z0-9][a-z0-9.:-]{{0,127}}/locations/[a-z0-9-]{{1,63}}/keyRings/{NAME}")


class GcpSettings(RemoteKmsSettings):
    """Settings of Cloud KMS; relative paths start at the configuration's folder."""

    type: Literal["gcp"] = "gcp"
    project: str | None = Field(default=None, description="Project of the key ring.")
    location: str | None = Field(default=None, description="Location of the key ring.")
    key_ring: str | None = Field(
        default=None, description="Key ring of master keys that are named by their short names."
    )
    endpoint: str = Field(
        default="cloudkms.googleapis.com", description="Host of Cloud KMS, with a port if it is not 443."
    )
    credentials_file: Path | None = Field(
        default=None,
        description="File with a service account key, or with credentials of gcloud for a user or for workload "
        "identity federation. Without it, application default credentials.",
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
        description="Bound to each wrapped key, as a text or a mapping. Not secret; needed to unwrap.",
    )
    insecure: bool = Field(
        default=False, description="Connect without TLS and credentials, for tests; to this machine only."
    )

    def secret_files(self) -> dict[tuple[str, ...], Path]:
        """Return the file with the credentials."""
        return {} if self.credentials_file is None else {("credentials_file",): self.credentials_file}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.key_ring_name()
        parts = _ENDPOINT.fullmatch(self.endpoint)
        if parts is None:
            raise ValueError("endpoint is a host, with or without a port, and without https://")
        if self.insecure and not is_loopback(parts[1]):
            raise ValueError("insecure is for tests with an endpoint on this machine, such as 127.0.0.1:8080")
        if self.insecure and (self.credentials_file or self.impersonate_service_account):
            raise ValueError("credentials would be sent without TLS: leave out insecure, or the credentials")
        if self.impersonation_delegates and not self.impersonate_service_account:
            raise ValueError("impersonation_delegates needs impersonate_service_account")
        if len(self.aad()) > _MAX_AAD_LENGTH:
            raise ValueError(f"additional_authenticated_data has more than {_MAX_AAD_LENGTH} bytes")
        return self

    def key_ring_name(self) -> str | None:
        """Return the resource name of the key ring, or None if it is not configured."""
        if not (self.project and self.location and self.key_ring):
            return None
        name = f"projects/{self.project}/locations/{self.location}/keyRings/{self.key_ring}"
        if not KEY_RING.fullmatch(name):
            raise ValueError("project, location and key_ring do not form the name of a key ring")
        return name

    def aad(self) -> bytes:
        """Return the additional authenticated data as sent to Cloud KMS."""
        return bytes_of_context(self.additional_authenticated_data)


# --- credentials ---


SDK_LOGS = SdkLogs(
    "google.auth.transport.requests",
    "google.cloud.kms_v1.services.key_management_service.transports",
    least_level=logging.CRITICAL + 1,
)
"""Google's libraries log keys and access tokens."""

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_LEAST_SECONDS_BETWEEN_REFUSALS = 30.0
"""If every token is refused, not every call requests another token."""

_KINDS: dict[str, Callable[..., Any]] = {
    "authorized_user": user_credentials.Credentials.from_authorized_user_info,
    "external_account": identity_pool.Credentials.from_info,
    "service_account": service_account.Credentials.from_service_account_info,
}


def load_credentials(
    file: Path | None, impersonate: str | None, delegates: Sequence[str], quota_project: str | None
) -> Any:
    """Return the credentials in a file, or application default credentials.

    Args:
        file: A service account key, or credentials of gcloud for a user or for workload identity federation.
        impersonate: Email of a service account to act as.
        delegates: Service accounts in between, each of which may act as the next.
        quota_project: Project whose quota is used, if it is not the project of the credentials.

    Raises:
        KmsConfigurationError: The file is missing, or of another kind. The text quotes nothing from it.
        google.auth.exceptions.GoogleAuthError: There are no application default credentials.
    """
    # Some kinds of credentials are used at once, to find the project.
    with SDK_LOGS.silenced():
        credentials = google.auth.default(scopes=_SCOPES)[0] if file is None else _from_file(file)
    if isinstance(credentials, service_account.Credentials):
        # A token that is signed locally saves a call to Google's token service.
        credentials = credentials.with_always_use_jwt_access(not impersonate)
    if impersonate:
        credentials = impersonated_credentials.Credentials(
            source_credentials=credentials,
            target_principal=impersonate,
            target_scopes=list(_SCOPES),
            delegates=list(delegates),
        )
    return credentials.with_quota_project(quota_project) if quota_project else credentials


def _from_file(file: Path) -> Any:
    failure = None
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        make = _KINDS.get(str(info.get("type"))) if isinstance(info, dict) else None
        if make is not None:
            return make(info, scopes=_SCOPES)
    except OSError as error:
        failure = error.strerror or type(error).__name__
    except Exception as error:  # the key cannot be parsed, and the exception may quote it
        failure = type(error).__name__
    kinds = ", ".join(sorted(_KINDS))
    detail = f"cannot use credentials_file: {failure or f'its type is none of {kinds}'}"
    hint = "For other kinds of credentials set GOOGLE_APPLICATION_CREDENTIALS in place of credentials_file."
    raise KmsConfigurationError(detail, operation="connect", hint=hint)


class TokenSource:
    """Makes authentication headers, with a token that is renewed before it expires.

    gRPC could use the credentials itself, but would report every failure, lasting or not, as an unavailable
    server.
    """

    def __init__(self, credentials: Any, request: Callable[..., Any] | None = None) -> None:
        self._credentials = credentials
        self._request = request or Request()
        self._lock = ForkSafeLock()
        self._refused_at = float("-inf")

    @property
    def is_fresh(self) -> bool:
        """Whether the next headers need no call."""
        return bool(self._credentials.token_state is TokenState.FRESH)

    @property
    def email(self) -> str | None:
        """Email of the service account, if it is known without a call."""
        return email_of(self._credentials)

    def headers(self, url: str, seconds: float) -> list[tuple[str, str]]:
        """Return headers for a call.

        Args:
            url: URL of the service.
            seconds: Timeout for a new token, including the wait for another thread that requests it.

        Raises:
            google.auth.exceptions.GoogleAuthError: No token is available.
        """
        deadline = time.monotonic() + seconds

        def request(*arguments: Any, **options: Any) -> Any:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError("no time is left")
            options["timeout"] = min(left, options.get("timeout") or left)
            # Silenced here, because the library may use a thread of its own.
            with SDK_LOGS.silenced():
                return self._request(*arguments, **options)

        headers: dict[str, str] = {}
        # One thread renews the token. The others wait for it, until their own timeouts.
        with self._turn(seconds):
            self._credentials.before_request(request, "POST", url, headers)
        return [(name.lower(), value) for name, value in headers.items()]

    def refused(self, headers: Sequence[tuple[str, str]], seconds: float) -> bool:
        """Note that the token in these headers was refused: it was revoked, or a clock is wrong.

        Returns:
            Whether the next headers may have another token.
        """
        with self._turn(seconds):
            if dict(headers).get("authorization") != f"Bearer {self._credentials.token}":
                return True
            now = time.monotonic()
            if now - self._refused_at < _LEAST_SECONDS_BETWEEN_REFUSALS:
                return False
            self._refused_at = now
            self._credentials.token = None
            return True

    @contextlib.contextmanager
    def _turn(self, seconds: float) -> Iterator[None]:
        try:
            with self._lock.held_within(seconds):
                yield
        except TimeoutError:
            # Not the KMS is silent, but the token service, for which another thread waits.
            raise TransportError("no token in time") from None


def email_of(credentials: Any) -> str | None:
    """Return the email of a service account's credentials, if it is known."""
    email = getattr(credentials, "service_account_email", None)
    # The credentials of a virtual machine have the email "default" until they are first used.
    return email if isinstance(email, str) and "@" in email else None


# --- the channel ---


_OPTIONS = [
    # By default, gRPC waits up to two minutes before it reconnects to a KMS that is available again.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Detects a connection that a network device has dropped, so that calls do not time out on it for minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # RemoteKmsClient retries. A channel must not share the state of other channels.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


GRPC_CALLS = CallGate()
"""One gate for all clients of a process: a call of any client would break a fork."""


class GcpConnection:
    """Sends calls to Cloud KMS, each once, unless its token is refused.

    Args:
        client: The client; its retries and timeouts are not used.
        tokens: Source of tokens; None if the client authenticates itself, or without authentication.
    """

    def __init__(self, client: Any, tokens: TokenSource | None) -> None:
        self.client = client
        self.tokens = tokens
        self._url = f"https://{getattr(client, 'api_endpoint', '')}/"

    @property
    def is_ready(self) -> bool:
        """Whether the next call needs no new token."""
        return self.tokens is None or self.tokens.is_fresh

    def call(self, method: str, request: Any, seconds: float) -> Any:
        """Send one request, within a timeout that includes a new token.

        If the token is refused, the request is sent once more with another token.
        """
        deadline = time.monotonic() + seconds
        headers = self.authenticate(seconds)
        try:
            return self._send(method, request, headers, deadline)
        except Unauthenticated:
            if self.tokens is None or not self.tokens.refused(headers, deadline - time.monotonic()):
                raise
        return self._send(method, request, self.authenticate(deadline - time.monotonic()), deadline)

    def _send(self, method: str, request: Any, headers: Sequence[tuple[str, str]], deadline: float) -> Any:
        with SDK_LOGS.silenced(), GRPC_CALLS:
            left = max(deadline - time.monotonic(), 0.001)
            return getattr(self.client, method)(request=request, retry=None, timeout=left, metadata=headers)

    def authenticate(self, seconds: float) -> Sequence[tuple[str, str]]:
        """Return the authentication headers."""
        return self.tokens.headers(self._url, seconds) if self.tokens is not None else ()

    def close(self) -> None:
        """Close the channel."""
        self.client.transport.close()


def open_client(endpoint: str, *, insecure: bool) -> KeyManagementServiceClient:
    """Return a client with a channel of its own, which connects when it is first used."""
    with GRPC_CALLS:
        if insecure:
            # A proxy of the environment is not on this machine, and would see plaintext keys.
            channel = grpc.insecure_channel(endpoint, [*_OPTIONS, ("grpc.enable_http_proxy", 0)])
        else:
            channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(), _OPTIONS)
        return KeyManagementServiceClient(
            transport=KeyManagementServiceGrpcTransport(host=endpoint, channel=channel)
        )


# --- the meaning of errors ---

# Only status codes and reasons appear in errors, never a text, which may quote the request.

_REASON = re.compile(r"[A-Z][A-Z0-9_]{1,62}")

# Invalid credentials do not mean that the master key is denied: with "access denied", a reader that hides denied
# columns would silently return fewer columns.
_BY_STATUS: dict[str, type[KmsError]] = {
    "ABORTED": KmsUnavailableError,
    "CANCELLED": KmsUnavailableError,
    "DATA_LOSS": KmsResponseInvalidError,
    "DEADLINE_EXCEEDED": KmsUnavailableError,
    "FAILED_PRECONDITION": MasterKeyDisabledError,
    "INTERNAL": KmsUnavailableError,
    "INVALID_ARGUMENT": KmsConfigurationError,
    "NOT_FOUND": MasterKeyNotFoundError,
    "PERMISSION_DENIED": KmsAccessDeniedError,
    "RESOURCE_EXHAUSTED": KmsThrottledError,
    "UNAUTHENTICATED": KmsConfigurationError,
    "UNAVAILABLE": KmsUnavailableError,
    "UNIMPLEMENTED": KmsConfigurationError,
    "UNKNOWN": KmsUnavailableError,
}

_CREDENTIALS_HINT = (
    "Check the credentials, which may have expired: `gcloud auth application-default login`, "
    "GOOGLE_APPLICATION_CREDENTIALS, credentials_file, or the service account of this machine."
)
_HINTS = {
    "FAILED_PRECONDITION": "The key has no primary version, its version is disabled or destroyed, or it is not a "
    "key for symmetric encryption. Enable or restore the version while Cloud KMS still has it.",
    "INVALID_ARGUMENT": "Check additional_authenticated_data: with a key in an HSM it may have 8 KiB.",
    "UNAUTHENTICATED": _CREDENTIALS_HINT,
    "UNIMPLEMENTED": "Check that endpoint is one of Cloud KMS.",
}
_HINTS_BY_REASON = {
    "SERVICE_DISABLED": "Enable the API in the project: gcloud services enable cloudkms.googleapis.com",
    "BILLING_DISABLED": "Enable billing in the project.",
    "ACCESS_TOKEN_SCOPE_INSUFFICIENT": "Give the credentials the scope cloud-platform or cloudkms.",
}
_UNREACHABLE = {
    # Text of gRPC about a channel that it cannot open -> its meaning.
    "connection refused": REFUSED,
    "dns resolution failed": "its host name cannot be resolved",
    "name resolution": "its host name cannot be resolved",
    "handshake": "TLS failed",
    "network is unreachable": "no network route leads there",
    "connection reset": "the connection was closed",
    "socket closed": "the connection was closed",
    "timed out": SILENT,
}
_WRONG_WRAPPED_KEY_HINT = (
    "Check that the file was written with this key and the same additional_authenticated_data, and restore it "
    "if it was altered."
)


def kms_error(error: Exception, operation: str) -> KmsError | None:
    """Return the `KmsError` that replaces an exception, or None for an exception of another library."""
    if isinstance(error, GoogleAuthError):
        is_passing = isinstance(error, TransportError) or error.retryable
        kind = KmsUnavailableError if is_passing else KmsConfigurationError
        return kind(f"no access token: {type(error).__name__}", hint=_CREDENTIALS_HINT)
    if isinstance(error, GoogleAPICallError):
        return _of_call(error, operation)
    return KmsUnavailableError("the gRPC call failed") if isinstance(error, grpc.RpcError) else None


def _of_call(error: GoogleAPICallError, operation: str) -> KmsError:
    status = getattr(error.grpc_status_code, "name", "UNKNOWN")
    kind = _BY_STATUS.get(status, KmsResponseInvalidError)
    reasons = _reasons(error)
    hint = next((_HINTS_BY_REASON[r] for r in reasons if r in _HINTS_BY_REASON), _HINTS.get(status))
    text = (error.message or "").lower()
    if status == "INVALID_ARGUMENT" and "checksum" in text:
        # The request was damaged on its way: the code is the same as for a wrong ciphertext, but a retry helps.
        kind, hint = KmsResponseInvalidError, None
    elif status == "INVALID_ARGUMENT" and operation == "unwrap":
        kind, hint = WrappedKeyInvalidError, _WRONG_WRAPPED_KEY_HINT
    known = [words for sign, words in _UNREACHABLE.items() if status == "UNAVAILABLE" and sign in text]
    detail = ", ".join([*known[:1], status, *reasons])
    return kind(detail, hint=hint, retry_after_seconds=_retry_after(error))


def _reasons(error: GoogleAPICallError) -> list[str]:
    """Return the machine-readable reasons of an error, of its ErrorInfo and its PreconditionFailure."""
    violations = [violation for detail in error.details for violation in getattr(detail, "violations", ())]
    candidates = {error.reason, *(getattr(violation, "type", None) for violation in violations)}
    return sorted(reason for reason in candidates if isinstance(reason, str) and _REASON.fullmatch(reason))


def _retry_after(error: GoogleAPICallError) -> float:
    """Return how long a RetryInfo asks to wait, in seconds; 0 without one."""
    delays = [detail.retry_delay for detail in error.details if hasattr(detail, "retry_delay")]
    return max([0.0, *(float(delay.seconds + delay.nanos / 1e9) for delay in delays)])
