"""A KMS client of Google Cloud KMS.

A wrapped key is the base64 of the ciphertext of Cloud KMS, so any tool with the permission to call Decrypt can
unwrap it. The ciphertext hides the version of the master key that made it. The raw form is the ciphertext of a
call without additional authenticated data, as in Iceberg's `GcpKeyManagementClient`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import google.auth
import grpc
from google.api_core.exceptions import GoogleAPICallError, Unauthenticated
from google.auth import identity_pool, impersonated_credentials
from google.auth.credentials import TokenState
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.cloud import kms_v1
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account
from pydantic import Field, model_validator

from parquet_keytools import strict_base64
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
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    MasterKeyDescription,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.remote_client import (
    RemoteKmsClient,
    RemoteKmsSettings,
    RemoteOperation,
    Time,
    bytes_of_context,
)
from parquet_keytools.kms.transport import REFUSED, SILENT, SdkLogs, is_loopback
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import CallGate, ForkSafeLock, OwnerProcess, PerProcess
from parquet_keytools.secret_bytes import SecretBytes

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


_CRYPTO_KEY = re.compile(rf"{KEY_RING.pattern}/cryptoKeys/{NAME}")
_CRYPTO_KEY_VERSION = re.compile(rf"({_CRYPTO_KEY.pattern})/cryptoKeyVersions/([1-9][0-9]{{0,8}})")
_SHORT_NAME = re.compile(NAME)
_FORM = "projects/PROJECT/locations/LOCATION/keyRings/KEY_RING/cryptoKeys/KEY"

_STATES = kms_v1.CryptoKeyVersion.CryptoKeyVersionState
_ENABLED = kms_v1.CryptoKeyVersion.CryptoKeyVersionState.ENABLED
_ENCRYPT_DECRYPT = kms_v1.CryptoKey.CryptoKeyPurpose.ENCRYPT_DECRYPT


class GcpKms(RemoteKmsClient):
    """Wraps and unwraps with Encrypt and Decrypt of Cloud KMS, with checksums both ways.

    Cloud KMS cannot re-encrypt: a re-wrap is Decrypt and Encrypt, and this process sees the key.

    Args:
        settings: Key ring, endpoint, credentials and limits.
        client: A client that uses gRPC, in place of the endpoint and the credentials in the settings.
            `close` leaves it open, and forked children cannot use it.
        time_source: For tests.
    """

    backend = "gcp"
    new_keys_have = frozenset({"tags"})
    Settings = GcpSettings
    address_setting = "endpoint"
    certificates_setting = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"

    def __init__(
        self,
        settings: GcpSettings | None = None,
        folder: Path = Path(),
        *,
        client: kms_v1.KeyManagementServiceClient | None = None,
        time_source: Time | None = None,
    ) -> None:
        self.settings = settings or GcpSettings()
        super().__init__(self.settings, time_source)
        if client is not None and not isinstance(client.transport, KeyManagementServiceGrpcTransport):
            hint = "Make it with transport='grpc'."
            raise KmsConfigurationError("the client does not use gRPC", hint=hint).about("gcp", "connect", None)
        self._folder = folder
        self._client = client
        self._owner = OwnerProcess()
        self._key_ring = self.settings.key_ring_name()
        self._aad = self.settings.aad()
        self._aad_fields: dict[str, Any] = {}
        if self._aad:
            self._aad_fields["additional_authenticated_data"] = self._aad
            self._aad_fields["additional_authenticated_data_crc32c"] = crc32c(self._aad)
        self._connections = PerProcess(self._connect)
        self._last_connection: GcpConnection | None = None

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return False: Cloud KMS has no request that re-wraps."""
        return False

    def close(self) -> None:
        """Close threads and the channel. A later call makes new ones."""
        super().close()
        connection = self._connections.take()
        if connection is not None and self._client is None:
            connection.close()

    def __repr__(self) -> str:
        return f"<GcpKms at {self._server()}>"

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._authenticated("wrap").each(requests, self._encrypt)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._authenticated("unwrap").each(requests, self._decrypt)

    def _authenticated(self, name: str) -> RemoteOperation:
        """Begin an operation with a fresh token, so that a failure to get one is a single error."""
        operation = self._operation(name)
        connection = self._last_connection
        if connection is None or not connection.is_ready:
            operation.call(None, lambda seconds: self._connections.get().authenticate(seconds))
        return operation

    def _encrypt(self, request: WrapRequest, seconds: float) -> str:
        name, key = self._key_name(request.master_key_id), request.key.reveal()
        message = kms_v1.EncryptRequest(name=name, plaintext=key, plaintext_crc32c=crc32c(key), **self._aad_fields)
        answer = self._send("encrypt", message, seconds)
        wrong = None
        if not answer.verified_plaintext_crc32c:
            wrong = "Cloud KMS did not check the checksum of the key"
        elif self._aad and not answer.verified_additional_authenticated_data_crc32c:
            wrong = "Cloud KMS did not check the checksum of the additional authenticated data"
        elif not answer.ciphertext or answer.ciphertext_crc32c != crc32c(answer.ciphertext):
            wrong = "the checksum of the wrapped key is wrong"
        elif version_of(answer.name, name) is None:
            wrong = "the answer is about another key"
        if wrong:
            raise KmsResponseInvalidError(wrong)
        return strict_base64.encode(answer.ciphertext)

    def _decrypt(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        name = self._key_name(request.master_key_id)
        try:
            ciphertext = strict_base64.decode(request.wrapped_key)
        except ValueError:
            raise WrappedKeyInvalidError("it is not base64") from None
        message = kms_v1.DecryptRequest(
            name=name, ciphertext=ciphertext, ciphertext_crc32c=crc32c(ciphertext), **self._aad_fields
        )
        answer = self._send("decrypt", message, seconds)
        if answer.plaintext_crc32c != crc32c(answer.plaintext):
            raise KmsResponseInvalidError("the checksum of the key is wrong")
        return SecretBytes(answer.plaintext)

    def probe(self, master_key_id: str) -> str | None:
        """Return a wrapped key that Cloud KMS never made: IAM is checked before ciphertexts."""
        return strict_base64.encode(secrets.token_bytes(60))

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        name = self._key_name(master_key_id)
        send = partial(self._send, "get_crypto_key", kms_v1.GetCryptoKeyRequest(name=name))
        key = self._operation("describe").call(master_key_id, send)
        if key.name != name:
            raise KmsResponseInvalidError("the answer is about another key")
        if key.purpose != _ENCRYPT_DECRYPT:
            raise KmsConfigurationError("the key is not for symmetric encryption (purpose ENCRYPT_DECRYPT)")
        primary, origin = key.primary, None
        if primary:
            origin = primary.protection_level.name + (", imported" if primary.import_job else "")
        return MasterKeyDescription(
            master_key_id,
            enabled=bool(primary) and primary.state == _ENABLED,
            current_version=version_of(primary.name, name) if primary else None,
            origin=origin,
            rotates="rotation_period" in key,
        )

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        key_ring, _, name = self._key_name(master_key_id).rpartition("/cryptoKeys/")
        key = kms_v1.CryptoKey(purpose=_ENCRYPT_DECRYPT, labels=tags)
        request = kms_v1.CreateCryptoKeyRequest(parent=key_ring, crypto_key_id=name, crypto_key=key)
        self._operation("create").call(master_key_id, partial(self._send, "create_crypto_key", request))

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        name = self._key_name(master_key_id)
        versions = self._versions(self._operation("describe"), name, master_key_id)
        return {number: version.create_time.astimezone(UTC) for number, version in versions if version.create_time}

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        concerned = set(_STATES) - {_STATES.DESTROYED, _STATES.DESTROY_SCHEDULED}
        return self._change_versions("delete", "destroy", master_key_id, concerned)

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        concerned = {_STATES.DESTROY_SCHEDULED}
        return self._change_versions("cancel_deletion", "restore", master_key_id, concerned)

    def _change_versions(self, name: str, verb: str, master_key_id: str, states: Collection[Any]) -> KeyDeletion:
        """Change each version in some states; a repeated call continues with the others."""
        operation = self._operation(name)
        for _, version in list(self._versions(operation, self._key_name(master_key_id), master_key_id)):
            if version.state in states:
                request = {"name": version.name}
                operation.call(master_key_id, partial(self._send, f"{verb}_crypto_key_version", request))
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        name = self._key_name(master_key_id)
        try:
            versions = dict(self._versions(self._operation("describe"), name, master_key_id))
        except MasterKeyNotFoundError:
            return KeyDeletion(name, "deleted")
        states = {version.state for version in versions.values()}
        words = {number: version.state.name for number, version in versions.items()}
        if states <= {_STATES.DESTROYED}:
            return KeyDeletion(name, "deleted", words)
        if states <= {_STATES.DESTROYED, _STATES.DESTROY_SCHEDULED}:
            # The last version to go; the times of the others are in the KMS.
            times = [v.destroy_time.astimezone(UTC) for v in versions.values() if v.destroy_time]
            return KeyDeletion(name, "scheduled", words, max(times, default=None))
        return KeyDeletion(name, "usable" if _ENABLED in states else "disabled", words)

    def _caller_identity(self) -> CallerIdentity:
        self._authenticated("identify")
        tokens = self._last_connection.tokens if self._last_connection is not None else None
        if tokens is None or not tokens.email:
            return super()._caller_identity()
        return CallerIdentity(tokens.email, "the credentials of Google Cloud; Cloud KMS has no such call")

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        return kms_error(error, operation) or super()._translate(error, operation, master_key_id)

    def _server(self) -> str:
        return self.settings.endpoint if self._client is None else self._client.api_endpoint

    def _place(self) -> str:
        return ""

    def _identity(self, master_key_id: str) -> str:
        return self._key_name(master_key_id)

    def _raw_obstacle(self) -> str:
        return "Iceberg's own client sends no additional authenticated data" if self._aad else ""

    def _may_be_of_others(self, master_key_id: str) -> bool:
        return "/" in master_key_id and not master_key_id.startswith(f"{self._key_ring}/cryptoKeys/")

    def _principal(self) -> str:
        """Return the caller's identity as far as it is known without a call."""
        if self._client is not None:
            return "a client of the caller"
        if self.settings.impersonate_service_account:
            return self.settings.impersonate_service_account
        tokens = self._last_connection.tokens if self._last_connection is not None else None
        return (tokens and tokens.email) or "application default credentials"

    # --- names: `projects/*/locations/*/keyRings/*/cryptoKeys/*`, and versions below them ---

    def _key_name(self, master_key_id: str) -> str:
        """Return the resource name of a master key, given its resource name or its name in the key ring."""
        if _CRYPTO_KEY.fullmatch(master_key_id):
            return master_key_id
        if version := _CRYPTO_KEY_VERSION.fullmatch(master_key_id):
            detail = "this names one version of the key"
            hint = f"Name the key: {version[1]}. Cloud KMS finds the version."
        elif not _SHORT_NAME.fullmatch(master_key_id):
            detail, hint = "this is not the name of a key in Cloud KMS", f"Its form is {_FORM}."
        elif self._key_ring is None:
            detail = "a short name needs a key ring"
            hint = f"Set project, location and key_ring under kms, or write it in full: {_FORM}."
        else:
            return f"{self._key_ring}/cryptoKeys/{master_key_id}"
        raise KmsConfigurationError(detail, hint=hint)

    # --- connection ---

    def _connect(self) -> GcpConnection:
        if self._client is not None:
            if not self._owner.is_here:
                detail = "the client that was passed in belongs to the parent process"
                hint = "Make a client in each process, or let the configuration make it."
                raise KmsConfigurationError(detail, hint=hint, operation="connect")
            self._last_connection = GcpConnection(self._client, None)
            return self._last_connection
        settings, tokens = self.settings, None
        if not settings.insecure:
            file = settings.credentials_file
            credentials = load_credentials(
                self._folder / expanded(file) if file is not None else None,
                settings.impersonate_service_account,
                settings.impersonation_delegates,
                settings.quota_project,
            )
            tokens = TokenSource(credentials)
        self._last_connection = GcpConnection(open_client(settings.endpoint, insecure=settings.insecure), tokens)
        return self._last_connection

    def _versions(self, operation: RemoteOperation, name: str, master_key_id: str) -> Iterator[tuple[str, Any]]:
        """Yield the versions of a master key, with their numbers."""
        page_token = ""
        while True:
            request = kms_v1.ListCryptoKeyVersionsRequest(parent=name, page_token=page_token)
            page = operation.call(master_key_id, partial(self._send, "list_crypto_key_versions", request))
            for version in page.crypto_key_versions:
                if number := version_of(version.name, name):
                    yield number, version
            page_token = page.next_page_token
            if not page_token:
                return

    def _send(self, method: str, request: Any, seconds: float) -> Any:
        return self._connections.get().call(method, request, seconds)


def version_of(version_name: str, key_name: str) -> str | None:
    """Return the number in the name of a key version, or None if the version is not one of this key."""
    parts = _CRYPTO_KEY_VERSION.fullmatch(version_name)
    return parts[2] if parts and parts[1] == key_name else None


# --- CRC32C (Castagnoli), the checksum of Cloud KMS ---

_REVERSED_POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_REVERSED_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))


def crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes. Wrapped keys are short, so plain Python is fast enough (ADR 7)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


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

KINDS: dict[str, Callable[..., Any]] = {
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
        make = KINDS.get(str(info.get("type"))) if isinstance(info, dict) else None
        if make is not None:
            return make(info, scopes=_SCOPES)
    except OSError as error:
        failure = error.strerror or type(error).__name__
    except Exception as error:  # the key cannot be parsed, and the exception may quote it
        failure = type(error).__name__
    kinds = ", ".join(sorted(KINDS))
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
        """Return headers for a call; the timeout for a new token includes the wait for another thread."""
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
        """Note that a token was refused: revoked, or a clock is wrong. Returns whether another may be had."""
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

    The retries and timeouts of the client are not used. Without tokens, it authenticates itself, if at all.
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
        """Send one request, and once more if its token is refused; the timeout includes a new token."""
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


def open_client(endpoint: str, *, insecure: bool) -> kms_v1.KeyManagementServiceClient:
    """Return a client with a channel of its own, which connects when it is first used."""
    with GRPC_CALLS:
        if insecure:
            # A proxy of the environment is not on this machine, and would see plaintext keys.
            channel = grpc.insecure_channel(endpoint, [*_OPTIONS, ("grpc.enable_http_proxy", 0)])
        else:
            channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(), _OPTIONS)
        return kms_v1.KeyManagementServiceClient(
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
        of_token = KmsUnavailableError if is_passing else KmsConfigurationError
        return of_token(f"no access token: {type(error).__name__}", hint=_CREDENTIALS_HINT)
    if not isinstance(error, GoogleAPICallError):
        return KmsUnavailableError("the gRPC call failed") if isinstance(error, grpc.RpcError) else None
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
    delays = [found.retry_delay for found in error.details if hasattr(found, "retry_delay")]  # of a RetryInfo
    wait = max([0.0, *(float(delay.seconds + delay.nanos / 1e9) for delay in delays)])
    return kind(detail, hint=hint, retry_after_seconds=wait)


def _reasons(error: GoogleAPICallError) -> list[str]:
    """Return the machine-readable reasons of an error, of its ErrorInfo and its PreconditionFailure."""
    violations = [violation for detail in error.details for violation in getattr(detail, "violations", ())]
    candidates = {error.reason, *(getattr(violation, "type", None) for violation in violations)}
    return sorted(reason for reason in candidates if isinstance(reason, str) and _REASON.fullmatch(reason))
