"""Code for server connections that backends share."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
import requests

from parquet_keytools.errors import KmsConfigurationError, KmsError, KmsUnavailableError
from parquet_keytools.kms.transport import (
    SdkLogs,
    connection_failure,
    http_parts,
    is_loopback,
    mistake_in_url,
    retry_after_seconds,
    tls_failure,
    unreachable_because,
)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)
    assert mistake_in_url(f"http://{host if ':' not in host else '[::1]'}:8200/x", "url", allow_http=False) == ""


@pytest.mark.parametrize(
    "host", ["", "localhost.example", "127.0.0.1.example", "128.0.0.1", "0.0.0.0", "::2", "10.0.0.1", "127.1"]
)
def test_other_machines(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "url",
    [
        "https://canary@kms.example",
        "https://:canary@kms.example",
        "https://user:canary@kms.example",
        "https://kms.example/?token=canary",
        "https://kms.example/#canary",
    ],
)
def test_an_address_holds_no_secret_that_logs_would_show(url: str) -> None:
    mistake = mistake_in_url(url, "url", allow_http=True)
    assert "url must contain only" in mistake and "canary" not in mistake


@pytest.mark.parametrize(
    "url", ["", "kms.example", "ftp://kms.example", "https://", "https://[", "https://h:x", "//h"]
)
def test_what_is_no_address(url: str) -> None:
    assert http_parts(url) is None
    assert "must be an address" in mistake_in_url(url, "url", allow_http=True)


def test_without_tls_all_can_read_the_keys() -> None:
    assert "is without TLS" in mistake_in_url("http://kms.example:8200", "url", allow_http=False)
    assert mistake_in_url("http://kms.example:8200", "url", allow_http=True) == ""
    assert mistake_in_url("https://kms.example/path", "url", allow_http=False) == ""


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("0", 0), ("7", 7), ("3600", 3600), ("3601", 3600), ("9" * 9, 3600), ("9" * 10, 0), ("-1", 0), ("1.5", 0)],
)
def test_how_long_a_server_wants_to_be_left_alone(header: str, seconds: float) -> None:
    assert retry_after_seconds(header) == seconds


def test_a_date_is_no_number_of_seconds() -> None:
    assert retry_after_seconds("Wed, 21 Oct 2026 07:28:00 GMT") == retry_after_seconds(None) == 0


class WrapperError(Exception):
    """Keeps its cause as SDKs do."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.kwargs = kwargs


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (socket.gaierror(-2, "Name or service not known"), "its host name cannot be resolved"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "the connection was refused"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "the connection was closed"),
        (TimeoutError("timed out"), "it did not answer in time"),
        (OSError(errno.EHOSTUNREACH, "No route"), "no network route leads there"),
        (OSError(errno.EIO, "Input/output error"), ""),
        (ValueError("something else"), ""),
    ],
)
def test_why_a_server_is_not_reached(cause: Exception, reason: str) -> None:
    """At any depth in an SDK's exception, also where exceptions refer to each other."""
    chained, circular = RuntimeError(), RuntimeError()
    chained.__cause__ = cause
    circular.__context__, circular.args = circular, (circular, cause)
    for error in (cause, chained, circular, RuntimeError(cause), WrapperError(error=cause)):
        assert unreachable_because(error) == reason
    assert tls_failure(WrapperError(error=RuntimeError(ssl.SSLError(1, "unknown_ca"))), "url", "ca_file")
    assert tls_failure(chained, "url", "ca_file") is None


@pytest.fixture
def passed() -> Iterator[list[str]]:
    """The messages that an SDK's loggers pass on."""
    found: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: found.append(f"{record.getMessage()} {record.exc_info}")  # type: ignore[method-assign]
    # The parts of an SDK, and unrelated packages.
    names = ("sdk_of_test", "sdk_of_test.part", "sdk_of_test_other")
    for name in names:
        logging.getLogger(name)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield found
    root.removeHandler(handler)
    root.setLevel(level)
    for name in names:
        logging.getLogger(name).filters.clear()


