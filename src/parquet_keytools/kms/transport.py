"""What backends share on the way to a server: its address, TLS, what its failures mean, and silence in SDKs' logs.

Files are looked at before the first connection: a wrong one would make the KMS look as if it could not be reached,
and for the passphrase of a private key OpenSSL would ask a terminal.
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
from typing import Any
from urllib.parse import SplitResult, urlsplit

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.contract import CallFacts

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
    """Return the parts of an http or https URL and its host, or None where it is none."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return (parts, host) if parts.scheme in ("http", "https") and host else None


def mistake_in_url(url: str, setting: str, *, allow_http: bool) -> str:
    """Return why a URL may not be used as the address of a KMS, or nothing.

    Args:
        url: The URL. It is not quoted, for it may hold a password.
        setting: Where it is set.
        allow_http: Whether another machine may be reached without TLS.
    """
    found = http_parts(url)
    if found is None:
        return f"{setting} has to be an address such as https://kms.example:8200"
    parts, host = found
    # A password stands behind a user's name, which may be empty.
    if parts.username is not None or parts.query or parts.fragment:
        return f"{setting} must hold nothing but scheme, host, port and path"
    if parts.scheme == "http" and not allow_http and not is_loopback(host):
        return f"{setting} is without TLS, so that all can read the keys: use https, or set allow_http: true"
    return ""


def check_certificates(file: str, *, backend: str) -> None:
    """Check a file of the certificates that vouch for a server.

    Raises:
        KmsConfigurationError: It cannot be read, or has no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except OSError as error:
        raise _mistake(f"{file} cannot be used as certificates", error, backend) from None


def check_client_certificate(file: str, key_file: str | None, *, backend: str) -> None:
    """Check a client certificate and its private key, which may be in the same file.

    Raises:
        KmsConfigurationError: They cannot be read, do not belong together, or the key needs a passphrase.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(file, key_file, password="")
    except OSError as error:
        what = file if key_file is None else f"{file} with {key_file}"
        hint = "It takes a certificate and its private key, both PEM, the key without a passphrase."
        raise _mistake(f"{what} cannot be used as a client certificate", error, backend, hint) from None


def _mistake(detail: str, error: OSError, backend: str, hint: str = "") -> KmsConfigurationError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    detail = f"{detail} ({reason or type(error).__name__})"
    return CallFacts(backend, "connect").error(KmsConfigurationError, detail, hint)


def tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS that led to an exception, if one did."""
    return next((found for found in _causes(error) if isinstance(found, ssl.SSLError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it; some SDKs keep these among the arguments of theirs."""
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


def unreachable_because(error: BaseException) -> str:
    """Return why a server could not be reached, as far as an exception says; empty where it does not."""
    for found in _causes(error):
        if isinstance(found, socket.gaierror):
            return "its host name cannot be resolved"
        if isinstance(found, ConnectionRefusedError):
            return "the connection was refused"
        if isinstance(found, ConnectionError) and found.errno is not None:
            return "the connection was closed"
        if isinstance(found, TimeoutError):
            return "no answer in time"
        if isinstance(found, OSError) and found.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return "no network route leads there"
    return ""


def retry_after_seconds(header: object) -> float:
    """Return how many seconds a server wants to be left alone, as Retry-After says; 0 where it is no number."""
    is_number = isinstance(header, str) and re.fullmatch(r"[0-9]{1,9}", header)
    return float(min(int(str(header)), _LONGEST_RETRY_AFTER_SECONDS)) if is_number else 0.0


class SdkLogs:
    """The loggers of an SDK, silent in the threads that are in a call of ours: they log keys and tokens at DEBUG.

    Args:
        *names: Loggers; those below them are silenced too.
        least_level: Of what is let through all the same, without its traceback, which has texts of answers in it.
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
        """Filter the loggers that were added since the last time."""
        # Loggers are never removed. Going over all of them takes as long as signing a request.
        for name in self._names:
            logging.getLogger(name)
        number = len(logging.root.manager.loggerDict)
        if number == self._loggers_seen:
            return
        # A filter of a logger does not hold for the loggers below it, so each of them needs it.
        for name in list(logging.root.manager.loggerDict):
            if any(f"{name}.".startswith(f"{ours}.") for ours in self._names):
                logging.getLogger(name).addFilter(self._may_pass)
        # Only now: another thread that comes meanwhile must not take them for silent.
        self._loggers_seen = number

    def _may_pass(self, record: logging.LogRecord) -> bool:
        if not self._in_our_call.get():
            return True
        record.exc_info = record.exc_text = None
        return record.levelno >= self._least_level
