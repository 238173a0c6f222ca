"""What refusals of Vault and OpenBao mean: by class and status, never by a text that may quote a request."""

from __future__ import annotations

from typing import Any

import pytest

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
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.kms.vault import (
    NO_MOUNT,
    NOT_JSON,
    RequestTooLargeError,
    VaultRefusal,
    meaning_of_texts,
)


def found(status: int, known: Meaning | None = None, **more: Any) -> KmsError:
    refusal = VaultRefusal(status, known, **more)
    return refusal.meaning.error(refusal.retry_after_seconds)


@pytest.mark.parametrize(
    ("status", "kind", "detail"),
    [
        (302, KmsResponseInvalidError, "status 302"),
        (400, KmsConfigurationError, "the server rejects the request as invalid"),
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
    assert meaning.retry_after_seconds == 7
    assert VaultRefusal(status).is_final == (status in (400, 401, 403, 404, 405))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 429, 503])
def test_a_refused_login_is_no_denied_key(status: int) -> None:
    """Otherwise, readers that hide denied columns would return less data than there is."""
    meaning = found(status, login="approle")
    assert type(meaning) is {429: KmsThrottledError, 503: KmsUnavailableError}.get(status, KmsConfigurationError)
    assert (meaning.detail == "the login with approle was refused") == (status < 429)


def test_a_login_that_is_answered_in_an_odd_way_is_not_refused() -> None:
    assert found(302, login="approle").detail == "status 302"


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("1 error occurred: encryption key not found", MasterKeyNotFoundError, ""),
        ("unknown key type none", MasterKeyNotFoundError, ""),
        ("soft-deleted key", MasterKeyDisabledError, "soft-deleted"),
        ("disallowed by policy (too old)", MasterKeyDisabledError, "min_decryption_version"),
        ("cipher: message authentication failed", WrappedKeyInvalidError, ""),
        ("request body too large", RequestTooLargeError, "too large"),
        ("missing 'context' for key derivation", KmsConfigurationError, "needs a context"),
        ("not supported for key type", KmsConfigurationError, "cannot wrap"),
        ("no handler for route", KmsConfigurationError, "no transit engine at mount_point"),
        ("namespace not found", KmsConfigurationError, "no such namespace"),
        ("Vault is sealed", KmsUnavailableError, "it is sealed"),
    ],
)
@pytest.mark.parametrize("status", [200, 400, 403, 500])
def test_a_text_that_is_known_decides(status: int, text: str, kind: type[KmsError], detail: str) -> None:
    error = found(status, meaning_of_texts(["x", 7, None, text]))
    assert type(error) is kind and detail in error.detail
    assert meaning_of_texts([]) is meaning_of_texts(["permission denied"]) is meaning_of_texts([7]) is None


def test_some_meanings_are_of_some_refusals() -> None:
    assert type(found(200, NOT_JSON)) is KmsResponseInvalidError
    assert "JSON" in found(200, NOT_JSON).detail and "JSON" in found(299, NOT_JSON).detail
    # A proxy on the way answers with a page.
    assert type(found(503, NOT_JSON)) is KmsUnavailableError
    assert found(300, NOT_JSON).detail == "status 300"
    # The auth method is not mounted.
    assert found(404, NO_MOUNT, login="approle").detail == "the login with approle was refused"
