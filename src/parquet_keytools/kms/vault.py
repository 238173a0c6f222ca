"""A KMS client for the transit engine of HashiCorp Vault and OpenBao.

A wrapped key is what the engine itself makes: `vault:v<version>:<base64>`.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import requests
from hvac.api.secrets_engines import Transit
from pydantic import SecretStr

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.client import (
    KEY_LENGTHS_BYTES,
    KmsSettings,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.per_process import PerProcess
from parquet_keytools.kms.remote_client import RemoteKmsClient, Time
from parquet_keytools.kms.vault_connection import Address, VaultConnection, open_session
from parquet_keytools.kms.vault_errors import (
    CallFacts,
    Reason,
    RequestTooLargeError,
    VaultRefusal,
    connection_error,
    reason_of,
    refusal_error,
)
from parquet_keytools.kms.vault_login import token_source
from parquet_keytools.kms.vault_master_key import TransitKey, unreadable_with_context
from parquet_keytools.kms.vault_session import VaultSession
from parquet_keytools.kms.vault_settings import VaultSettings
from parquet_keytools.secret_bytes import SecretBytes

R = TypeVar("R", WrapRequest, UnwrapRequest, RewrapRequest)
S = TypeVar("S")
T = TypeVar("T")

_KEY_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,254}[A-Za-z0-9_])?")
_WRAPPED_KEY = re.compile(r"vault:v([1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})")

_NO_TYPE = "none"
"""The engine creates a missing key when a token may, with the type that the request asks for. This is none, so
the engine refuses; of a key that exists it does not look at the type."""

_LEAST_ADDED_BYTES = 28
"""A nonce of at least 12 bytes and a tag of 16 come with each wrapped key."""

_KEY_FACTS_LIFETIME_SECONDS = 300.0
_CLOSING_SECONDS = 2.0


class VaultKms(RemoteKmsClient):
    """Wraps and unwraps with keys of a transit engine, many at a time, and rewraps on the server.

    It connects, and logs in where it has to, when it is first used. A forked child does so for itself.

    Args:
        settings: The settings.
        folder: Where relative paths in them start.
        time_source: Clock and pauses; tests pass others.
        session: Makes what holds the connections, in place of what the settings describe. It must not follow
            the environment.
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
        self._context = settings.context_bytes()
        self._key_facts: dict[str, tuple[float, TransitKey | None]] = {}
        self._batch_size = settings.batch_size
        make_session = session or partial(open_session, settings, folder)
        self._link = PerProcess(lambda: _Link(settings, folder, make_session(), self._time.clock))

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client of `VaultSettings`; nothing is read or connected before it is first used."""
        assert isinstance(settings, VaultSettings)
        return cls(settings, folder)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that stands in a wrapped key, or None where it is none of a transit engine."""
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        return parts[1] if parts else None

    def close(self) -> None:
        """Revoke the token if a login gave it to us, and give back connections and threads."""
        link = self._link.take()
        if link is not None:
            # It would end by itself: that the server is away must not keep anyone from closing.
            with contextlib.suppress(Exception):
                link.session.revoke(self._time.clock() + min(_CLOSING_SECONDS, self.limits.call_timeout_seconds))
            link.connections.close()
        super().close()

    def _principal(self) -> str:
        """Return who the server takes us for; before the first call, how we shall log in."""
        return self._link.get().session.principal

    # --- hooks ---

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return value_or_raise(self._wrap_many([WrapRequest(key, master_key_id)])[0])

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return value_or_raise(self._unwrap_many([UnwrapRequest(wrapped_key, master_key_id)])[0])

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches("wrap", requests, lambda r: r.master_key_id, self._wrap_batch)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        # The server is lenient in how a wrapped key is spelt; an altered file must not pass as unaltered.
        bad = {id(r) for r in requests if _parts(r.wrapped_key) is None}
        asked = iter(
            self._in_batches(
                "unwrap", [r for r in requests if id(r) not in bad], lambda r: r.master_key_id, self._unwrap_batch
            )
        )
        return [self._not_ours(r.master_key_id, "unwrap") if id(r) in bad else next(asked) for r in requests]

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        outcomes: dict[int, str | KmsError] = {}
        kept, moved = [], []
        for request in requests:
            if _parts(request.wrapped_key) is None:
                outcomes[id(request)] = self._not_ours(request.master_key_id, "rewrap")
            elif request.new_master_key_id == request.master_key_id:
                kept.append(request)
            else:
                moved.append(request)
        rewrapped = self._in_batches("rewrap", kept, lambda r: r.master_key_id, self._rewrap_batch)
        outcomes |= {id(r): outcome for r, outcome in zip(kept, rewrapped, strict=True)}
        outcomes |= {id(r): outcome for r, outcome in zip(moved, self._moved(moved), strict=True)}
        return [outcomes[id(request)] for request in requests]

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self._read_key("describe", master_key_id).description()

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        call = self._facts(operation, master_key_id)
        if isinstance(error, VaultRefusal):
            return refusal_error(error, call)
        return connection_error(error, call) or super()._translate(error, operation, master_key_id)

    # --- batches ---

    def _in_batches(
        self,
        operation: str,
        requests: Sequence[R],
        key_of: Callable[[R], str],
        ask: Callable[[VaultConnection, str, Sequence[R]], list[T | KmsError]],
    ) -> list[T | KmsError]:
        """Ask for many, a batch for each master key at least, and several batches at a time."""
        of_key: dict[str, list[int]] = defaultdict(list)
        for position, request in enumerate(requests):
            of_key[key_of(request)].append(position)
        outcomes: dict[int, T | KmsError] = {}
        batches: list[tuple[str, list[int]]] = []
        names = list(of_key)
        mistakes = self._map(partial(self._mistake, operation), names)
        for name, mistake in zip(names, mistakes, strict=True):
            places = of_key[name]
            if mistake is not None:
                outcomes |= dict.fromkeys(places, mistake)
            else:
                size = self._batch_size
                batches += [(name, places[start : start + size]) for start in range(0, len(places), size)]

        def answers(batch: tuple[str, list[int]]) -> list[T | KmsError]:
            return self._batch(operation, batch[0], [requests[place] for place in batch[1]], ask)

        for (_, places), batch in zip(batches, self._map(answers, batches), strict=True):
            outcomes |= dict(zip(places, batch, strict=True))
        return [outcomes[position] for position in range(len(requests))]

    def _batch(
        self,
        operation: str,
        master_key_id: str,
        requests: Sequence[R],
        ask: Callable[[VaultConnection, str, Sequence[R]], list[T | KmsError]],
    ) -> list[T | KmsError]:
        """Ask for one batch; one that is too large for the server becomes two, and later ones are smaller."""
        outcome = self._outcome(
            operation,
            master_key_id,
            self._ask,
            operation,
            master_key_id,
            lambda connection: ask(connection, master_key_id, requests),
        )
        if not isinstance(outcome, KmsError):
            return outcome
        if not isinstance(outcome, RequestTooLargeError) or len(requests) == 1:
            return [outcome] * len(requests)
        half: int = len(requests) // 2
        self._batch_size = min(self._batch_size, max(half, 1))
        return [
            *self._batch(operation, master_key_id, requests[:half], ask),
            *self._batch(operation, master_key_id, requests[half:], ask),
        ]

    def _wrap_batch(
        self, connection: VaultConnection, name: str, requests: Sequence[WrapRequest]
    ) -> list[str | KmsError]:
        items = [{"plaintext": strict_base64.encode(request.key.reveal())} for request in requests]
        results = self._results(connection, "wrap", "encrypt", name, items)
        return [
            self._wrapped_key_in(result, self._facts("wrap", name), request.key)
            for request, result in zip(requests, results, strict=True)
        ]

    def _unwrap_batch(
        self, connection: VaultConnection, name: str, requests: Sequence[UnwrapRequest]
    ) -> list[SecretBytes | KmsError]:
        return self._decrypted(connection, "unwrap", name, [request.wrapped_key for request in requests])

    def _decrypted(
        self, connection: VaultConnection, operation: str, name: str, wrapped_keys: Sequence[str]
    ) -> list[SecretBytes | KmsError]:
        items = [{"ciphertext": wrapped_key} for wrapped_key in wrapped_keys]
        call = self._facts(operation, name)
        return [_key_in(result, call) for result in self._results(connection, operation, "decrypt", name, items)]

    def _rewrap_batch(
        self, connection: VaultConnection, name: str, requests: Sequence[RewrapRequest]
    ) -> list[str | KmsError]:
        items = [{"ciphertext": request.wrapped_key} for request in requests]
        results = self._results(connection, "rewrap", "rewrap", name, items)
        return [self._wrapped_key_in(result, self._facts("rewrap", name)) for result in results]

    def _moved(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Wrap with another master key. The engine cannot do that, so the keys pass through this process."""
        names = list(dict.fromkeys(request.new_master_key_id for request in requests))
        mistakes = dict(zip(names, self._map(partial(self._mistake, "rewrap"), names), strict=True))
        able = [request for request in requests if mistakes[request.new_master_key_id] is None]
        keys = self._in_batches(
            "rewrap",
            able,
            lambda r: r.master_key_id,
            lambda connection, name, batch: self._decrypted(
                connection, "rewrap", name, [request.wrapped_key for request in batch]
            ),
        )
        outcomes: dict[int, str | KmsError] = {}
        to_wrap: dict[int, WrapRequest] = {}
        for request, key in zip(able, keys, strict=True):
            if isinstance(key, KmsError):
                outcomes[id(request)] = key
            else:
                to_wrap[id(request)] = WrapRequest(key, request.new_master_key_id)
        wrapped = self._in_batches("rewrap", list(to_wrap.values()), lambda r: r.master_key_id, self._wrap_batch)
        outcomes |= dict(zip(to_wrap, wrapped, strict=True))
        return [mistakes[r.new_master_key_id] or outcomes[id(r)] for r in requests]

    def _results(
        self, connection: VaultConnection, operation: str, action: str, name: str, items: list[dict[str, str]]
    ) -> list[Mapping[str, Any]]:
        """Send a batch and return what the answer has for each item."""
        if self._context is not None:
            context = strict_base64.encode(self._context)
            items = [{**item, "context": context} for item in items]
        body: dict[str, object] = {"batch_input": items}
        if action == "encrypt":
            body["type"] = _NO_TYPE
        if action != "rewrap":
            body["partial_failure_response_code"] = 200
        answer = connection.post(f"/v1/{self.settings.mount_point}/{action}/{name}", json=body)
        data = answer.get("data")
        results = data.get("batch_results") if isinstance(data, Mapping) else None
        if (
            not isinstance(results, list)
            or len(results) != len(items)
            or not all(isinstance(result, Mapping) for result in results)
        ):
            detail = "the number of answers is not that of the requests"
            raise self._facts(operation, name).error(KmsResponseInvalidError, detail)
        return results

    def _wrapped_key_in(
        self, result: Mapping[str, Any], call: CallFacts, key: SecretBytes | None = None
    ) -> str | KmsError:
        """Return the wrapped key in a result, if it can be one."""
        if failure := _failure(result, call):
            return failure
        text = result.get("ciphertext")
        parts = _parts(text) if isinstance(text, str) else None
        if parts is None:
            raise call.error(KmsResponseInvalidError, "what it sent is no wrapped key")
        version, data = parts
        if "key_version" in result and result["key_version"] != version:
            raise call.error(KmsResponseInvalidError, "it contradicts itself about the version of the master key")
        least = (len(key) if key is not None else min(KEY_LENGTHS_BYTES)) + _LEAST_ADDED_BYTES
        if len(data) < least or (key is not None and key.reveal() in data):
            raise call.error(KmsResponseInvalidError, "what it sent is no wrapped key")
        assert isinstance(text, str)
        return text

    def _not_ours(self, master_key_id: str, operation: str) -> KmsError:
        call = self._facts(operation, master_key_id)
        return call.error(WrappedKeyInvalidError, "it was not made by a transit engine")

    # --- master keys ---

    def _mistake(self, operation: str, master_key_id: str) -> KmsError | None:
        """Return why a master key cannot be used, as far as that has to be known before; None if it can."""
        if not _is_key_name(master_key_id):
            return self._no_key_name(operation, master_key_id)
        wraps = operation != "unwrap"
        if not wraps and self._context is None:
            return None
        fact = self._outcome(operation, master_key_id, self._known_key, operation, master_key_id)
        if isinstance(fact, KmsError):
            return fact
        call = self._facts(operation, master_key_id)
        if fact is not None:
            return fact.mistake(call, with_context=self._context is not None)
        return unreadable_with_context(call) if wraps and self._context is not None else None

    def _known_key(self, operation: str, master_key_id: str) -> TransitKey | None:
        """Return what is known of a master key, or None where the token may not read that."""
        known = self._key_facts.get(master_key_id)
        now = self._time.clock()
        if known is not None and now - known[0] < _KEY_FACTS_LIFETIME_SECONDS:
            return known[1]
        try:
            fact = self._read_key(operation, master_key_id)
        except KmsAccessDeniedError as error:
            # The policy may allow nothing but to encrypt. If all is refused, the call itself will say so.
            if error.detail:
                raise
            fact = None
        self._key_facts[master_key_id] = (now, fact)
        return fact

    def _read_key(self, operation: str, master_key_id: str) -> TransitKey:
        if not _is_key_name(master_key_id):
            raise self._no_key_name(operation, master_key_id)

        def read(connection: VaultConnection) -> TransitKey:
            transit: Any = Transit(connection)
            answer = transit.read_key(master_key_id, mount_point=self.settings.mount_point)
            return TransitKey.read(master_key_id, answer)

        return self._ask(operation, master_key_id, read)

    def _no_key_name(self, operation: str, master_key_id: str) -> KmsError:
        hint = "A name has letters, digits, `_`, `-` and `.`; the mount point is a setting of its own."
        return self._facts(operation, master_key_id).error(
            MasterKeyNotFoundError, "that is no name of a transit key", hint
        )

    # --- calls ---

    def _facts(self, operation: str, master_key_id: str | None) -> CallFacts:
        return CallFacts(operation, master_key_id, self.settings.mount_point)

    def _ask(self, operation: str, master_key_id: str, ask: Callable[[VaultConnection], T]) -> T:
        """Call the server, with as many tries as the errors allow."""
        return self._call(operation, master_key_id, partial(self._one_try, ask))

    def _one_try(self, ask: Callable[[VaultConnection], T], seconds: float) -> T:
        """Ask once; a second time with another token where the first one is no longer good."""
        link = self._link.get()
        deadline = self._time.clock() + seconds
        held = link.session.token(deadline)
        try:
            return ask(link.connect(held.value, deadline))
        except VaultRefusal as refusal:
            if refusal.status not in (401, 403):
                raise
            fresh = link.session.replace(held, deadline)
            if fresh is None:
                raise
        return ask(link.connect(fresh.value, deadline))


class _Link:
    """Connections and token of one process."""

    def __init__(
        self,
        settings: VaultSettings,
        folder: Path,
        connections: requests.Session,
        clock: Callable[[], float],
    ) -> None:
        self.connections = connections
        self._address = Address(settings.url, settings.namespace, settings.redirect_hosts)
        self._clock = clock
        self.session = VaultSession(token_source(settings, folder), self.connect, clock)

    def connect(self, token: SecretStr | None, deadline: float) -> VaultConnection:
        return VaultConnection(self.connections, self._address, token, deadline, self._clock)


def _is_key_name(text: str) -> bool:
    """Return whether the transit engine could have a key of this name; it may come from a file."""
    return _KEY_NAME.fullmatch(text) is not None and ".." not in text


def _parts(wrapped_key: str) -> tuple[int, bytes] | None:
    """Return version and ciphertext of a wrapped key, or None where it is none."""
    parts = _WRAPPED_KEY.fullmatch(wrapped_key)
    if parts is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parts[1]), strict_base64.decode(parts[2])
    return None


def _failure(result: Mapping[str, Any], call: CallFacts) -> KmsError | None:
    """Return why the server failed for one item of a batch, or None."""
    text = result.get("error")
    if not text:
        return None
    reason = reason_of([text])
    if reason is Reason.UNKNOWN:
        return call.error(KmsResponseInvalidError, "it refused for a reason that is not known")
    return refusal_error(VaultRefusal(400, reason), call)


def _key_in(result: Mapping[str, Any], call: CallFacts) -> SecretBytes | KmsError:
    """Return the key in a result, if it can be one."""
    if failure := _failure(result, call):
        return failure
    text = result.get("plaintext")
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            key = SecretBytes(strict_base64.decode(text))
            if len(key) in KEY_LENGTHS_BYTES:
                return key
    raise call.error(KmsResponseInvalidError, "the unwrapped key does not have 16, 24 or 32 bytes")
