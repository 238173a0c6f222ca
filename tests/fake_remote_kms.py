"""A KMS across an imaginary network, which answers as the test chooses."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from parquet_keytools.errors import KmsError, KmsThrottledError
from parquet_keytools.kms.client import KmsSettings, MasterKeyDescription, UnwrapRequest, WrapRequest
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings, Time
from parquet_keytools.secret_bytes import SecretBytes


class FakeRemoteSettings(RemoteKmsSettings):
    type: Literal["fake_remote"] = "fake_remote"


class FakeRemoteKms(RemoteKmsClient):
    """Wraps by base64. `on_try` is called with operation, master key and seconds per attempt, and may raise."""

    backend = "fake_remote"
    Settings = FakeRemoteSettings

    def __init__(
        self,
        on_try: Callable[[str, str, float], object] = lambda *_: None,
        time_source: Time | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(FakeRemoteSettings(**limits), time_source)
        self.on_try = on_try

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> FakeRemoteKms:
        assert isinstance(settings, FakeRemoteSettings)
        return cls(**settings.model_dump(exclude={"type", "instance_id", "audit_log", "telemetry_key_ids"}))

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._operation("wrap").each(requests, self._wrap)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._operation("unwrap").each(requests, self._unwrap)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        self._operation("describe").call(master_key_id, lambda left: self.on_try("describe", master_key_id, left))
        return MasterKeyDescription(master_key_id, enabled=True)

    def _wrap(self, request: WrapRequest, seconds: float) -> str:
        self.on_try("wrap", request.master_key_id, seconds)
        return base64.b64encode(request.key.reveal()).decode()

    def _unwrap(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        self.on_try("unwrap", request.master_key_id, seconds)
        return SecretBytes(base64.b64decode(request.wrapped_key))

    def error(self, kind: type[KmsError], **facts: Any) -> KmsError:
        return kind(backend=self.backend, operation="try", **facts)


class QuotaKms:
    """Decides which calls a KMS with a quota accepts.

    Args:
        per_second: The quota.
        kind: `bucket` refills all the time; `window` starts at zero each second.
        burst_seconds: How many seconds of the quota a bucket holds.
    """

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float],
        kind: Literal["bucket", "window"] = "bucket",
        burst_seconds: float = 1.0,
    ) -> None:
        self.per_second = per_second
        self._clock = clock
        self._kind = kind
        self._burst = max(per_second * burst_seconds, 1.0)
        self._left = self._burst
        self._at = clock()
        self.taken: list[float] = []
        self.refused: list[float] = []

    def __call__(self) -> None:
        now = self._clock()
        if self._kind == "bucket":
            self._left = min(self._burst, self._left + (now - self._at) * self.per_second)
            self._at = now
        elif int(now) != int(self._at):
            self._left, self._at = self.per_second, now
        if self._left < 1:
            self.refused.append(now)
            raise KmsThrottledError(backend="fake_remote", operation="try")
        self._left -= 1
        self.taken.append(now)
