"""A KMS client for the transit engine of HashiCorp Vault and OpenBao.

A wrapped key is what the engine itself makes: `vault:v<version>:<base64>`. The raw form is its ASCII bytes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import requests

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.contract import (
    KmsSettings,
    MasterKeyDescription,
    R,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, Time
from parquet_keytools.kms.vault.connection import VaultConnection, VaultSettings, open_session
from parquet_keytools.kms.vault.errors import (
    RequestTooLargeError,
    TransitCall,
    VaultRefusal,
    connection_error,
    refusal_error,
)
from parquet_keytools.kms.vault.session import VaultSession
from parquet_keytools.kms.vault.transit import (
    TransitEngine,
    TransitKey,
    is_key_name,
    parts_of,
    unreadable_with_context,
    version_in,
)
from parquet_keytools.runtime.fork_safety import PerProcess
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

_KEY_FACTS_LIFETIME_SECONDS = 300.0
_CLOSING_SECONDS = 2.0


class VaultKms(RemoteKmsClient):
    """Wraps and unwraps with keys of a transit engine, many at a time, and rewraps on the server.

    It connects, and logs in where it has to, when it is first used. A forked child does so for itself.

    Args:
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
        self._engine = TransitEngine(settings.mount_point, settings.context_bytes())
        self._key_facts: dict[str, tuple[float, TransitKey | None]] = {}
        self._batch_size = settings.batch_size
        make_session = session or partial(open_session, settings, folder)
        self._session = PerProcess(lambda: VaultSession(settings, folder, make_session(), self._time.clock))

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client of `VaultSettings`; nothing is read or connected before it is first used."""
        assert isinstance(settings, VaultSettings)
        return cls(settings, folder)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that stands in a wrapped key, or None where it is none of a transit engine."""
        return version_in(wrapped_key)

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether it is the same master key: the engine moves nothing to another one."""
        return master_key_id == new_master_key_id

    def close(self) -> None:
        """Revoke the token if a login gave it to us, and give back connections and threads."""
        session = self._session.take()
        if session is not None:
            # It would end by itself: that the server is away must not keep anyone from closing.
            with contextlib.suppress(Exception):
                session.revoke(self._time.clock() + min(_CLOSING_SECONDS, self.limits.call_timeout_seconds))
            session.connections.close()
        super().close()

    def _principal(self) -> str:
        """Return who the server takes us for; before the first call, how we shall log in."""
        return self._session.get().principal

    # --- hooks ---

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return value_or_raise(self._wrap_many([WrapRequest(key, master_key_id)])[0])

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return value_or_raise(self._unwrap_many([UnwrapRequest(wrapped_key, master_key_id)])[0])

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        return self._wrap(key, master_key_id).encode("ascii")

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        # A text of other bytes is no wrapped key either, and is refused as such.
        return self._unwrap(wrapped_key.decode("ascii", "replace"), master_key_id)

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches("wrap", requests, self._engine.wrap)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        # The server is lenient in how a wrapped key is spelt; an altered file must not pass as unaltered.
        bad = {id(r) for r in requests if parts_of(r.wrapped_key) is None}
        asked = iter(self._in_batches("unwrap", [r for r in requests if id(r) not in bad], self._engine.unwrap))
        return [self._not_ours(r.master_key_id, "unwrap") if id(r) in bad else next(asked) for r in requests]

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        outcomes: dict[int, str | KmsError] = {}
        kept, moved = [], []
        for request in requests:
            if parts_of(request.wrapped_key) is None:
                outcomes[id(request)] = self._not_ours(request.master_key_id, "rewrap")
            elif request.new_master_key_id == request.master_key_id:
                kept.append(request)
            else:
                moved.append(request)
        rewrapped = self._in_batches("rewrap", kept, self._engine.rewrap)
        outcomes |= {id(r): outcome for r, outcome in zip(kept, rewrapped, strict=True)}
        outcomes |= {id(r): outcome for r, outcome in zip(moved, self._moved(moved), strict=True)}
        return [outcomes[id(request)] for request in requests]

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        return self._read_key("describe", master_key_id).description()

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        call = self._call_facts(operation, master_key_id)
        if isinstance(error, VaultRefusal):
            return refusal_error(error, call)
        return connection_error(error, call) or super()._translate(error, operation, master_key_id)

    # --- batches ---

    def _in_batches(
        self,
        operation: str,
        requests: Sequence[R],
        ask: Callable[[VaultConnection, TransitCall, Sequence[R]], list[T | KmsError]],
    ) -> list[T | KmsError]:
        """Ask for many, a batch for each master key at least, and several batches at a time."""
        of_key: dict[str, list[R]] = defaultdict(list)
        for request in requests:
            of_key[request.master_key_id].append(request)
        names = list(of_key)
        mistakes = dict(zip(names, self._map(partial(self._mistake, operation), names), strict=True))
        able = [of_key[name] for name in names if mistakes[name] is None]
        size = self._batch_size
        batches = [of_one[start : start + size] for of_one in able for start in range(0, len(of_one), size)]
        outcomes: dict[int, T | KmsError] = {}
        answers = self._map(lambda batch: self._batch(operation, batch, ask), batches)
        for batch, answer in zip(batches, answers, strict=True):
            outcomes |= dict(zip(map(id, batch), answer, strict=True))
        return [mistakes[request.master_key_id] or outcomes[id(request)] for request in requests]

    def _batch(
        self,
        operation: str,
        requests: Sequence[R],
        ask: Callable[[VaultConnection, TransitCall, Sequence[R]], list[T | KmsError]],
    ) -> list[T | KmsError]:
        """Ask for one batch; one that is too large for the server becomes two, and later ones are smaller."""
        call = self._call_facts(operation, requests[0].master_key_id)

        def send(connection: VaultConnection) -> list[T | KmsError]:
            return ask(connection, call, requests)

        outcome = self._outcome(operation, call.master_key_id, self._ask, operation, call.master_key_id, send)
        if not isinstance(outcome, KmsError):
            return outcome
        if not isinstance(outcome, RequestTooLargeError) or len(requests) == 1:
            return [outcome] * len(requests)
        half: int = len(requests) // 2
        self._batch_size = min(self._batch_size, max(half, 1))
        return [*self._batch(operation, requests[:half], ask), *self._batch(operation, requests[half:], ask)]

    def _moved(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Wrap with another master key. The engine cannot do that, so the keys pass through this process."""
        names = list(dict.fromkeys(request.new_master_key_id for request in requests))
        mistakes = dict(zip(names, self._map(partial(self._mistake, "rewrap"), names), strict=True))
        able = [request for request in requests if mistakes[request.new_master_key_id] is None]
        keys = self._in_batches("rewrap", able, self._engine.unwrap)
        unwrapped = list(zip(able, keys, strict=True))
        outcomes: dict[int, str | KmsError] = {id(r): key for r, key in unwrapped if isinstance(key, KmsError)}
        to_wrap = {
            id(r): WrapRequest(key, r.new_master_key_id) for r, key in unwrapped if isinstance(key, SecretBytes)
        }
        wrapped = self._in_batches("rewrap", list(to_wrap.values()), self._engine.wrap)
        outcomes |= dict(zip(to_wrap, wrapped, strict=True))
        return [mistakes[r.new_master_key_id] or outcomes[id(r)] for r in requests]

    def _not_ours(self, master_key_id: str, operation: str) -> KmsError:
        return self._kms_error(
            WrappedKeyInvalidError, operation, master_key_id, "it was not made by a transit engine"
        )

    # --- master keys ---

    def _mistake(self, operation: str, master_key_id: str) -> KmsError | None:
        """Return why a master key cannot be used, as far as that has to be known before; None if it can."""
        if not is_key_name(master_key_id):
            return self._no_key_name(operation, master_key_id)
        wraps = operation != "unwrap"
        if not wraps and self._engine.context is None:
            return None
        fact = self._outcome(operation, master_key_id, self._known_key, operation, master_key_id)
        if isinstance(fact, KmsError):
            return fact
        call = self._call_facts(operation, master_key_id)
        if fact is not None:
            return fact.mistake(call, with_context=self._engine.context is not None)
        return unreadable_with_context(call) if wraps and self._engine.context is not None else None

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
        if not is_key_name(master_key_id):
            raise self._no_key_name(operation, master_key_id)
        return self._ask(
            operation, master_key_id, lambda connection: self._engine.read_key(connection, master_key_id)
        )

    def _no_key_name(self, operation: str, master_key_id: str) -> KmsError:
        hint = "A name has letters, digits, `_`, `-` and `.`; the mount point is a setting of its own."
        detail = "that is no name of a transit key"
        return self._kms_error(MasterKeyNotFoundError, operation, master_key_id, detail, hint)

    # --- calls ---

    def _call_facts(self, operation: str, master_key_id: str | None) -> TransitCall:
        return TransitCall(self.backend, operation, master_key_id, self.settings.mount_point)

    def _server(self) -> str:
        namespace = f"namespace {self.settings.namespace}" if self.settings.namespace else ""
        return ", ".join(filter(None, [self.settings.url, namespace]))

    def _ask(self, operation: str, master_key_id: str | None, ask: Callable[[VaultConnection], T]) -> T:
        """Call the server, with as many attempts as the errors allow."""
        return self._call(operation, master_key_id, partial(self._one_try, ask))

    def _one_try(self, ask: Callable[[VaultConnection], T], seconds: float) -> T:
        """Ask once; a second time with another token where the first one is no longer good."""
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
