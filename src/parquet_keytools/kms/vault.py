"""A KMS client for the transit engine of HashiCorp Vault and OpenBao.

A wrapped key is the ciphertext of the engine, `vault:v<version>:<base64>`. The raw form is its ASCII bytes.

A request is sent once, before its deadline, to the configured server only: redirects are refused, since token and
keys would follow them. No text of the server appears in an exception, since it may contain plaintext keys.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

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
    KEY_LENGTHS_BYTES,
    CallerIdentity,
    KeyDeletion,
    MasterKeyDescription,
    R,
    RewrapRequest,
    StrictSettings,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.http_session import REDIRECTS, Answer, HttpSession, send
from parquet_keytools.kms.remote_client import (
    RemoteKmsClient,
    RemoteKmsSettings,
    RemoteOperation,
    Time,
    bytes_of_context,
)
from parquet_keytools.kms.transport import (
    Meaning,
    check_certificates,
    check_client_certificate,
    http_parts,
    is_loopback,
    mistake_in_url,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, PerProcess
from parquet_keytools.secret_bytes import SecretBytes

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


T = TypeVar("T")

_KEY_FACTS_LIFETIME_SECONDS = 300.0
_CLOSING_SECONDS = 2.0

_WRAPPED_KEY = re.compile(r"vault:v(?P<version>[1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})")

_NO_KEY_NAME = Meaning(
    MasterKeyNotFoundError,
    "this is not a valid name of a transit key",
    "A name has letters, digits, `_`, `-` and `.`; the mount point is a setting of its own.",
)


class VaultKms(RemoteKmsClient):
    """Wraps and unwraps with keys of a transit engine, many at a time, and re-wraps on the server.

    It connects and logs in when it is first used, and again in a forked child.

    Args:
        time_source: For tests.
    """

    backend = "vault"
    Settings = VaultSettings
    wrapped_key_form = _WRAPPED_KEY
    raw_form_is_text = True

    def __init__(self, settings: VaultSettings, folder: Path = Path(), *, time_source: Time | None = None) -> None:
        super().__init__(settings, time_source)
        self.settings = settings
        self._folder = folder
        self._context = settings.context_bytes()
        self._key_facts: dict[str, tuple[float, TransitKey | None]] = {}
        self._batch_size = settings.batch_size
        self._connection = PerProcess(self._connect)

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether both are the same master key: the engine cannot re-wrap under another key."""
        return master_key_id == new_master_key_id

    def probe(self, master_key_id: str) -> str | None:
        """Return a wrapped key that no key of the engine made: policies are checked before ciphertexts."""
        return f"vault:v1:{strict_base64.encode(secrets.token_bytes(60))}"

    def close(self) -> None:
        """Revoke the token of a login, and close connections and threads."""
        session = self._connection.take()
        if session is not None:
            # The token expires anyway, so an unavailable server must not prevent closing.
            with contextlib.suppress(Exception):
                seconds = min(_CLOSING_SECONDS, self.limits.call_timeout_seconds)
                session.revoke(self._time.clock() + seconds)
            session.server.session.close()
        super().close()

    def _principal(self) -> str:
        """Return the identity of the token; before the first call, the method of the login."""
        return self._connection.get().principal

    def _connect(self) -> VaultSession:
        server = VaultServer(open_session(self.settings, self._folder), self.settings, self._time.clock)
        return VaultSession(token_source(self.settings, self._folder), server, self._time.clock)

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches("wrap", requests)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_batches("unwrap", requests)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        kept = [request for request in requests if request.new_master_key_id == request.master_key_id]
        # The engine cannot move a key to another master key, so this process unwraps and wraps it.
        moved = [request for request in requests if request.new_master_key_id != request.master_key_id]
        outcomes = dict(zip(kept, self._in_batches("rewrap", kept), strict=True))
        outcomes |= zip(moved, super()._rewrap_many(moved), strict=True)
        return [outcomes[request] for request in requests]

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self._key(master_key_id).description()

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        _check_name(master_key_id)
        content = {"type": _TYPES[0], "derived": self._context is not None}
        create = partial(self._request, "POST", self._path("keys", master_key_id), content=content)
        self._operation("create").call(master_key_id, lambda seconds: create(seconds=seconds))

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        return self._key(master_key_id).created

    def _place(self) -> str:
        return f"{self._server()}, {self.settings.mount_point}"

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        path = self._path("keys", master_key_id)

        def delete(seconds: float) -> None:
            # The permission to configure a key is apart from the permission to delete it.
            self._request("POST", f"{path}/config", seconds, {"deletion_allowed": True})
            self._request("DELETE", path, seconds)

        # It may be deleted already, also by an attempt whose answer was lost: the state decides.
        if not self._key_deletion_state(master_key_id).is_gone:
            with contextlib.suppress(MasterKeyNotFoundError):
                self._operation("delete").call(master_key_id, delete)
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        _check_name(master_key_id)
        versions: dict[str, bool] = {}
        with contextlib.suppress(MasterKeyNotFoundError):
            key = self._key(master_key_id)
            oldest = key.latest_version + 1 if key.soft_deleted else key.min_decryption_version
            versions = {str(number): number >= oldest for number in range(1, key.latest_version + 1)}
        return KeyDeletion.of_versions(master_key_id, versions)

    def _caller_identity(self) -> CallerIdentity:
        self._operation("identify").call(None, partial(self._request, "GET", "/v1/auth/token/lookup-self"))
        return CallerIdentity(self._principal(), "auth/token/lookup-self")

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        if isinstance(error, VaultRefusal):
            return error.meaning.error(error.retry_after_seconds)
        return super()._translate(error, operation, master_key_id)

    # --- batches ---

    def _in_batches(self, name: str, requests: Sequence[R]) -> list[Any]:
        """Send the requests of an operation in batches, each for one master key, several batches at a time."""
        operation = self._operation(name)
        outcomes: dict[int, Any] = {}
        left: list[R] = []
        for request in requests:
            # The server accepts several spellings of a wrapped key; an altered file must not pass as unaltered.
            if not isinstance(request, WrapRequest) and _parts_of(request.wrapped_key) is None:
                outcomes[id(request)] = WrappedKeyInvalidError("it was not made by a transit engine")
            else:
                left.append(request)
        mistakes = self._mistakes(operation, list(dict.fromkeys(request.master_key_id for request in left)))
        outcomes |= {id(each): mistakes[each.master_key_id] for each in left if each.master_key_id in mistakes}
        left = [request for request in left if request.master_key_id not in mistakes]
        size = self._batch_size
        while left:
            found = operation.in_batches(left, size, partial(self._send_batch, name))
            outcomes |= zip(map(id, left), found, strict=True)
            left = [request for request in left if isinstance(outcomes[id(request)], RequestTooLargeError)]
            longest = max(Counter(request.master_key_id for request in left).values(), default=0)
            size = min(size, longest) // 2
            if not size:
                break
            self._batch_size = min(self._batch_size, size)
        return [outcomes[id(request)] for request in requests]

    def _send_batch(self, name: str, batch: Sequence[R], seconds: float) -> list[Any]:
        """Send requests with one master key. Returns the key or the error of each."""
        items = [
            {"plaintext": strict_base64.encode(request.key.reveal())}
            if isinstance(request, WrapRequest)
            else {"ciphertext": request.wrapped_key}
            for request in batch
        ]
        if self._context is not None:
            context = strict_base64.encode(self._context)
            items = [{**item, "context": context} for item in items]
        verb, options = _VERBS[name]
        path = self._path(verb, batch[0].master_key_id)
        data = self._request("POST", path, seconds, {"batch_input": items, **options}).get("data")
        results = data.get("batch_results") if isinstance(data, Mapping) else None
        if (
            not isinstance(results, list)
            or len(results) != len(items)
            or not all(isinstance(result, Mapping) for result in results)
        ):
            raise KmsResponseInvalidError("the number of answers differs from the number of requests")
        return [_answer_in(name, request, result) for request, result in zip(batch, results, strict=True)]

    # --- master keys ---

    def _mistakes(self, operation: RemoteOperation, names: Sequence[str]) -> dict[str, KmsError]:
        """Return why master keys must not be used, as far as that has to be known before keys are sent."""
        mistakes: dict[str, KmsError] = {name: _NO_KEY_NAME.error() for name in names if not _is_key_name(name)}
        with_context = self._context is not None
        if operation.name == "unwrap" and not with_context:
            return mistakes
        now = self._time.clock()
        # None where the token may not read the key.
        facts = {
            name: known[1]
            for name in names
            if (known := self._key_facts.get(name)) and now - known[0] < _KEY_FACTS_LIFETIME_SECONDS
        }
        unknown = [name for name in names if name not in mistakes and name not in facts]
        for name, read in zip(unknown, operation.each(unknown, self._read_key, str), strict=True):
            if isinstance(read, KmsAccessDeniedError) and not read.detail:
                # The policy may allow only to encrypt. If it allows nothing, the call itself fails.
                facts[name] = None
                self._key_facts[name] = now, None
            elif isinstance(read, KmsError):
                mistakes[name] = read
            else:
                facts[name] = read
        for name, fact in facts.items():
            if fact is not None:
                if mistake := fact.mistake(with_context=with_context):
                    mistakes[name] = mistake.error()
            elif with_context and operation.name != "unwrap":
                detail = "whether it is a derived key cannot be read; if not, the server ignores context"
                hint = f"Allow `read` on {self.settings.mount_point}/keys/{name}."
                mistakes[name] = KmsAccessDeniedError(detail, hint=hint)
        return mistakes

    def _key(self, master_key_id: str) -> TransitKey:
        _check_name(master_key_id)
        return self._operation("describe").call(master_key_id, partial(self._read_key, master_key_id))

    def _read_key(self, master_key_id: str, seconds: float) -> TransitKey:
        fact = TransitKey.read(master_key_id, self._request("GET", self._path("keys", master_key_id), seconds))
        self._key_facts[master_key_id] = self._time.clock(), fact
        return fact

    # --- requests ---

    def _server(self) -> str:
        namespace = f"namespace {self.settings.namespace}" if self.settings.namespace else ""
        return ", ".join(filter(None, [self.settings.url, namespace]))

    def _path(self, verb: str, master_key_id: str) -> str:
        return f"/v1/{self.settings.mount_point}/{verb}/{master_key_id}"

    def _request(
        self, method: str, path: str, seconds: float, content: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Send a request; a second time with another token if the first token is no longer valid."""
        session = self._connection.get()
        deadline = self._time.clock() + seconds
        held = session.token(deadline)
        try:
            return session.server.request(method, path, held.value, deadline, content)
        except VaultRefusal as refusal:
            if refusal.status not in (401, 403):
                raise
            fresh = session.replace(held, deadline)
            if fresh is None:
                raise
        return session.server.request(method, path, fresh.value, deadline, content)


# --- the engine: its requests and answers ---


_LATEST_SECONDS = 1 << 37
"""Later times have no date."""

_KEY_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,254}[A-Za-z0-9_])?")

_NO_TYPE = "none"
"""An invalid key type. If the token may create keys, the engine would create a missing key with the type in the
request; with an invalid type it refuses. It ignores the type if the key exists."""

_LEAST_ADDED_BYTES = 28
"""Each wrapped key contains a nonce of at least 12 bytes and a tag of 16."""

# These are authenticated ciphers. With RSA, anyone who has the public key could make wrapped keys.
_TYPES = ("aes256-gcm96", "aes128-gcm96", "chacha20-poly1305", "xchacha20-poly1305")


@dataclass(frozen=True)
class TransitKey:
    """A key of the transit engine; the creation times of versions that were trimmed are missing."""

    name: str
    type: str
    derived: bool
    latest_version: int
    min_decryption_version: int
    soft_deleted: bool
    imported: bool
    rotates: bool | None
    created: dict[str | None, datetime]

    @classmethod
    def read(cls, name: str, answer: Mapping[str, Any]) -> TransitKey:
        """Return the properties of a key from an answer; refuse an answer that contradicts itself."""
        data = answer.get("data")
        if not isinstance(data, Mapping) or data.get("name") != name or not isinstance(data.get("type"), str):
            raise VaultRefusal(200, NOT_JSON)
        period = data.get("auto_rotate_period")
        versions = data.get("keys")
        latest, oldest = data.get("latest_version"), data.get("min_decryption_version", 1)
        if type(latest) is not int or type(oldest) is not int or not 0 <= oldest <= latest or latest < 1:
            raise VaultRefusal(200, NOT_JSON)
        return cls(
            name=name,
            type=data["type"],
            derived=data.get("derived") is True,
            latest_version=latest,
            min_decryption_version=max(oldest, 1),
            soft_deleted=data.get("soft_deleted") is True,
            imported=data.get("imported_key") is True,
            rotates=period > 0 if type(period) is int else None,
            created={
                version: datetime.fromtimestamp(seconds, UTC)
                for version, seconds in (versions.items() if isinstance(versions, Mapping) else ())
                if type(seconds) is int and 0 <= seconds < _LATEST_SECONDS
            },
        )

    def description(self) -> MasterKeyDescription:
        """Return what `KmsClient.describe` returns."""
        return MasterKeyDescription(
            self.name,
            enabled=not self.soft_deleted and self.type in _TYPES,
            current_version=str(self.latest_version),
            origin="imported" if self.imported else "transit",
            rotates=self.rotates,
        )

    def mistake(self, *, with_context: bool) -> Meaning | None:
        """Return why the key must not be used with this configuration, or None."""
        if self.type not in _TYPES:
            detail = f"it is of type {self.type[:40]!r}, which does not protect wrapped keys from being altered"
            return Meaning(KmsConfigurationError, detail, f"Use a key of type {', '.join(_TYPES)}.")
        if self.derived and not with_context:
            return NEEDS_CONTEXT
        if with_context and not self.derived:
            detail = "it is not a derived key: the server would silently ignore the context"
            hint = "Create the key with derived=true, or leave context out of the configuration."
            return Meaning(KmsConfigurationError, detail, hint)
        return None


def _is_key_name(text: str) -> bool:
    """Return whether a text, which may come from a file, is a valid name of a key."""
    return _KEY_NAME.fullmatch(text) is not None and ".." not in text


def _check_name(master_key_id: str) -> None:
    """Raise `KmsError` for a text that would lead out of the keys of the mount point."""
    if not _is_key_name(master_key_id):
        raise _NO_KEY_NAME.error()


def _parts_of(wrapped_key: object) -> tuple[int, bytes] | None:
    """Return version and ciphertext of a wrapped key, or None if the text is not a wrapped key."""
    parts = _WRAPPED_KEY.fullmatch(wrapped_key) if isinstance(wrapped_key, str) else None
    if parts is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parts[1]), strict_base64.decode(parts[2])
    return None


def _answer_in(name: str, request: WrapRequest | UnwrapRequest | RewrapRequest, result: Mapping[str, Any]) -> Any:
    """Return the key or the wrapped key in a result, or why the server failed for this item of a batch."""
    if text := result.get("error"):
        unknown = Meaning(KmsResponseInvalidError, "it refused for an unknown reason")
        return (meaning_of_texts([text]) or unknown).error()
    if name == "unwrap":
        text = result.get("plaintext")
        return checked_key(strict_base64.decode_or_empty(text) if isinstance(text, str) else b"")
    parts = _parts_of(result.get("ciphertext"))
    if parts is None:
        raise KmsResponseInvalidError("the KMS returned an invalid wrapped key")
    version, data = parts
    if "key_version" in result and result["key_version"] != version:
        raise KmsResponseInvalidError("it contradicts itself about the version of the master key")
    key = request.key if isinstance(request, WrapRequest) else None
    least = (len(key) if key is not None else min(KEY_LENGTHS_BYTES)) + _LEAST_ADDED_BYTES
    if len(data) < least or (key is not None and key.reveal() in data):
        raise KmsResponseInvalidError("the KMS returned an invalid wrapped key")
    return result["ciphertext"]


_VERBS: dict[str, tuple[str, dict[str, object]]] = {
    # operation -> as in the path of the request, and further fields of it
    "wrap": ("encrypt", {"partial_failure_response_code": 200, "type": _NO_TYPE}),
    "unwrap": ("decrypt", {"partial_failure_response_code": 200}),
    "rewrap": ("rewrap", {}),
}


# --- the token: its source (configuration, file or login), its renewal, and its replacement ---

# A token is renewed in time, or replaced by another login if it cannot be renewed. Nothing runs in the background:
# the next call renews the token, and other calls use the old token meanwhile.

_MAX_SECRET_BYTES = 64 * 1024

GivenToken = Callable[[], SecretStr]
"""Returns the current token from the configuration, or from a file that another program maintains."""


@dataclass(frozen=True)
class Login:
    """An auth method that issues a token to this client."""

    method: str
    mount: str
    name: str  # identity, without secrets
    fields: Callable[[], dict[str, str]]  # of the request, with the current secret


def token_source(settings: VaultSettings, folder: Path) -> GivenToken | Login:
    """Return the source of the token in the settings."""

    def secret(setting: SecretStr | None, file: Path | None, what: str) -> SecretStr:
        """Return a secret from the settings, or the current secret in a file: other programs replace it."""
        return _checked(setting, what) if setting is not None else read_secret(folder / expanded(file or ""))

    def approle_fields() -> dict[str, str]:
        assert approle is not None
        if approle.secret_id is None and approle.secret_id_file is None:
            return {"role_id": approle.role_id}
        secret_id = secret(approle.secret_id, approle.secret_id_file, "the secret id")
        return {"role_id": approle.role_id, "secret_id": secret_id.get_secret_value()}

    def jwt_fields(role: str, jwt: SecretStr | None, file: Path | None) -> dict[str, str]:
        return {"role": role, "jwt": secret(jwt, file, "the JSON Web Token").get_secret_value()}

    approle, pod, jwt = settings.approle, settings.kubernetes, settings.jwt
    if approle is not None:
        return Login("approle", approle.mount, approle.mount, approle_fields)
    if pod is not None:
        fields = partial(jwt_fields, pod.role, None, pod.jwt_path)
        return Login("kubernetes", pod.mount, f"{pod.mount} role {pod.role}", fields)
    if jwt is not None:
        fields = partial(jwt_fields, jwt.role, jwt.jwt, jwt.jwt_file)
        return Login("jwt", jwt.mount, f"{jwt.mount} role {jwt.role}", fields)
    return partial(secret, settings.token, settings.token_file, "the token")


def read_secret(path: Path) -> SecretStr:
    """Return the single line in a file.

    The file may be readable for other users: Kubernetes and the agents of Vault and OpenBao choose its mode. The
    configuration warns about it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        detail = f"{path} cannot be read ({error.strerror or type(error).__name__})"
        raise KmsConfigurationError(detail, operation="connect") from None
    return _checked(SecretStr(content.decode("latin-1").strip()), f"the secret in {path}")


def _checked(secret: SecretStr, what: str) -> SecretStr:
    """Return a secret after a check that it can be part of a header."""
    text = secret.get_secret_value()
    if not text or len(text) > _MAX_SECRET_BYTES or not (text.isascii() and text.isprintable()) or " " in text:
        detail = f"{what} is empty, too long, or has characters other than printable ASCII without spaces"
        raise KmsConfigurationError(detail, operation="connect")
    return secret


_RENEWED_AFTER = 2 / 3
"""Of the lifetime: early enough for more attempts, late enough to cost little."""

_NEXT_ATTEMPT_SECONDS = 5.0
_LEAST_SECONDS_BETWEEN_LOGINS = 30.0


@dataclass(frozen=True)
class HeldToken:
    """A token and its properties. Times are on the clock."""

    value: SecretStr
    principal: str
    got_at: float
    lifetime_seconds: float  # at that time; 0 if it does not expire, or if that is unknown
    renewable: bool
    may_look_itself_up: bool
    ends_at: float = math.inf
    due_at: float = math.inf  # when it must be renewed or replaced

    def lives_for(self, seconds: float, now: float) -> HeldToken:
        """Return this token with a new expiry."""
        return replace(self, ends_at=now + seconds, due_at=now + seconds * _RENEWED_AFTER)


class VaultSession:
    """The token of one process, for all its threads."""

    def __init__(self, source: GivenToken | Login, server: VaultServer, clock: Callable[[], float]) -> None:
        self._source = source
        self.server = server
        self._clock = clock
        self._lock = ForkSafeLock()
        self._held: HeldToken | None = None

    @property
    def principal(self) -> str:
        """The identity of the token, if it is known without a call."""
        if self._held is not None:
            return self._held.principal
        return self._source.name if isinstance(self._source, Login) else "token"

    def token(self, deadline: float) -> HeldToken:
        """Return a token that is expected to be valid."""
        held = self._held
        if held is not None and self._clock() < held.due_at:
            return held
        if held is not None and self._clock() < held.ends_at:
            with contextlib.suppress(TimeoutError), self._lock.held_within(0):
                self._held = self._kept(held, deadline) if self._held is held else self._held
            return self._held or held  # another thread may be renewing it
        return self._another(held, deadline)

    def replace(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return another token after a token was refused, or None if the refused token is valid."""
        if self._held is not held and self._held is not None:
            return self._held
        is_login = isinstance(self._source, Login)
        if held.may_look_itself_up:
            if self._looked_up(held.value, deadline) is not None:
                return None
        elif is_login and self._clock() - held.got_at < _LEAST_SECONDS_BETWEEN_LOGINS:
            return None
        elif not isinstance(self._source, Login) and self._source() == held.value:
            raise VaultRefusal(403, self.server.meaning_of_refusals(held.value, deadline))
        return self._another(held, deadline)

    def revoke(self, deadline: float) -> None:
        """Revoke the token of a login. A configured token is not revoked: other programs may use it."""
        held, self._held = self._held, None
        if held is not None and isinstance(self._source, Login):
            self.server.request("POST", "/v1/auth/token/revoke-self", held.value, deadline, {})

    def _another(self, held: HeldToken | None, deadline: float) -> HeldToken:
        """Return the token that another thread got meanwhile, or a fresh token."""
        with self._lock.held_within(deadline - self._clock()):
            if self._held is held or self._held is None:
                self._held = self._fresh(held, deadline)
            return self._held

    def _kept(self, held: HeldToken, deadline: float) -> HeldToken:
        """Renew a valid token, or log in again. If both fail, the token is used until it expires."""
        with contextlib.suppress(VaultRefusal, KmsError, OSError):
            renewed = self._renewed(held, deadline) if held.renewable else None
            return renewed or self._fresh(held, deadline)
        pause = min(_NEXT_ATTEMPT_SECONDS, held.lifetime_seconds / 20)
        return replace(held, due_at=self._clock() + pause)

    def _renewed(self, held: HeldToken, deadline: float) -> HeldToken | None:
        """Return the token with a new expiry, or None if another login is needed."""
        asked_at = self._clock()
        try:
            answer = self.server.request("POST", "/v1/auth/token/renew-self", held.value, deadline, {})
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None
        auth = _part(answer, "auth")
        seconds = _seconds(auth.get("lease_duration"))
        # Near its maximum TTL, the server renews a token only for the time left.
        enough = not isinstance(self._source, Login) or seconds > held.lifetime_seconds / 2
        if not seconds or not enough:
            return None
        return replace(held.lives_for(seconds, asked_at), renewable=auth.get("renewable") is True)

    def _fresh(self, previous: HeldToken | None, deadline: float) -> HeldToken:
        """Log in, or read the configured token again, and look up the properties of the token."""
        asked_at = self._clock()
        known = None
        if isinstance(self._source, Login):
            name, facts = self._source.name, self._logged_in(self._source, deadline)
            value, lifetime = SecretStr(facts["client_token"]), facts.get("lease_duration")
            # The login succeeded: if the lookup fails, no further login may follow from it.
            with contextlib.suppress(VaultRefusal, OSError):
                known = self._looked_up(value, deadline)
        else:
            name, value = "token", self._source()
            known = self._looked_up(value, deadline)
            was_known = previous is not None and previous.value == value and previous.may_look_itself_up
            if known is None and was_known:
                raise VaultRefusal(403, TOKEN_DEAD)
            facts = known or {}
            lifetime = facts.get("ttl")
        seconds = _seconds(lifetime)
        held = HeldToken(
            value,
            principal=_principal(known) or name,
            got_at=asked_at,
            lifetime_seconds=seconds,
            renewable=facts.get("renewable") is True,
            may_look_itself_up=known is not None,
        )
        return held.lives_for(seconds, asked_at) if seconds else held

    def _logged_in(self, login: Login, deadline: float) -> Mapping[str, Any]:
        """Log in. Returns the answer, which holds a token."""
        try:
            path = f"/v1/auth/{login.mount}/login"
            answer = self.server.request("POST", path, None, deadline, login.fields())
        except VaultRefusal as refusal:
            raise replace(refusal, login=login.method) from None
        auth = _part(answer, "auth")
        token = auth.get("client_token")
        # It becomes a header.
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
            raise VaultRefusal(200, NOT_JSON)
        return auth

    def _looked_up(self, value: SecretStr, deadline: float) -> Mapping[str, Any] | None:
        """Return the properties of a token, or None if the server refuses: usually the token is invalid."""
        try:
            return _part(self.server.request("GET", "/v1/auth/token/lookup-self", value, deadline), "data")
        except VaultRefusal as refusal:
            if not refusal.is_final:
                raise
            return None


def _part(answer: object, name: str) -> Mapping[str, Any]:
    part = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(part, Mapping):
        raise VaultRefusal(200, NOT_JSON)
    return part


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0.0


def _principal(known: Mapping[str, Any] | None) -> str:
    """Return the identity of a token, in one line of printable characters."""
    if known is None:
        return ""
    details = known.get("meta")
    role = details.get("role_name") if isinstance(details, Mapping) else None
    parts = [known.get("display_name"), f"role {role}" if role else None]
    text = " ".join(part for part in parts if isinstance(part, str))
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


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
    """Sends requests to the server; deadlines are on the clock."""

    def __init__(self, session: HttpSession, settings: VaultSettings, clock: Callable[[], float]) -> None:
        self.session = session
        self._settings = settings
        self._clock = clock

    def request(
        self, method: str, path: str, token: SecretStr | None, deadline: float, content: Any = None
    ) -> dict[str, Any]:
        """Send a request. Returns the JSON object in the answer, or an empty mapping if the answer has no content.

        The answer to a batch with failed items is an answer, too. Other refusals, redirects and invalid answers
        raise `VaultRefusal`.
        """
        headers = {"X-Vault-Request": "true"}
        if self._settings.namespace:
            headers["X-Vault-Namespace"] = self._settings.namespace
        if token is not None:
            headers["X-Vault-Token"] = token.get_secret_value()
        url = f"{self._settings.url.rstrip('/')}{path}"
        return _content(send(self.session, method, url, deadline, self._clock, headers=headers, json=content))

    def meaning_of_refusals(self, token: SecretStr, deadline: float) -> Meaning | None:
        """Return what refusals with this token mean; None if it is valid: any valid token may list its mounts.

        An invalid token must not be reported as a denied master key: readers may hide the columns under such a
        key.
        """
        try:
            self.request("GET", "/v1/sys/internal/ui/mounts", token, deadline)
        except VaultRefusal as refusal:
            return TOKEN_DEAD if refusal.status == 403 else TOKEN_UNKNOWN
        return None


def _content(answer: Answer) -> dict[str, Any]:
    """Return the content of an answer, or raise `VaultRefusal`."""
    status, content, wait = answer.status, answer.json, answer.retry_after_seconds
    if status == 204:
        return {}
    if status in REDIRECTS:
        raise VaultRefusal(status, REDIRECT)
    if not isinstance(content, dict):
        raise VaultRefusal(status, NOT_JSON, wait)
    if status == 200:
        return content
    data = content.get("data")
    if status == 400 and isinstance(data, dict) and isinstance(data.get("batch_results"), list):
        return content
    errors = content.get("errors")
    raise VaultRefusal(status, meaning_of_texts(errors if isinstance(errors, list) else []), wait)


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
    """The server refused a request, or sent an invalid answer. Holds no text of the server."""

    status: int
    known: Meaning | None = None  # of the server's text
    retry_after_seconds: float = 0.0
    login: str = ""  # the auth method whose login was refused

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
