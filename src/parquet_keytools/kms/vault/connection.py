"""HTTP to Vault or OpenBao for hvac: one attempt, within its time, to hosts that are configured, without leaks.

hvac's own adapters follow redirects to any host and put answers, plaintexts included, into exceptions.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from hvac.adapters import Adapter
from pydantic import SecretStr
from requests.adapters import HTTPAdapter
from urllib3 import Timeout
from urllib3.exceptions import HTTPError, ReadTimeoutError

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.transport import (
    check_certificates,
    check_client_certificate,
    is_loopback,
    retry_after_seconds,
)
from parquet_keytools.kms.vault.errors import BACKEND, Reason, VaultRefusal, reason_of
from parquet_keytools.kms.vault.settings import VaultSettings

_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """Where the server is, and where it may send us."""

    url: str
    namespace: str | None
    redirect_hosts: tuple[str, ...]


class _Connections(requests.Session):
    def get_redirect_target(self, response: requests.Response) -> None:  # type: ignore[override, unused-ignore]
        """Know of no redirects: requests would look at where they lead, and read their whole content."""


def open_session(settings: VaultSettings, folder: Path) -> requests.Session:
    """Return what holds the connections of one process; it retries nothing and asks no environment."""
    session = _Connections()
    # The environment could name proxies, certificates, and passwords in ~/.netrc that become headers.
    session.trust_env = False
    if settings.proxy is not None:
        proxy = settings.proxy.get_secret_value()
        session.proxies = {"http": proxy, "https": proxy}
    if settings.ca_file is not None:
        session.verify = _file(folder, settings.ca_file)
        check_certificates(session.verify, backend=BACKEND)
    if settings.client_cert is not None:
        certificate = _file(folder, settings.client_cert)
        key = None if settings.client_key is None else _file(folder, settings.client_key)
        check_client_certificate(certificate, key, backend=BACKEND)
        session.cert = certificate if key is None else (certificate, key)
    connections = settings.max_concurrent_calls
    adapter = HTTPAdapter(pool_connections=8, pool_maxsize=connections, max_retries=0, pool_block=False)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def _file(folder: Path, setting: Path) -> str:
    path = folder / setting.expanduser()
    if not path.is_file():
        detail = f"there is no file {path}"
        raise KmsConfigurationError(detail, backend=BACKEND, operation="connect")
    return str(path)


class VaultConnection(Adapter):  # type: ignore[misc, type-arg, unused-ignore]
    """What hvac sends its requests through.

    Answers are returned as mappings; whatever else there is becomes a `VaultRefusal`, without the answer's text.

    Args:
        token: Sent along, or None.
        deadline: When the answer must be here, on the clock.
    """

    def __init__(
        self,
        session: requests.Session,
        address: Address,
        token: SecretStr | None,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(base_uri=address.url, session=session, allow_redirects=False)
        self._address = address
        self._secret_token = token
        self._deadline = deadline
        self._clock = clock

    def get_login_token(self, response: Mapping[str, Any]) -> str:
        """Return the token in the answer to a login; hvac's contract, which nothing here uses."""
        return str(response["auth"]["client_token"])

    def reason_of_refusals(self) -> Reason:
        """Return whether the token is dead: one that lives may list the mounts that it sees, without a policy.

        A dead token must not pass for one that may not use a key: readers may hide the columns under such a key.
        """
        try:
            self.get(url="/v1/sys/internal/ui/mounts")
        except VaultRefusal as refusal:
            return Reason.TOKEN_DEAD if refusal.status == 403 else Reason.TOKEN_UNKNOWN
        return Reason.UNKNOWN

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        raise_exception: bool = True,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a request. Returns the JSON object of the answer, an empty one where there is no content.

        The answer to a batch of which some items failed is an answer, too.

        Raises:
            VaultRefusal: The server refused, or sent what is no answer.
            requests.RequestException, OSError: The connection failed.
        """
        base = self._address.url.rstrip("/")
        for _ in range(_MAX_REDIRECTS + 1):
            status, answered, body = self._send(method, f"{base}{url}", headers, arguments.get("json"))
            if status not in (301, 302, 303, 307, 308):
                return _content(status, answered, body)
            base = self._redirected(base, answered.get("Location", ""))
        raise VaultRefusal(310, Reason.REDIRECT)

    def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None, content: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        sent = {**(headers or {}), "X-Vault-Request": "true"}
        if self._address.namespace:
            sent["X-Vault-Namespace"] = self._address.namespace
        if self._secret_token is not None:
            sent["X-Vault-Token"] = self._secret_token.get_secret_value()
        with self.session.request(
            method,
            url,
            headers=sent,
            json=content,
            allow_redirects=False,
            stream=True,
            timeout=Timeout(total=left),  # type: ignore[arg-type, unused-ignore]
        ) as response:
            return response.status_code, response.headers, self._body(response)

    def _body(self, response: requests.Response) -> bytes:
        """Read an answer, which has an end in time and in size."""
        body = bytearray()
        try:
            while part := response.raw.read1(65_536, decode_content=True):
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise VaultRefusal(response.status_code, Reason.NOT_JSON)
                # The timeout is one of silence: a server that drips bytes never meets it.
                if self._clock() >= self._deadline:
                    raise TimeoutError
        except ReadTimeoutError:
            raise TimeoutError from None
        except HTTPError as error:
            raise requests.ConnectionError(type(error).__name__) from None
        return bytes(body)

    def _redirected(self, base: str, location: str) -> str:
        """Return where a redirect leads, if the token and keys may go there.

        Never from https to http, nor from this machine to another one without TLS.
        """
        now = urlsplit(base)
        try:
            to = urlsplit(location)
            host, port = to.hostname or "", to.port or _PORTS.get(to.scheme, 0)
        except ValueError:
            raise VaultRefusal(310, Reason.REDIRECT) from None
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}", host) or to.scheme not in _PORTS:
            raise VaultRefusal(310, Reason.REDIRECT)
        is_own = (host, port) == (now.hostname, now.port or _PORTS[now.scheme])
        loses_protection = to.scheme == "http" and (
            now.scheme == "https" or (is_loopback(now.hostname or "") and not is_loopback(host))
        )
        host = f"[{host}]" if ":" in host else host
        place = f"{host}:{port}"
        allowed = is_own or place in self._address.redirect_hosts or host in self._address.redirect_hosts
        if not allowed or loses_protection:
            raise VaultRefusal(310, Reason.REDIRECT, host=f"{to.scheme}://{place}")
        # The path stays ours: it says which master key is asked.
        return f"{to.scheme}://{place}{now.path}"


def _content(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the content of an answer, or raise why it has none."""
    if status == 204:
        return {}
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise VaultRefusal(status, Reason.NOT_JSON, retry_after_seconds(headers.get("Retry-After")))
    if status == 200:
        return content
    data = content.get("data")
    if status == 400 and isinstance(data, dict) and isinstance(data.get("batch_results"), list):
        return content
    errors = content.get("errors")
    texts = errors if isinstance(errors, list) else []
    raise VaultRefusal(status, reason_of(texts), retry_after_seconds(headers.get("Retry-After")))
