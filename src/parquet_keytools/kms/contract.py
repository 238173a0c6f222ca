"""The terms of the contract of a KMS client: settings, requests and answers, and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from parquet_keytools.errors import KmsError, KmsResponseInvalidError
from parquet_keytools.secret_bytes import SecretBytes

# --- settings: of every backend, and of every backend across a network ---


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


class RemoteKmsSettings(KmsSettings):
    """Settings that every KMS across a network has.

    Attributes:
        call_timeout_seconds: Timeout of one attempt, including the connection.
        timeout_seconds: How long an operation waits for an answer of the KMS, in all attempts of all its calls.
        max_tries: Maximum number of attempts of a call.
        max_concurrent_calls: Maximum number of calls at a time.
        max_calls_per_second: Maximum number of calls started per second; None for no limit.
    """

    call_timeout_seconds: float = Field(
        default=5.0, gt=0, le=600, description="Timeout of one attempt of a call, in seconds."
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Timeout of an operation with all its retries, in seconds: it fails if "
        "the KMS has answered none of its calls for this long.",
    )
    max_tries: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="Maximum number of attempts of a call; with the defaults, timeout_seconds ends a call first.",
    )
    max_concurrent_calls: int = Field(default=32, ge=1, le=1000, description="Maximum number of calls at a time.")
    max_calls_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Maximum number of calls started per second. Default: no limit.",
    )

    def shared_by(self, processes: int) -> Self:
        """Return the settings of each of several processes that share the limits of one."""
        per_second = self.max_calls_per_second
        if processes == 1:
            return self
        return self.model_copy(
            update={
                "max_concurrent_calls": max(1, self.max_concurrent_calls // processes),
                "max_calls_per_second": None if per_second is None else per_second / processes,
            }
        )


def bytes_of_context(context: str | Mapping[str, str] | None) -> bytes:
    """Return the bytes that are bound to each wrapped key. The order of a mapping makes no difference."""
    if isinstance(context, Mapping):
        context = json.dumps(context, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return (context or "").encode()


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

_MAX_WRAPPED_KEY_LENGTH = 16_384
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]+")

T = TypeVar("T")


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


def identity_of(request: WrapRequest | UnwrapRequest | RewrapRequest) -> object:
    """Return what two requests must share to be sent as one. Wraps are never shared."""
    return id(request) if isinstance(request, WrapRequest) else request


@dataclass(frozen=True)
class MasterKeyDescription:
    """A KMS's description of a master key.

    Attributes:
        master_key_id: Its identifier in the KMS.
        enabled: Whether it can be used now.
        current_version: The version that wraps, or None where the KMS has no versions or hides them.
        enabled_versions: The versions that unwrap, or None if unknown.
        origin: Where the key was generated, in the words of the KMS.
        rotates: Whether the KMS makes new versions by itself, or None if unknown.
    """

    master_key_id: str
    enabled: bool
    current_version: str | None = None
    enabled_versions: tuple[str, ...] | None = None
    origin: str | None = None
    rotates: bool | None = None


class Meaning(NamedTuple):
    """The meaning of a failure in a KMS or its SDK.

    Attributes:
        kind: The class of the error.
        detail: What is known beyond the class.
        hint: What to do next, in place of the hint of the class.
    """

    kind: type[KmsError]
    detail: str = ""
    hint: str | None = None

    def error(self, retry_after_seconds: float = 0.0) -> KmsError:
        """Return the error. `KmsClient` adds the facts of the call."""
        return self.kind(self.detail, hint=self.hint, retry_after_seconds=retry_after_seconds)


def checked_key(data: object) -> SecretBytes:
    """Return the key that the KMS sent.

    Raises:
        KmsResponseInvalidError: It is not bytes, or does not have the length of a key.
    """
    key = SecretBytes(data if isinstance(data, bytes) else b"")
    if mistake := mistake_in_key(key):
        raise KmsResponseInvalidError(mistake)
    return key


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


def checked_answers(
    requests: Sequence[R], answers: list[T | KmsError] | KmsError, mistake_in: Callable[[object], str]
) -> list[T | KmsError]:
    """Return the answers of a backend, one for each request; an error replaces each answer that is not valid."""
    if not isinstance(answers, KmsError) and (not isinstance(answers, list) or len(answers) != len(requests)):
        answers = KmsResponseInvalidError("the number of answers differs from the number of requests")
    if isinstance(answers, KmsError):
        return [answers] * len(requests)
    return [
        KmsResponseInvalidError(mistake)
        if not isinstance(answer, KmsError) and (mistake := mistake_in(answer))
        else answer
        for answer in answers
    ]