def test_an_sdk_is_silent_in_our_calls_alone(passed: list[str]) -> None:
    logs = SdkLogs("sdk_of_test")

    def log_in_a_thread() -> None:
        thread = threading.Thread(target=logging.getLogger("sdk_of_test").debug, args=("of another thread",))
        thread.start()
        thread.join()

    with logs.silenced():
        logging.getLogger("sdk_of_test").debug("key")
        logging.getLogger("sdk_of_test.part").info("key")
        logging.getLogger("sdk_of_test_other").debug("of another SDK")
        log_in_a_thread()
        with logs.silenced():
            pass
        logging.getLogger("sdk_of_test").debug("key")
        try:
            raise ValueError("key")
        except ValueError:
            logging.getLogger("sdk_of_test").warning("of all", exc_info=True)
    logging.getLogger("sdk_of_test").debug("of the caller")
    expected = ["of another SDK", "of another thread", "of all", "of the caller"]
    assert passed == [f"{text} None" for text in expected]


def test_loggers_that_nobody_has_asked_for_yet_are_silent(passed: list[str]) -> None:
    """An SDK may be imported in the first call."""
    with SdkLogs("sdk_of_test_one", "sdk_of_test_two").silenced():
        logging.getLogger("sdk_of_test_one").critical("let through")
        for name in ("sdk_of_test_one", "sdk_of_test_two"):
            logging.getLogger(name).warning("let through")
            logging.getLogger(name).info("key")
    assert passed == ["let through None"] * 3


def test_loggers_that_an_sdk_makes_later_are_silent_too(passed: list[str]) -> None:
    logs = SdkLogs("sdk_of_test", least_level=logging.CRITICAL + 1)
    with logs.silenced():
        pass
    late = logging.getLogger("sdk_of_test.late.and_later")
    with logs.silenced():
        late.critical("key")
        with pytest.raises(ValueError, match="x"), logs.silenced():
            raise ValueError("x")
        late.critical("key")
    late.critical("of the caller")
    assert passed == ["of the caller None"]


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
        (tls(ssl.SSLCertVerificationError), KmsConfigurationError, "certificate is not trusted"),
        (tls(reason="TLSV13_ALERT_CERTIFICATE_REQUIRED"), KmsConfigurationError, "TLS failed (TLSV13_ALERT"),
        (tls(reason="wrong_version_number"), KmsConfigurationError, "TLS failed (wrong_version_number)"),
        (tls(reason="UNEXPECTED_EOF_WHILE_READING"), KmsUnavailableError, "the connection failed (SSLError)"),
        (tls(text="unknown_ca"), KmsConfigurationError, "TLS failed (no reason given)"),
        (tls(reason="UNEXPECTED_EOF_WHILE_READING", text="unknown_ca"), KmsUnavailableError, "(SSLError)"),
        (tls(), KmsUnavailableError, "the connection failed (SSLError)"),
        (requests.ConnectionError(TimeoutError("s.CANARY")), KmsUnavailableError, "it did not answer in time"),
        (TimeoutError("s.CANARY"), KmsUnavailableError, "it did not answer in time"),
        (ConnectionRefusedError(111, "s.CANARY"), KmsUnavailableError, "the connection was refused"),
        (requests.ConnectionError("s.CANARY"), KmsUnavailableError, "the connection failed (ConnectionError)"),
    ],
)
def test_what_goes_wrong_on_the_way(error: Exception, kind: type[KmsError], detail: str) -> None:
    meaning = connection_failure(error, "url", "ca_file")
    assert meaning is not None and meaning.kind is kind
    assert detail in meaning.detail and "CANARY" not in str(meaning)


def test_what_goes_wrong_elsewhere_has_no_meaning() -> None:
    for error in (ValueError("timed out"), KmsUnavailableError()):
        assert connection_failure(error, "url", "ca_file") is None
