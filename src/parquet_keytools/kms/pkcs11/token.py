"""The settings of a token, and the PKCS#11 libraries of a process: one login for each token, and pooled sessions.

PKCS#11 keeps one state for each process, which all clients share. python-pkcs11 initializes a library with
`C_Initialize(NULL)`, the promise that one thread calls it at a time. So by default one call at a time enters a
library, from whichever client: SoftHSM, for one, crashes otherwise.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Self

import pkcs11
from pkcs11.constants import TokenFlag
from pydantic import Field, SecretStr, model_validator

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
)
from parquet_keytools.kms.passphrase import passphrase_source
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import CallGate, ForkSafeLock, OwnerProcess


class Pkcs11Settings(RemoteKmsSettings):
    """Settings of a PKCS#11 token; relative paths start at the configuration's folder."""

    type: Literal["pkcs11"] = "pkcs11"
    module: Path = Field(description="Path of the HSM's PKCS#11 library.")
    token_label: str | None = Field(default=None, min_length=1, description="Label of the token.")
    serial: str | None = Field(default=None, min_length=1, description="Serial number of the token.")
    slot: int | None = Field(default=None, ge=0, description="Number of the token's slot.")
    pin: SecretStr | None = Field(default=None, description="PIN of the user.")
    pin_file: Path | None = Field(default=None, description="File with the PIN, which only its owner may read.")
    mechanism: Literal["AES_GCM", "AES_KEY_WRAP"] = Field(
        default="AES_GCM", description="How keys are wrapped: CKM_AES_GCM, or CKM_AES_KEY_WRAP (RFC 3394)."
    )
    hsm_chooses_nonce: bool = Field(
        default=False, description="The HSM replaces the nonce of AES-GCM, and wants it to be zero (AWS CloudHSM)."
    )
    max_sessions: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Maximum number of sessions in use at a time in a process. More than 1 only if the library is "
        "safe for threads even if it is initialized for one thread.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.token_label, self.serial, self.slot).count(None) != 2:
            raise ValueError("give one of token_label, serial and slot")
        if (self.pin is None) == (self.pin_file is None):
            raise ValueError("give either pin or pin_file")
        return self


# --- the meaning of errors ---


def errors_named(names: str) -> tuple[type[pkcs11.PKCS11Error], ...]:
    """Return the errors of these names."""
    return tuple(getattr(pkcs11, name) for name in names.split())


_LOST = errors_named(
    "DeviceError DeviceRemoved GeneralError SessionClosed SessionHandleInvalid SlotIDInvalid TokenNotPresent "
    "TokenNotRecognised UserNotLoggedIn"
)
"""After these, sessions and handles are worthless. SoftHSM sees a token that returns only if it is initialized."""

_MEANINGS = {
    _LOST: Meaning(
        KmsUnavailableError,
        "the token was removed, or its connection failed",
        "Check the HSM, its connection, and that its token is there.",
    ),
    errors_named(
        "KeyHandleInvalid ObjectHandleInvalid UnwrappingKeyHandleInvalid WrappingKeyHandleInvalid"
    ): Meaning(
        MasterKeyNotFoundError,
        "the key was deleted while it was being used",
        "Restore it from a backup of the token: a new key of the same name is another key.",
    ),
    errors_named(
        "FunctionNotSupported KeySizeRange KeyTypeInconsistent MechanismInvalid MechanismParamInvalid"
    ): Meaning(
        KmsConfigurationError,
        "the token, or its policy, does not allow this mechanism with this key",
        "Set `mechanism` to one that the token has: AES_GCM or AES_KEY_WRAP.",
    ),
    errors_named(
        "AttributeReadOnly AttributeTypeInvalid AttributeValueInvalid FunctionRejected SessionReadOnly "
        "TemplateIncomplete TemplateInconsistent TokenWriteProtected"
    ): Meaning(
        KmsAccessDeniedError,
        "the token does not allow these objects, or this change",
        "Use the vendor's tool, as the user who may change the key.",
    ),
    errors_named("DeviceMemory HostMemory SessionCount"): Meaning(
        KmsThrottledError,
        "the token has no session left, or no memory",
        "End processes that hold sessions, or raise the limit of the token.",
    ),
    errors_named("PinExpired PinLocked UserPinNotInitialized"): Meaning(
        KmsConfigurationError,
        "the PIN is locked, has expired, or was never set",
        "Only the security officer of the token can change this.",
    ),
}


