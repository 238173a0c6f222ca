"""What exceptions of the AWS SDK mean: by listed codes, and never by a text that may quote a request."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from botocore import exceptions as sdk

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
)
from parquet_keytools.kms.aws import aws_error, code_of

SECRET = "s.CANARY of a text"


def answer(
    code: Any, status: int | None = 400, *, message: str = SECRET, operation: str = "Decrypt", **headers: str
) -> sdk.ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        response["ResponseMetadata"] = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return sdk.ClientError(response, operation)


def found(error: Exception, **more: str) -> KmsError:
    meaning = aws_error(error, **more)
    assert meaning is not None
    assert "CANARY" not in str(meaning)
    return meaning


def test_what_is_not_from_there_has_no_meaning() -> None:
    for error in (ValueError("AccessDeniedException"), OSError("timed out")):
        assert aws_error(error) is None


@pytest.mark.parametrize(
    "code",
    [
        "AccessDeniedException",
        "com.amazonaws.kms#AccessDeniedException",
        "AccessDeniedException:http://internal.amazon.com/",
        "com.amazonaws.kms#AccessDeniedException:http://internal.amazon.com/",
    ],
)
def test_codes_have_several_spellings(code: str) -> None:
    assert code_of(answer(code)) == "AccessDeniedException"
    assert type(found(answer(code))) is KmsAccessDeniedError


@pytest.mark.parametrize(
    ("status", "kind", "detail"),
    [
        (None, KmsResponseInvalidError, "an unknown error"),
        (299, KmsResponseInvalidError, "HTTP status 299"),
        (300, KmsResponseInvalidError, "a redirect, which is not followed (HTTP status 300)"),
        (399, KmsResponseInvalidError, "a redirect, which is not followed (HTTP status 399)"),
        (400, KmsResponseInvalidError, "HTTP status 400"),
        (428, KmsResponseInvalidError, "HTTP status 428"),
        (429, KmsThrottledError, "HTTP status 429"),
        (499, KmsResponseInvalidError, "HTTP status 499"),
        (500, KmsUnavailableError, "HTTP status 500"),
        (503, KmsUnavailableError, "HTTP status 503"),
    ],
)
@pytest.mark.parametrize("code", [SECRET, "Unheard", 7, None])
def test_where_no_code_is_known_the_status_decides(
    code: Any, status: int | None, kind: type[KmsError], detail: str
) -> None:
    meaning = found(answer(code, status))
    assert (type(meaning), meaning.detail) == (kind, detail)
    assert code_of(answer(code, status)) == ""


def test_a_role_that_may_not_be_assumed_is_no_denied_key() -> None:
    """Otherwise, readers that hide denied columns would return less data than there is."""
    denied = found(answer("AccessDenied", 403, operation="AssumeRole"))
    assert type(denied) is KmsConfigurationError
    assert denied.detail == "the role may not be assumed (AccessDenied of sts:AssumeRole)"
    throttled = found(answer("ThrottlingException", operation="AssumeRole"))
    assert type(throttled) is KmsThrottledError and throttled.detail.endswith("of sts:AssumeRole")
    assert found(answer("Unheard", 500, operation="AssumeRole")).detail == "HTTP status 500 of sts:AssumeRole"


def test_the_hint_for_a_missing_key_is_for_that_alone() -> None:
    hint = "Look elsewhere."
    missing = found(answer("NotFoundException"), hint_for_missing_key=hint)
    assert type(missing) is MasterKeyNotFoundError and hint in str(missing)
    assert hint not in str(found(answer("AccessDeniedException"), hint_for_missing_key=hint))
    assert found(answer("NotFoundException")).hint == MasterKeyNotFoundError.default_hint


@pytest.mark.parametrize(
    ("message", "kind", "detail"),
    [
        ("arn:aws:kms:eu-west-1:1:key/2 is pending deletion.", MasterKeyDisabledError, "deletion"),
        ("alias/pending-deletion is disabled.", MasterKeyDisabledError, "KMSInvalidStateException"),
        ("alias/creating is PENDING IMPORT.", MasterKeyDisabledError, "not imported"),
        ("k is Updating.", KmsUnavailableError, "is being updated"),
        ("k is s.CANARY.", MasterKeyDisabledError, "its state does not allow this"),
    ],
)
def test_a_state_is_read_from_the_text_and_not_from_a_name(
    message: str, kind: type[KmsError], detail: str
) -> None:
    meaning = found(answer("KMSInvalidStateException", message=message))
    assert type(meaning) is kind and detail in meaning.detail


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (sdk.HTTPClientError(error=ValueError(SECRET)), KmsResponseInvalidError,
         "the SDK cannot read it (HTTPClientError)"),
        (sdk.HTTPClientError(error=OSError(SECRET)), KmsUnavailableError, "HTTPClientError"),
        (sdk.ConnectTimeoutError(endpoint_url=SECRET, error=ValueError(SECRET)), KmsUnavailableError,
         "it did not answer in time (ConnectTimeoutError)"),
        (sdk.NoRegionError(), KmsConfigurationError, "the region is not known (NoRegionError)"),
        (sdk.BotoCoreError(), KmsConfigurationError, "BotoCoreError"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_the_sdk(error: Exception, kind: type[KmsError], detail: str) -> None:
    meaning = found(error)
    assert type(meaning) is kind and meaning.detail.endswith(detail) and meaning.retry_after_seconds == 0


def test_why_nothing_is_reached_is_said() -> None:
    error = sdk.EndpointConnectionError(endpoint_url=SECRET, error=ConnectionRefusedError(111, SECRET))
    error.__cause__ = ConnectionRefusedError(111, SECRET)
    assert found(error).detail == "the connection was refused (EndpointConnectionError)"
    other = sdk.BotoCoreError()
    other.__cause__ = ConnectionRefusedError(111, SECRET)
    assert found(other).detail == "BotoCoreError"


def test_a_certificate_that_is_not_trusted_is_no_outage() -> None:
    for cause, kind in (
        (ssl.SSLCertVerificationError(1, SECRET), KmsConfigurationError),
        (ssl.SSLError(1, SECRET), KmsUnavailableError),
    ):
        error = sdk.SSLError(endpoint_url=SECRET, error=cause)
        error.__cause__ = cause
        assert type(found(error)) is kind


def test_a_mistake_in_the_configuration_has_a_hint() -> None:
    assert "Check the configuration of AWS on this machine." in str(found(sdk.BotoCoreError()))
    assert "Check the configuration of AWS" not in str(found(answer("InvalidGrantTokenException")))
    assert "Set `region`, or AWS_REGION." in str(found(sdk.NoRegionError()))


def test_what_the_kms_asks_for_is_kept() -> None:
    assert found(answer("ThrottlingException", **{"retry-after": "3"})).retry_after_seconds == 3
    assert found(answer("ThrottlingException")).retry_after_seconds == 0
    assert found(answer("ThrottlingException", None)).retry_after_seconds == 0
