"""A KMS client for the transit engine of HashiCorp Vault and OpenBao.

A wrapped key is the ciphertext of the engine, `vault:v<version>:<base64>`. The raw form is its ASCII bytes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
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
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteOperation, Time
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.kms.vault.connection import (
    NEEDS_CONTEXT,
    NOT_JSON,
    RequestTooLargeError,
    VaultRefusal,
    VaultServer,
    VaultSettings,
    meaning_of_texts,
    open_session,
)
from parquet_keytools.kms.vault.session import VaultSession, token_source
from parquet_keytools.runtime.threads_and_forks import PerProcess
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

_KEY_FACTS_LIFETIME_SECONDS = 300.0
_CLOSING_SECONDS = 2.0

_WRAPPED_KEY = re.compile(r"vault:v(?P<version>[1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})")

_NO_KEY_NAME = Meaning(
    MasterKeyNotFoundError,
    "this is not a valid name of a transit key",
    "A name has letters, digits, `_`, `-` and `.`; the mount point is a setting of its own.",
)


class _Connection(NamedTuple):
    server: VaultServer
    session: VaultSession


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
        connection = self._connection.take()
        if connection is not None:
            # The token expires anyway, so an unavailable server must not prevent closing.
            with contextlib.suppress(Exception):
                seconds = min(_CLOSING_SECONDS, self.limits.call_timeout_seconds)
                connection.session.revoke(self._time.clock() + seconds)
            connection.server.session.close()
        super().close()

    def _principal(self) -> str:
        """Return the identity of the token; before the first call, the method of the login."""
        return self._connection.get().session.principal

    def _connect(self) -> _Connection:
        server = VaultServer(open_session(self.settings, self._folder), self.settings, self._time.clock)
        source = token_source(self.settings, self._folder)
        return _Connection(server, VaultSession(source, server, self._time.clock))

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches(self._operation("wrap"), requests, _ENCRYPT)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_batches(self._operation("unwrap"), requests, _DECRYPT)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        kept = [request for request in requests if request.new_master_key_id == request.master_key_id]
        # The engine cannot move a key to another master key, so this process unwraps and wraps it.
        moved = [request for request in requests if request.new_master_key_id != request.master_key_id]
        rewrapped = self._in_batches(self._operation("rewrap"), kept, _REWRAP)
        outcomes: dict[int, str | KmsError] = dict(zip(map(id, kept), rewrapped, strict=True))
        outcomes |= dict(zip(map(id, moved), super()._rewrap_many(moved), strict=True))
        return [outcomes[id(request)] for request in requests]

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        if not _is_key_name(master_key_id):
            raise _NO_KEY_NAME.error()
        read = partial(self._read_key, master_key_id)
        return self._operation("describe").call(master_key_id, read).description()

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        if not _is_key_name(master_key_id):
            # It would lead out of the keys of the mount point.
            raise _NO_KEY_NAME.error()
        path = f"/v1/{self.settings.mount_point}/keys/{master_key_id}"
        content = {"type": _TYPES[0], "derived": self._context is not None}
        self._operation("create").call(
            master_key_id, lambda seconds: self._request("POST", path, seconds, content)
        )

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        if not _is_key_name(master_key_id):
            raise _NO_KEY_NAME.error()
        read = partial(self._read_key, master_key_id)
        return self._operation("describe").call(master_key_id, read).created

    def _place(self) -> str:
        return f"{self._server()}, {self.settings.mount_point}"

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        path = f"/v1/{self.settings.mount_point}/keys/{master_key_id}"

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
        if not _is_key_name(master_key_id):
            raise _NO_KEY_NAME.error()
        versions: dict[str, bool] = {}
        with contextlib.suppress(MasterKeyNotFoundError):
            key = self._operation("describe").call(master_key_id, partial(self._read_key, master_key_id))
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

    def _in_batches(
        self,
        operation: RemoteOperation,
        requests: Sequence[R],
        action: _Action[R, T],
    ) -> list[T | KmsError]:
        """Send the requests in batches, each for one master key, several batches at a time."""
        outcomes: dict[int, T | KmsError] = {}
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
            found = operation.in_batches(left, size, partial(self._send_batch, action))
            outcomes |= zip(map(id, left), found, strict=True)
            left = [request for request in left if isinstance(outcomes[id(request)], RequestTooLargeError)]
            longest = max(Counter(request.master_key_id for request in left).values(), default=0)
            size = min(size, longest) // 2
            if not size:
                break
            self._batch_size = min(self._batch_size, size)
        return [outcomes[id(request)] for request in requests]

    def _send_batch(self, action: _Action[R, T], batch: Sequence[R], seconds: float) -> list[T | KmsError]:
        """Send requests with one master key."""
        items = [action.item(request) for request in batch]
        if self._context is not None:
            context = strict_base64.encode(self._context)
            items = [{**item, "context": context} for item in items]
        path = f"/v1/{self.settings.mount_point}/{action.name}/{batch[0].master_key_id}"
        answer = self._request("POST", path, seconds, {"batch_input": items, **action.options})
        data = answer.get("data")
        results = data.get("batch_results") if isinstance(data, Mapping) else None
        if (
            not isinstance(results, list)
            or len(results) != len(items)
            or not all(isinstance(result, Mapping) for result in results)
        ):
            raise KmsResponseInvalidError("the number of answers differs from the number of requests")
        return [action.outcome(request, result) for request, result in zip(batch, results, strict=True)]

    # --- master keys ---

    def _mistakes(self, operation: RemoteOperation, names: Sequence[str]) -> dict[str, KmsError]:
        """Return why master keys must not be used, as far as that has to be known before keys are sent."""
        mistakes = {name: _NO_KEY_NAME for name in names if not _is_key_name(name)}
        with_context = self._context is not None
        failures: dict[str, KmsError] = {}
        if operation.name != "unwrap" or with_context:
            facts, failures = self._facts(operation, [name for name in names if name not in mistakes])
            for name, fact in facts.items():
                if fact is not None and (mistake := fact.mistake(with_context=with_context)):
                    mistakes[name] = mistake
                elif fact is None and with_context and operation.name != "unwrap":
                    detail = "whether it is a derived key cannot be read; if not, the server ignores context"
                    hint = f"Allow `read` on {self.settings.mount_point}/keys/{name}."
                    mistakes[name] = Meaning(KmsAccessDeniedError, detail, hint)
        return failures | {name: mistake.error() for name, mistake in mistakes.items()}

    def _facts(
        self, operation: RemoteOperation, names: Sequence[str]
    ) -> tuple[dict[str, TransitKey | None], dict[str, KmsError]]:
        """Return the properties of master keys, None where the token may not read them, and failures to read."""
        now = self._time.clock()
        facts = {
            name: known[1]
            for name in names
            if (known := self._key_facts.get(name)) and now - known[0] < _KEY_FACTS_LIFETIME_SECONDS
        }
        failures: dict[str, KmsError] = {}
        unknown = [name for name in names if name not in facts]
        for name, fact in zip(unknown, operation.each(unknown, self._read_key, str), strict=True):
            if isinstance(fact, KmsAccessDeniedError) and not fact.detail:
                # The policy may allow only to encrypt. If it allows nothing, the call itself fails.
                facts[name] = None
                self._key_facts[name] = now, None
            elif isinstance(fact, KmsError):
                failures[name] = fact
            else:
                facts[name] = fact
        return facts, failures

    def _read_key(self, master_key_id: str, seconds: float) -> TransitKey:
        path = f"/v1/{self.settings.mount_point}/keys/{master_key_id}"
        fact = TransitKey.read(master_key_id, self._request("GET", path, seconds))
        self._key_facts[master_key_id] = self._time.clock(), fact
        return fact

    # --- requests ---

    def _server(self) -> str:
        namespace = f"namespace {self.settings.namespace}" if self.settings.namespace else ""
        return ", ".join(filter(None, [self.settings.url, namespace]))

    def _request(
        self, method: str, path: str, seconds: float, content: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Send a request; a second time with another token if the first token is no longer valid."""
        server, session = self._connection.get()
        deadline = self._time.clock() + seconds
        held = session.token(deadline)
        try:
            return server.request(method, path, held.value, deadline, content)
        except VaultRefusal as refusal:
            if refusal.status not in (401, 403):
                raise
            fresh = session.replace(held, deadline)
            if fresh is None:
                raise
        return server.request(method, path, fresh.value, deadline, content)


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
    """A key of the transit engine.

    Attributes:
        type: Its cipher, such as `aes256-gcm96`.
        derived: Whether each context has its own key.
        latest_version: The version that wraps.
        min_decryption_version: The oldest version that unwraps.
        imported: Whether the key was generated elsewhere.
        rotates: Whether the engine makes new versions by itself; None if unknown.
        created: Version -> when it was created, as far as the answer says. Versions that were trimmed are missing.
    """

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
        """Return the properties of a key from an answer.

        Raises:
            VaultRefusal: The answer is about something else, or contradicts itself.
        """
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
        """Return its description for callers of the contract."""
        enabled = not self.soft_deleted and self.type in _TYPES
        versions = range(self.min_decryption_version, self.latest_version + 1) if enabled else ()
        return MasterKeyDescription(
            self.name,
            enabled=enabled,
            current_version=str(self.latest_version),
            enabled_versions=tuple(map(str, versions)),
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


def _parts_of(wrapped_key: object) -> tuple[int, bytes] | None:
    """Return version and ciphertext of a wrapped key, or None if the text is not a wrapped key."""
    parts = _WRAPPED_KEY.fullmatch(wrapped_key) if isinstance(wrapped_key, str) else None
    if parts is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parts[1]), strict_base64.decode(parts[2])
    return None


