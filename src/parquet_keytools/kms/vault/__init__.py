"""A KMS client for the transit engine of HashiCorp Vault and OpenBao.

A wrapped key is the ciphertext of the engine, `vault:v<version>:<base64>`. The raw form is its ASCII bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import requests

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.contract import (
    KEY_LENGTHS_BYTES,
    KmsSettings,
    MasterKeyDescription,
    Meaning,
    R,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteOperation, Time
from parquet_keytools.kms.vault.connection import VaultConnection, VaultSettings, open_session
from parquet_keytools.kms.vault.errors import (
    NEEDS_CONTEXT,
    NOT_JSON,
    RequestTooLargeError,
    VaultRefusal,
    meaning_of_texts,
)
from parquet_keytools.kms.vault.session import VaultSession
from parquet_keytools.runtime.fork_safety import PerProcess
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

_KEY_FACTS_LIFETIME_SECONDS = 300.0
_CLOSING_SECONDS = 2.0

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
        session: Makes the requests session, in place of the settings. It must ignore the environment.
    """

    backend = "vault"
    Settings = VaultSettings

    def __init__(
        self,
        settings: VaultSettings,
        folder: Path = Path(),
        *,
        time_source: Time | None = None,
        session: Callable[[], requests.Session] | None = None,
    ) -> None:
        super().__init__(settings, time_source)
        self.settings = settings
        self._engine = TransitEngine(settings.mount_point, settings.context_bytes())
        self._key_facts: dict[str, tuple[float, TransitKey | None]] = {}
        self._batch_size = settings.batch_size
        make_session = session or partial(open_session, settings, folder)
        self._session = PerProcess(lambda: VaultSession(settings, folder, make_session(), self._time.clock))

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client from `VaultSettings`; it reads files and connects when it is first used."""
        assert isinstance(settings, VaultSettings)
        return cls(settings, folder)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that a wrapped key names, or None if no transit engine made it."""
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        return parts[1] if parts else None

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether both are the same master key: the engine cannot re-wrap under another key."""
        return master_key_id == new_master_key_id

    def close(self) -> None:
        """Revoke the token of a login, and close connections and threads."""
        session = self._session.take()
        if session is not None:
            # The token expires anyway, so an unavailable server must not prevent closing.
            with contextlib.suppress(Exception):
                session.revoke(self._time.clock() + min(_CLOSING_SECONDS, self.limits.call_timeout_seconds))
            session.connections.close()
        super().close()

    def _principal(self) -> str:
        """Return the identity of the token; before the first call, the method of the login."""
        return self._session.get().principal

    # --- hooks ---

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        return value_or_raise(self._wrap_many([WrapRequest(key, master_key_id)])[0]).encode("ascii")

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        # Bytes that are not ASCII become a text that is refused as an invalid wrapped key.
        request = UnwrapRequest(wrapped_key.decode("ascii", "replace"), master_key_id)
        return value_or_raise(self._unwrap_many([request])[0])

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches(self._operation("wrap"), requests, self._engine.wrap)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_batches(self._operation("unwrap"), requests, self._engine.unwrap)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        operation = self._operation("rewrap")
        kept = [request for request in requests if request.new_master_key_id == request.master_key_id]
        moved = [request for request in requests if request.new_master_key_id != request.master_key_id]
        outcomes = dict(zip(map(id, kept), self._in_batches(operation, kept, self._engine.rewrap), strict=True))
        outcomes |= dict(zip(map(id, moved), self._moved(operation, moved), strict=True))
        return [outcomes[id(request)] for request in requests]

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        if not _is_key_name(master_key_id):
            raise _NO_KEY_NAME.error()
        read = partial(self._read_key, master_key_id)
        return self._operation("describe").call(master_key_id, read).description()

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        if isinstance(error, VaultRefusal):
            return error.meaning.error(error.retry_after_seconds)
        return super()._translate(error, operation, master_key_id)

    # --- batches ---

    def _in_batches(
        self,
        operation: RemoteOperation,
        requests: Sequence[R],
        ask: Callable[[Sequence[R], VaultConnection], list[T | KmsError]],
    ) -> list[T | KmsError]:
        """Send the requests in batches, each for one master key, several batches at a time."""
        outcomes: dict[int, T | KmsError] = {}
        of_key: dict[str, list[R]] = defaultdict(list)
        for request in requests:
            # The server accepts several spellings of a wrapped key; an altered file must not pass as unaltered.
            if not isinstance(request, WrapRequest) and _parts_of(request.wrapped_key) is None:
                detail = "it was not made by a transit engine"
                outcomes[id(request)] = WrappedKeyInvalidError(detail)
            else:
                of_key[request.master_key_id].append(request)
        for name, mistake in self._mistakes(operation, list(of_key)).items():
            outcomes |= dict.fromkeys(map(id, of_key.pop(name)), mistake)

        def send(batch: Sequence[R], seconds: float) -> list[T | KmsError]:
            return self._with_token(partial(ask, batch), seconds)

        size = self._batch_size
        batches = [
            of_one[start : start + size] for of_one in of_key.values() for start in range(0, len(of_one), size)
        ]
        while batches:
            answers = operation.each(batches, send, lambda batch: batch[0].master_key_id)
            asked, batches = batches, []
            for batch, answer in zip(asked, answers, strict=True):
                if isinstance(answer, RequestTooLargeError) and len(batch) > 1:
                    half = len(batch) // 2
                    self._batch_size = min(self._batch_size, half)
                    batches += [batch[:half], batch[half:]]
                elif isinstance(answer, KmsError):
                    outcomes |= dict.fromkeys(map(id, batch), answer)
                else:
                    outcomes |= dict(zip(map(id, batch), answer, strict=True))
        return [
            outcome.about(self.backend, operation.name, request.master_key_id)
            if isinstance(outcome := outcomes[id(request)], KmsError)
            else outcome
            for request in requests
        ]

    def _moved(self, operation: RemoteOperation, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Wrap with another master key. The engine cannot do that, so this process sees the keys."""
        mistakes = self._mistakes(operation, list(dict.fromkeys(r.new_master_key_id for r in requests)))
        able = [request for request in requests if request.new_master_key_id not in mistakes]
        keys = dict(zip(map(id, able), self._in_batches(operation, able, self._engine.unwrap), strict=True))
        to_wrap = {
            id(request): WrapRequest(key, request.new_master_key_id)
            for request in able
            if isinstance(key := keys[id(request)], SecretBytes)
        }
        wrapped = self._in_batches(operation, list(to_wrap.values()), self._engine.wrap)
        outcomes: dict[int, str | KmsError] = {id_: key for id_, key in keys.items() if isinstance(key, KmsError)}
        outcomes |= dict(zip(to_wrap, wrapped, strict=True))
        return [mistakes.get(r.new_master_key_id) or outcomes[id(r)] for r in requests]

    # --- master keys ---

    def _mistakes(self, operation: RemoteOperation, names: Sequence[str]) -> dict[str, KmsError]:
        """Return why master keys must not be used, as far as that has to be known before keys are sent."""
        mistakes: dict[str, KmsError] = {
            name: _NO_KEY_NAME.error().about(self.backend, operation.name, name)
            for name in names
            if not _is_key_name(name)
        }
        with_context = self._engine.context is not None
        if operation.name == "unwrap" and not with_context:
            return mistakes
        now = self._time.clock()
        facts = {
            name: known[1]
            for name in names
            if (known := self._key_facts.get(name)) and now - known[0] < _KEY_FACTS_LIFETIME_SECONDS
        }
        unknown = [name for name in names if name not in facts and name not in mistakes]
        for name, fact in zip(unknown, operation.each(unknown, self._read_key, str), strict=True):
            if not isinstance(fact, KmsError):
                facts[name] = fact
            elif isinstance(fact, KmsAccessDeniedError) and not fact.detail:
                # The policy may allow only to encrypt. If it allows nothing, the call itself fails.
                facts[name] = None
            else:
                mistakes[name] = fact
                continue
            self._key_facts[name] = now, facts[name]
        for name, known_fact in facts.items():
            mistake = None
            if known_fact is not None:
                mistake = known_fact.mistake(with_context=with_context)
            elif with_context and operation.name != "unwrap":
                detail = (
                    "whether it is a derived key cannot be read, and the server ignores the context if it is not"
                )
                hint = f"Allow `read` on {self._engine.mount_point}/keys/{name}."
                mistake = Meaning(KmsAccessDeniedError, detail, hint)
            if mistake is not None:
                mistakes[name] = mistake.error().about(self.backend, operation.name, name)
        return mistakes

    def _read_key(self, master_key_id: str, seconds: float) -> TransitKey:
        return self._with_token(partial(self._engine.read_key, master_key_id), seconds)

    # --- calls ---

    def _server(self) -> str:
        namespace = f"namespace {self.settings.namespace}" if self.settings.namespace else ""
        return ", ".join(filter(None, [self.settings.url, namespace]))

    def _with_token(self, ask: Callable[[VaultConnection], T], seconds: float) -> T:
        """Ask once; a second time with another token if the first token is no longer valid."""
        session = self._session.get()
        deadline = self._time.clock() + seconds
        held = session.token(deadline)
        try:
            return ask(session.connect(held.value, deadline))
        except VaultRefusal as refusal:
            if refusal.status not in (401, 403):
                raise
            fresh = session.replace(held, deadline)
            if fresh is None:
                raise
        return ask(session.connect(fresh.value, deadline))


