"""Turns errors of Cloud KMS, gRPC and Google's authentication library into errors of this package.

Only status codes and reasons appear in errors, never a text, which may quote the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
from google.api_core.exceptions import GoogleAPICallError
from google.auth.exceptions import GoogleAuthError, TransportError

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)

_REASON = re.compile(r"[A-Z][A-Z0-9_]{1,62}")

# Invalid credentials do not mean that the master key is denied: with "access denied", a reader that hides denied
# columns would silently return fewer columns.
_BY_STATUS: dict[str, type[KmsError]] = {
    "ABORTED": KmsUnavailableError,
    "CANCELLED": KmsUnavailableError,
    "DATA_LOSS": KmsResponseInvalidError,
    "DEADLINE_EXCEEDED": KmsUnavailableError,
    "FAILED_PRECONDITION": MasterKeyDisabledError,
    "INTERNAL": KmsUnavailableError,
    "INVALID_ARGUMENT": KmsConfigurationError,
    "NOT_FOUND": MasterKeyNotFoundError,
    "PERMISSION_DENIED": KmsAccessDeniedError,
    "RESOURCE_EXHAUSTED": KmsThrottledError,
    "UNAUTHENTICATED": KmsConfigurationError,
    "UNAVAILABLE": KmsUnavailableError,
    "UNIMPLEMENTED": KmsConfigurationError,
    "UNKNOWN": KmsUnavailableError,
}

_CREDENTIALS_HINT = (
    "Check the credentials, which may have expired: `gcloud auth application-default login`, "
    "GOOGLE_APPLICATION_CREDENTIALS, credentials_file, or the service account of this machine."
)
_HINTS = {
    "FAILED_PRECONDITION": "The key has no primary version, its version is disabled or destroyed, or it is not a "
    "key for symmetric encryption. Enable or restore the version while Cloud KMS still has it.",
    "INVALID_ARGUMENT": "Check additional_authenticated_data: with a key in an HSM it may have 8 KiB.",
    "UNAUTHENTICATED": _CREDENTIALS_HINT,
    "UNIMPLEMENTED": "Check that endpoint is one of Cloud KMS.",
}
_HINTS_BY_REASON = {
    "SERVICE_DISABLED": "Enable the API in the project: gcloud services enable cloudkms.googleapis.com",
    "BILLING_DISABLED": "Enable billing in the project.",
    "ACCESS_TOKEN_SCOPE_INSUFFICIENT": "Give the credentials the scope cloud-platform or cloudkms.",
}
_UNREACHABLE = {
    # Text of gRPC about a channel that it cannot open -> its meaning.
    "connection refused": "the connection was refused",
    "dns resolution failed": "its host name cannot be resolved",
    "name resolution": "its host name cannot be resolved",
    "handshake": "TLS failed",
    "network is unreachable": "no network route leads there",
    "connection reset": "the connection was closed",
    "socket closed": "the connection was closed",
    "timed out": "it did not answer in time",
}
_WRONG_WRAPPED_KEY_HINT = (
    "Check that the file was written with this key and the same additional_authenticated_data, and restore it "
    "if it was altered."
)


def kms_error(error: Exception, operation: str) -> KmsError | None:
    """Return the `KmsError` that replaces an exception, or None for an exception of another library."""
    if isinstance(error, GoogleAuthError):
        is_passing = isinstance(error, TransportError) or error.retryable
        kind = KmsUnavailableError if is_passing else KmsConfigurationError
        return kind(f"no access token: {type(error).__name__}", hint=_CREDENTIALS_HINT)
    if isinstance(error, GoogleAPICallError):
        return _of_call(error, operation)
    return KmsUnavailableError("the gRPC call failed") if isinstance(error, grpc.RpcError) else None


def _of_call(error: GoogleAPICallError, operation: str) -> KmsError:
    status = getattr(error.grpc_status_code, "name", "UNKNOWN")
    kind = _BY_STATUS.get(status, KmsResponseInvalidError)
    reasons = sorted(set(_reasons(error)))
    hint = next((_HINTS_BY_REASON[r] for r in reasons if r in _HINTS_BY_REASON), _HINTS.get(status))
    text = (error.message or "").lower()
    if status == "INVALID_ARGUMENT" and "checksum" in text:
        # The request was damaged on its way: the code is the same as for a wrong ciphertext, but a retry helps.
        kind, hint = KmsResponseInvalidError, None
    elif status == "INVALID_ARGUMENT" and operation == "unwrap":
        kind, hint = WrappedKeyInvalidError, _WRONG_WRAPPED_KEY_HINT
    elif status == "UNAVAILABLE" and "metadata from plugin" in text:
        # In this way, gRPC reports that the credentials of a client that was passed in gave no token.
        hint = _CREDENTIALS_HINT
    known = [words for sign, words in _UNREACHABLE.items() if status == "UNAVAILABLE" and sign in text]
    detail = ", ".join([*known[:1], status, *reasons])
    return kind(detail, hint=hint, retry_after_seconds=_retry_after(error))


def _reasons(error: GoogleAPICallError) -> Iterator[str]:
    """Yield the machine-readable reasons of an error."""
    candidates = [error.reason]
    for detail in error.details:
        candidates.extend(violation.type for violation in _violations(detail))
    for candidate in candidates:
        if isinstance(candidate, str) and _REASON.fullmatch(candidate):
            yield candidate


def _violations(detail: Any) -> list[Any]:
    """Return the violations of a PreconditionFailure; violations of other details have no type."""
    return [v for v in getattr(detail, "violations", ()) if hasattr(v, "type")]


def _retry_after(error: GoogleAPICallError) -> float:
    """Return how long a RetryInfo asks to wait, in seconds; 0 without one."""
    delays = [detail.retry_delay for detail in error.details if hasattr(detail, "retry_delay")]
    return max([0.0, *(float(delay.seconds + delay.nanos / 1e9) for delay in delays)])