def meaning(error: Exception) -> Meaning | None:
    """Return the meaning of an error of the library, or None if it is unknown."""
    return next((meaning for kinds, meaning in _MEANINGS.items() if isinstance(error, kinds)), None)


# --- tokens and PINs ---

_WRONG_PIN = errors_named("PinIncorrect PinInvalid PinLenRange")
_PIN_HINT = "Correct `pin` or `pin_file`. Each wrong PIN counts, and the token locks after a few."

_digest_key = secrets.token_bytes(32)
_refused_pins: set[tuple[str, bytes, bytes]] = set()
"""Library, serial number of the token and digest of each PIN that it refused: no PIN is tried twice."""


class Token:
    """A token, and how one client uses it; relative paths in the settings start at a folder."""

    def __init__(self, settings: Pkcs11Settings, folder: Path) -> None:
        names = {"label": settings.token_label, "serial": settings.serial, "slot": settings.slot}
        self._kind, self._name = next((kind, name) for kind, name in names.items() if name is not None)
        self.name = f"token with the {self._kind} {self._name!r}"
        self.library = os.path.realpath(folder / expanded(settings.module))
        self.pin = passphrase_source(settings.pin, settings.pin_file, folder, what="PIN", backend="pkcs11")
        self._max_sessions = settings.max_sessions

    def is_named(self, found: pkcs11.Token) -> bool:
        """Return whether this is the token."""
        serial = found.serial.decode(errors="replace")
        return {"label": found.label, "serial": serial, "slot": found.slot.slot_id}[self._kind] == self._name

    @contextlib.contextmanager
    def session(self, within_seconds: float) -> Iterator[pkcs11.Session]:
        """Use a session of the logged-in user in a block; wait so long while other sessions are in use.

        Raises `KmsError`, or a `pkcs11.PKCS11Error` that `meaning` knows. A call cannot be interrupted.
        """
        library = _library_at(self.library)
        with library.turn(self._max_sessions, within_seconds):
            idle, session = library.taken(self)
            # After an error of the library, an operation may still be active in the session.
            is_usable = False
            try:
                yield session
                is_usable = True
            except KmsError:
                is_usable = True
                raise
            finally:
                if is_usable and library.idle.get(self.name) is idle:
                    idle.append(session)
                else:
                    _close([session])

    def log_out(self) -> None:
        """Close the sessions of this process. Another client logs in again when it is next used."""
        library = _libraries.get(self.library)
        if library is not None and library.owner.is_here:
            with contextlib.suppress(KmsThrottledError), library.turn(self._max_sessions, 2.0):
                _close(library.idle.pop(self.name, []))


def check_present(session: pkcs11.Session) -> None:
    """Raise `PKCS11Error` unless the token of a session is still there: some libraries just show no objects."""
    known, now = session.token, session.token.slot.get_token()
    if (now.label, now.serial) != (known.label, known.serial):
        raise pkcs11.TokenNotPresent


# --- the libraries of this process ---


_libraries: dict[str, _Library] = {}
_lock = ForkSafeLock()
_CALLS = CallGate()


def _library_at(path: str) -> _Library:
    """Return a library of this process. A forked child initializes it again, as PKCS#11 demands."""
    with _lock:
        library = _libraries.get(path)
        if library is None or not library.owner.is_here:
            with _CALLS:
                library = _libraries[path] = _Library(path, is_inherited=library is not None)
        return library


