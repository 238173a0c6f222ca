"""Turns refusals of Vault and OpenBao into errors of this package, without any text of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.contract import Meaning


class RequestTooLargeError(KmsConfigurationError):
    """The server refuses a request with this number of keys."""


NO_KEY = Meaning(MasterKeyNotFoundError)
WRAPPED_KEY_INVALID = Meaning(WrappedKeyInvalidError)
TOO_LARGE = Meaning(RequestTooLargeError, "the request is too large for it", "Lower batch_size.")
NEEDS_CONTEXT = Meaning(
    KmsConfigurationError, "it is a derived key, which needs a context", "Set context in the configuration."
)
NO_MOUNT = Meaning(
    KmsConfigurationError,
    "there is no transit engine at mount_point",
    "Check mount_point, url and namespace.",
)
NOT_JSON = Meaning(KmsResponseInvalidError, "it is not JSON of the expected form")
TOKEN_DEAD = Meaning(
    KmsConfigurationError,
    "the token has expired, was revoked, or never was valid",
    "Put a fresh token into the configuration, or use a login method, which gets its own token.",
)
TOKEN_UNKNOWN = Meaning(
    KmsAccessDeniedError, "the token may not look itself up, so it may also have expired or be revoked"
)
REDIRECT = Meaning(KmsConfigurationError, "it redirects to an address that must not be followed")

_TEXTS = {
    # Text of the server -> its meaning, whatever the status.
    "encryption key not found": NO_KEY,
    # The answer to a wrap with a missing key: the wrap sends an invalid key type, so that no key is created.
    "unknown key type": NO_KEY,
    "soft-deleted key": Meaning(MasterKeyDisabledError, "it is soft-deleted"),
    "disallowed by policy (too old)": Meaning(
        MasterKeyDisabledError,
        "the version that wrapped the key is older than min_decryption_version",
        "Lower min_decryption_version in the KMS, rotate the files, then raise it again.",
    ),
    "message authentication failed": WRAPPED_KEY_INVALID,
    "invalid ciphertext": WRAPPED_KEY_INVALID,
    "missing ciphertext": WRAPPED_KEY_INVALID,
    "exceeded maximum": TOO_LARGE,
    "request body too large": TOO_LARGE,
    "missing 'context'": NEEDS_CONTEXT,
    "not supported for key type": Meaning(
        KmsConfigurationError, "keys of its type cannot wrap", "Use a key of type aes256-gcm96."
    ),
    "no handler for route": NO_MOUNT,
    "unsupported path": NO_MOUNT,
    "unsupported operation": NO_MOUNT,
    "namespace not found": Meaning(KmsConfigurationError, "there is no such namespace", "Check namespace."),
    "is sealed": Meaning(KmsUnavailableError, "it is sealed"),
}


def meaning_of_texts(texts: Iterable[object]) -> Meaning | None:
    """Return the meaning of the texts of a refusal, or None if it is unknown."""
    joined = " ".join(text for text in texts if isinstance(text, str))
    return next((meaning for known, meaning in _TEXTS.items() if known in joined), None)


def redirect_to(host: str) -> Meaning:
    """Return the meaning of a redirect to a host that the configuration does not allow."""
    detail = f"it redirects to {host}, which must get neither token nor keys"
    hint = "If this host belongs to your cluster, add it to url or redirect_hosts, with https as well."
    return Meaning(KmsConfigurationError, detail, hint)


@dataclass(eq=False)
class VaultRefusal(Exception):  # noqa: N818 - it is translated before a caller sees it
    """The server refused a request, or sent an invalid answer. Holds no text of the server.

    Attributes:
        known: The meaning of the server's text; None if only the status is known.
        retry_after_seconds: How long the server asks the client to wait.
        login: The auth method whose login was refused, or empty.
    """

    status: int
    known: Meaning | None = None
    retry_after_seconds: float = 0.0
    login: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the same request with the same token would be refused again."""
        return self.status in (400, 401, 403, 404, 405)

    @property
    def meaning(self) -> Meaning:
        """The meaning of the text, or of the status."""
        # The mount of a login is one of an auth method. A page of a proxy has a status, which says more.
        says_less = (self.known is NO_MOUNT and self.login) or (self.known is NOT_JSON and self.status >= 300)
        if self.known is not None and not says_less:
            return self.known
        if self.login and self.is_final:
            # Not "access denied", which is about master keys: readers may hide the columns under a denied key.
            hint = "Check role, secret and mount of the auth method, and whether the secret has expired."
            return Meaning(KmsConfigurationError, f"the login with {self.login} was refused", hint)
        if self.status in _STATUSES:
            return _STATUSES[self.status]
        kind = KmsUnavailableError if self.status >= 500 else KmsResponseInvalidError
        return Meaning(kind, f"status {self.status}")


_STATUSES = {
    400: Meaning(
        KmsConfigurationError,
        "the server rejects the request as invalid",
        "Check that a transit engine is mounted at mount_point.",
    ),
    401: Meaning(KmsAccessDeniedError),
    403: Meaning(KmsAccessDeniedError),
    404: NO_KEY,
    412: Meaning(KmsUnavailableError, "the node has not caught up with its cluster yet"),
    429: Meaning(KmsThrottledError),
    472: Meaning(KmsUnavailableError, "it is a disaster recovery secondary"),
    473: Meaning(KmsUnavailableError, "it is a performance standby"),
    501: Meaning(KmsUnavailableError, "it is not initialised"),
}
