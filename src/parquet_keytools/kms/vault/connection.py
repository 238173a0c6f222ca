"""The settings of Vault and OpenBao, requests to the server, and the meaning of its refusals.

A request is sent once, before its deadline, to the configured server only: redirects are refused, since token and
keys would follow them. No text of the server appears in an exception, since it may contain plaintext keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import StrictSettings
from parquet_keytools.kms.http_session import REDIRECTS, HttpSession, send
from parquet_keytools.kms.remote_client import RemoteKmsSettings, bytes_of_context
from parquet_keytools.kms.transport import (
    Meaning,
    check_certificates,
    check_client_certificate,
    http_parts,
    is_loopback,
    mistake_in_url,
    retry_after_seconds,
)
from parquet_keytools.runtime.presentation import expanded

_MOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*(/[A-Za-z0-9_][A-Za-z0-9_. -]*)*/?")


def _checked_mount(mount: str) -> str:
    # It becomes part of a path, in which `..` would leave the mount.
    if not _MOUNT.fullmatch(mount) or ".." in mount:
        raise ValueError("a mount point is a path such as `transit` or `team/transit`")
    return mount


def _checked_namespace(namespace: str) -> str:
    if not _NAMESPACE.fullmatch(namespace) or ".." in namespace:
        raise ValueError("a namespace is a path such as `team` or `org/team`")
    return namespace


Mount = Annotated[str, AfterValidator(_checked_mount)]
Namespace = Annotated[str, AfterValidator(_checked_namespace)]


class AppRoleSettings(StrictSettings):
    """Login of a service with a role id and a secret id."""

    role_id: str = Field(min_length=1, description="The role id.")
    secret_id: SecretStr | None = Field(default=None, description="The secret id, best as `${VARIABLE}`; or")
    secret_id_file: Path | None = Field(
        default=None, description="a file with the secret id, read at each login. A role may need neither."
    )
    mount: Mount = Field(default="approle", description="Where the auth method is mounted.")

    @model_validator(mode="after")
    def _one_secret_id(self) -> Self:
        if self.secret_id is not None and self.secret_id_file is not None:
            raise ValueError("give either secret_id or secret_id_file")
        return self


class KubernetesSettings(StrictSettings):
    """Login of a pod with the token of its service account."""

    role: str = Field(min_length=1, description="The role to log in to.")
    jwt_path: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        description="The file with the service account's token, read at each login.",
    )
    mount: Mount = Field(default="kubernetes", description="Where the auth method is mounted.")


class JwtSettings(StrictSettings):
    """Login with a JSON Web Token, for example from a CI service."""

    role: str = Field(min_length=1, description="The role to log in to.")
    jwt: SecretStr | None = Field(default=None, description="The JSON Web Token, best as `${VARIABLE}`; or")
    jwt_file: Path | None = Field(default=None, description="a file with it, read at each login.")
    mount: Mount = Field(default="jwt", description="Where the auth method is mounted.")

    @model_validator(mode="after")
    def _one_jwt(self) -> Self:
        if (self.jwt is None) == (self.jwt_file is None):
            raise ValueError("give either jwt or jwt_file")
        return self


class VaultSettings(RemoteKmsSettings):
    """Settings of Vault and OpenBao; relative paths start at the configuration's folder."""

    type: Literal["vault"] = "vault"
    url: str = Field(description="Address of the server, such as `https://vault.example:8200`.")
    allow_http: bool = Field(default=False, description="Allow an address on another machine without TLS.")
    proxy: SecretStr | None = Field(
        default=None,
        description="Address of a proxy, best as `${VARIABLE}` if it contains a password. Proxies in "
        "environment variables are not used.",
    )
    namespace: Namespace | None = Field(default=None, description="The namespace that mounts and logins are in.")
    mount_point: Mount = Field(default="transit", description="Where the transit engine is mounted.")
    token: SecretStr | None = Field(default=None, description="A token, best as `${VAULT_TOKEN}`; or")
    token_file: Path | None = Field(
        default=None, description="a file with a token that another program renews; or"
    )
    approle: AppRoleSettings | None = Field(default=None, description="a login with AppRole; or")
    kubernetes: KubernetesSettings | None = Field(default=None, description="a login with Kubernetes; or")
    jwt: JwtSettings | None = Field(default=None, description="a login with a JSON Web Token.")
    ca_file: Path | None = Field(
        default=None, description="PEM file of certificates to trust instead of public certificates."
    )
    client_cert: Path | None = Field(default=None, description="A client certificate (PEM).")
    client_key: Path | None = Field(default=None, description="Its key (PEM), if it is not in the same file.")
    context: str | dict[str, str] | None = Field(
        default=None, description="Context of derived keys. With a context, all master keys must be derived keys."
    )
    batch_size: int = Field(default=100, ge=1, le=1000, description="Maximum number of keys in one call.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ways = (self.token, self.token_file, self.approle, self.kubernetes, self.jwt)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give one of token, token_file, approle, kubernetes and jwt")
        if self.client_key is not None and self.client_cert is None:
            raise ValueError("client_key needs client_cert")
        if mistake := mistake_in_url(self.url, "url", allow_http=self.allow_http):
            raise ValueError(mistake)
        if self.proxy is not None:
            _check_proxy(self.proxy.get_secret_value(), self.url, self.allow_http)
        return self

    def secret_files(self) -> dict[tuple[str, ...], Path]:
        """Return the files with secrets, without `kubernetes.jwt_path`: kubelet decides who may read that."""
        key = "client_cert" if self.client_key is None else "client_key"
        files: dict[tuple[str, ...], Path | None] = {
            ("token_file",): self.token_file,
            ("approle", "secret_id_file"): self.approle.secret_id_file if self.approle else None,
            ("jwt", "jwt_file"): self.jwt.jwt_file if self.jwt else None,
            (key,): self.client_cert if self.client_key is None else self.client_key,
        }
        return {names: file for names, file in files.items() if file is not None}

    def context_bytes(self) -> bytes | None:
        """Return the context as sent to the server, or None."""
        return None if self.context is None else bytes_of_context(self.context)


