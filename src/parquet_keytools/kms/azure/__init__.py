"""A KMS client for Azure Key Vault and Managed HSM.

A wrapped key is `azure:<algorithm>:<version>:<base64>`: the algorithm is RSA-OAEP-256, A256KW or A256GCM, the
version has 32 hexadecimal digits. The base64 is the ciphertext; with A256GCM it is the nonce of 12 bytes, the
ciphertext and the tag of 16 bytes, and the AAD is the master key's name in lower case. The raw form is the bare
ciphertext of RSA-OAEP-256 or A256KW, as in Iceberg's `AzureKeyManagementClient`.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.azure.connection import (
    BAD_REQUEST,
    SOFT_DELETED,
    AzureConnection,
    AzureSettings,
    make_credential,
)
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    MasterKeyDescription,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteOperation, Time
from parquet_keytools.runtime.threads_and_forks import PerProcess
from parquet_keytools.secret_bytes import SecretBytes

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
        versions: dict[str, dict[str, Any]] | None = None
        # The service does not show a version that is disabled, but lists it.
        with contextlib.suppress(MasterKeyDisabledError):
            key = operation.call(master_key_id, partial(self._read_key, master_key_id))
            _algorithm_of(key)
        with contextlib.suppress(KmsAccessDeniedError):
            versions = self._versions(operation, master_key_id)
        enabled = [version for version, facts in (versions or {}).items() if facts.get("enabled") is True]
        facts, now = key.get("attributes") or {}, time.time()
        return MasterKeyDescription(
            master_key_id,
            enabled=facts.get("enabled") is True
            and (facts.get("nbf") or 0) <= now < (facts.get("exp") or math.inf),
            current_version=key.get("version") or next(iter(versions or ()), None),
            enabled_versions=None if versions is None else tuple(reversed(enabled)),
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

        def read(seconds: float) -> dict[str, Any]:
            path = f"/deletedkeys/{self._name(master_key_id)}"
            return self._connection.get().request(path, self._time.clock() + seconds)

        try:
            deleted = operation.call(master_key_id, read)
        except MasterKeyNotFoundError:
            return KeyDeletion(name, "deleted")
        purged, level = deleted.get("scheduledPurgeDate"), (deleted.get("attributes") or {}).get("recoveryLevel")
        at = datetime.fromtimestamp(purged, UTC) if type(purged) is int else None
        return KeyDeletion(name, "scheduled", deletes_at=at, answer={"recoveryLevel": str(level)})

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        path = f"/deletedkeys/{self._name(master_key_id)}/recover"

        def recover(seconds: float) -> None:
            self._connection.get().request(path, self._time.clock() + seconds, method="POST")

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
        self,
        name: str,
        rest: str,
        seconds: float,
        content: Mapping[str, object] | None = None,
        method: str = "",
    ) -> dict[str, Any]:
        """Send a request about a master key; `rest` is the rest of the path, or the URL of a further page."""
        path = rest if rest.startswith("https:") else f"/keys/{name}/{rest}".rstrip("/")
        is_unwrap = path.endswith(("/unwrapkey", "/decrypt"))
        try:
            return self._connection.get().request(path, self._time.clock() + seconds, content, method)
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

    def _exists(self, path: str, seconds: float) -> bool:
        try:
            self._connection.get().request(path, self._time.clock() + seconds)
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
