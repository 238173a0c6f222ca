"""The settings of Azure Key Vault and Managed HSM, credentials, requests, and the meaning of refusals.

The requests are made here, and not by Azure's `CryptographyClient`: with an RSA key, that client wraps in this
process with the public key, which leaves no record in the vault's log. No text of the service appears in an
exception, since it may contain plaintext keys.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from azure import identity
from azure.core.credentials import AccessToken
from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from pydantic import Field, SecretStr, field_validator, model_validator

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
)
from parquet_keytools.kms.http_session import Answer, HttpSession, send
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.kms.transport import (
    Meaning,
    SdkLogs,
    check_certificates,
    http_parts,
    retry_after_seconds,
    unreachable_because,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock

_LOGINS = {
    # login -> the settings that it needs, and others that it takes
    "default": ("", ""),
    "client_secret": ("tenant_id client_id client_secret", ""),
    "certificate": ("tenant_id client_id certificate_file", ""),
    "managed_identity": ("", "client_id"),
    "workload_identity": ("", "tenant_id client_id"),
}
_SETTINGS_OF_LOGINS = set(" ".join(needed + " " + other for needed, other in _LOGINS.values()).split())


class AzureSettings(RemoteKmsSettings):
    """Settings of Azure Key Vault and Managed HSM; relative paths start at the configuration's folder."""

    type: Literal["azure"] = "azure"
    vault_url: str = Field(
        description="Address of the vault or HSM, such as `https://my-hsm.managedhsm.azure.net`."
    )
    algorithm: Literal["auto", "RSA-OAEP-256", "A256KW", "A256GCM"] = Field(
        default="auto",
        description="How keys are wrapped. auto reads the master key first: A256GCM with an AES key that may "
        "encrypt and decrypt, A256KW with another AES key, RSA-OAEP-256 with an RSA key. With any other value, "
        "keys that were wrapped in another way are refused.",
    )
    login: Literal["default", "client_secret", "certificate", "managed_identity", "workload_identity"] = Field(
        default="default", description="Source of access tokens; default is Azure's `DefaultAzureCredential`."
    )
    tenant_id: str | None = Field(default=None, description="Id or domain of the application's tenant.")
    client_id: str | None = Field(
        default=None, description="Client id of the application, or of a user-assigned managed identity."
    )
    client_secret: SecretStr | None = Field(default=None, description="Its secret, best as `${VARIABLE}`.")
    certificate_file: Path | None = Field(
        default=None, description="Its certificate and private key, as PEM, without a passphrase."
    )

    @field_validator("vault_url")
    @classmethod
    def _is_a_vault(cls, url: str) -> str:
        found = http_parts(url)
        if found is None or found[0].scheme != "https" or "." not in found[1]:
            raise ValueError("vault_url must be an address such as https://my-vault.vault.azure.net")
        parts, host = found
        if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("vault_url must contain only https:// and a host; keys are named under master_keys")
        return f"https://{host}{f':{parts.port}' if parts.port not in (None, 443) else ''}"

    @model_validator(mode="after")
    def _fits_the_login(self) -> Self:
        needed, other = (set(names.split()) for names in _LOGINS[self.login])
        given = {name for name in _SETTINGS_OF_LOGINS if getattr(self, name) is not None}
        if missing := sorted(needed - given):
            raise ValueError(f"login {self.login} needs {', '.join(missing)}")
        if unused := sorted(given - needed - other):
            raise ValueError(f"login {self.login} does not use {', '.join(unused)}: set login, or leave it out")
        return self

    def secret_files(self) -> dict[tuple[str, ...], Path]:
        """Return the file with the private key."""
        return {} if self.certificate_file is None else {("certificate_file",): self.certificate_file}


# --- credentials ---

# Their warnings quote answers of Entra ID, which may quote what it was sent.
_sdk_logs = SdkLogs("azure", "msal", least_level=logging.CRITICAL + 1)

_CREDENTIALS_HINT = (
    "Check the credentials, which may have expired: `az login`, the AZURE_ variables, the managed identity of "
    "this machine, or the settings of login."
)
_ENTRA_CODE = re.compile(r"AADSTS[0-9]{3,9}")
_ENTRA_CODES = {
    "AADSTS7000215": "the client secret is wrong",
    "AADSTS7000222": "the client secret has expired",
    "AADSTS700016": "the tenant has no such application",
}