def _check_proxy(proxy: str, url: str, allow_http: bool) -> None:
    found = http_parts(proxy)
    if found is None:
        raise ValueError("proxy must be an address such as http://proxy.example:3128")
    # With TLS, a proxy sees nothing; without TLS, it sees token and keys.
    if urlsplit(url).scheme == "http" and not allow_http and not is_loopback(found[1]):
        raise ValueError("url is without TLS, so that the proxy can read the keys: leave out proxy, or use https")


# --- the meaning of refusals ---


class RequestTooLargeError(KmsConfigurationError):
    """The server refuses a request with this number of keys."""


NO_KEY = Meaning(MasterKeyNotFoundError)
WRAPPED_KEY_INVALID = Meaning(WrappedKeyInvalidError)
TOO_LARGE = Meaning(RequestTooLargeError, "the request is too large for it", "Lower batch_size.")
NEEDS_CONTEXT = Meaning(
    KmsConfigurationError, "it is a derived key, which needs a context", "Set context in the configuration."
)
NO_MOUNT = Meaning(
    KmsConfigurationError,
    "there is no transit engine at mount_point",
    "Check mount_point, url and namespace.",
)
NOT_JSON = Meaning(KmsResponseInvalidError, "it is not JSON of the expected form")
TOKEN_DEAD = Meaning(
    KmsConfigurationError,
    "the token has expired, was revoked, or never was valid",
    "Put a fresh token into the configuration, or use a login method, which gets its own token.",
)
TOKEN_UNKNOWN = Meaning(
    KmsAccessDeniedError, "the token may not look itself up, so it may also have expired or be revoked"
)
REDIRECT = Meaning(
    KmsConfigurationError,
    "it redirects to another address, which must get neither token nor keys",
    "Set url to the address of the active node, or of a load balancer that leads to it.",
)

_TEXTS = {
    # Text of the server -> its meaning, whatever the status.
    "encryption key not found": NO_KEY,
    # The answer to a wrap with a missing key: the wrap sends an invalid key type, so that no key is created.
    "unknown key type": NO_KEY,
    "soft-deleted key": Meaning(MasterKeyDisabledError, "it is soft-deleted"),
    "disallowed by policy (too old)": Meaning(
        MasterKeyDisabledError,
        "the version that wrapped the key is older than min_decryption_version",
        "Lower min_decryption_version in the KMS, rotate the files, then raise it again.",
    ),
    "message authentication failed": WRAPPED_KEY_INVALID,
    "invalid ciphertext": WRAPPED_KEY_INVALID,
    "missing ciphertext": WRAPPED_KEY_INVALID,
    "exceeded maximum": TOO_LARGE,
    "request body too large": TOO_LARGE,
    "missing 'context'": NEEDS_CONTEXT,
    "not supported for key type": Meaning(
        KmsConfigurationError, "keys of its type cannot wrap", "Use a key of type aes256-gcm96."
    ),
    "no handler for route": NO_MOUNT,
    "unsupported path": NO_MOUNT,
    "unsupported operation": NO_MOUNT,
    "namespace not found": Meaning(KmsConfigurationError, "there is no such namespace", "Check namespace."),
    "is sealed": Meaning(KmsUnavailableError, "it is sealed"),
}


def meaning_of_texts(texts: Iterable[object]) -> Meaning | None:
    """Return the meaning of the texts of a refusal, or None if it is unknown."""
    joined = " ".join(text for text in texts if isinstance(text, str))
    return next((meaning for known, meaning in _TEXTS.items() if known in joined), None)


