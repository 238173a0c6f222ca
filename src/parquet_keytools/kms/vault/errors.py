"""Why Vault or OpenBao refused, as our errors; of the server's own texts only what class they are is kept."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

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
from parquet_keytools.kms.contract import CallFacts
from parquet_keytools.kms.transport import tls_error, unreachable_because

BACKEND = "vault"
CONNECT = CallFacts(BACKEND, "connect")


class Reason(Enum):
    """What a text of the server means."""

    UNKNOWN = auto()
    NO_KEY = auto()
    DISABLED = auto()
    VERSION_DISABLED = auto()
    WRAPPED_KEY_INVALID = auto()
    TOO_LARGE = auto()
    CONTEXT_MISSING = auto()
    WRONG_TYPE = auto()
    NO_MOUNT = auto()
    NO_NAMESPACE = auto()
    SEALED = auto()
    # These are ours:
    NOT_JSON = auto()
    REDIRECT = auto()
    TOKEN_DEAD = auto()
    TOKEN_UNKNOWN = auto()


_TEXTS = (
    ("encryption key not found", Reason.NO_KEY),
    # What a wrap gets that would have created the key, because the type that it sends is none.
    ("unknown key type", Reason.NO_KEY),
    ("soft-deleted key", Reason.DISABLED),
    ("disallowed by policy (too old)", Reason.VERSION_DISABLED),
    ("message authentication failed", Reason.WRAPPED_KEY_INVALID),
    ("invalid ciphertext", Reason.WRAPPED_KEY_INVALID),
    ("missing ciphertext", Reason.WRAPPED_KEY_INVALID),
    ("exceeded maximum", Reason.TOO_LARGE),
    ("request body too large", Reason.TOO_LARGE),
    ("missing 'context'", Reason.CONTEXT_MISSING),
    ("not supported for key type", Reason.WRONG_TYPE),
    ("no handler for route", Reason.NO_MOUNT),
    ("unsupported path", Reason.NO_MOUNT),
    ("unsupported operation", Reason.NO_MOUNT),
    ("namespace not found", Reason.NO_NAMESPACE),
    ("is sealed", Reason.SEALED),
)


def reason_of(texts: Iterable[object]) -> Reason:
    """Return what the texts of a refusal mean."""
    joined = " ".join(text for text in texts if isinstance(text, str))
    return next((reason for known, reason in _TEXTS if known in joined), Reason.UNKNOWN)


@dataclass(eq=False)
class VaultRefusal(Exception):  # noqa: N818 - not an error of ours: it becomes one
    """The server refused, or its answer is none. Holds nothing that the server wrote.

    Attributes:
        reason: What the server's text means.
        retry_after_seconds: How long it wants to be left alone.
        login: The auth method whose login was refused, or empty.
        host: Where it redirects to, for `Reason.REDIRECT`.
    """

    status: int
    reason: Reason = Reason.UNKNOWN
    retry_after_seconds: float = 0.0
    login: str = ""
    host: str = ""

    @property
    def is_final(self) -> bool:
        """Whether asking again, with the same token, would change nothing."""
        return self.status in (400, 401, 403, 404, 405)


class RequestTooLargeError(KmsConfigurationError):
    """The server takes no request with so many keys."""


@dataclass(frozen=True)
class TransitCall(CallFacts):
    """What a call was about, and the mount point of the engine that got it."""

    mount_point: str = ""


_STATUSES_OF_NODES = {
    412: "the node has not caught up with its cluster yet",
    472: "it is a disaster recovery secondary",
    473: "it is a performance standby",
    501: "it is not initialised",
}


def refusal_error(refusal: VaultRefusal, call: TransitCall) -> KmsError:
    """Return the error that stands for a refusal."""
    status = refusal.status
    by_reason = _error_of_reason(refusal, call)
    if by_reason is not None:
        return by_reason
    if status == 429:
        return call.error(KmsThrottledError, wait=refusal.retry_after_seconds)
    if status in _STATUSES_OF_NODES or status >= 500:
        detail = _STATUSES_OF_NODES.get(status, f"status {status}")
        if refusal.reason is Reason.SEALED:
            detail = "it is sealed"
        return call.error(KmsUnavailableError, detail, wait=refusal.retry_after_seconds)
    if refusal.login and refusal.is_final:
        # Not "access denied", which is said of master keys: readers may hide the columns under such a key.
        hint = "Check role, secret and mount of the auth method, and whether the secret has expired."
        return call.error(KmsConfigurationError, f"the login with {refusal.login} was refused", hint)
    if status in (401, 403):
        return call.error(KmsAccessDeniedError)
    if status == 404:
        return call.error(MasterKeyNotFoundError)
    if status == 400:
        detail = f"the server takes the request for an invalid one, at mount point {call.mount_point!r}"
        return call.error(KmsConfigurationError, detail, "Check that a transit engine is mounted there.")
    return call.error(KmsResponseInvalidError, f"status {status}")


def _error_of_reason(refusal: VaultRefusal, call: TransitCall) -> KmsError | None:
    """Return the error for what is known to be the reason, whatever the status."""
    match refusal.reason:
        case Reason.NO_KEY:
            return call.error(MasterKeyNotFoundError)
        case Reason.DISABLED:
            return call.error(MasterKeyDisabledError, "it is soft-deleted")
        case Reason.VERSION_DISABLED:
            detail = "the version that wrapped the key is older than min_decryption_version"
            hint = "Lower min_decryption_version in the KMS, rotate the files, then raise it again."
            return call.error(MasterKeyDisabledError, detail, hint)
        case Reason.WRAPPED_KEY_INVALID:
            return call.error(WrappedKeyInvalidError)
        case Reason.TOO_LARGE:
            return call.error(RequestTooLargeError, "the request is too large for it", "Lower batch_size.")
        case Reason.CONTEXT_MISSING:
            hint = "Set context in the configuration."
            return call.error(KmsConfigurationError, "it is a derived key, which needs a context", hint)
        case Reason.WRONG_TYPE:
            detail = "keys of its type do not wrap"
            return call.error(KmsConfigurationError, detail, "Use a key of type aes256-gcm96.")
        case Reason.NO_MOUNT if not refusal.login:
            detail = f"there is no transit engine at mount point {call.mount_point!r}"
            return call.error(KmsConfigurationError, detail, "Check mount_point, url and namespace.")
        case Reason.NO_NAMESPACE:
            return call.error(KmsConfigurationError, "there is no such namespace", "Check namespace.")
        case Reason.NOT_JSON if refusal.status < 300:
            return call.error(KmsResponseInvalidError, "it is not JSON of the expected form")
        case Reason.REDIRECT:
            return _redirect_error(refusal, call)
        case Reason.TOKEN_DEAD:
            detail = "the token has expired, was revoked, or never was valid"
            hint = "Put a fresh token into the configuration, or use a login method, which gets its own."
            return call.error(KmsConfigurationError, detail, hint)
        case Reason.TOKEN_UNKNOWN:
            detail = "the token may not ask whether it is valid, so it may also have expired or be revoked"
            return call.error(KmsAccessDeniedError, detail)
        case _:
            return None


def _redirect_error(refusal: VaultRefusal, call: TransitCall) -> KmsError:
    if not refusal.host:
        return call.error(KmsConfigurationError, "it redirects to an address that may not be followed")
    detail = f"it redirects to {refusal.host}, which gets neither token nor keys"
    hint = "If that host is one of your cluster, put it into url or redirect_hosts, with https as well."
    return call.error(KmsConfigurationError, detail, hint)


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


def connection_error(error: Exception, call: TransitCall) -> KmsError | None:
    """Return the error for a failure on the way to the server, or None where it is something else."""
    tls = tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        hint = "Check url, and that ca_file has the certificate of the authority that vouches for the server."
        return call.error(KmsConfigurationError, "the server's certificate is not one that we trust", hint)
    if tls is not None and any(word in str(tls.reason or tls).upper() for word in _TLS_IS_WRONG):
        hint = "Check that url is right in http or https, and client_cert and client_key."
        return call.error(KmsConfigurationError, f"TLS failed ({tls.reason or 'no reason given'})", hint)
    if isinstance(error, (requests.Timeout, TimeoutError)):
        return call.error(KmsUnavailableError, "it did not answer in time")
    if isinstance(error, OSError):  # those of requests are such errors, too
        detail = unreachable_because(error) or f"the connection failed ({type(error).__name__})"
        return call.error(KmsUnavailableError, detail)
    return None
