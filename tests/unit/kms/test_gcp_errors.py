"""What Google's exceptions mean: by status and reasons, and never by a text that may quote a request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.api_core import exceptions as google
from google.auth import exceptions as auth
from google.rpc import error_details_pb2

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.gcp import kms_error


def found(error: Exception, operation: str = "unwrap") -> KmsError:
    meaning = kms_error(error, operation)
    assert meaning is not None
    return meaning


def precondition(*kinds: str) -> Any:
    return error_details_pb2.PreconditionFailure(
        violations=[error_details_pb2.PreconditionFailure.Violation(type=kind) for kind in kinds]
    )


def test_what_is_not_from_there_has_no_meaning() -> None:
    for error in (ValueError("UNAVAILABLE"), OSError("timed out")):
        assert kms_error(error, "unwrap") is None
    assert type(found(grpc.RpcError("anything"))) is KmsUnavailableError


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (google.ServiceUnavailable("Connection reset by peer, then it timed out"), KmsUnavailableError,
         "the connection was closed, UNAVAILABLE"),
        (google.ServiceUnavailable("anything"), KmsUnavailableError, "UNAVAILABLE"),
        (google.ServiceUnavailable(None), KmsUnavailableError, "UNAVAILABLE"),
        # The texts of other statuses are not about the network, or a request that was damaged.
        (google.PermissionDenied("it timed out"), KmsAccessDeniedError, "PERMISSION_DENIED"),
        (google.PermissionDenied("The checksum is wrong"), KmsAccessDeniedError, "PERMISSION_DENIED"),
        (google.InvalidArgument("The Checksum in field x did not match"), KmsResponseInvalidError,
         "INVALID_ARGUMENT"),
        (google.InvalidArgument("Decryption failed"), WrappedKeyInvalidError, "INVALID_ARGUMENT"),
        # Without a gRPC status, as from a proxy.
        (google.GoogleAPICallError("what"), KmsUnavailableError, "UNKNOWN"),
    ],
)  # fmt: skip
def test_the_status_decides(error: Exception, kind: type[KmsError], detail: str) -> None:
    meaning = found(error)
    assert (type(meaning), meaning.detail) == (kind, detail)


def test_an_argument_that_is_refused_is_no_wrapped_key_elsewhere() -> None:
    assert type(found(google.InvalidArgument("Decryption failed"), "wrap")) is KmsConfigurationError


def test_reasons_are_codes_and_each_is_said_once() -> None:
    """Any other text in their place may be a secret."""
    quota = error_details_pb2.QuotaFailure(violations=[error_details_pb2.QuotaFailure.Violation(subject="A_B")])
    details = [quota, precondition("KEY_DISABLED", "s.CANARY of a text"), precondition("KEY_DISABLED", "A_REASON")]
    error = google.PermissionDenied("no", details=details, error_info=None)
    assert found(error).detail == "PERMISSION_DENIED, A_REASON, KEY_DISABLED"
    info = error_details_pb2.ErrorInfo(reason="not a code, but s.CANARY")
    assert "CANARY" not in str(found(google.PermissionDenied("no", error_info=info)))
    info = error_details_pb2.ErrorInfo(reason="BILLING_DISABLED")
    assert "Enable billing" in str(found(google.PermissionDenied("no", error_info=info)))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (auth.TransportError("s.CANARY"), KmsUnavailableError),
        (auth.RefreshError("s.CANARY", retryable=True), KmsUnavailableError),
        (auth.RefreshError("s.CANARY"), KmsConfigurationError),
        (auth.DefaultCredentialsError("s.CANARY"), KmsConfigurationError),
    ],
)
def test_without_a_token(error: Exception, kind: type[KmsError]) -> None:
    meaning = found(error)
    assert type(meaning) is kind and meaning.detail == f"no access token: {type(error).__name__}"
    assert "Check the credentials" in str(meaning)


def test_the_longest_wait_that_is_asked_for_counts() -> None:
    def wait(**delay: int) -> Any:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds, retry.retry_delay.nanos = delay.get("seconds", 0), delay.get("nanos", 0)
        return retry

    assert found(google.TooManyRequests("no")).retry_after_seconds == 0
    details = [wait(seconds=2, nanos=500_000_000), precondition("A_B"), wait(seconds=1)]
    assert found(google.TooManyRequests("no", details=details)).retry_after_seconds == 2.5
