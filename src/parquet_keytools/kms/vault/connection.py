"""The settings of Vault and OpenBao, and an HTTP connection.

A request is sent once, before its deadline, to configured hosts only, and no answer appears in an exception. (hvac
follows redirects to any host, and puts answers, including plaintext keys, into exceptions.)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import requests
from pydantic import AfterValidator, Field, SecretStr, model_validator
from requests.adapters import HTTPAdapter
from urllib3 import Timeout
from urllib3.exceptions import HTTPError, ReadTimeoutError

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.contract import Meaning, RemoteKmsSettings, StrictSettings, bytes_of_context
from parquet_keytools.kms.transport import (
    check_certificates,
    check_client_certificate,
    http_parts,
    is_loopback,
    mistake_in_url,
    retry_after_seconds,
)
from parquet_keytools.kms.vault.errors import (
    NOT_JSON,
    REDIRECT,
    TOKEN_DEAD,
    TOKEN_UNKNOWN,
    VaultRefusal,
    meaning_of_texts,
    redirect_to,
)
from parquet_keytools.runtime.presentation import expanded

_MOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*(/[A-Za-z0-9_][A-Za-z0-9_. -]*)*/?")
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


def _checked_mount(mount: str) -> str:
    # It becomes part of a path, in which `..` would leave the mount.
    if not _MOUNT.fullmatch(mount) or ".." in mount:
        raise ValueError("a mount point is a path such as `transit` or `team/transit`")
    return mount


def _checked_namespace(namespace: str) -> str:
    if not _NAMESPACE.fullmatch(namespace) or ".." in namespace:
        raise ValueError("a namespace is a path such as `team` or `org/team`")
    return namespace


def _checked_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ValueError("a host is a name or an address, with a port if it is not the default port")
    return host.lower()


Mount = Annotated[str, AfterValidator(_checked_mount)]
Namespace = Annotated[str, AfterValidator(_checked_namespace)]
Host = Annotated[str, AfterValidator(_checked_host)]


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
    redirect_hosts: tuple[Host, ...] = Field(
        default=(), description="Other hosts that the server may redirect to, such as the nodes of its cluster."
    )
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


# --- the connection ---


_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


class _Connections(requests.Session):
    def get_redirect_target(self, response: requests.Response) -> None:  # type: ignore[override, unused-ignore]
        """Report no redirects: requests would parse their target, and read their whole content."""


def open_session(settings: VaultSettings, folder: Path) -> requests.Session:
    """Return the session of one process, which retries nothing and ignores the environment."""
    session = _Connections()
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
    connections = settings.max_concurrent_calls
    adapter = HTTPAdapter(pool_connections=8, pool_maxsize=connections, max_retries=0, pool_block=False)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def _file(folder: Path, setting: Path) -> str:
    path = folder / expanded(setting)
    if not path.is_file():
        raise KmsConfigurationError(f"there is no file {path}", operation="connect")
    return str(path)


class VaultConnection:
    """Sends requests with one token, before one deadline.

    Answers are returned as mappings. Any other answer becomes a `VaultRefusal`, without the text of the answer.

    Args:
        settings: Address of the server, and permitted redirects.
        token: Token to send, or None.
        deadline: Deadline of the answer, on the clock.
    """

    def __init__(
        self,
        session: requests.Session,
        settings: VaultSettings,
        token: SecretStr | None,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._settings = settings
        self._token = token
        self._deadline = deadline
        self._clock = clock

    def get(self, url: str) -> dict[str, Any]:
        """Send a GET request; see `request`."""
        return self.request("GET", url)

    def post(self, url: str, json: Mapping[str, object]) -> dict[str, Any]:
        """Send a POST request; see `request`."""
        return self.request("POST", url, json)

    def meaning_of_refusals(self) -> Meaning | None:
        """Return whether the token is invalid: any valid token may list its mounts, without a policy.

        An invalid token must not be reported as a denied master key: readers may hide the columns under such a
        key.
        """
        try:
            self.get("/v1/sys/internal/ui/mounts")
        except VaultRefusal as refusal:
            return TOKEN_DEAD if refusal.status == 403 else TOKEN_UNKNOWN
        return None

    def request(self, method: str, url: str, content: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Send a request. Returns the JSON object in the answer, or an empty mapping if the answer has no content.

        The answer to a batch with failed items is an answer, too.

        Args:
            method: The HTTP method.
            url: The path, from `/v1/` on.
            content: The JSON object to send, if any.

        Raises:
            VaultRefusal: The server refused, or sent an invalid answer.
            requests.RequestException, OSError: The connection failed.
        """
        base = self._settings.url.rstrip("/")
        for _ in range(_MAX_REDIRECTS + 1):
            status, answered, body = self._send(method, f"{base}{url}", content)
            if status not in (301, 302, 303, 307, 308):
                return _content(status, answered, body)
            base = self._redirected(base, answered.get("Location", ""))
        raise VaultRefusal(310, REDIRECT)

    def _send(self, method: str, url: str, content: Any) -> tuple[int, Mapping[str, str], bytes]:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        headers = {"X-Vault-Request": "true"}
        if self._settings.namespace:
            headers["X-Vault-Namespace"] = self._settings.namespace
        if self._token is not None:
            headers["X-Vault-Token"] = self._token.get_secret_value()
        try:
            with self._session.request(
                method,
                url,
                headers=headers,
                json=content,
                allow_redirects=False,
                stream=True,
                timeout=Timeout(total=left),  # type: ignore[arg-type, unused-ignore]
            ) as response:
                return response.status_code, response.headers, self._body(response)
        except requests.Timeout:
            raise TimeoutError from None

    def _body(self, response: requests.Response) -> bytes:
        """Read an answer, within the deadline and a limit of size."""
        body = bytearray()
        try:
            while part := response.raw.read1(65_536, decode_content=True):
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise VaultRefusal(response.status_code, NOT_JSON)
                # The timeout of the request limits silence only: a server that drips bytes never exceeds it.
                if self._clock() >= self._deadline:
                    raise TimeoutError
        except ReadTimeoutError:
            raise TimeoutError from None
        except HTTPError as error:
            raise requests.ConnectionError(type(error).__name__) from None
        return bytes(body)

    def _redirected(self, base: str, location: str) -> str:
        """Return the target of a redirect, if the token and keys may be sent there.

        Redirects from https to http, and from this machine to another machine without TLS, are always refused.
        """
        now = urlsplit(base)
        try:
            to = urlsplit(location)
            host, port = to.hostname or "", to.port or _PORTS.get(to.scheme, 0)
        except ValueError:
            raise VaultRefusal(310, REDIRECT) from None
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}", host) or to.scheme not in _PORTS:
            raise VaultRefusal(310, REDIRECT)
        is_own = (host, port) == (now.hostname, now.port or _PORTS[now.scheme])
        loses_protection = to.scheme == "http" and (
            now.scheme == "https" or (is_loopback(now.hostname or "") and not is_loopback(host))
        )
        host = f"[{host}]" if ":" in host else host
        place = f"{host}:{port}"
        allowed = is_own or place in self._settings.redirect_hosts or host in self._settings.redirect_hosts
        if not allowed or loses_protection:
            raise VaultRefusal(310, redirect_to(f"{to.scheme}://{place}"))
        # The path stays as it was: it names the master key.
        return f"{to.scheme}://{place}{now.path}"


def _content(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the content of an answer, or raise `VaultRefusal`."""
    if status == 204:
        return {}
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