def _failure_in(result: Mapping[str, Any]) -> KmsError | None:
    """Return why the server failed for one item of a batch, or None."""
    text = result.get("error")
    if not text:
        return None
    unknown = Meaning(KmsResponseInvalidError, "it refused for an unknown reason")
    return (meaning_of_texts([text]) or unknown).error()


def _wrapped_key_in(result: Mapping[str, Any], key: SecretBytes | None = None) -> str | KmsError:
    """Return the wrapped key in a result, or the error of the item."""
    if failure := _failure_in(result):
        return failure
    text = result.get("ciphertext")
    parts = _parts_of(text)
    if parts is None:
        raise KmsResponseInvalidError("the KMS returned an invalid wrapped key")
    version, data = parts
    if "key_version" in result and result["key_version"] != version:
        raise KmsResponseInvalidError("it contradicts itself about the version of the master key")
    least = (len(key) if key is not None else min(KEY_LENGTHS_BYTES)) + _LEAST_ADDED_BYTES
    if len(data) < least or (key is not None and key.reveal() in data):
        raise KmsResponseInvalidError("the KMS returned an invalid wrapped key")
    return str(text)


def _key_in(result: Mapping[str, Any]) -> SecretBytes | KmsError:
    """Return the key in a result, or the error of the item."""
    if failure := _failure_in(result):
        return failure
    text, data = result.get("plaintext"), b""
    with contextlib.suppress(ValueError):
        data = strict_base64.decode(text) if isinstance(text, str) else b""
    return checked_key(data)


