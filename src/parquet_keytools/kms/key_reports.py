"""What metrics, traces and the audit log get to know of the keys that a KMS was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parquet_keytools.kms.requests import R, RewrapRequest
from parquet_keytools.runtime import audit, telemetry

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