@dataclass(eq=False)
class VaultRefusal(Exception):  # noqa: N818 - it is translated before a caller sees it
    """The server refused a request, or sent an invalid answer. Holds no text of the server.

    Attributes:
        known: The meaning of the server's text; None if only the status is known.
        retry_after_seconds: How long the server asks the client to wait.
        login: The auth method whose login was refused, or empty.
    """

    status: int
    known: Meaning | None = None
    retry_after_seconds: float = 0.0
    login: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the same request with the same token would be refused again."""
        return self.status in (400, 401, 403, 404, 405)

    @property
    def meaning(self) -> Meaning:
        """The meaning of the text, or of the status."""
        # The mount of a login is one of an auth method. A page of a proxy has a status, which says more.
        says_less = (self.known is NO_MOUNT and self.login) or (self.known is NOT_JSON and self.status >= 300)
        if self.known is not None and not says_less:
            return self.known
        if self.login and self.is_final:
            # Not "access denied", which is about master keys: readers may hide the columns under a denied key.
            hint = "Check role, secret and mount of the auth method, and whether the secret has expired."
            return Meaning(KmsConfigurationError, f"the login with {self.login} was refused", hint)
        if self.status in _STATUSES:
            return _STATUSES[self.status]
        kind = KmsUnavailableError if self.status >= 500 else KmsResponseInvalidError
        return Meaning(kind, f"status {self.status}")


_STATUSES = {
    400: Meaning(
        KmsConfigurationError,
        "the server rejects the request as invalid",
        "Check that a transit engine is mounted at mount_point.",
    ),
    401: Meaning(KmsAccessDeniedError),
    403: Meaning(KmsAccessDeniedError),
    404: NO_KEY,
    412: Meaning(KmsUnavailableError, "the node has not caught up with its cluster yet"),
    429: Meaning(KmsThrottledError),
    472: Meaning(KmsUnavailableError, "it is a disaster recovery secondary"),
    473: Meaning(KmsUnavailableError, "it is a performance standby"),
    501: Meaning(KmsUnavailableError, "it is not initialised"),
}


# --- requests ---


def open_session(settings: VaultSettings, folder: Path) -> HttpSession:
    """Return the session of one process, which retries nothing and ignores the environment."""
    session = HttpSession(settings.max_concurrent_calls)
    # The environment could name proxies and certificates, and ~/.netrc passwords that become headers.
    session.trust_env = False
    if settings.proxy is not None:
        proxy = settings.proxy.get_secret_value()
        session.proxies = {"http": proxy, "https": proxy}
    if settings.ca_file is not None:
        session.verify = _file(folder, settings.ca_file)
        check_certificates(session.verify)
    if settings.client_cert is not None:
        certificate = _file(folder, settings.client_cert)
        key = None if settings.client_key is None else _file(folder, settings.client_key)
        check_client_certificate(certificate, key)
        session.cert = certificate if key is None else (certificate, key)
    return session


def _file(folder: Path, setting: Path) -> str:
    path = folder / expanded(setting)
    if not path.is_file():
        raise KmsConfigurationError(f"there is no file {path}", operation="connect")
    return str(path)


class VaultServer:
    """Sends requests to the server.

    Args:
        session: Sends them.
        settings: Address of the server.
        clock: Clock of the deadlines.
    """

    def __init__(self, session: HttpSession, settings: VaultSettings, clock: Callable[[], float]) -> None:
        self.session = session
        self._settings = settings
        self._clock = clock

    def request(
        self,
        method: str,
        path: str,
        token: SecretStr | None,
        deadline: float,
        content: Any = None,
    ) -> dict[str, Any]:
        """Send a request. Returns the JSON object in the answer, or an empty mapping if the answer has no content.

        The answer to a batch with failed items is an answer, too.

        Args:
            method: The HTTP method.
            path: The path of the URL, from `/v1/` on.
            token: The token to send, or None.
            deadline: Deadline of the answer, on the clock.
            content: The JSON object to send, if any.

        Raises:
            VaultRefusal: The server refused, redirected, or sent an invalid answer.
            requests.RequestException, OSError: The connection failed.
        """
        headers = {"X-Vault-Request": "true"}
        if self._settings.namespace:
            headers["X-Vault-Namespace"] = self._settings.namespace
        if token is not None:
            headers["X-Vault-Token"] = token.get_secret_value()
        url = f"{self._settings.url.rstrip('/')}{path}"
        return _content(*send(self.session, method, url, deadline, self._clock, headers=headers, json=content))

    def meaning_of_refusals(self, token: SecretStr, deadline: float) -> Meaning | None:
        """Return whether a token is invalid: any valid token may list its mounts, without a policy.

        An invalid token must not be reported as a denied master key: readers may hide the columns under such a
        key.
        """
        try:
            self.request("GET", "/v1/sys/internal/ui/mounts", token, deadline)
        except VaultRefusal as refusal:
            return TOKEN_DEAD if refusal.status == 403 else TOKEN_UNKNOWN
        return None


def _content(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the content of an answer, or raise `VaultRefusal`."""
    if status == 204:
        return {}
    if status in REDIRECTS:
        raise VaultRefusal(status, REDIRECT)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    wait = retry_after_seconds(headers.get("Retry-After"))
    if not isinstance(content, dict):
        raise VaultRefusal(status, NOT_JSON, wait)
    if status == 200:
        return content
    data = content.get("data")
    if status == 400 and isinstance(data, dict) and isinstance(data.get("batch_results"), list):
        return content
    errors = content.get("errors")
    raise VaultRefusal(status, meaning_of_texts(errors if isinstance(errors, list) else []), wait)