def make_credential(settings: AzureSettings, folder: Path) -> Any:
    """Return the credential of the login in the settings.

    Raises:
        KmsConfigurationError: It cannot be made: a file cannot be read, or a variable is missing.
    """
    options: dict[str, Any] = dict.fromkeys(("connection_timeout", "read_timeout"), settings.call_timeout_seconds)
    application = str(settings.tenant_id), str(settings.client_id)
    secret, file = settings.client_secret, settings.certificate_file
    try:
        if secret is not None:
            options["client_secret"] = secret.get_secret_value()
            return identity.ClientSecretCredential(*application, **options)
        if file is not None:
            path = str(folder / expanded(file))
            return identity.CertificateCredential(*application, certificate_path=path, **options)
        if settings.login == "managed_identity":
            return identity.ManagedIdentityCredential(client_id=settings.client_id, **options)
        if settings.login == "workload_identity":
            options |= {"tenant_id": settings.tenant_id, "client_id": settings.client_id}
            return identity.WorkloadIdentityCredential(**options)
        return identity.DefaultAzureCredential(**options)
    except (ValueError, OSError) as error:
        failure = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    detail = f"login {settings.login} cannot be used: {failure}"
    raise KmsConfigurationError(detail, hint="Check its settings and files.", operation="connect")


def token_failure(error: Exception) -> Meaning:
    """Return the meaning of a failure to get an access token. Only codes of Entra ID appear in it."""
    if isinstance(error, (ServiceRequestError, ServiceResponseError)):
        return Meaning(KmsUnavailableError, f"no access token: {unreachable_because(error) or 'no answer'}")
    code = _ENTRA_CODE.search(str(error))
    name = code[0] if code else type(error).__name__
    known = f"{_ENTRA_CODES[name]}, {name}" if name in _ENTRA_CODES else name
    return Meaning(KmsConfigurationError, f"no access token: {known}", _CREDENTIALS_HINT)


# --- requests ---

_API_VERSION = "7.4"
"""It has the operations with AES keys of Managed HSM."""

_LEAST_TOKEN_SECONDS = 60.0
_SECONDS_BETWEEN_FAILURES = 2.0
"""If no token is available, or each one is refused, not every call of a list requests another token."""

_PARAMETER = re.compile(r'(\w+)="?([^",\s]+)')


class AzureConnection:
    """Sends requests to one vault, each once, unless its token is refused.

    The vault answers a request without a token by a challenge, which names the tenant and the resource of the
    token. The resource must be the domain that the vault lies in: a vault that could choose the resource would get
    a token that other services accept.
    """

    def __init__(self, settings: AzureSettings, credential: Any, clock: Callable[[], float]) -> None:
        self._url = settings.vault_url
        self._domain = urlsplit(self._url).netloc.partition(".")[2]
        self._credential = credential
        self._clock = clock
        self._lock = ForkSafeLock()
        self._token: AccessToken | None = None
        self._failure: tuple[float, Meaning] | None = None
        self.session = HttpSession(settings.max_concurrent_calls)
        # Read once: requests would read the environment for each call, and send passwords of ~/.netrc.
        self.session.trust_env = False
        if not proxy_bypass(urlsplit(self._url).netloc):
            self.session.proxies = getproxies()
        if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
            check_certificates(bundle)
            self.session.verify = bundle

    def request(self, path: str, deadline: float, content: object = None, method: str = "") -> dict[str, Any]:
        """Send a request to a path, or to the URL of a further page. Returns the JSON object in the answer.

        Raises:
            KmsError: The service refused, redirected, or sent an invalid answer, or there is no token.
            OSError: The connection failed.
        """
        url = path if path.startswith("https:") else f"{self._url}{path}?api-version={_API_VERSION}"
        if not url.startswith(f"{self._url}/"):
            raise KmsResponseInvalidError("its next page is at another address")
        token = self._valid_token(deadline)
        answer = self._send(url, deadline, token, content, method)
        if answer.status == 401:
            token = self._another(token, deadline)
            answer = self._send(url, deadline, token, content, method)
            if answer.status == 401:
                self._failure = self._clock(), _meaning(answer)
        if answer.status == 200 and isinstance(found := _json(answer), dict):
            return found
        raise _meaning(answer).error(retry_after_seconds(answer.headers.get("Retry-After")))

    def _valid_token(self, deadline: float) -> AccessToken:
        token = self._token
        if token is None or token.expires_on < time.time() + _LEAST_TOKEN_SECONDS:
            token = self._another(token, deadline)
        return token

    def caller(self, deadline: float) -> str:
        """Return whom Entra ID issued the access token to; empty if the token does not show it."""
        parts = self._valid_token(deadline).token.split(".")
        try:
            claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
            found = [claims.get(name) for name in ("upn", "appid", "oid", "tid")]
        except (AttributeError, IndexError, ValueError):
            return ""
        return " ".join(filter(str.isprintable, (text for text in found if isinstance(text, str))))[:300]

    def _send(
        self,
        url: str,
        deadline: float,
        token: AccessToken | None = None,
        content: object = None,
        method: str = "",
    ) -> Answer:
        headers = {} if token is None else {"Authorization": f"Bearer {token.token}"}
        method = method or ("GET" if content is None else "POST")
        return send(self.session, method, url, deadline, self._clock, headers=headers, json=content)

    def _another(self, held: AccessToken | None, deadline: float) -> AccessToken:
        """Return the token that another thread got meanwhile, or a fresh token."""
        with self._lock.held_within(deadline - self._clock()):
            if self._token is not held and self._token is not None:
                return self._token
            if self._failure is not None and self._clock() - self._failure[0] < _SECONDS_BETWEEN_FAILURES:
                raise self._failure[1].error()
            # A request without token and content: they follow only after the check of the challenge.
            challenge = self._send(f"{self._url}/keys?api-version={_API_VERSION}", deadline)
            if challenge.status != 401:
                raise (_NO_CHALLENGE if challenge.status == 200 else _meaning(challenge)).error()
            options = self._checked(challenge.headers.get("WWW-Authenticate") or "")
            try:
                with _sdk_logs.silenced():
                    token: AccessToken = self._credential.get_token(f"https://{self._domain}/.default", **options)
                self._token = token
                return token
            except Exception as error:
                failure = token_failure(error)
            self._failure = self._clock(), failure
            raise failure.error()

    def _checked(self, challenge: str) -> dict[str, str]:
        """Return the tenant that a challenge names, if any, after a check of its resource."""
        parameters = dict(_PARAMETER.findall(challenge))
        resource = parameters.get("resource") or parameters.get("scope", "").removesuffix("/.default")
        if not challenge.lower().startswith("bearer ") or not resource:
            raise _NO_CHALLENGE.error()
        if resource.rstrip("/").lower() != f"https://{self._domain}":
            detail = "it asks for a token that is not for the domain of vault_url; no token was requested"
            raise KmsConfigurationError(detail, hint="Check vault_url, and proxies in between.")
        tenant = urlsplit(parameters.get("authorization") or "").path.strip("/").partition("/")[0]
        return {"tenant_id": tenant} if tenant else {}