# --- the engine: its requests and answers ---


_KEY_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,254}[A-Za-z0-9_])?")
_WRAPPED_KEY = re.compile(r"vault:v([1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})")

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
    """

    name: str
    type: str
    derived: bool
    latest_version: int
    min_decryption_version: int
    soft_deleted: bool
    imported: bool
    rotates: bool | None

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


@dataclass(frozen=True)
class TransitEngine:
    """The engine at a mount point. Each method makes one request."""

    mount_point: str
    context: bytes | None

    def wrap(self, batch: Sequence[WrapRequest], connection: VaultConnection) -> list[str | KmsError]:
        """Wrap keys with one master key."""
        items = [{"plaintext": strict_base64.encode(request.key.reveal())} for request in batch]
        results = self._results(connection, batch[0].master_key_id, "encrypt", items)
        return [_wrapped_key_in(result, request.key) for request, result in zip(batch, results, strict=True)]

    def unwrap(
        self, batch: Sequence[UnwrapRequest | RewrapRequest], connection: VaultConnection
    ) -> list[SecretBytes | KmsError]:
        """Unwrap keys with one master key."""
        items = [{"ciphertext": request.wrapped_key} for request in batch]
        return [_key_in(result) for result in self._results(connection, batch[0].master_key_id, "decrypt", items)]

    def rewrap(self, batch: Sequence[RewrapRequest], connection: VaultConnection) -> list[str | KmsError]:
        """Re-wrap keys under the current version of one master key."""
        items = [{"ciphertext": request.wrapped_key} for request in batch]
        return [
            _wrapped_key_in(result)
            for result in self._results(connection, batch[0].master_key_id, "rewrap", items)
        ]

    def read_key(self, name: str, connection: VaultConnection) -> TransitKey:
        """Return the properties of a master key."""
        return TransitKey.read(name, connection.get(f"/v1/{self.mount_point}/keys/{name}"))

    def _results(
        self, connection: VaultConnection, name: str, action: str, items: list[dict[str, str]]
    ) -> list[Mapping[str, Any]]:
        """Send a batch. Returns the result of each item."""
        if self.context is not None:
            context = strict_base64.encode(self.context)
            items = [{**item, "context": context} for item in items]
        body: dict[str, object] = {"batch_input": items}
        if action == "encrypt":
            body["type"] = _NO_TYPE
        if action != "rewrap":
            body["partial_failure_response_code"] = 200
        answer = connection.post(f"/v1/{self.mount_point}/{action}/{name}", json=body)
        data = answer.get("data")
        results = data.get("batch_results") if isinstance(data, Mapping) else None
        if (
            not isinstance(results, list)
            or len(results) != len(items)
            or not all(isinstance(result, Mapping) for result in results)
        ):
            raise KmsResponseInvalidError("the number of answers differs from the number of requests")
        return results


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
