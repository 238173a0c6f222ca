"""The contract of a KMS client: what wraps and unwraps keys with master keys that live elsewhere."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar, TypeVarTuple

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from parquet_keytools import audit, telemetry
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.fork_safe_lock import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

KEY_LENGTHS_BYTES = (16, 24, 32)
"""Lengths that an AES key can have (spec 4)."""

_MAX_WRAPPED_KEY_LENGTH = 16_384
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]+")
_NOT_A_WRAPPED_KEY = "the wrapped key is not a short string of printable ASCII"

S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class WrapRequest:
    """A key to be wrapped with a master key."""

    key: SecretBytes
    master_key_id: str


@dataclass(frozen=True)
class UnwrapRequest:
    """A wrapped key, and the master key that wrapped it."""

    wrapped_key: str
    master_key_id: str


@dataclass(frozen=True)
class RewrapRequest:
    """A wrapped key, the master key that wrapped it, and the one whose current version shall wrap it."""

    wrapped_key: str
    master_key_id: str
    new_master_key_id: str


@dataclass(frozen=True)
class MasterKeyDescription:
    """What a KMS says of a master key.

    Attributes:
        master_key_id: Its identifier in the KMS.
        enabled: Whether it may be used now.
        current_version: The version that wraps, or None where the KMS has no versions or hides them.
        enabled_versions: The versions that unwrap, or None where the KMS does not tell.
        origin: Where its bytes were made, as the KMS names it.
        rotates: Whether the KMS makes new versions by itself, or None where it does not tell.
    """

    master_key_id: str
    enabled: bool
    current_version: str | None = None
    enabled_versions: tuple[str, ...] | None = None
    origin: str | None = None
    rotates: bool | None = None


R = TypeVar("R", WrapRequest, UnwrapRequest, RewrapRequest)


class KmsSettings(BaseModel):
    """What stands under `kms:` in a configuration; a backend adds its own fields.

    Attributes:
        type: Name of the backend.
        instance_id: Written into the footer's key material as `kmsInstanceID`; for information only.
        audit_log: Whether each wrap, unwrap and rewrap of a key is written to the audit log.
        telemetry_key_ids: Whether spans say which master key they are about.
    """

    # Errors of pydantic quote what they got; here that may be a token.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    type: str
    instance_id: str = "DEFAULT"
    audit_log: bool = Field(
        default=False,
        description="Write each wrap, unwrap and rewrap of a key to the logger `parquet_keytools.audit`.",
    )
    telemetry_key_ids: bool = Field(
        default=False, description="Say in OpenTelemetry's spans which master key they are about."
    )

    def __getstate__(self) -> dict[Any, Any]:
        if _holds_secret(self):
            raise TypeError("these settings hold a secret, and cannot be pickled: it must not leave the process")
        return super().__getstate__()


def _holds_secret(value: object) -> bool:
    """Return whether a setting is or holds a secret."""
    match value:
        case SecretStr():
            return True
        case BaseModel():
            return any(map(_holds_secret, vars(value).values()))
        case Mapping():
            return any(map(_holds_secret, value.values()))
        case list() | tuple():
            return any(map(_holds_secret, value))
    return False


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
        """Return the identifiers of all master keys, or None where only the KMS itself could tell."""
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
        """Wrap a wrapped key anew, with the current version of its master key or of another one.

        Raises:
            KmsError: One of its subclasses says why not.
        """
        request = RewrapRequest(wrapped_key, master_key_id, new_master_key_id or master_key_id)
        return value_or_raise(self.rewrap_many([request])[0])

    # --- public: many keys, each with its own outcome ---

    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap many keys. Returns, in the order of the requests, the wrapped key or why there is none."""
        for request in requests:
            if len(request.key) not in KEY_LENGTHS_BYTES:
                raise ValueError(f"a key to be wrapped has 16, 24 or 32 bytes, not {len(request.key)}")
        return self._many("wrap", requests, self._wrap_many, self._check_wrapped_key)

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap many keys. Returns, in the order of the requests, the key or why there is none."""
        return self._many("unwrap", requests, self._unwrap_many, self._check_key)

    def rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Wrap many wrapped keys anew. Returns, in the order of the requests, the new one or why not."""
        return self._many("rewrap", requests, self._rewrap_many, self._check_wrapped_key)

    # --- public: about master keys ---

    def describe(self, master_key_id: str) -> MasterKeyDescription:
        """Return what the KMS says of a master key.

        Raises:
            MasterKeyNotFoundError: The KMS has no such key.
            KmsError: Another subclass says why it cannot tell.
        """
        self._count("describe", 1)
        with self._span("describe", master_key_id):
            return self._guard("describe", master_key_id, self._checked_description, master_key_id)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version of the master key that wrapped a key, or None where nobody can tell.

        This asks nothing of the KMS: it reads what the wrapped key itself says, unauthenticated.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a backend without connections has nothing to close
        """Give back connections. Calls after this may fail; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _rewrap(self, request: RewrapRequest) -> str:
        """Wrap a wrapped key anew. A KMS that can do so itself overrides this, so that no key leaves it."""
        key = self.unwrap(request.wrapped_key, request.master_key_id)
        return self.wrap(key, request.new_master_key_id)

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
        """Wrap many wrapped keys anew; a KMS with a call for many overrides this."""
        return self._map(lambda r: self._outcome("rewrap", r.master_key_id, self._rewrap, r), requests)

    def _map(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Return the results of a function that does not raise; a KMS across a network calls several at a time."""
        return [function(item) for item in items]

    def _may_be_of_others(self, master_key_id: str) -> bool:
        """Return whether an identifier can mean a master key of somebody else; see `trust`."""
        return False

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        """Return the `KmsError` that stands for a foreign exception.

        Only the type of the foreign exception may go into its text: SDKs put response bodies, and so keys
        and tokens, into theirs.
        """
        kind = KmsUnavailableError if isinstance(error, (OSError, TimeoutError)) else KmsResponseInvalidError
        return kind(
            f"unexpected {type(error).__name__}",
            backend=self.backend,
            operation=operation,
            master_key_id=master_key_id,
        )

    def _principal(self) -> str:
        """Return who uses the KMS, for the audit log: a name, never a token. May raise anything."""
        return audit.default_principal()

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
        raise _alone(failure)

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
            return _alone(error)

    def _count(self, operation: str, keys: int) -> None:
        with self._lock:
            self._call_counts[operation] += keys

    def _many(
        self,
        operation: str,
        requests: Sequence[R],
        call: Callable[[Sequence[R]], list[T | KmsError]],
        check: Callable[[str, R, T], T],
    ) -> list[T | KmsError]:
        """Ask for many at once, each distinct request once, and check every answer."""
        outcomes: dict[object, T | KmsError] = {}
        distinct: dict[object, R] = {}
        refused: dict[object, R] = {}
        for request in requests:
            if not isinstance(request, WrapRequest) and not _may_be_wrapped_key(request.wrapped_key):
                error = self._wrapped_key_invalid(request.master_key_id, _NOT_A_WRAPPED_KEY)
                outcomes[_identity(request)] = error
                refused[_identity(request)] = request
            elif not isinstance(request, WrapRequest) and not self._is_trusted(request.master_key_id):
                outcomes[_identity(request)] = MasterKeyNotTrustedError(
                    backend=self.backend, operation=operation, master_key_id=request.master_key_id
                )
                refused[_identity(request)] = request
            else:
                distinct[_identity(request)] = request
        # The KMS does not get to know of these, so its own log cannot show who tries to have them unwrapped.
        self._audit(operation, list(refused.values()), [_outcome_name(outcomes[key]) for key in refused])
        if distinct:
            self._count(operation, len(distinct))
            asked = list(distinct.values())
            with self._span(operation, *[request.master_key_id for request in asked], keys=len(asked)) as span:
                try:
                    checked = self._checked(operation, asked, self._outcome(operation, None, call, asked), check)
                except BaseException as error:
                    # The KMS may have done it all the same.
                    self._tell(operation, asked, [type(error).__name__] * len(asked), span)
                    raise
                self._tell(operation, asked, [_outcome_name(outcome) for outcome in checked], span)
            outcomes.update(zip(distinct, checked, strict=True))
        return [outcomes[_identity(request)] for request in requests]

    def _is_trusted(self, master_key_id: str) -> bool:
        trusted = self._trusted
        return trusted is None or master_key_id in trusted or not self._may_be_of_others(master_key_id)

    def _span(self, operation: str, *master_key_ids: str, **attributes: int) -> telemetry.Span:
        about: dict[str, str | int | Sequence[str]] = {"backend": self.backend, **attributes}
        if self.telemetry_key_ids:
            about["master_key_ids"] = sorted(set(master_key_ids))
        return telemetry.Span(f"kms.{operation}", about)

    def _tell(self, operation: str, requests: Sequence[R], outcomes: Sequence[str], span: telemetry.Span) -> None:
        """Tell telemetry and the audit log what became of each key."""
        about = {"backend": self.backend, "operation": operation}
        telemetry.measure("kms.operation.keys", len(requests), about)
        counts = Counter(outcomes)
        for outcome, number in counts.items():
            telemetry.count("kms.keys", number, {**about, "outcome": outcome})
        failures = [outcome for outcome in counts if outcome != _OK]
        if failures:
            span.note(keys_failed=sum(counts[outcome] for outcome in failures))
            span.failed(failures[0])
        self._audit(operation, requests, outcomes)

    def _audit(self, operation: str, requests: Sequence[R], outcomes: Sequence[str]) -> None:
        """Tell the audit log what became of each key."""
        if self.audit_log and requests:
            principal = self._known_principal()
            for request, outcome in zip(requests, outcomes, strict=True):
                new = request.new_master_key_id if isinstance(request, RewrapRequest) else None
                audit.write(
                    audit.KeyUse(
                        operation=operation,
                        outcome=outcome,
                        backend=self.backend,
                        kms_instance=self.instance_id,
                        master_key_id=request.master_key_id,
                        new_master_key_id=new,
                        principal=principal,
                        subject=audit.current_subject(),
                    )
                )

    def _known_principal(self) -> str:
        try:
            return str(self._principal())
        except Exception:
            return "unknown"

    def _checked(
        self,
        operation: str,
        requests: Sequence[R],
        answers: list[T | KmsError] | KmsError,
        check: Callable[[str, R, T], T],
    ) -> list[T | KmsError]:
        """Return the answers of the backend, each right in form or an error."""
        if not isinstance(answers, KmsError) and (not isinstance(answers, list) or len(answers) != len(requests)):
            detail = "the number of answers is not that of the requests"
            answers = self._response_invalid(detail, operation, None)
        if isinstance(answers, KmsError):
            return [answers] * len(requests)
        return [
            _alone(answer)
            if isinstance(answer, KmsError)
            else self._outcome(operation, request.master_key_id, check, operation, request, answer)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _checked_description(self, master_key_id: str) -> MasterKeyDescription:
        answer = self._describe(master_key_id)
        if not isinstance(answer, MasterKeyDescription):
            raise self._response_invalid("the answer describes no master key", "describe", master_key_id)
        return answer

    def _check_wrapped_key(self, operation: str, request: WrapRequest | RewrapRequest, answer: str) -> str:
        """Check the form of a wrapped key that came back."""
        if not _may_be_wrapped_key(answer):
            raise self._response_invalid(_NOT_A_WRAPPED_KEY, operation, request.master_key_id)
        return answer

    def _check_key(self, operation: str, request: UnwrapRequest, answer: SecretBytes) -> SecretBytes:
        """Check the form of a key that came back."""
        if not isinstance(answer, SecretBytes) or len(answer) not in KEY_LENGTHS_BYTES:
            detail = "the unwrapped key does not have 16, 24 or 32 bytes"
            raise self._response_invalid(detail, operation, request.master_key_id)
        return answer

    def _response_invalid(self, detail: str, operation: str, master_key_id: str | None) -> KmsResponseInvalidError:
        return KmsResponseInvalidError(
            detail, backend=self.backend, operation=operation, master_key_id=master_key_id
        )

    # --- for backends: errors with the backend's name in them ---

    def _configuration_error(self, detail: str, *, hint: str = "") -> KmsConfigurationError:
        return KmsConfigurationError(detail, backend=self.backend, operation="connect", hint=hint)

    def _wrapped_key_invalid(self, master_key_id: str, detail: str = "") -> WrappedKeyInvalidError:
        return WrappedKeyInvalidError(
            detail, backend=self.backend, operation="unwrap", master_key_id=master_key_id
        )


_OK = "ok"


def _outcome_name(outcome: object) -> str:
    """Return what metrics and the audit log say of an outcome."""
    return type(outcome).__name__ if isinstance(outcome, KmsError) else _OK


def _may_be_wrapped_key(text: object) -> bool:
    """Return whether something has the form of a wrapped key of any backend."""
    return (
        isinstance(text, str)
        and len(text) <= _MAX_WRAPPED_KEY_LENGTH
        and _PRINTABLE_ASCII.fullmatch(text) is not None
    )


def _identity(request: WrapRequest | UnwrapRequest | RewrapRequest) -> object:
    """Return what makes two requests the same call to the KMS: each wrap is one of its own."""
    return id(request) if isinstance(request, WrapRequest) else request


def _alone(error: KmsError) -> KmsError:
    """Return an error without what hangs on it.

    A foreign exception in its context would print its text, which may hold keys and tokens, in a traceback.
    The frames of its own traceback hold keys, and an outcome may be kept for long and raised many times.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
