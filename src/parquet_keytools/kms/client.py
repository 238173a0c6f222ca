"""The contract of a KMS client: what wraps and unwraps keys with master keys that live elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar, TypeVarTuple

from parquet_keytools import audit, strict_base64
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
    value_or_raise,
    without_frames,
)
from parquet_keytools.kms.contract import (
    KEY_LENGTHS_BYTES,
    CallFacts,
    E,
    KeyReporter,
    KmsSettings,
    MasterKeyDescription,
    R,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
    checked_answers,
    identity_of,
    mistake_in_key,
    mistake_in_wrapped_key,
)
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

__all__ = [
    "KEY_LENGTHS_BYTES",
    "KmsClient",
    "KmsSettings",
    "MasterKeyDescription",
    "RewrapRequest",
    "UnwrapRequest",
    "WrapRequest",
]

S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class KmsClient(ABC):
    """Wraps and unwraps keys with the master keys of one KMS, from any number of threads.

    A backend implements the private hooks. Callers use the public methods: these check what goes in and what
    comes back, and turn every exception of an SDK into a `KmsError` without its text, which may hold secrets.

    A wrapped key is a string of printable ASCII, as parquet-java and Arrow store it in key material.
    """

    backend: ClassVar[str]
    """Name of the backend in configurations, errors and metrics."""

    Settings: ClassVar[type[KmsSettings]] = KmsSettings
    """What a configuration of this backend may say; secrets are `pydantic.SecretStr`."""

    instance_id: str = "DEFAULT"
    """Of the configuration; for the audit log."""

    audit_log: bool = False
    """Whether each wrap, unwrap and rewrap of a key is written to the audit log."""

    telemetry_key_ids: bool = False
    """Whether spans say which master key they are about."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._call_counts: Counter[str] = Counter()
        self._trusted: frozenset[str] | None = None

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client; it connects when it is first used.

        Args:
            settings: An instance of `cls.Settings`.
            folder: Of the configuration's file: relative paths in the settings start there.
        """

    @property
    def call_counts(self) -> Counter[str]:
        """How many keys the backend was asked for, by operation: `wrap`, `unwrap`, `rewrap`, `describe`."""
        with self._lock:
            return Counter(self._call_counts)

    def master_key_ids(self) -> frozenset[str] | None:
        """Return the identifiers of all master keys, or None where only the KMS itself knows them."""
        return None

    def trust(self, master_key_ids: Iterable[str]) -> None:
        """Unwrap nothing with a master key that may be somebody else's, unless it was named in such a call.

        Key material is not authenticated. An identifier that is good in the whole cloud can be that of a key in
        the account of an attacker, who lets everybody unwrap with it: a file of theirs would be taken for true.
        """
        self._trusted = (self._trusted or frozenset()) | frozenset(master_key_ids)

    def trust_also(self, master_key_ids: Iterable[str]) -> None:
        """Trust more master keys than those of `trust`, because the caller names them; all are without `trust`."""
        if self._trusted is not None:
            self.trust(master_key_ids)

    # --- public: one key ---

    def wrap(self, key: SecretBytes, master_key_id: str) -> str:
        """Wrap a key of 16, 24 or 32 bytes with the current version of a master key.

        Raises:
            KmsError: One of its subclasses says why not.
        """
        return value_or_raise(self.wrap_many([WrapRequest(key, master_key_id)])[0])

    def unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        """Unwrap what `wrap` returned.

        Raises:
            KmsError: One of its subclasses says why not.
        """
        return value_or_raise(self.unwrap_many([UnwrapRequest(wrapped_key, master_key_id)])[0])

    def rewrap(self, wrapped_key: str, master_key_id: str, new_master_key_id: str | None = None) -> str:
        """Re-wrap a wrapped key under the current version of its master key, or of another one.

        Raises:
            KmsError: One of its subclasses says why not.
        """
        request = RewrapRequest(wrapped_key, master_key_id, new_master_key_id or master_key_id)
        return value_or_raise(self.rewrap_many([request])[0])

    # --- public: many keys, each with its own outcome ---

    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap many keys. Returns, in the order of the requests, the wrapped key or why there is none."""
        for request in requests:
            request.refuse_other_lengths()
        return self._many("wrap", requests, self._wrap_many, mistake_in_wrapped_key)

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap many keys. Returns, in the order of the requests, the key or why there is none."""
        return self._many("unwrap", requests, self._unwrap_many, mistake_in_key)

    def rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Re-wrap many wrapped keys. Returns, in the order of the requests, the new one or why not."""
        return self._many("rewrap", requests, self._rewrap_many, mistake_in_wrapped_key)

    # --- public: the raw form of Iceberg, which is bound to nothing that only we know ---

    def wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap a key, and return the bare ciphertext of the KMS, as Iceberg stores it.

        Raises:
            KmsConfigurationError: The backend, or its settings, have no form that Iceberg's own clients read.
            KmsError: Another subclass says why not.
        """
        request = WrapRequest(key, master_key_id)
        request.refuse_other_lengths()
        answer = self._in_raw_form(
            request, lambda: strict_base64.encode(self._wrap_raw(key, master_key_id)), mistake_in_wrapped_key
        )
        return strict_base64.decode(answer)

    def unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap what `wrap_raw` returned, or another program that calls the same KMS. Errors are the same."""
        request = UnwrapRequest(strict_base64.encode(wrapped_key), master_key_id)
        return self._in_raw_form(request, lambda: self._unwrap_raw(wrapped_key, master_key_id), mistake_in_key)

    # --- public: about master keys ---

    def describe(self, master_key_id: str) -> MasterKeyDescription:
        """Return what the KMS says of a master key.

        Raises:
            MasterKeyNotFoundError: The KMS has no such key.
            KmsError: Another subclass says why it does not answer.
        """
        call = self._call_facts("describe", master_key_id)
        with self._lock:
            self._call_counts["describe"] += 1
        with self._reporter().span("describe", [master_key_id]):
            return self._guard(
                "describe", master_key_id, lambda: call.checked_description(self._describe(master_key_id))
            )

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version of the master key that wrapped a key, or None where that is not known.

        The wrapped key itself says it, and `unwrap` must prove it: where it says another version, `unwrap` fails.
        """
        return None

    def identity(self, master_key_id: str) -> str | None:
        """Return the one name of a master key, which an alias is not; None where the KMS does not say."""
        found = self._outcome("describe", master_key_id, self._identity, master_key_id)
        return None if isinstance(found, KmsError) else found

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether the KMS has a request for it; if not, `rewrap` unwraps, and rotations make new KEKs."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back connections. Calls after this may fail; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- hooks ---

    @abstractmethod
    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        """Wrap one key. May raise anything; what is not a `KmsError` goes through `_translate`."""

    @abstractmethod
    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        """Unwrap one key. A wrapped key that is not valid raises `WrappedKeyInvalidError`."""

    @abstractmethod
    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        """Describe a master key, or raise `MasterKeyNotFoundError`."""

    def _identity(self, master_key_id: str) -> str:
        """Return the one name of a master key; a KMS with aliases overrides this."""
        return master_key_id

    def _rewrap(self, request: RewrapRequest) -> str:
        """Re-wrap a wrapped key. A KMS that can do so itself overrides this, so that no key leaves it."""
        key = self.unwrap(request.wrapped_key, request.master_key_id)
        return self.wrap(key, request.new_master_key_id)

    def _prepare(self, operation: str) -> None:  # noqa: B027 - most need nothing
        """Get what every key of an operation needs, such as a token; what fails here is one error for all."""

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap many keys; a KMS with a call for many overrides this."""
        return self._map(
            lambda r: self._outcome("wrap", r.master_key_id, self._wrap, r.key, r.master_key_id), requests
        )

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap many keys; a KMS with a call for many overrides this."""
        return self._map(
            lambda r: self._outcome("unwrap", r.master_key_id, self._unwrap, r.wrapped_key, r.master_key_id),
            requests,
        )

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Re-wrap many wrapped keys; a KMS with a call for many overrides this."""
        return self._map(lambda r: self._outcome("rewrap", r.master_key_id, self._rewrap, r), requests)

    def _map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function that does not raise; a KMS across a network calls several at a time."""
        return [function(item) for item in items]

    def _raw_obstacle(self) -> str:
        """Return why there is no raw form, or nothing: a backend that has one overrides this."""
        return "this backend has no raw form, which Iceberg needs"

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap one key. A backend whose wrapped keys are not base64 of their raw form overrides this."""
        return strict_base64.decode(self._wrap(key, master_key_id))

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap one key. A wrapped key that is not valid raises `WrappedKeyInvalidError`."""
        return self._unwrap(strict_base64.encode(wrapped_key), master_key_id)

    def _may_be_of_others(self, master_key_id: str) -> bool:
        """Return whether an identifier can mean a master key of somebody else; see `trust`."""
        return False

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        """Return the `KmsError` that stands for a foreign exception.

        Only the type of the foreign exception may go into its text: SDKs put response bodies, and so keys
        and tokens, into theirs.
        """
        kind = KmsUnavailableError if isinstance(error, (OSError, TimeoutError)) else KmsResponseInvalidError
        return self._kms_error(kind, operation, master_key_id, f"unexpected {type(error).__name__}")

    def _principal(self) -> str:
        """Return who uses the KMS, for the audit log: a name, never a token. May raise anything."""
        return audit.default_principal()

    def _call_facts(self, operation: str, master_key_id: str | None) -> CallFacts:
        """Return what a call is about."""
        return CallFacts(self.backend, operation, master_key_id)

    def _kms_error(
        self, kind: type[E], operation: str, master_key_id: str | None, detail: str = "", hint: str | None = None
    ) -> E:
        """Return an error with the backend's name in it."""
        return self._call_facts(operation, master_key_id).error(kind, detail, hint)

    # --- the guarded door ---

    def _guard(self, operation: str, master_key_id: str | None, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call into the backend; every exception that leaves is a `KmsError`."""
        try:
            return call(*arguments)
        except KmsError as error:
            failure = error
        except Exception as error:
            failure = self._translated(error, operation, master_key_id)
        # Raised outside of the handlers, which would attach the foreign exception again.
        raise without_frames(failure)

    def _translated(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        """Return what the backend makes of a foreign exception, or what we do if it cannot."""
        try:
            return self._translate(error, operation, master_key_id)
        except Exception:
            return KmsClient._translate(self, error, operation, master_key_id)

    def _outcome(
        self, operation: str, master_key_id: str | None, call: Callable[[*Ts], T], *arguments: *Ts
    ) -> T | KmsError:
        """Call into the backend and return its result or its `KmsError`."""
        try:
            return self._guard(operation, master_key_id, call, *arguments)
        except KmsError as error:
            return without_frames(error)

    def _many(
        self,
        operation: str,
        requests: Sequence[R],
        call: Callable[[Sequence[R]], list[T | KmsError]],
        mistake_in: Callable[[object], str],
    ) -> list[T | KmsError]:
        """Ask for many at once, each distinct request once, and check every answer."""
        outcomes: dict[object, T | KmsError] = {}
        distinct: dict[object, R] = {}
        refused: dict[object, R] = {}
        for request in requests:
            if refusal := self._refusal(operation, request):
                outcomes[identity_of(request)] = refusal
                refused[identity_of(request)] = request
            else:
                distinct[identity_of(request)] = request
        reporter = self._reporter()
        # The KMS never sees these requests, so its own log cannot show who made them.
        reporter.audit(operation, list(refused.values()), [outcomes[key] for key in refused])
        if distinct:
            with self._lock:
                self._call_counts[operation] += len(distinct)
            asked = list(distinct.values())
            with reporter.span(operation, [request.master_key_id for request in asked], keys=len(asked)) as span:
                try:
                    answers = self._outcome(operation, None, self._prepared, operation, call, asked)
                    checked = checked_answers(self._call_facts, operation, asked, answers, mistake_in)
                except BaseException as error:
                    reporter.report(operation, asked, [error] * len(asked), span)  # the KMS may have done it
                    raise
                reporter.report(operation, asked, checked, span)
            outcomes.update(zip(distinct, checked, strict=True))
        return [outcomes[identity_of(request)] for request in requests]

    def _in_raw_form(self, request: R, call: Callable[[], T], mistake_in: Callable[[object], str]) -> T:
        operation = "wrap" if isinstance(request, WrapRequest) else "unwrap"

        def answers(_: Sequence[R]) -> list[T | KmsError]:
            if obstacle := self._raw_obstacle():
                raise self._kms_error(KmsConfigurationError, operation, request.master_key_id, obstacle)
            return [self._guard(operation, request.master_key_id, call)]

        return value_or_raise(self._many(operation, [request], answers, mistake_in)[0])

    def _prepared(self, operation: str, call: Callable[[Sequence[R]], T], requests: Sequence[R]) -> T:
        self._prepare(operation)
        return call(requests)

    def _refusal(self, operation: str, request: WrapRequest | UnwrapRequest | RewrapRequest) -> KmsError | None:
        """Return why the KMS is not even asked, or None."""
        if isinstance(request, WrapRequest):
            return None
        master_key_id, trusted = request.master_key_id, self._trusted
        if mistake := mistake_in_wrapped_key(request.wrapped_key):
            return self._kms_error(WrappedKeyInvalidError, operation, master_key_id, mistake)
        if trusted is None or master_key_id in trusted or not self._may_be_of_others(master_key_id):
            return None
        return self._kms_error(MasterKeyNotTrustedError, operation, master_key_id)

    def _reporter(self) -> KeyReporter:
        return KeyReporter(self.backend, self.instance_id, self.audit_log, self.telemetry_key_ids, self._principal)