class _Action(NamedTuple, Generic[R, T]):
    """A request of the engine for many keys.

    Attributes:
        name: As in the path of the request.
        options: Fields of the request.
        item: Returns the fields for one key.
        outcome: Returns the key in a result, or the error of the item.
    """

    name: str
    options: Mapping[str, object]
    item: Callable[[R], dict[str, str]]
    outcome: Callable[[R, Mapping[str, Any]], T | KmsError]


def _ciphertext(request: UnwrapRequest | RewrapRequest) -> dict[str, str]:
    return {"ciphertext": request.wrapped_key}


_ITEM_BY_ITEM = {"partial_failure_response_code": 200}

_ENCRYPT: _Action[WrapRequest, str] = _Action(
    "encrypt",
    {**_ITEM_BY_ITEM, "type": _NO_TYPE},
    lambda request: {"plaintext": strict_base64.encode(request.key.reveal())},
    lambda request, result: _wrapped_key_in(result, request.key),
)
_DECRYPT: _Action[Any, SecretBytes] = _Action(
    "decrypt", _ITEM_BY_ITEM, _ciphertext, lambda _, result: _key_in(result)
)
_REWRAP: _Action[RewrapRequest, str] = _Action(
    "rewrap", {}, _ciphertext, lambda _, result: _wrapped_key_in(result)
)
