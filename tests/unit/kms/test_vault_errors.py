"""What refusals of Vault and OpenBao mean: by class and status, never by a text that may quote a request."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import requests

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
from parquet_keytools.kms.vault.errors import (
    Reason,
    RequestTooLargeError,
    TransitCall,
    VaultRefusal,
    connection_error,
    reason_of,
    refusal_error,
)

CALL = TransitCall("vault", "unwrap", "k", "here")


def found(status: int, reason: Reason = Reason.UNKNOWN, **more: Any) -> KmsError:
    meaning = refusal_error(VaultRefusal(status, reason, **more), CALL)
    assert (meaning.backend, meaning.operation, meaning.master_key_id) == ("vault", "unwrap", "k")
    return meaning


@pytest.mark.parametrize(
    ("status", "kind", "detail"),
    [
        (302, KmsResponseInvalidError, "status 302"),
        (400, KmsConfigurationError, "the server takes the request for an invalid one, at mount point 'here'"),
        (401, KmsAccessDeniedError, ""),
        (402, KmsResponseInvalidError, "status 402"),
        (403, KmsAccessDeniedError, ""),
        (404, MasterKeyNotFoundError, ""),
        (405, KmsResponseInvalidError, "status 405"),
        (412, KmsUnavailableError, "the node has not caught up with its cluster yet"),
        (429, KmsThrottledError, ""),
        (472, KmsUnavailableError, "it is a disaster recovery secondary"),
        (473, KmsUnavailableError, "it is a performance standby"),
        (499, KmsResponseInvalidError, "status 499"),
        (500, KmsUnavailableError, "status 500"),
        (501, KmsUnavailableError, "it is not initialised"),
    ],
)
def test_where_no_reason_is_known_the_status_decides(status: int, kind: type[KmsError], detail: str) -> None:
    meaning = found(status, retry_after_seconds=7)
    assert (type(meaning), meaning.detail) == (kind, detail)
    assert meaning.retry_after_seconds == (7 if meaning.retryable else 0)
    assert VaultRefusal(status).is_final == (status in (400, 401, 403, 404, 405))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 429, 503])
def test_a_refused_login_is_no_denied_key(status: int) -> None:
    """Readers that hide denied columns would return less than there is."""
    meaning = found(status, login="approle")
    assert type(meaning) is {429: KmsThrottledError, 503: KmsUnavailableError}.get(status, KmsConfigurationError)
    assert (meaning.detail == "the login with approle was refused") == (status < 429)


def test_a_login_that_is_answered_in_an_odd_way_is_not_refused() -> None:
    assert found(302, login="approle").detail == "status 302"


@pytest.mark.parametrize(
    ("reason", "kind", "detail"),
    [
        (Reason.NO_KEY, MasterKeyNotFoundError, ""),
        (Reason.DISABLED, MasterKeyDisabledError, "soft-deleted"),
        (Reason.VERSION_DISABLED, MasterKeyDisabledError, "min_decryption_version"),
        (Reason.WRAPPED_KEY_INVALID, WrappedKeyInvalidError, ""),
        (Reason.TOO_LARGE, RequestTooLargeError, "too large"),
        (Reason.CONTEXT_MISSING, KmsConfigurationError, "needs a context"),
        (Reason.WRONG_TYPE, KmsConfigurationError, "do not wrap"),
        (Reason.NO_MOUNT, KmsConfigurationError, "no transit engine at mount point 'here'"),
        (Reason.NO_NAMESPACE, KmsConfigurationError, "no such namespace"),
        (Reason.TOKEN_DEAD, KmsConfigurationError, "expired"),
        (Reason.TOKEN_UNKNOWN, KmsAccessDeniedError, "may not ask whether it is valid"),
        (Reason.REDIRECT, KmsConfigurationError, "it redirects to an address that may not be followed"),
    ],
)
@pytest.mark.parametrize("status", [200, 400, 403, 500])
def test_a_reason_that_is_known_decides(status: int, reason: Reason, kind: type[KmsError], detail: str) -> None:
    meaning = found(status, reason)
    assert type(meaning) is kind and detail in meaning.detail


def test_some_reasons_are_of_some_refusals() -> None:
    assert found(503, Reason.SEALED).detail == "it is sealed"
    assert type(found(503, Reason.SEALED)) is KmsUnavailableError
    assert type(found(200, Reason.NOT_JSON)) is KmsResponseInvalidError
    assert "JSON" in found(200, Reason.NOT_JSON).detail and "JSON" in found(299, Reason.NOT_JSON).detail
    # A proxy on the way says so with a page.
    assert type(found(503, Reason.NOT_JSON)) is KmsUnavailableError
    assert found(300, Reason.NOT_JSON).detail == "status 300"
    # It is the auth method that is not mounted.
    assert found(404, Reason.NO_MOUNT, login="approle").detail == "the login with approle was refused"
    assert "it redirects to other.host," in found(307, Reason.REDIRECT, host="other.host").detail


def test_a_text_is_a_reason_and_nothing_else() -> None:
    assert reason_of(["x", 7, None, "1 error occurred: encryption key not found"]) is Reason.NO_KEY
    assert reason_of(["Vault is sealed"]) is Reason.SEALED
    assert reason_of([]) is reason_of(["permission denied"]) is reason_of([7]) is Reason.UNKNOWN


def tls(
    kind: type[ssl.SSLError] = ssl.SSLError, reason: str = "", text: str = "s.CANARY"
) -> requests.exceptions.SSLError:
    error = kind(1, text)
    error.reason = reason
    failed = requests.exceptions.SSLError("s.CANARY")
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (tls(ssl.SSLCertVerificationError), KmsConfigurationError, "certificate is not one that we trust"),
        (tls(reason="TLSV13_ALERT_CERTIFICATE_REQUIRED"), KmsConfigurationError, "TLS failed (TLSV13_ALERT"),
        (tls(reason="wrong_version_number"), KmsConfigurationError, "TLS failed (wrong_version_number)"),
        (tls(reason="UNEXPECTED_EOF_WHILE_READING"), KmsUnavailableError, "the connection failed (SSLError)"),
        (tls(text="unknown_ca"), KmsConfigurationError, "TLS failed (no reason given)"),
        (tls(reason="UNEXPECTED_EOF_WHILE_READING", text="unknown_ca"), KmsUnavailableError, "(SSLError)"),
        (tls(), KmsUnavailableError, "the connection failed (SSLError)"),
        (requests.ReadTimeout("s.CANARY"), KmsUnavailableError, "it did not answer in time"),
        (TimeoutError("s.CANARY"), KmsUnavailableError, "it did not answer in time"),
        (ConnectionRefusedError(111, "s.CANARY"), KmsUnavailableError, "the connection was refused"),
        (requests.ConnectionError("s.CANARY"), KmsUnavailableError, "the connection failed (ConnectionError)"),
    ],
)
def test_what_goes_wrong_on_the_way(error: Exception, kind: type[KmsError], detail: str) -> None:
    meaning = connection_error(error, CALL)
    assert type(meaning) is kind and detail in meaning.detail and "CANARY" not in str(meaning)


def test_what_goes_wrong_elsewhere_has_no_meaning() -> None:
    for error in (ValueError("timed out"), VaultRefusal(403)):
        assert connection_error(error, CALL) is None
