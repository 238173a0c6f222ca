"""A KMS client for Azure Key Vault and Managed HSM.

A wrapped key is `azure:<algorithm>:<version>:<base64>`: the algorithm is RSA-OAEP-256, A256KW or A256GCM, the
version has 32 hexadecimal digits. The base64 is the ciphertext; with A256GCM it is the nonce of 12 bytes, the
ciphertext and the tag of 16 bytes, and the AAD is the master key's name in lower case. The raw form is the bare
ciphertext of RSA-OAEP-256 or A256KW, as in Iceberg's `AzureKeyManagementClient`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from azure import identity
from azure.core.credentials import AccessToken
from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from pydantic import Field, SecretStr, field_validator, model_validator

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
    checked_key,
)
from parquet_keytools.kms.http_session import Answer, HttpSession, send
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings, RemoteOperation, Time
from parquet_keytools.kms.transport import (
    Meaning,
    SdkLogs,
    check_certificates,
    http_parts,
    unreachable_because,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, PerProcess
from parquet_keytools.secret_bytes import SecretBytes

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


_NAME = re.compile(r"[0-9A-Za-z-]{1,127}")
_KEY_URL = re.compile(rf"(https://[^/?#]+)/keys/({_NAME.pattern})(?:/([0-9a-f]{{32}}))?")
_WRAPPED_KEY = re.compile(r"azure:(RSA-OAEP-256|A256KW|A256GCM):(?P<version>[0-9a-f]{32}):([A-Za-z0-9+/]+={0,2})")

_ALGORITHM_LIFETIME_SECONDS = 300.0
_NONCE_LENGTH, _TAG_LENGTH = 12, 16


class AzureKms(RemoteKmsClient):
    """Wraps and unwraps in the service, never here, with keys of one vault or HSM.

    The service cannot re-wrap: a re-wrap is an unwrap and a wrap, and this process sees the key.

    Args:
        credential: A credential of azure-identity, in place of the login in the settings.
        time_source: For tests.
    """

    backend = "azure"
    new_keys_have = frozenset({"tags"})
    Settings = AzureSettings
    wrapped_key_form = _WRAPPED_KEY
    address_setting = "vault_url"
    certificates_setting = "REQUESTS_CA_BUNDLE"

    def __init__(
        self,
        settings: AzureSettings,
        folder: Path = Path(),
        *,
        credential: Any = None,
        time_source: Time | None = None,
    ) -> None:
        super().__init__(settings, time_source)
        self.settings = settings
        self._folder = folder
        self._credential = credential
        self._algorithms: dict[str, tuple[float, str]] = {}
        self._connection = PerProcess(self._connect)

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return False: the service has no request that re-wraps."""
        return False

    def probe(self, master_key_id: str) -> str | None:
        """Return a wrapped key that the current version never made, or None if the key cannot be read."""
        read = partial(self._operation("describe").call, master_key_id, partial(self._read_key, master_key_id))
        key = self._outcome("describe", master_key_id, read)
        if isinstance(key, KmsError):
            return None
        algorithm = self._known_algorithm(master_key_id) or _algorithm_of(key)
        # An RSA ciphertext is a number less than the modulus.
        data = bytes(1) + secrets.token_bytes({"RSA-OAEP-256": 255, "A256KW": 23, "A256GCM": 43}[algorithm])
        return f"azure:{algorithm}:{key['version']}:{strict_base64.encode(data)}"

    def close(self) -> None:
        """Close threads and connections. A later call makes new ones."""
        super().close()
        connection = self._connection.take()
        if connection is not None:
            connection.session.close()

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        operation = self._operation("wrap")
        ids = list(dict.fromkeys(request.master_key_id for request in requests))
        algorithms: dict[str, str | KmsError] = {
            id_: known for id_ in ids if (known := self._known_algorithm(id_))
        }
        unknown = [id_ for id_ in ids if id_ not in algorithms]
        algorithms |= zip(unknown, operation.each(unknown, self._read_algorithm, str), strict=True)
        failures = {id_: found for id_, found in algorithms.items() if isinstance(found, KmsError)}
        ready = [request for request in requests if request.master_key_id not in failures]
        wrapped = iter(operation.each(ready, partial(self._wrap, algorithms)))
        return [failures[r.master_key_id] if r.master_key_id in failures else next(wrapped) for r in requests]

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._operation("unwrap").each(requests, self._unwrap)

    def _wrap(self, algorithms: Mapping[str, object], request: WrapRequest, seconds: float) -> str:
        algorithm = str(algorithms[request.master_key_id])
        version, data = self._wrapped(request.key, request.master_key_id, algorithm, seconds)
        return f"azure:{algorithm}:{version}:{strict_base64.encode(data)}"

    def _unwrap(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        parts = _WRAPPED_KEY.fullmatch(request.wrapped_key)
        if parts is None:
            raise WrappedKeyInvalidError("it was not made by this client of Azure Key Vault")
        try:
            data = strict_base64.decode(parts[3])
        except ValueError:
            raise WrappedKeyInvalidError("it is not base64") from None
        if self.settings.algorithm not in ("auto", parts[1]):
            hint = f"Set algorithm to auto if keys wrapped by {parts[1]} are expected."
            raise WrappedKeyInvalidError(f"it was wrapped by {parts[1]}, which algorithm excludes", hint=hint)
        return self._unwrapped(data, request.master_key_id, parts[1], parts[2], seconds)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        operation = self._operation("describe")
        key: dict[str, Any] = {}
        with contextlib.suppress(MasterKeyDisabledError):
            key = operation.call(master_key_id, partial(self._read_key, master_key_id))
            _algorithm_of(key)
        facts, now, version = key.get("attributes") or {}, time.time(), key.get("version")
        if version is None:
            # The service does not show a version that is disabled, but lists it.
            with contextlib.suppress(KmsAccessDeniedError):
                version = next(iter(self._versions(operation, master_key_id)), None)
        return MasterKeyDescription(
            master_key_id,
            enabled=facts.get("enabled") is True
            and (facts.get("nbf") or 0) <= now < (facts.get("exp") or math.inf),
            current_version=version,
            origin=key.get("kty"),
        )

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        is_hsm, algorithm = ".managedhsm." in self.settings.vault_url, self.settings.algorithm
        if algorithm == "auto":
            algorithm = "A256GCM" if is_hsm else "RSA-OAEP-256"
        if algorithm == "RSA-OAEP-256":
            key: dict[str, Any] = {"kty": "RSA-HSM" if is_hsm else "RSA", "key_size": 3072}
        else:
            key = {"kty": "oct-HSM", "key_size": 256}
        key["key_ops"] = ["encrypt", "decrypt"] if algorithm == "A256GCM" else ["wrapKey", "unwrapKey"]
        name = self._name(master_key_id)
        create = partial(self._request, name, "create", content={**key, "tags": dict(tags)})
        self._operation("create").call(master_key_id, lambda seconds: create(seconds=seconds))

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        versions = self._versions(self._operation("describe"), master_key_id)
        return {
            version: datetime.fromtimestamp(facts["created"], UTC)
            for version, facts in versions.items()
            if type(facts.get("created")) is int
        }

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        def delete(seconds: float) -> None:
            # An earlier attempt may have succeeded.
            with contextlib.suppress(MasterKeyDisabledError, MasterKeyNotFoundError):
                self._request(self._name(master_key_id), "", seconds, method="DELETE")

        self._operation("delete").call(master_key_id, delete)
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        operation, name = self._operation("describe"), self._identity(master_key_id)
        # Listed, for the service does not show a disabled version.
        with contextlib.suppress(MasterKeyNotFoundError, MasterKeyDisabledError):
            if versions := self._versions(operation, master_key_id):
                enabled = {version: facts.get("enabled") is True for version, facts in versions.items()}
                return KeyDeletion.of_versions(name, enabled)

        path = f"/deletedkeys/{self._name(master_key_id)}"
        try:
            deleted = operation.call(master_key_id, partial(self._send, path))
        except MasterKeyNotFoundError:
            return KeyDeletion(name, "deleted")
        purged, level = deleted.get("scheduledPurgeDate"), (deleted.get("attributes") or {}).get("recoveryLevel")
        at = datetime.fromtimestamp(purged, UTC) if type(purged) is int else None
        return KeyDeletion(name, "scheduled", deletes_at=at, answer={"recoveryLevel": str(level)})

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        path = f"/deletedkeys/{self._name(master_key_id)}/recover"
        recover = partial(self._send, path, content=None, method="POST")
        self._operation("cancel_deletion").call(master_key_id, recover)
        return self._key_deletion_state(master_key_id)

    def _caller_identity(self) -> CallerIdentity:
        name = self._operation("identify").call(
            None, lambda seconds: self._connection.get().caller(self._time.clock() + seconds)
        )
        return CallerIdentity(name, "the access token of Entra ID") if name else super()._caller_identity()

    def _place(self) -> str:
        return ""

    def _identity(self, master_key_id: str) -> str:
        return f"{self.settings.vault_url}/keys/{self._name(master_key_id).lower()}"

    def _may_be_of_others(self, master_key_id: str) -> bool:
        return "/" in master_key_id and not master_key_id.startswith(f"{self.settings.vault_url}/keys/")

    def _server(self) -> str:
        return self.settings.vault_url

    def _principal(self) -> str:
        login = self.settings.login if self._credential is None else "a credential of the caller"
        return " ".join(filter(None, [login, self.settings.client_id]))

    # --- the raw form ---

    def _raw_obstacle(self) -> str:
        is_gcm = self.settings.algorithm == "A256GCM"
        return "Iceberg's own client uses RSA-OAEP-256 or A256KW, not A256GCM" if is_gcm else ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        operation = self._operation("wrap")
        algorithm = self._raw_algorithm(operation, master_key_id)
        return operation.call(master_key_id, partial(self._wrapped, key, master_key_id, algorithm))[1]

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap a ciphertext that names no version: try the current version, then older ones."""
        operation = self._operation("unwrap")
        algorithm = self._raw_algorithm(operation, master_key_id)

        def unwrapped(version: str) -> SecretBytes:
            call = partial(self._unwrapped, wrapped_key, master_key_id, algorithm, version)
            return operation.call(master_key_id, call)

        try:
            return unwrapped("")
        except (WrappedKeyInvalidError, MasterKeyDisabledError) as error:
            failure = error
        for version in self._versions(operation, master_key_id):
            with contextlib.suppress(WrappedKeyInvalidError, MasterKeyDisabledError):
                return unwrapped(version)
        raise failure

    def _raw_algorithm(self, operation: RemoteOperation, master_key_id: str) -> str:
        algorithm = self._known_algorithm(master_key_id) or operation.call(
            master_key_id, partial(self._read_algorithm, master_key_id)
        )
        return algorithm.replace("A256GCM", "A256KW")

    # --- requests ---

    def _connect(self) -> AzureConnection:
        credential = self._credential or make_credential(self.settings, self._folder)
        return AzureConnection(self.settings, credential, self._time.clock)

    def _name(self, master_key_id: str) -> str:
        """Return the name of a master key, given its name or its URL in this vault."""
        if _NAME.fullmatch(master_key_id):
            return master_key_id
        url = _KEY_URL.fullmatch(master_key_id)
        if url is None:
            detail, hint = "this is not the name of a key in Azure Key Vault", "It has letters, digits and `-`."
        elif url[1].lower().removesuffix(":443") != self.settings.vault_url:
            detail, hint = "it is in another vault than vault_url", "Keys of one configuration are in one vault."
        elif url[3]:
            detail = "this names one version of the key"
            hint = f"Name the key: {url[2]}. The service finds the version."
        else:
            return url[2]
        raise KmsConfigurationError(detail, hint=hint)

    def _wrapped(self, key: SecretBytes, master_key_id: str, algorithm: str, seconds: float) -> tuple[str, bytes]:
        """Let the service wrap a key. Returns the version that wrapped it, and the ciphertext."""
        name, content = self._name(master_key_id), {"alg": algorithm, "value": _encoded(key.reveal())}
        if algorithm == "A256GCM":
            # Without the address of the HSM: its backup may be restored to another one.
            aad = _encoded(name.lower().encode())
            answer = self._request(name, "encrypt", seconds, content | {"aad": aad})
            parts = [_decoded(answer.get(part)) for part in ("iv", "value", "tag")]
            is_valid = list(map(len, parts)) == [_NONCE_LENGTH, len(key), _TAG_LENGTH]
            data = b"".join(parts)
        else:
            answer = self._request(name, "wrapkey", seconds, content)
            data = _decoded(answer.get("value"))
            is_valid = len(data) >= len(key) + 8
        if not is_valid or key.reveal() in data:
            raise KmsResponseInvalidError("the KMS returned an invalid wrapped key")
        return _version_in(answer, name), data

    def _unwrapped(
        self, data: bytes, master_key_id: str, algorithm: str, version: str, seconds: float
    ) -> SecretBytes:
        """Let the service unwrap a key with a version; with the current version if it is empty."""
        name, verb, content = self._name(master_key_id), "unwrapkey", {"alg": algorithm, "value": _encoded(data)}
        if algorithm == "A256GCM":
            verb, nonce, tag = "decrypt", data[:_NONCE_LENGTH], data[-_TAG_LENGTH:]
            content |= {
                "value": _encoded(data[_NONCE_LENGTH:-_TAG_LENGTH]),
                "aad": _encoded(name.lower().encode()),
            }
            content |= {"iv": _encoded(nonce), "tag": _encoded(tag)}
        answer = self._request(name, f"{version}/{verb}".lstrip("/"), seconds, content)
        if version not in ("", _version_in(answer, name)):
            raise KmsResponseInvalidError("the answer is about another version of the key")
        return checked_key(_decoded(answer.get("value")))

    def _request(
        self, name: str, rest: str, seconds: float, content: object = None, method: str = ""
    ) -> dict[str, Any]:
        """Send a request about a master key; `rest` is the rest of the path, or the URL of a further page."""
        path = rest if rest.startswith("https:") else f"/keys/{name}/{rest}".rstrip("/")
        is_unwrap = path.endswith(("/unwrapkey", "/decrypt"))
        try:
            return self._send(path, seconds, content, method)
        except MasterKeyNotFoundError:
            # The service answers alike to a version that the key never had, and to a key that is soft-deleted.
            if is_unwrap and "/" in rest and self._exists(f"/keys/{name}", seconds):
                raise WrappedKeyInvalidError("it names a version that the master key does not have") from None
            if self._exists(f"/deletedkeys/{name}", seconds):
                raise SOFT_DELETED.error() from None
            raise
        except KmsConfigurationError as error:
            if is_unwrap and error.detail == BAD_REQUEST.detail:
                raise WrappedKeyInvalidError from None
            raise

    def _send(self, path: str, seconds: float, content: object = None, method: str = "") -> dict[str, Any]:
        return self._connection.get().request(path, self._time.clock() + seconds, content, method)

    def _exists(self, path: str, seconds: float) -> bool:
        try:
            self._send(path, seconds)
        except (KmsError, OSError) as error:
            return isinstance(error, MasterKeyDisabledError)
        return True

    # --- master keys ---

    def _read_key(self, master_key_id: str, seconds: float) -> dict[str, Any]:
        """Return the current version of a master key: a JSON Web Key, with its attributes."""
        answer = self._request(name := self._name(master_key_id), "", seconds)
        found = dict(answer.get("key") or ()) | {"attributes": answer.get("attributes") or {}}
        return found | {"version": _version_in(found, name)}

    def _known_algorithm(self, master_key_id: str) -> str | None:
        if self.settings.algorithm != "auto":
            return self.settings.algorithm
        known = self._algorithms.get(master_key_id)
        return known[1] if known and self._time.clock() - known[0] < _ALGORITHM_LIFETIME_SECONDS else None

    def _read_algorithm(self, master_key_id: str, seconds: float) -> str:
        algorithm = _algorithm_of(self._read_key(master_key_id, seconds))
        self._algorithms[master_key_id] = self._time.clock(), algorithm
        return algorithm

    def _versions(self, operation: RemoteOperation, master_key_id: str) -> dict[str, dict[str, Any]]:
        """Return the versions of a master key with their attributes, the newest first."""
        found: dict[str, dict[str, Any]] = {}
        name, rest = self._name(master_key_id), "versions"
        while rest:
            page = operation.call(master_key_id, partial(self._request, name, rest))
            found |= {_version_in(entry, name): entry.get("attributes") or {} for entry in page.get("value") or ()}
            rest = page.get("nextLink") or ""
        return dict(sorted(found.items(), key=lambda version: version[1].get("created") or 0, reverse=True))


# --- answers ---


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _decoded(text: object) -> bytes:
    """Return the bytes of a base64url text in an answer; empty if it is none."""
    if not isinstance(text, str):
        return b""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""


def _version_in(answer: Mapping[str, Any], name: str) -> str:
    """Return the version that an answer is about, or raise if it is about another key."""
    kid = answer.get("kid")
    url = _KEY_URL.fullmatch(kid) if isinstance(kid, str) else None
    if url is None or not url[3] or url[2].lower() != name.lower():
        raise KmsResponseInvalidError("the answer is about another key")
    return url[3]


def _algorithm_of(key: Mapping[str, Any]) -> str:
    """Return how a key wraps, by its type and the operations that it permits."""
    kind, operations = str(key.get("kty")), key.get("key_ops") or ()
    if kind in ("RSA", "RSA-HSM"):
        return "RSA-OAEP-256"
    if kind in ("oct", "oct-HSM"):
        return "A256GCM" if {"encrypt", "decrypt"} <= set(operations) else "A256KW"
    hint = "Use an AES key of a Managed HSM (oct-HSM, 256 bits), or an RSA key."
    raise KmsConfigurationError(f"it is of type {kind[:20]!r}, which cannot wrap keys", hint=hint)


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
    """Return the credential of the login in the settings."""
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

# They are made here, and not by Azure's `CryptographyClient`: with an RSA key, that client wraps in this process
# with the public key, which leaves no record in the vault's log. No text of the service appears in an exception,
# since it may contain plaintext keys.

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
        """Send a request to a path, or to the URL of a further page. Returns the JSON object in the answer."""
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
        if answer.status == 200 and isinstance(found := answer.json, dict):
            return found
        raise _meaning(answer).error(answer.retry_after_seconds)

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
        self, url: str, deadline: float, token: AccessToken | None = None, content: object = None, method: str = ""
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


def _meaning(answer: Answer) -> Meaning:
    status, body = answer.status, answer.json
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
