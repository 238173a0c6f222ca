"""The settings under `kms:` that every backend has, and those of every backend across a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from parquet_keytools.secret_bytes import SecretBytes


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
