"""The contract of a KMS client, which wraps and unwraps keys with master keys that live elsewhere."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, TypeVarTuple

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from parquet_keytools import audit, strict_base64, telemetry
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
    value_or_raise,
    without_frames,
)
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# --- settings ---


class StrictSettings(BaseModel):
    """Root of all settings: frozen, without unknown fields."""

    # pydantic quotes rejected values in its errors; here a value may be a key or a token.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class KmsSettings(StrictSettings):
    """The settings under `kms:` in a configuration; a backend adds its own fields.

    Attributes:
        type: Name of the backend.
        instance_id: Written into the footer's key material as `kmsInstanceID`; for information only.
        audit_log: Whether each wrap, unwrap and re-wrap of a key is written to the audit log.
        telemetry_key_ids: Whether spans name master keys.
    """

    type: str
    instance_id: str = "DEFAULT"
    audit_log: bool = Field(
        default=False,
        description="Log each wrap, unwrap and re-wrap of a key to the logger `parquet_keytools.audit`.",
    )
    telemetry_key_ids: bool = Field(default=False, description="Put the master key id into OpenTelemetry spans.")

    def secret_files(self) -> Mapping[tuple[str, ...], Path]:
        """Return the files that hold secrets: names of the setting -> path as configured.

        A configuration warns if other users may read such a file. Omit a file that the backend refuses then.
        """
        return {}

    def __getstate__(self) -> dict[Any, Any]:
        if holds_secret(self):
            raise TypeError("these settings hold a secret, which must not leave the process: they do not pickle")
        return super().__getstate__()


_SECRET_TYPES = (SecretBytes, pydantic.Secret, pydantic.SecretStr, pydantic.SecretBytes)


def holds_secret(value: object) -> bool:
    """Return whether a setting is or holds a secret."""
    if isinstance(value, _SECRET_TYPES):
        return True
    if isinstance(value, BaseModel):
        return any(map(holds_secret, vars(value).values()))
    if is_dataclass(value):
        return any(holds_secret(getattr(value, entry.name)) for entry in fields(value))
    if isinstance(value, Mapping):
        return any(map(holds_secret, value.values()))
    return isinstance(value, (list, tuple, set, frozenset)) and any(map(holds_secret, value))


# --- requests and answers ---

KEY_LENGTHS_BYTES = (16, 24, 32)
"""Lengths that an AES key can have (spec 4)."""

_KEEPS_KEYS = "this client does not delete master keys"
_KEEPS_KEYS_HINT = "Delete the master key with the KMS's own tools."

_MAX_WRAPPED_KEY_LENGTH = 16_384
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]+")


@dataclass(frozen=True)
class WrapRequest:
    """A key to be wrapped with a master key."""

    key: SecretBytes
    master_key_id: str

    def refuse_other_lengths(self) -> None:
        """Raise `ValueError` unless the key has the length of an AES key."""
        if len(self.key) not in KEY_LENGTHS_BYTES:
            raise ValueError(f"a key to be wrapped has 16, 24 or 32 bytes, not {len(self.key)}")


@dataclass(frozen=True)
class UnwrapRequest:
    """A wrapped key, and the master key that wrapped it."""

    wrapped_key: str
    master_key_id: str


@dataclass(frozen=True)
class RewrapRequest:
    """A wrapped key, the master key that wrapped it, and the master key that is to wrap it now."""

    wrapped_key: str
    master_key_id: str
    new_master_key_id: str


R = TypeVar("R", WrapRequest, UnwrapRequest, RewrapRequest)


@dataclass(frozen=True)
class MasterKeyDescription:
    """A KMS's description of a master key.

    Attributes:
        master_key_id: Its identifier in the KMS.
        enabled: Whether it can be used now.
        current_version: The version that wraps, or None where the KMS has no versions or hides them.
        origin: Where the key was generated, in the words of the KMS.
        rotates: Whether the KMS makes new versions by itself, or None if unknown.
    """

    master_key_id: str
    enabled: bool
    current_version: str | None = None
    origin: str | None = None
    rotates: bool | None = None


@dataclass(frozen=True)
class KeyDeletion:
    """Whether a master key is deleted, or will be.

    Attributes:
        key: Identifier of the master key that is no alias.
        state: `usable`; `disabled`; `scheduled`: it unwraps nothing, and the KMS deletes it later; `deleted`: the
            KMS has no such master key, or none of its versions.
        versions: Version -> its state in the words of the KMS; empty where the KMS shows none.
        deletes_at: When the KMS deletes it; None if that is not scheduled.
        answer: Further words of the KMS.
    """

    key: str
    state: Literal["usable", "disabled", "scheduled", "deleted"]
    versions: Mapping[str, str] = field(default_factory=dict)
    deletes_at: datetime | None = None
    answer: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_versions(cls, key: str, enabled: Mapping[str, bool]) -> KeyDeletion:
        """Return the state of a master key of a KMS that deletes at once: version -> whether it unwraps."""
        words = {version: "enabled" if unwraps else "disabled" for version, unwraps in enabled.items()}
        return cls(key, "deleted" if not words else "usable" if any(enabled.values()) else "disabled", words)

    @property
    def is_gone(self) -> bool:
        """Whether it unwraps nothing because of a deletion."""
        return self.state in ("scheduled", "deleted")


class CallerIdentity(NamedTuple):
    """Who calls a KMS, and what says so."""

    name: str
    source: str


def mistake_in_key(answer: object) -> str:
    """Return why an answer cannot be an unwrapped key, or an empty string."""
    if isinstance(answer, SecretBytes) and len(answer) in KEY_LENGTHS_BYTES:
        return ""
    return "the unwrapped key does not have 16, 24 or 32 bytes"


def mistake_in_wrapped_key(text: object) -> str:
    """Return why a text cannot be a wrapped key of any backend, or an empty string."""
    if isinstance(text, str) and len(text) <= _MAX_WRAPPED_KEY_LENGTH and _PRINTABLE_ASCII.fullmatch(text):
        return ""
    return "the wrapped key is not a short string of printable ASCII"


def checked_key(data: object) -> SecretBytes:
    """Return the key that the KMS sent, or raise `KmsResponseInvalidError`."""
    key = SecretBytes(data if isinstance(data, bytes) else b"")
    if mistake := mistake_in_key(key):
        raise KmsResponseInvalidError(mistake)
    return key


# --- the client ---


class KmsClient(ABC):
    """Wraps and unwraps keys with the master keys of one KMS, from any number of threads.

    A backend implements the private hooks. Callers use the public methods, which take lists. These methods check
    the requests and the answers, and turn each exception of an SDK into a `KmsError` without its text, which may
    contain secrets.

    A wrapped key is a string of printable ASCII, as parquet-java and Arrow store it in key material.
    """

    backend: ClassVar[str]
    """Name of the backend in configurations, errors and metrics."""

    Settings: ClassVar[type[KmsSettings]] = KmsSettings
    """The settings of this backend in a configuration; secrets are `pydantic.SecretStr`."""

    wrapped_key_form: ClassVar[re.Pattern[str] | None] = None
    """What wrapped keys look like that name their version, in the group `version`."""

    raw_form_is_text: ClassVar[bool] = False
    """Whether the raw form is the wrapped key itself, as ASCII bytes."""

    new_keys_have: ClassVar[frozenset[str]] = frozenset()
    """What `create_master_key` takes for a new master key: `tags`, `policy`."""

    instance_id: str = "DEFAULT"
    """The setting `instance_id`, for the audit log."""

    is_one_of_several: bool = False
    """Whether the configuration names several KMSs; `instance_id` is then the name of this one."""

    audit_log: bool = False
    """Whether each wrap, unwrap and re-wrap of a key is written to the audit log."""

    telemetry_key_ids: bool = False
    """Whether spans name master keys."""

    waiting_days: ClassVar[range | None] = None
    """The waiting periods before a master key is deleted, if a caller may choose; the last one is the default."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._call_counts: Counter[str] = Counter()
        self._trusted: frozenset[str] | None = None
        self._is_trusted: Callable[[str], object] = lambda _: False

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client; it connects when it is first used.

        Args:
            settings: An instance of `cls.Settings`.
            folder: The folder of the configuration file, where relative paths in the settings start.
        """

    @property
    def call_counts(self) -> Counter[str]:
        """Number of keys sent to the backend, by operation: `wrap`, `unwrap`, `rewrap`, `describe`."""
        with self._lock:
            return Counter(self._call_counts)

    def master_key_ids(self) -> frozenset[str] | None:
        """Return the identifiers of all master keys, or None where only the KMS itself knows them."""
        return None

    def trust(self, master_key_ids: Iterable[str], others: Callable[[str], object] | None = None) -> None:
        """Trust these master keys, and from now on unwrap with no foreign master key that is not trusted.

        Key material is not authenticated. An identifier that is valid in the whole cloud can name a master key in
        an attacker's account, with a policy that lets everyone unwrap. A file that the attacker forged would then
        pass as authentic. `_may_be_of_others` decides which identifiers can name such a key.

        Args:
            master_key_ids: Their identifiers.
            others: Returns something true for other identifiers that are trusted, too.
        """
        if others is not None:
            self._is_trusted = others
        self._trusted = (self._trusted or frozenset()) | frozenset(master_key_ids)

    def trust_also(self, master_key_ids: Iterable[str]) -> None:
        """Trust the master keys that a caller names, too. Without an earlier `trust`, all are trusted."""
        if self._trusted is not None:
            self.trust(master_key_ids)

    # --- public: the KMS in files; `NamedKmss` stands for several KMSs ---

    @property
    def instances(self) -> frozenset[str]:
        """The names of several KMSs, which files may name; empty for a single KMS."""
        return frozenset()

    def parts(self, master_key_id: str) -> tuple[KmsClient, str]:
        """Return the client of a master key's KMS, and the identifier of the master key there."""
        return self, master_key_id

    def instance_of(self, master_key_id: str) -> str:
        """Return what key material of a footer under this master key names as `kmsInstanceID`."""
        return self.instance_id

    def id_in_file(self, master_key_id: str, instance_id: str | None) -> str:
        """Return the identifier of a master key for a file whose footer names a KMS; None if it names none.

        With several KMSs, it begins with the name of its KMS where this differs from the KMS that the file means.
        """
        return master_key_id

    def id_of_file(self, master_key_id: str, instance_id: str | None) -> str:
        """Return the identifier of a master key that a file names whose footer names a KMS.

        A single KMS ignores what files say.

        Raises:
            KeyNotAvailableError: The configuration has several KMSs, and none is meant.
        """
        return master_key_id

    # --- public: keys; each request has an outcome of its own ---

    def wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap keys of 16, 24 or 32 bytes, each with the current version of its master key.

        Returns:
            In the order of the requests, the wrapped key or the error.

        Raises:
            ValueError: A key has another length.
        """
        for request in requests:
            request.refuse_other_lengths()
        return self._many("wrap", requests, self._wrap_many, mistake_in_wrapped_key)

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap keys. Returns, in the order of the requests, the key or the error."""
        return self._many("unwrap", requests, self._unwrap_many, mistake_in_key)

    def rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Re-wrap keys under the current version of the same or another master key.

        Returns:
            In the order of the requests, the new wrapped key or the error.
        """
        return self._many("rewrap", requests, self._rewrap_many, mistake_in_wrapped_key)

    # --- public: the raw form of Iceberg, which is bound to nothing that only this package knows ---

    def wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap a key, and return the bare ciphertext of the KMS, as Iceberg stores it.

        Raises:
            KmsConfigurationError: The backend, or its settings, have no form that Iceberg's own clients read.
            KmsError: Another subclass gives the reason.
        """
        request = WrapRequest(key, master_key_id)
        request.refuse_other_lengths()
        wrap = lambda: strict_base64.encode(self._wrap_raw(key, master_key_id))  # noqa: E731
        return strict_base64.decode(self._raw("wrap", request, wrap, mistake_in_wrapped_key))

    def unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap a key that `wrap_raw`, or another program with the same KMS, wrapped. Errors are the same."""
        request = UnwrapRequest(strict_base64.encode(wrapped_key), master_key_id)
        return self._raw("unwrap", request, lambda: self._unwrap_raw(wrapped_key, master_key_id), mistake_in_key)

    def _raw(self, operation: str, request: R, call: Callable[[], T], mistake_in: Callable[[object], str]) -> T:
        def checked() -> T:
            if obstacle := self._raw_obstacle():
                raise KmsConfigurationError(obstacle)
            return call()

        def hook(_: Sequence[R]) -> list[T | KmsError]:
            return [self._outcome(operation, request.master_key_id, checked)]

        return value_or_raise(self._many(operation, [request], hook, mistake_in)[0])

    # --- public: master keys ---

    def describe(self, master_key_id: str) -> MasterKeyDescription:
        """Return the KMS's description of a master key.

        Raises:
            MasterKeyNotFoundError: The KMS has no such key.
            KmsError: Another subclass gives the reason.
        """
        with self._lock:
            self._call_counts["describe"] += 1
        return self._of_key(MasterKeyDescription, "describe", master_key_id, self._describe, master_key_id)

    # --- public: the end of master keys; a backend that cannot delete them has none of the hooks ---

    def schedule_key_deletion(self, master_key_id: str, waiting_days: int | None = None) -> KeyDeletion:
        """Delete a master key, at once or after the waiting period of the KMS; it unwraps nothing from now on.

        A call for a master key that is deleted already, or only in part, changes only what is left.

        Args:
            master_key_id: Its identifier.
            waiting_days: Waiting period; None for the default of the KMS.

        Raises:
            KmsConfigurationError: The backend does not delete master keys, or its waiting period is not a choice.
            KmsError: Another subclass gives the reason.
        """
        allowed = self.waiting_days or range(0)
        if waiting_days is not None and waiting_days not in allowed:
            detail = "its waiting period cannot be chosen when a key is deleted"
            if allowed:
                detail = f"the waiting period has {allowed[0]} to {allowed[-1]} days"
            raise KmsConfigurationError(detail).about(self.backend, "delete", master_key_id)
        hook = self._schedule_key_deletion
        return self._of_key(KeyDeletion, "delete", master_key_id, hook, master_key_id, waiting_days)

    def key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        """Return whether a master key is deleted, or will be; errors as with `schedule_key_deletion`."""
        return self._of_key(KeyDeletion, "describe", master_key_id, self._key_deletion_state, master_key_id)

    def cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        """Cancel a deletion that is scheduled. The KMS may keep the master key disabled.

        Raises:
            KmsConfigurationError: The deletion is not scheduled; or as with `schedule_key_deletion`.
            KmsError: Another subclass gives the reason.
        """
        found = self.key_deletion_state(master_key_id)
        if found.state != "scheduled":
            detail = f"there is no deletion to cancel: it is {found.state}"
            raise KmsConfigurationError(detail).about(self.backend, "cancel_deletion", master_key_id)
        hook = self._cancel_key_deletion
        return self._of_key(KeyDeletion, "cancel_deletion", master_key_id, hook, master_key_id)

    def caller_identity(self, master_key_id: str) -> CallerIdentity:
        """Return who calls the KMS of a master key, by the KMS's own word where it has such a call.

        Raises:
            KmsError: The KMS could not be asked.
        """
        return value_or_raise(self._outcome("identify", None, self._caller_identity))

    def version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        """Return when each version of a master key was created: version -> time in UTC.

        None stands for the master key itself. A version that the KMS gives no time for is missing; the dictionary
        is empty where the KMS gives none.

        Raises:
            MasterKeyNotFoundError: The KMS has no such key.
            KmsError: Another subclass gives the reason.
        """
        return self._of_key(dict, "describe", master_key_id, self._version_dates, master_key_id)

    def create_master_key(
        self, master_key_id: str, tags: Mapping[str, str] | None = None, policy: str | None = None
    ) -> bool:
        """Create a master key, unless there is one. Nothing else in this package creates one in a KMS.

        Args:
            master_key_id: Its identifier.
            tags: Its tags, or labels; name -> value.
            policy: Its policy, in the form of the KMS.

        Returns:
            Whether it was created; False if there is a master key with this identifier, enabled or not.

        Raises:
            KmsConfigurationError: The backend cannot create master keys, or none with tags or a policy.
            KmsError: Another subclass gives the reason.
        """
        for what, given in (("tags", tags), ("policy", policy)):
            if given and what not in self.new_keys_have:
                hint = "Leave it out of the template."
                refusal = KmsConfigurationError(f"its master keys have no {what}", hint=hint)
                raise refusal.about(self.backend, "create", master_key_id)
        with contextlib.suppress(MasterKeyNotFoundError):
            self.describe(master_key_id)
            return False
        hook = self._create_master_key
        self._of_key(object, "create", master_key_id, hook, master_key_id, tags or {}, policy)
        return True

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version of the master key that wrapped a key, or None where it is unknown.

        The version is read from the wrapped key itself. `unwrap_many` must prove it: if the wrapped key names
        another version, unwrapping fails.
        """
        found = self.wrapped_key_form.fullmatch(wrapped_key) if self.wrapped_key_form is not None else None
        return found["version"] if found else None

    def identity(self, master_key_id: str) -> str | None:
        """Return the unique name of a master key, which an alias is not; None where the KMS does not say."""
        found = self._outcome("describe", master_key_id, self._identity, master_key_id)
        return None if isinstance(found, KmsError) else found

    def place(self) -> str:
        """Return what is the same for all clients of one KMS, as far as that is known."""
        return f"{self.backend}, {self._place()}"

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return whether the KMS itself can re-wrap a key; if not, rotations make new KEKs instead."""
        return True

    def probe(self, master_key_id: str) -> str | None:
        """Return a well-formed wrapped key that the KMS never made, to find out what a caller may do.

        A KMS that checks permissions first refuses it as invalid only if the caller may unwrap. None if the KMS
        does not, or if that is unknown.
        """
        return None

    def end_within(self, seconds: float) -> None:  # noqa: B027 - a local KMS takes no time
        """Let all later operations together take at most `seconds`; others then fail with `tries` 0."""

    def dry_run(self, moves: Sequence[tuple[str, str | None]]) -> list[KmsError | None] | None:
        """Find out what a caller may do, without a wrapped key, from a KMS that has such a request.

        Args:
            moves: A master key, and the master key to re-wrap to; None to unwrap.

        Returns:
            For each, None if the caller may do it, or else the refusal. None if the KMS has no such request.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most clients have nothing to close
        """Close the connections. Calls after this may fail. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- hooks ---

    @abstractmethod
    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        """Wrap keys. An exception fails all requests; unless it is a `KmsError`, it goes through `_translate`."""

    @abstractmethod
    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        """Unwrap keys. The outcome of a wrapped key that is not valid is a `WrappedKeyInvalidError`."""

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        """Re-wrap keys. A KMS that can do this itself overrides this method, so that no key leaves the KMS."""
        # Through the public methods: the KMS unwraps and wraps, so the audit log has records of both.
        keys = self.unwrap_many([UnwrapRequest(r.wrapped_key, r.master_key_id) for r in requests])
        to_wrap = [
            WrapRequest(key, request.new_master_key_id)
            for key, request in zip(keys, requests, strict=True)
            if not isinstance(key, KmsError)
        ]
        wrapped = iter(self.wrap_many(to_wrap))
        return [key if isinstance(key, KmsError) else next(wrapped) for key in keys]

    @abstractmethod
    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        """Describe a master key, or raise `MasterKeyNotFoundError`."""

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        """Create a master key that does not exist; a backend that can do so overrides this."""
        raise KmsConfigurationError(
            "this backend cannot create master keys", hint="Create it with the tools of the KMS."
        )

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        """Return when versions were created; a KMS that says so overrides this."""
        return {}

    def _identity(self, master_key_id: str) -> str:
        """Return the unique name of a master key; a KMS with aliases overrides this."""
        return master_key_id

    def _place(self) -> str:
        """Return where the names that `_identity` returns are unique, so that two clients of one KMS are known.

        Empty if they are unique everywhere.
        """
        return str(id(self))

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        """Delete a master key as far as it is not deleted, and return its state. May be called several times."""
        raise KmsConfigurationError(_KEEPS_KEYS, hint=_KEEPS_KEYS_HINT)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        """Return the state of a master key; `deleted` if there is no such key."""
        raise KmsConfigurationError(_KEEPS_KEYS, hint=_KEEPS_KEYS_HINT)

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        """Cancel a deletion that is scheduled, and return the state."""
        raise KmsConfigurationError("this client cannot cancel a deletion", hint=_KEEPS_KEYS_HINT)

    def _caller_identity(self) -> CallerIdentity:
        """Ask the KMS who calls it; a KMS with such a call overrides this."""
        return CallerIdentity(str(self._principal()), "this client, without a call to the KMS")

    def _raw_obstacle(self) -> str:
        """Return why there is no raw form, or an empty string; a backend with a raw form overrides this."""
        return "" if self.raw_form_is_text else "this backend has no raw form, which Iceberg needs"

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        """Wrap one key. A backend whose wrapped keys are not base64 of their raw form, or text, overrides this."""
        wrapped_key = value_or_raise(self._wrap_many([WrapRequest(key, master_key_id)])[0])
        return wrapped_key.encode("ascii") if self.raw_form_is_text else strict_base64.decode(wrapped_key)

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        """Unwrap one key. A wrapped key that is not valid raises `WrappedKeyInvalidError`."""
        # Bytes that are not ASCII become a text that is refused as an invalid wrapped key.
        text = (
            wrapped_key.decode("ascii", "replace") if self.raw_form_is_text else strict_base64.encode(wrapped_key)
        )
        return value_or_raise(self._unwrap_many([UnwrapRequest(text, master_key_id)])[0])

    def _may_be_of_others(self, master_key_id: str) -> bool:
        """Return whether an identifier can name a master key in another account; see `trust`."""
        return False

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        """Return the `KmsError` that replaces a foreign exception; the caller adds backend, operation and key.

        Only the type of the foreign exception may appear in the error: SDKs put response bodies, and so keys and
        tokens, into the text.
        """
        kind = KmsUnavailableError if isinstance(error, (OSError, TimeoutError)) else KmsResponseInvalidError
        return kind(f"unexpected {type(error).__name__}")

    def _principal(self) -> str:
        """Return the caller's identity for the audit log: a name, never a token. May raise anything."""
        return audit.default_principal()

    # --- for backends ---

    def _outcome(
        self, operation: str, master_key_id: str | None, call: Callable[[*Ts], T], *arguments: *Ts
    ) -> T | KmsError:
        """Return the result of a call into the backend, or the `KmsError` that replaces its exception."""
        try:
            return call(*arguments)
        except Exception as error:
            failure = self._kms_error(error, operation, master_key_id)
        return without_frames(failure.about(self.backend, operation, master_key_id))

    def _kms_error(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        """Return the `KmsError` for an exception of a backend; the default one if its translation fails."""
        if isinstance(error, KmsError):
            return error
        try:
            return self._translate(error, operation, master_key_id)
        except Exception:
            return KmsClient._translate(self, error, operation, master_key_id)

    # --- behind the public methods ---

    def _many(
        self,
        operation: str,
        requests: Sequence[R],
        hook: Callable[[Sequence[R]], list[T | KmsError]],
        mistake_in: Callable[[object], str],
    ) -> list[T | KmsError]:
        """Send each distinct request to the backend once, check every answer, and report it."""
        # Wraps are never shared.
        identities: list[object] = [id(r) if isinstance(r, WrapRequest) else r for r in requests]
        distinct = dict(zip(identities, requests, strict=True))
        outcomes: dict[object, T | KmsError] = {
            identity: refusal.about(self.backend, operation, request.master_key_id)
            for identity, request in distinct.items()
            if (refusal := self._refusal(request))
        }
        # The KMS never sees refused requests, so its own log cannot show who made them.
        self._audit(operation, [distinct[identity] for identity in outcomes], list(outcomes.values()))
        to_send = {identity: request for identity, request in distinct.items() if identity not in outcomes}
        sent = list(to_send.values())
        if not sent:
            return [outcomes[identity] for identity in identities]
        with self._lock:
            self._call_counts[operation] += len(sent)
        with self._span(operation, [request.master_key_id for request in sent], keys=len(sent)) as span:
            try:
                answers: object = hook(sent)
            except Exception as error:
                failure = self._kms_error(error, operation, None).about(self.backend, operation, None)
                answers = [failure] * len(sent)
            except BaseException as interruption:
                # The KMS may have done it.
                self._report(operation, sent, [interruption] * len(sent), span)
                raise
            if not isinstance(answers, list) or len(answers) != len(sent):
                wrong = "the number of answers differs from the number of requests"
                answers = [KmsResponseInvalidError(wrong) for _ in sent]
            checked: list[Any] = []
            for request, answer in zip(sent, answers, strict=True):
                if not isinstance(answer, KmsError) and (mistake := mistake_in(answer)):
                    answer = KmsResponseInvalidError(mistake)
                if isinstance(answer, KmsError):
                    answer = without_frames(answer.about(self.backend, operation, request.master_key_id))
                checked.append(answer)
            self._report(operation, sent, checked, span)
        outcomes |= zip(to_send, checked, strict=True)
        return [outcomes[identity] for identity in identities]

    def _refusal(self, request: WrapRequest | UnwrapRequest | RewrapRequest) -> KmsError | None:
        """Return why a request is not sent to the KMS at all, or None."""
        if isinstance(request, WrapRequest):
            return None
        if mistake := mistake_in_wrapped_key(request.wrapped_key):
            return WrappedKeyInvalidError(mistake)
        master_key_id, trusted = request.master_key_id, self._trusted
        if trusted is None or master_key_id in trusted or not self._may_be_of_others(master_key_id):
            return None
        if self._is_trusted(master_key_id):
            return None
        return MasterKeyNotTrustedError()

    # --- metrics, traces and the audit log ---

    @property
    def _about(self) -> dict[str, str]:
        """What metrics and spans say of the KMS: its name only where there are several."""
        name = {"kms": self.instance_id} if self.is_one_of_several else {}
        return {"backend": self.backend, **name}

    def _span(self, operation: str, master_key_ids: Iterable[str], **attributes: int) -> telemetry.Span:
        about: dict[str, str | int | Sequence[str]] = {**self._about, **attributes}
        if self.telemetry_key_ids:
            about["master_key_ids"] = sorted(set(master_key_ids))
        return telemetry.Span(f"kms.{operation}", about)

    def _report(
        self, operation: str, requests: Sequence[R], outcomes: Sequence[object], span: telemetry.Span
    ) -> None:
        """Report the outcome of each key."""
        about = {**self._about, "operation": operation}
        telemetry.measure("kms.operation.keys", len(requests), about)
        counts = Counter(map(outcome_name, outcomes))
        for outcome, number in counts.items():
            telemetry.count("kms.keys", number, {**about, "outcome": outcome})
        failures = [outcome for outcome in counts if outcome != _OK]
        if failures:
            span.note(keys_failed=sum(counts[outcome] for outcome in failures))
            span.failed(failures[0])
        self._audit(operation, requests, outcomes)

    def _of_key(
        self, kind: type[T], operation: str, master_key_id: str, hook: Callable[[*Ts], object], *arguments: *Ts
    ) -> T:
        """Call a hook about a master key itself; the audit log has a record of each deletion and its end."""

        def checked() -> T:
            found = hook(*arguments)
            if not isinstance(found, kind):
                raise KmsResponseInvalidError("the answer is of another form")
            return found

        with self._span(operation, [master_key_id]):
            outcome = self._outcome(operation, master_key_id, checked)
            if operation in ("delete", "cancel_deletion"):
                self._audit(operation, [UnwrapRequest("", master_key_id)], [outcome])
            return value_or_raise(outcome)

    def _audit(
        self,
        operation: str,
        requests: Sequence[WrapRequest | UnwrapRequest | RewrapRequest],
        outcomes: Sequence[object],
    ) -> None:
        """Write the outcome of each key to the audit log, if it is enabled."""
        if not self.audit_log or not requests:
            return
        principal = "unknown"
        with contextlib.suppress(Exception):
            principal = str(self._principal())
        for request, outcome in zip(requests, outcomes, strict=True):
            audit.write(
                audit.KeyUse(
                    operation=operation,
                    outcome=outcome_name(outcome),
                    backend=self.backend,
                    kms_instance=self.instance_id,
                    master_key_id=request.master_key_id,
                    new_master_key_id=request.new_master_key_id if isinstance(request, RewrapRequest) else None,
                    principal=principal,
                    subject=audit.current_subject(),
                )
            )


_OK = "ok"


def outcome_name(outcome: object) -> str:
    """Return the name of an outcome in metrics and the audit log."""
    return type(outcome).__name__ if isinstance(outcome, BaseException) else _OK


class SingleKeyKmsClient(KmsClient):
    """Base class of a local backend that takes one key at a time: it implements `_wrap` and `_unwrap`."""

    @abstractmethod
    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        """Wrap one key. May raise anything; unless it is a `KmsError`, it goes through `_translate`."""

    @abstractmethod
    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        """Unwrap one key. A wrapped key that is not valid raises `WrappedKeyInvalidError`."""

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return [self._outcome("wrap", r.master_key_id, self._wrap, r.key, r.master_key_id) for r in requests]

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return [
            self._outcome("unwrap", r.master_key_id, self._unwrap, r.wrapped_key, r.master_key_id)
            for r in requests
        ]
