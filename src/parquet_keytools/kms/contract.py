"""The terms of the contract of a KMS client: its settings, requests and answers, errors and reports of calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from parquet_keytools import audit, telemetry
from parquet_keytools.errors import KmsError, KmsResponseInvalidError, without_frames
from parquet_keytools.secret_bytes import SecretBytes

# --- settings: those of every backend, and those of every backend across a network ---


class StrictSettings(BaseModel):
    """Root of all settings: frozen, without unknown fields."""

    # Errors of pydantic quote what they got; here that may be a key or a token.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class KmsSettings(StrictSettings):
    """The settings under `kms:` in a configuration; a backend adds its own fields.

    Attributes:
        type: Name of the backend.
        instance_id: Written into the footer's key material as `kmsInstanceID`; for information only.
        audit_log: Whether each wrap, unwrap and rewrap of a key is written to the audit log.
        telemetry_key_ids: Whether spans say which master key they are about.
    """

    type: str
    instance_id: str = "DEFAULT"
    audit_log: bool = Field(
        default=False,
        description="Log each wrap, unwrap and re-wrap of a key to the logger `parquet_keytools.audit`.",
    )
    telemetry_key_ids: bool = Field(default=False, description="Put the master key id into OpenTelemetry spans.")

    def secret_files(self) -> Mapping[tuple[str, ...], Path]:
        """Return the files that hold secrets: names of the setting -> path as it is set.

        A configuration warns if others may read one. Leave out what the backend refuses then.
        """
        return {}

    def __getstate__(self) -> dict[Any, Any]:
        if holds_secret(self):
            raise TypeError("these settings hold a secret, and cannot be pickled: it must not leave the process")
        return super().__getstate__()


class RemoteKmsSettings(KmsSettings):
    """Settings that every KMS across a network has.

    Attributes:
        call_timeout_seconds: How long one attempt may take, connecting included.
        timeout_seconds: How long a call may take with all its attempts.
        max_tries: How often a call is attempted that may succeed later.
        max_concurrent_calls: How many calls are under way at a time.
        max_calls_per_second: How many are started in a second; None lets the KMS's own throttling decide.
        fail_fast_after_seconds: When the KMS could not be reached for so long, new calls fail at once.
        probe_every_seconds: How often one is let through then, to see whether it is back.
    """

    call_timeout_seconds: float = Field(
        default=5.0, gt=0, le=600, description="Timeout of one attempt of a call, in seconds."
    )
    timeout_seconds: float = Field(
        default=60.0, gt=0, le=3600, description="Timeout of a call with all its retries, in seconds."
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
        description="Maximum number of calls started per second. Default: only throttling by the KMS limits it.",
    )
    fail_fast_after_seconds: float = Field(
        default=20.0,
        gt=0,
        description="After the KMS was unreachable for this long, in seconds, new calls fail at once.",
    )
    probe_every_seconds: float = Field(
        default=2.0, gt=0, description="How often one call is then let through, to check whether the KMS is back."
    )

    def shared_by(self, processes: int) -> Self:
        """Return the settings of each of several processes that shall not call more than one would."""
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
    """Return the bytes of what is bound to each wrapped key: a mapping has one spelling, whatever its order."""
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

E = TypeVar("E", bound=KmsError)
T = TypeVar("T")


@dataclass(frozen=True)
class WrapRequest:
    """A key to be wrapped with a master key."""

    key: SecretBytes
    master_key_id: str

    def refuse_other_lengths(self) -> None:
        """Raise `ValueError` if the key is no AES key."""
        if len(self.key) not in KEY_LENGTHS_BYTES:
            raise ValueError(f"a key to be wrapped has 16, 24 or 32 bytes, not {len(self.key)}")


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


R = TypeVar("R", WrapRequest, UnwrapRequest, RewrapRequest)


def identity_of(request: WrapRequest | UnwrapRequest | RewrapRequest) -> object:
    """Return what makes two requests the same call to the KMS: each wrap is one of its own."""
    return id(request) if isinstance(request, WrapRequest) else request


@dataclass(frozen=True)
class MasterKeyDescription:
    """What a KMS says of a master key.

    Attributes:
        master_key_id: Its identifier in the KMS.
        enabled: Whether it may be used now.
        current_version: The version that wraps, or None where the KMS has no versions or hides them.
        enabled_versions: The versions that unwrap, or None where the KMS does not say.
        origin: Where its bytes were made, as the KMS names it.
        rotates: Whether the KMS makes new versions by itself, or None where it does not say.
    """

    master_key_id: str
    enabled: bool
    current_version: str | None = None
    enabled_versions: tuple[str, ...] | None = None
    origin: str | None = None
    rotates: bool | None = None


@dataclass(frozen=True)
class CallFacts:
    """What a call was about, for its error.

    Attributes:
        backend: Name of the KMS client.
        operation: `wrap`, `unwrap`, `rewrap`, `describe`, `connect` or `update`.
        master_key_id: The master key; None for a call about many.
    """

    backend: str
    operation: str
    master_key_id: str | None = None

    def error(self, kind: type[E], detail: str = "", hint: str | None = None, wait: float = 0.0) -> E:
        """Return an error about this call.

        Args:
            kind: Its class.
            detail: What is known beyond its class.
            hint: What to do next, in place of what the class says.
            wait: How many seconds the KMS wants to be left alone.
        """
        return kind(
            detail,
            backend=self.backend,
            operation=self.operation,
            master_key_id=self.master_key_id,
            hint=hint,
            retry_after_seconds=wait,
        )

    def checked_key(self, data: bytes) -> SecretBytes:
        """Return the key that the KMS sent.

        Raises:
            KmsResponseInvalidError: It has another length than a key has.
        """
        key = SecretBytes(data)
        if mistake := mistake_in_key(key):
            raise self.error(KmsResponseInvalidError, mistake)
        return key

    def checked_description(self, answer: object) -> MasterKeyDescription:
        """Return what a backend says of a master key, unless it is something else: `KmsResponseInvalidError`."""
        if not isinstance(answer, MasterKeyDescription):
            raise self.error(KmsResponseInvalidError, "it describes no master key")
        return answer


def mistake_in_key(answer: object) -> str:
    """Return why something cannot be a key that was wrapped, or nothing."""
    if isinstance(answer, SecretBytes) and len(answer) in KEY_LENGTHS_BYTES:
        return ""
    return "the unwrapped key does not have 16, 24 or 32 bytes"


def mistake_in_wrapped_key(text: object) -> str:
    """Return why something has not the form of a wrapped key of any backend, or nothing."""
    if isinstance(text, str) and len(text) <= _MAX_WRAPPED_KEY_LENGTH and _PRINTABLE_ASCII.fullmatch(text):
        return ""
    return "the wrapped key is not a short string of printable ASCII"


def checked_answers(
    call_facts: Callable[[str, str | None], CallFacts],
    operation: str,
    requests: Sequence[R],
    answers: list[T | KmsError] | KmsError,
    mistake_in: Callable[[object], str],
) -> list[T | KmsError]:
    """Return the answers of a backend, each right in form or an error."""
    if not isinstance(answers, KmsError) and (not isinstance(answers, list) or len(answers) != len(requests)):
        mistake = "the number of answers is not that of the requests"
        answers = call_facts(operation, None).error(KmsResponseInvalidError, mistake)
    if isinstance(answers, KmsError):
        return [answers] * len(requests)
    outcomes: list[T | KmsError] = []
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, KmsError):
            outcomes.append(without_frames(answer))
        elif mistake := mistake_in(answer):
            call = call_facts(operation, request.master_key_id)
            outcomes.append(call.error(KmsResponseInvalidError, mistake))
        else:
            outcomes.append(answer)
    return outcomes


# --- what metrics, traces and the audit log get to know ---

_OK = "ok"


def outcome_name(outcome: object) -> str:
    """Return what metrics and the audit log call an outcome."""
    return type(outcome).__name__ if isinstance(outcome, BaseException) else _OK


@dataclass(frozen=True)
class KeyReporter:
    """Reports about one client."""

    backend: str
    instance_id: str
    audit_log: bool
    telemetry_key_ids: bool
    principal: Callable[[], object]

    def span(self, operation: str, master_key_ids: Iterable[str], **attributes: int) -> telemetry.Span:
        """Return the span of an operation."""
        about: dict[str, str | int | Sequence[str]] = {"backend": self.backend, **attributes}
        if self.telemetry_key_ids:
            about["master_key_ids"] = sorted(set(master_key_ids))
        return telemetry.Span(f"kms.{operation}", about)

    def report(
        self, operation: str, requests: Sequence[R], outcomes: Sequence[object], span: telemetry.Span
    ) -> None:
        """Report what became of each key."""
        about = {"backend": self.backend, "operation": operation}
        telemetry.measure("kms.operation.keys", len(requests), about)
        counts = Counter(map(outcome_name, outcomes))
        for outcome, number in counts.items():
            telemetry.count("kms.keys", number, {**about, "outcome": outcome})
        failures = [outcome for outcome in counts if outcome != _OK]
        if failures:
            span.note(keys_failed=sum(counts[outcome] for outcome in failures))
            span.failed(failures[0])
        self.audit(operation, requests, outcomes)

    def audit(self, operation: str, requests: Sequence[R], outcomes: Sequence[object]) -> None:
        """Write what became of each key to the audit log, if there is one."""
        if not self.audit_log or not requests:
            return
        principal = self._known_principal()
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

    def _known_principal(self) -> str:
        try:
            return str(self.principal())
        except Exception:
            return "unknown"
