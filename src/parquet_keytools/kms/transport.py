"""Addresses, TLS, failures of connections, and filters for the logs of SDKs.

Certificate files are checked before the first connection: with a wrong file, the KMS would seem unreachable, and
OpenSSL would prompt for the passphrase of a private key on the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from parquet_keytools.errors import KmsConfigurationError, KmsError, KmsUnavailableError

_LONGEST_RETRY_AFTER_SECONDS = 3600


def is_loopback(host: str) -> bool:
    """Return whether a host, in brackets or not, is this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def http_parts(url: str) -> tuple[SplitResult, str] | None:
    """Return the parts of an http or https URL and its host, or None for any other text."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return (parts, host) if parts.scheme in ("http", "https") and host else None


def mistake_in_url(url: str, setting: str, *, allow_http: bool) -> str:
    """Return why a URL must not be used as the address of a KMS, or an empty string.

    The URL is not quoted, because it may contain a password. `allow_http` allows another machine without TLS.
    """
    found = http_parts(url)
    if found is None:
        return f"{setting} must be an address such as https://kms.example:8200"
    parts, host = found
    # The name of a user can be empty, and a password can follow it.
    if parts.username is not None or parts.query or parts.fragment:
        return f"{setting} must contain only scheme, host, port and path"
    if parts.scheme == "http" and not allow_http and not is_loopback(host):
        return f"{setting} is without TLS, so that others can read the keys: use https, or set allow_http: true"
    return ""


def check_certificates(file: str) -> None:
    """Check that a file can be read, and contains certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except OSError as error:
        raise _mistake(f"{file} cannot be used as certificates", error) from None


def check_client_certificate(file: str, key_file: str | None) -> None:
    """Check that a client certificate and its private key belong together, and need no passphrase."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(file, key_file, password="")
    except OSError as error:
        what = file if key_file is None else f"{file} with {key_file}"
        hint = "Configure a certificate and its private key, both as PEM, the key without a passphrase."
        raise _mistake(f"{what} cannot be used as a client certificate", error, hint) from None


def _mistake(detail: str, error: OSError, hint: str = "") -> KmsConfigurationError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    detail = f"{detail} ({reason or type(error).__name__})"
    return KmsConfigurationError(detail, operation="connect", hint=hint)


# --- failures of connections ---


class Meaning(NamedTuple):
    """The meaning of a failure in a KMS or its SDK."""

    kind: type[KmsError]
    detail: str = ""
    hint: str | None = None  # in place of the hint of the class

    def error(self, retry_after_seconds: float = 0.0) -> KmsError:
        """Return the error. `KmsClient` adds the facts of the call."""
        return self.kind(self.detail, hint=self.hint, retry_after_seconds=retry_after_seconds)


_TLS_IS_WRONG = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "HANDSHAKE_FAILURE",
    "WRONG_VERSION_NUMBER",
    "NO_PROTOCOLS_AVAILABLE",
    "UNSUPPORTED_PROTOCOL",
    "KEY_VALUES_MISMATCH",
)


def tls_failure(error: BaseException, address: str, certificates: str) -> Meaning | None:
    """Return the meaning of a mistake in the configuration of TLS, or None for any other exception of any SDK.

    `address` and `certificates` are the settings with the address of the KMS and with the certificates to trust.
    """
    tls = next((found for found in _causes(error) if isinstance(found, ssl.SSLError)), None)
    if isinstance(tls, ssl.SSLCertVerificationError):
        hint = f"Check {address}, and that {certificates} has the certificate of the server's authority."
        return Meaning(KmsConfigurationError, "the server's certificate is not trusted", hint)
    reason = getattr(tls, "reason", None)
    if tls is not None and any(word in str(reason or tls).upper() for word in _TLS_IS_WRONG):
        hint = f"Check whether {address} needs http or https, and check the client certificate, if there is one."
        return Meaning(KmsConfigurationError, f"TLS failed ({reason or 'no reason given'})", hint)
    return None


def connection_failure(error: Exception, address: str, certificates: str) -> Meaning | None:
    """Return the meaning of a failed connection, or None for any other exception; see `tls_failure`."""
    if found := tls_failure(error, address, certificates):
        return found
    if isinstance(error, OSError):  # which includes the errors of requests
        detail = unreachable_because(error) or f"the connection failed ({type(error).__name__})"
        return Meaning(KmsUnavailableError, detail)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes; some SDKs keep a cause among the arguments of their exceptions."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, BaseException) and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args]
            arguments = getattr(found, "kwargs", None)
            waiting += arguments.values() if isinstance(arguments, dict) else ()


REFUSED = "the connection was refused"
"""The reason, in all backends, why nothing listens at the address of a KMS."""

SILENT = "it did not answer in time"
"""The reason, in all backends, why a KMS gave no answer."""


def unreachable_because(error: BaseException) -> str:
    """Return why a server could not be reached, or an empty string if the exception does not say."""
    for found in _causes(error):
        if isinstance(found, socket.gaierror):
            return "its host name cannot be resolved"
        if isinstance(found, ConnectionRefusedError):
            return REFUSED
        if isinstance(found, ConnectionError) and found.errno is not None:
            return "the connection was closed"
        if isinstance(found, TimeoutError):
            return SILENT
        if isinstance(found, OSError) and found.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return "no network route leads there"
    return ""


def retry_after_seconds(header: object) -> float:
    """Return the seconds in a Retry-After header, or 0 if it is not a number."""
    is_number = isinstance(header, str) and re.fullmatch(r"[0-9]{1,9}", header)
    return float(min(int(str(header)), _LONGEST_RETRY_AFTER_SECONDS)) if is_number else 0.0


class SdkLogs:
    """The loggers of an SDK, and their children, which log keys and tokens at DEBUG: silent during our calls.

    Records from `least_level` on pass, without their tracebacks, which contain texts of answers.
    """

    def __init__(self, *names: str, least_level: int = logging.WARNING) -> None:
        self._names = names
        self._least_level = least_level
        self._in_our_call: ContextVar[bool] = ContextVar(f"parquet_keytools_call_of_{names[0]}", default=False)
        self._loggers_seen = 0

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Keep the loggers silent in a block."""
        self.add_filters()
        token = self._in_our_call.set(True)
        try:
            yield
        finally:
            self._in_our_call.reset(token)

    def add_filters(self) -> None:
        """Filter the loggers that were added since the last call."""
        # Loggers are never removed. A loop over all loggers takes as long as signing a request.
        for name in self._names:
            logging.getLogger(name)
        number = len(logging.root.manager.loggerDict)
        if number == self._loggers_seen:
            return
        # A filter does not apply to the children of a logger, so each child needs its own.
        for name in list(logging.root.manager.loggerDict):
            if any(f"{name}.".startswith(f"{ours}.") for ours in self._names):
                logging.getLogger(name).addFilter(self._may_pass)
        # Set last, so that another thread does not assume filters that are not added yet.
        self._loggers_seen = number

    def _may_pass(self, record: logging.LogRecord) -> bool:
        if not self._in_our_call.get():
            return True
        record.exc_info = record.exc_text = None
        return record.levelno >= self._least_level