class _Library:
    def __init__(self, path: str, *, is_inherited: bool) -> None:
        self.owner = OwnerProcess()
        self._changed = threading.Condition()
        self._in_use = 0
        self._most = sys.maxsize
        self._is_stale = is_inherited
        self._logging_in = threading.Lock()
        # By the name of the token. The first idle session stays: with the last session, the login would end.
        self._tokens: dict[str, pkcs11.Token] = {}
        self.idle: dict[str, list[pkcs11.Session]] = {}
        try:
            self._library = pkcs11.lib(path)
        except pkcs11.PKCS11Error as error:
            if type(error) is not pkcs11.PKCS11Error:
                raise
            detail = f"{path} cannot be loaded as a PKCS#11 library"
            hint = f"Check that `module` exists and is for this machine, and with `ldd {path}` what it needs."
            raise KmsConfigurationError(detail, hint=hint) from None

    @contextlib.contextmanager
    def turn(self, most: int, within_seconds: float) -> Iterator[None]:
        """Hold one of the sessions in use. If clients allow different numbers of them, the smallest counts."""
        # Starting over ends all sessions, so all others must be done.
        is_free: Callable[[], bool] = lambda: self._in_use < (1 if self._is_stale else self._most)  # noqa: E731
        with self._changed:
            self._most = min(self._most, most)
            if not self._changed.wait_for(is_free, within_seconds):
                raise KmsThrottledError("all sessions that `max_sessions` allows were in use")
            self._in_use += 1
            is_stale = self._is_stale
        try:
            with _CALLS:
                if is_stale:
                    self._start_over()
                yield
        except _LOST:
            self._is_stale = True
            raise
        finally:
            with self._changed:
                self._in_use -= 1
                self._changed.notify_all()

    def _start_over(self) -> None:
        self.idle.clear()
        # Libraries that notice a fork refuse to finalize what the parent initialized.
        with contextlib.suppress(pkcs11.PKCS11Error):
            self._library.finalize()
        self._library.initialize()
        self._is_stale = False

    def taken(self, token: Token) -> tuple[list[pkcs11.Session], pkcs11.Session]:
        """Return the idle sessions of a token, and one that was among them or is new."""
        with self._logging_in:
            if token.name not in self.idle:
                self._tokens[token.name] = self._find(token)
                self.idle[token.name] = [self._log_in(token, self._tokens[token.name])]
            idle = self.idle[token.name]
            # Writable, since some libraries have no other sessions.
            return idle, idle.pop() if len(idle) > 1 else self._tokens[token.name].open(rw=True)

    def _find(self, token: Token) -> pkcs11.Token:
        found: list[pkcs11.Token] = []
        others: list[str] = []
        for slot in self._library.get_slots(token_present=True):
            # One token that fails must not hide the others.
            with contextlib.suppress(pkcs11.PKCS11Error):
                each = slot.get_token()
                if token.is_named(each):
                    found.append(each)
                elif TokenFlag.TOKEN_INITIALIZED in each.flags:
                    others.append(f"{each.label!r} (serial {each.serial.decode(errors='replace')})")
        if len(found) == 1:
            return found[0]
        if found:
            hint = "Set `serial` or `slot` in place of `token_label`."
            raise KmsConfigurationError(f"there is more than one {token.name}", hint=hint)
        if token.name in self._tokens:
            raise pkcs11.TokenNotPresent  # now
        hint = f"The library shows: {', '.join(others)}." if others else "The library shows no token at all."
        raise KmsConfigurationError(f"there is no {token.name}", hint=hint)

    def _log_in(self, token: Token, found: pkcs11.Token) -> pkcs11.Session:
        pin = token.pin()
        attempt = (token.library, found.serial, hmac.digest(_digest_key, pin.reveal(), "sha256"))
        if attempt in _refused_pins:
            raise KmsConfigurationError("the token refused this PIN before; it is not tried again", hint=_PIN_HINT)
        if TokenFlag.USER_PIN_LOCKED in found.flags:
            raise pkcs11.PinLocked
        if TokenFlag.USER_PIN_FINAL_TRY in found.flags:
            detail = "another wrong PIN would lock the token, so no PIN is tried"
            raise KmsConfigurationError(detail, hint="Log in once with the vendor's tool, which resets the count.")
        try:
            return found.open(rw=True, user_pin=pin.reveal().decode())
        except UnicodeDecodeError:
            raise KmsConfigurationError("the PIN is not UTF-8") from None
        except pkcs11.UserAlreadyLoggedIn:
            return found.open(rw=True)  # another part of this process logged in
        except _WRONG_PIN:
            _refused_pins.add(attempt)
        raise KmsConfigurationError("the token refused the PIN", hint=_PIN_HINT)


def _close(sessions: list[pkcs11.Session]) -> None:
    for session in sessions:
        with contextlib.suppress(pkcs11.PKCS11Error):
            session.close()