# --- the meaning of refusals ---

_NO_CHALLENGE = Meaning(KmsConfigurationError, "it does not answer as a Key Vault or HSM", "Check vault_url.")
_VAULT_CODE = re.compile(r"AKV[0-9]{3,8}")
_RBAC_HINT = "Assign a role, such as Key Vault Crypto Service Encryption User. It takes effect after some minutes."
BAD_REQUEST = Meaning(
    KmsConfigurationError,
    "the service does not accept the request",
    "Check algorithm: RSA-OAEP-256 needs an RSA key; A256GCM and A256KW need an AES key of 256 bits.",
)
_POLICY_HINT = "Add an access policy with the key permissions get, list, wrapKey and unwrapKey, or change to RBAC."
SOFT_DELETED = Meaning(MasterKeyDisabledError, "it is soft-deleted", "Recover it: `az keyvault key recover`.")
_NETWORK = Meaning(KmsConfigurationError, "its network rules refuse this machine", "Check the vault's firewall.")

# Codes of errors, and of the errors in them -> meaning. The more specific code is looked up first.
_CODES = {
    "KeyDisabled": Meaning(MasterKeyDisabledError),
    "KeyExpired": Meaning(MasterKeyDisabledError, "it has expired", "Extend its expiry, or make a new version."),
    "KeyNotYetValid": Meaning(MasterKeyDisabledError, "it is not valid yet"),
    "KeyOperationForbidden": Meaning(KmsConfigurationError, "its key_ops do not permit this", "Check algorithm."),
    "ForbiddenByRbac": Meaning(KmsAccessDeniedError, "Azure RBAC does not permit it", _RBAC_HINT),
    "ForbiddenByPolicy": Meaning(KmsAccessDeniedError, "no access policy of the vault permits it", _POLICY_HINT),
    "ForbiddenByFirewall": _NETWORK,
    "ForbiddenByConnection": _NETWORK,
    "ObjectIsDeletedButRecoverable": SOFT_DELETED,
    "ObjectIsBeingDeleted": SOFT_DELETED,
    "KeyNotFound": Meaning(MasterKeyNotFoundError),
}


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _meaning(answer: Answer) -> Meaning:
    status, body = answer.status, _json(answer)
    if 300 <= status < 400:
        detail = "it redirects to another address, which must get neither token nor keys"
        return Meaning(KmsConfigurationError, detail, "Check vault_url.")
    if status == 429:
        return Meaning(KmsThrottledError)
    if status >= 500 or status == 408:
        return Meaning(KmsUnavailableError, f"status {status}")
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    if status == 401:
        code = _VAULT_CODE.search(str(error.get("message")))
        detail = f"it does not accept the access token{f' ({code[0]})' if code else ''}"
        return Meaning(KmsConfigurationError, detail, _CREDENTIALS_HINT)
    inner = error.get("innererror")
    for code in (inner.get("code") if isinstance(inner, dict) else None, error.get("code")):
        if status in (403, 404, 409) and str(code) in _CODES:
            return _CODES[str(code)]
    if status == 200 or not error:
        return Meaning(KmsResponseInvalidError, f"HTTP status {status}, not JSON of the expected form")
    if status == 403:
        return Meaning(KmsAccessDeniedError, "", "Assign a role. A Managed HSM has local roles for each key.")
    return BAD_REQUEST if status == 400 else Meaning(KmsResponseInvalidError, f"HTTP status {status}")
