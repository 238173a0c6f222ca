"""The PKCS#11 libraries of a process: one login for each token, and a bounded pool of sessions.

PKCS#11 keeps one state for each process, which all clients share. python-pkcs11 initializes a library with
`C_Initialize(NULL)`, the promise that one thread calls it at a time. So by default one call at a time enters a
library, from whichever client: SoftHSM, for one, crashes otherwise.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pkcs11
from pkcs11.constants import TokenFlag

from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
)
from parquet_keytools.kms.passphrase import PassphraseSource
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.runtime.fork_safety import CallGate, ForkSafeLock, OwnerProcess


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
    errors_named("DeviceMemory HostMemory"): Meaning(
        KmsThrottledError, "out of memory", "Remove objects from the token, or retry later."
    ),
    errors_named("SessionCount"): Meaning(
        KmsThrottledError,
        "the token has no session left",
        "End processes that hold sessions, or raise the limit of the token.",
    ),
    errors_named("PinExpired"): Meaning(
        KmsConfigurationError, "the PIN has expired", "Set a new PIN with the vendor's tool."
    ),
    errors_named("PinLocked"): Meaning(
        KmsConfigurationError, "the PIN is locked", "Only the security officer of the token can unlock it."
    ),
    errors_named("UserPinNotInitialized"): Meaning(
        KmsConfigurationError, "the token has no user PIN yet", "Set one as the security officer of the token."
    ),
}


def meaning(error: Exception) -> Meaning | None:
    """Return the meaning of an error of the library, or None if it is unknown."""
    return next((meaning for kinds, meaning in _MEANINGS.items() if isinstance(error, kinds)), None)


# --- tokens and PINs ---

_WRONG_PIN = errors_named("PinIncorrect PinInvalid PinLenRange")
_PIN_HINT = "Correct `pin` or `pin_file`. Each wrong PIN counts, and the token locks after a few."

_seen: set[tuple[str, TokenName]] = set()
"""Tokens that this process, or its parent, has used: if one is missing now, it was removed."""

_refused_pins: set[tuple[str, bytes, bytes]] = set()
"""Library, serial number of the token and digest of each PIN that it refused: no PIN is tried twice."""

_digest_key = secrets.token_bytes(32)


class TokenName(NamedTuple):
    """How a configuration names a token; exactly one is set."""

    label: str | None = None
    serial: str | None = None
    slot: int | None = None

    def __str__(self) -> str:
        if self.label is not None:
            return f"token {self.label!r}"
        return f"token {self.serial!r}" if self.serial is not None else f"token in slot {self.slot}"

    def names(self, token: pkcs11.Token) -> bool:
        """Return whether this is the token."""
        if self.slot is not None:
            return token.slot.slot_id == self.slot
        if self.serial is not None:
            return token.serial == self.serial.encode()
        return token.label == self.label


@dataclass(frozen=True, eq=False)
class TokenAccess:
    """What one client needs to use its token.

    Attributes:
        library: Path of the PKCS#11 library, without symbolic links.
        name: The token.
        pin: Returns the user's PIN.
        most_sessions: How many sessions may be in use at a time, in all clients of the library.
    """

    library: str
    name: TokenName
    pin: PassphraseSource = field(repr=False)
    most_sessions: int

    def session(self, within_seconds: float) -> contextlib.AbstractContextManager[pkcs11.Session]:
        """Use a session of the logged-in user in a block.

        Args:
            within_seconds: How long to wait while other sessions are in use. A call into the library cannot be
                interrupted.

        Raises:
            KmsError: The library, the token or the PIN is refused, or no session was free in time.
            pkcs11.PKCS11Error: `meaning` returns the `KmsError`.
        """
        return _library_at(self.library).session(self, within_seconds)

    def close(self) -> None:
        """Log out, and close the sessions, unless another client of this process uses the token."""
        with _libraries_lock:
            library = _libraries.get(self.library)
        if library is not None and library.owner.is_here:
            library.leave(self)


def check_present(session: pkcs11.Session) -> None:
    """Raise `PKCS11Error` unless the token of a session is still there: some libraries just show no objects."""
    known, now = session.token, session.token.slot.get_token()
    if (now.label, now.serial) != (known.label, known.serial):
        raise pkcs11.TokenNotPresent


# --- the library of this process ---

_libraries: dict[str, _Library] = {}
_libraries_lock = ForkSafeLock()
_CALLS = CallGate()


def _library_at(path: str) -> _Library:
    """Return a library of this process. A forked child initializes it again, as PKCS#11 demands."""
    with _libraries_lock:
        library = _libraries.get(path)
        if library is None or not library.owner.is_here:
            with _CALLS:
                library = _libraries[path] = _Library(path, is_inherited=library is not None)
        return library


class _Library:
    def __init__(self, path: str, *, is_inherited: bool) -> None:
        self.owner = OwnerProcess()
        self._path = path
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._in_use = 0
        self._most = sys.maxsize
        self._is_stale = is_inherited
        self._logging_in = threading.Lock()
        self._logins: dict[TokenName, _Login] = {}
        if not Path(path).is_file():
            raise KmsConfigurationError(f"there is no file {path}", hint="Set `module` to the library of the HSM.")
        try:
            self._library = pkcs11.lib(path)
        except pkcs11.PKCS11Error as error:
            if type(error) is not pkcs11.PKCS11Error:
                raise
            detail = f"{path} cannot be loaded as a PKCS#11 library"
            hint = f"Check that it is for this machine, and with `ldd {path}` that nothing is missing."
            raise KmsConfigurationError(detail, hint=hint) from None

    @contextlib.contextmanager
    def session(self, access: TokenAccess, within_seconds: float) -> Iterator[pkcs11.Session]:
        with self._turn(access.most_sessions, within_seconds) as is_stale:
            try:
                if is_stale:
                    self._start_over()
                with self._login(access).session() as session:
                    yield session
            except _LOST:
                self._is_stale = True
                raise

    def leave(self, access: TokenAccess) -> None:
        with contextlib.suppress(KmsThrottledError), self._turn(access.most_sessions, 2.0), self._logging_in:
            login = self._logins.get(access.name)
            if login is not None:
                login.users.discard(access)
                if not login.users:
                    del self._logins[access.name]
                    login.close()

    @contextlib.contextmanager
    def _turn(self, most: int, within_seconds: float) -> Iterator[bool]:
        """Hold one of the sessions in use; yield whether the library must start over, alone.

        The thread that has waited longest is next. If clients of one library allow different numbers of sessions,
        the smallest number counts.
        """
        ticket = object()

        def is_next() -> bool:
            # Starting over ends all sessions, so all others must be done.
            return self._queue[0] is ticket and self._in_use < (1 if self._is_stale else self._most)

        with self._changed:
            self._most = min(self._most, most)
            self._queue.append(ticket)
            try:
                has_turn = self._changed.wait_for(is_next, within_seconds)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            if not has_turn:
                raise KmsThrottledError("all sessions that `max_sessions` allows were in use")
            self._in_use += 1
            is_stale = self._is_stale
        try:
            with _CALLS:
                yield is_stale
        finally:
            with self._changed:
                self._in_use -= 1
                self._changed.notify_all()

    def _start_over(self) -> None:
        self._logins.clear()
        # Libraries that notice a fork refuse to finalize what the parent initialized.
        with contextlib.suppress(pkcs11.PKCS11Error):
            self._library.finalize()
        self._library.initialize()
        self._is_stale = False

    def _login(self, access: TokenAccess) -> _Login:
        with self._logging_in:
            login = self._logins.get(access.name)
            if login is None:
                token = self._token(access.name)
                login = self._logins[access.name] = _Login(token, self._log_in(token, access.pin))
            login.users.add(access)
            return login

    def _token(self, name: TokenName) -> pkcs11.Token:
        found: list[pkcs11.Token] = []
        others: list[str] = []
        for slot in self._library.get_slots(token_present=True):
            # One token that fails must not hide the others.
            with contextlib.suppress(pkcs11.PKCS11Error):
                token = slot.get_token()
                if name.names(token):
                    found.append(token)
                elif TokenFlag.TOKEN_INITIALIZED in token.flags:
                    others.append(f"{token.label!r} (serial {token.serial.decode(errors='replace')})")
        if len(found) == 1:
            _seen.add((self._path, name))
            return found[0]
        if found:
            hint = "Set `serial` or `slot` in place of `token_label`."
            raise KmsConfigurationError(f"there is more than one {name}", hint=hint)
        if (self._path, name) in _seen:
            raise pkcs11.TokenNotPresent
        hint = f"The library shows: {', '.join(others)}." if others else "The library shows no token at all."
        raise KmsConfigurationError(f"there is no {name}", hint=hint)

    def _log_in(self, token: pkcs11.Token, pin_source: PassphraseSource) -> pkcs11.Session:
        """Return a session that stays open: with the last session, the login would end."""
        pin = pin_source()
        attempt = (self._path, token.serial, hmac.digest(_digest_key, pin.reveal(), "sha256"))
        if attempt in _refused_pins:
            raise KmsConfigurationError("the token refused this PIN before; it is not tried again", hint=_PIN_HINT)
        if TokenFlag.USER_PIN_LOCKED in token.flags:
            raise pkcs11.PinLocked
        if TokenFlag.USER_PIN_FINAL_TRY in token.flags:
            detail = "another wrong PIN would lock the token, so no PIN is tried"
            raise KmsConfigurationError(detail, hint="Log in once with the vendor's tool, which resets the count.")
        try:
            return token.open(rw=True, user_pin=pin.reveal().decode())
        except UnicodeDecodeError:
            raise KmsConfigurationError("the PIN is not UTF-8") from None
        except pkcs11.UserAlreadyLoggedIn:
            return token.open(rw=True)  # another part of this process logged in
        except _WRONG_PIN:
            _refused_pins.add(attempt)
        raise KmsConfigurationError("the token refused the PIN", hint=_PIN_HINT)


class _Login:
    """The login of this process to one token, and the sessions that are not in use."""

    def __init__(self, token: pkcs11.Token, first: pkcs11.Session) -> None:
        self.users: weakref.WeakSet[TokenAccess] = weakref.WeakSet()
        self._token = token
        self._first = first
        self._idle: list[pkcs11.Session] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[pkcs11.Session]:
        session = None
        with contextlib.suppress(IndexError):
            session = self._idle.pop()
        # Writable, since some libraries have no other sessions.
        session = session or self._token.open(rw=True)
        # After an error of the library, an operation may still be active in the session.
        is_usable = False
        try:
            yield session
            is_usable = True
        except KmsError:
            is_usable = True
            raise
        finally:
            if is_usable:
                self._idle.append(session)
            else:
                with contextlib.suppress(pkcs11.PKCS11Error):
                    session.close()

    def close(self) -> None:
        for session in (*self._idle, self._first):
            with contextlib.suppress(pkcs11.PKCS11Error):
                session.close()
