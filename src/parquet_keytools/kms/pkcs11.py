"""A KMS client for HSMs with a PKCS#11 library.

A master key is the AES secret keys of a token with one label (`CKA_LABEL`), the master key id. Each is a version:
`CKA_ID` is its number, from 1, as an unsigned big-endian integer of 1 to 4 bytes. The highest version wraps; all
unwrap. A key is used only if it is sensitive and not extractable.

A wrapped key is `pkcs11:v<version>:<gcm or kw>:<base64>`:

- `gcm`: nonce (12 bytes), ciphertext and tag (16 bytes) of AES-GCM; its AAD is the master key id.
- `kw`: AES key wrap (RFC 3394, `CKM_AES_KEY_WRAP`), which takes no AAD.

The raw form is the ASCII bytes of the wrapped key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import pkcs11
from pkcs11.constants import Attribute, MechanismFlag, ObjectClass, TokenFlag
from pkcs11.mechanisms import GCMParams, KeyType, Mechanism
from pydantic import Field, SecretStr, model_validator

from parquet_keytools import strict_base64
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
    without_frames,
)
from parquet_keytools.kms.client import (
    KeyDeletion,
    MasterKeyDescription,
    R,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.passphrase import passphrase_source
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import CallGate, ForkSafeLock, OwnerProcess
from parquet_keytools.secret_bytes import SecretBytes


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


T = TypeVar("T")

_KEYS_IN_ONE_CALL = 64
"""Other threads wait for a session for as long as it takes to wrap or unwrap this number of keys."""


# --- master keys in a token ---

_MECHANISMS = {"AES_GCM": "gcm", "AES_KEY_WRAP": "kw"}
_USES = {
    # mechanism in a wrapped key -> attributes that allow it to wrap and to unwrap
    "gcm": {"wrap": Attribute.ENCRYPT, "unwrap": Attribute.DECRYPT},
    "kw": {"wrap": Attribute.WRAP, "unwrap": Attribute.UNWRAP},
}
_MUST_BE = {
    Attribute.KEY_TYPE: (KeyType.AES, "it is not an AES key"),
    Attribute.SENSITIVE: (True, "the token shows its value: CKA_SENSITIVE is not true"),
    Attribute.EXTRACTABLE: (False, "it can leave the token: CKA_EXTRACTABLE is not false"),
}


class KeyVersion:
    """One version of a master key: an AES key of a token, in one session.

    `version` is 0 if `CKA_ID` is no number, `obstacle` says why this client does not use the key.
    """

    def __init__(self, key: pkcs11.SecretKey) -> None:
        self.key: Any = key  # its methods depend on its attributes
        wanted = [Attribute.LABEL, Attribute.ID, Attribute.LOCAL, *_MUST_BE]
        wanted += [attribute for uses in _USES.values() for attribute in uses.values()]
        # A token may keep attributes to itself: then they are missing.
        self._attributes = found = key.get_attributes(wanted)
        self.master_key_id = str(found.get(Attribute.LABEL, ""))
        number = found.get(Attribute.ID, b"")
        self.version = int.from_bytes(number, "big") if 1 <= len(number) <= 4 else 0
        self.origin = {True: "generated in the token", False: "imported"}.get(found.get(Attribute.LOCAL, ""))
        wrong = (why for attribute, (value, why) in _MUST_BE.items() if found.get(attribute) != value)
        self.obstacle = next(wrong, "")

    def may(self, use: str, mechanism: str | None = None) -> bool:
        """Return whether the key may be used to `wrap` or `unwrap`, by a mechanism or by any."""
        mechanisms = _USES if mechanism is None else (mechanism,)
        return not self.obstacle and any(self._attributes.get(_USES[each][use]) is True for each in mechanisms)

    def refuse_unless(self, use: str, mechanism: str) -> None:
        """Raise `KmsError` unless the key may be used."""
        if self.obstacle:
            hint = "Create a key with `parquet-keytools pkcs11 create-key`, and rotate files to it."
            raise KmsConfigurationError(f"version {self.version} is refused: {self.obstacle}", hint=hint)
        if not self.may(use, mechanism):
            detail = f"version {self.version} has CKA_{_USES[mechanism][use].name} = false"
            hint = "Enable it with `parquet-keytools pkcs11 enable`, or set `mechanism` to what the key is for."
            raise MasterKeyDisabledError(detail, hint=hint)

    def set_enabled(self, mechanism: str | None) -> None:
        """Let the token use the key by a mechanism, or by none."""
        for each, attributes in _USES.items():
            for attribute in attributes.values():
                if each == mechanism or (mechanism is None and self._attributes.get(attribute) is not False):
                    self.key[attribute] = each == mechanism


def _keys(session: pkcs11.Session, label: str | None = None) -> list[KeyVersion]:
    wanted = {Attribute.CLASS: ObjectClass.SECRET_KEY} | ({} if label is None else {Attribute.LABEL: label})
    # A search that is left unfinished ends when it is collected, perhaps after its session.
    objects = list(session.get_objects(wanted))
    found = [KeyVersion(key) for key in objects if isinstance(key, pkcs11.SecretKey)]
    if not found:
        check_present(session)
    return found


def _versions(session: pkcs11.Session, master_key_id: str) -> dict[int, KeyVersion]:
    """Return the versions of a master key, the newest last."""
    keys = sorted(_keys(session, master_key_id), key=lambda key: key.version)
    if not keys:
        raise MasterKeyNotFoundError
    versions = {key.version: key for key in keys}
    detail = ""
    if 0 in versions:
        detail = "the CKA_ID of one of its keys is no version: an integer from 1 in 1 to 4 bytes"
        hint = "Set it with the vendor's tool, such as 01 for the first version."
    elif len(versions) < len(keys):
        detail = "two keys in the token have this label and the same CKA_ID"
        hint = "Find out which of them wrapped keys, and change the other's label."
    if detail:
        raise KmsConfigurationError(detail, hint=hint)
    return versions


# --- the client ---

_WRAPPED_KEY = re.compile(r"pkcs11:v(?P<version>[1-9][0-9]{0,9}):(gcm|kw):([A-Za-z0-9+/]+={0,2})")
_NONCE_LENGTH = 12
_TAG_LENGTH = 16
_ADDED_BYTES = {"gcm": _NONCE_LENGTH + _TAG_LENGTH, "kw": 8}

_INVALID = errors_named(
    "DataInvalid DataLenRange EncryptedDataInvalid EncryptedDataLenRange WrappedKeyInvalid WrappedKeyLenRange"
)
_MAY_BE_INVALID = (pkcs11.GeneralError, pkcs11.FunctionFailed, pkcs11.PKCS11Error)
"""SoftHSM reports a wrong tag as it reports a removed token."""


class Pkcs11Kms(RemoteKmsClient):
    """Wraps and unwraps with AES keys of a PKCS#11 token.

    It loads the library and logs in when it is first used, and again in a forked child. Each operation searches
    the token for its keys, so versions and disabled keys are known at once.
    """

    backend = "pkcs11"
    Settings = Pkcs11Settings
    wrapped_key_form = _WRAPPED_KEY
    raw_form_is_text = True

    def __init__(self, settings: Pkcs11Settings, folder: Path = Path()) -> None:
        super().__init__(settings)
        self.settings = settings
        self.mechanism = _MECHANISMS[settings.mechanism]
        self._token = Token(settings, folder)

    def close(self) -> None:
        """Log out; another client of this process logs in again when it is next used."""
        self._token.log_out()
        super().close()

    def _server(self) -> str:
        return f"{self._token.name} of {self._token.library}"

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        known = meaning(error)
        return known.error() if known is not None else super()._translate(error, operation, master_key_id)

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_sessions("wrap", requests, self._wrap)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_sessions("unwrap", requests, self._unwrap)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        def read(seconds: float) -> MasterKeyDescription:
            with self._token.session(seconds) as session:
                versions = list(_versions(session, master_key_id).values())
            return MasterKeyDescription(
                master_key_id,
                enabled=versions[-1].may("wrap", self.mechanism),
                current_version=str(versions[-1].version),
                origin=versions[-1].origin,
                rotates=False,
            )

        return self._operation("describe").call(master_key_id, read)

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        self.create_key(master_key_id)

    def _place(self) -> str:
        return self._server()

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        with suppress(MasterKeyNotFoundError), self._session("update", master_key_id) as session:
            for version in _versions(session, master_key_id).values():
                version.key.destroy()
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        versions: dict[str, bool] = {}
        with suppress(MasterKeyNotFoundError), self._session("describe", master_key_id) as session:
            found = _versions(session, master_key_id).values()
            versions = {str(each.version): each.may("unwrap") for each in found}
        return KeyDeletion.of_versions(master_key_id, versions)

    def _in_sessions(
        self, name: str, requests: Sequence[R], use: Callable[[pkcs11.Session, dict[int, KeyVersion], R], T]
    ) -> list[T | KmsError]:
        def send(batch: Sequence[R], seconds: float) -> list[T | KmsError]:
            outcomes: list[T | KmsError] = []
            with self._token.session(seconds) as session:
                versions = _versions(session, batch[0].master_key_id)
                for request in batch:
                    # Errors of the library are not caught: they concern the whole batch.
                    try:
                        outcomes.append(use(session, versions, request))
                    except KmsError as refusal:
                        outcomes.append(refusal)
            return outcomes

        return self._operation(name).in_batches(requests, _KEYS_IN_ONE_CALL, send)

    # --- wrapping ---

    def _wrap(self, session: pkcs11.Session, versions: dict[int, KeyVersion], request: WrapRequest) -> str:
        version, newest = list(versions.items())[-1]
        newest.refuse_unless("wrap", self.mechanism)
        if self.mechanism == "gcm":
            data = self._encrypt(newest, request.key, request.master_key_id.encode())
        else:
            data = _wrap_by_rfc_3394(session, newest, request.key)
        return f"pkcs11:v{version}:{self.mechanism}:{strict_base64.encode(data)}"

    def _unwrap(
        self, session: pkcs11.Session, versions: dict[int, KeyVersion], request: UnwrapRequest
    ) -> SecretBytes:
        parts = _WRAPPED_KEY.fullmatch(request.wrapped_key)
        data = strict_base64.decode_or_empty(parts[3]) if parts else b""
        if not parts or len(data) - _ADDED_BYTES[parts[2]] not in (16, 24, 32):
            raise WrappedKeyInvalidError("it was not made by a client of PKCS#11")
        key = versions.get(int(parts[1]))
        if key is None:
            raise WrappedKeyInvalidError(f"the token has no version {parts[1]} of it")
        key.refuse_unless("unwrap", parts[2])
        try:
            if parts[2] == "gcm":
                return checked_key(_decrypt(key, data, request.master_key_id.encode()))
            return checked_key(_unwrap_by_rfc_3394(key, data))
        except _INVALID:
            raise WrappedKeyInvalidError from None
        except pkcs11.PKCS11Error as error:
            if type(error) not in _MAY_BE_INVALID:
                raise
            check_present(session)
            _versions(session, request.master_key_id)
            raise WrappedKeyInvalidError from None

    def _encrypt(self, key: KeyVersion, secret: SecretBytes, aad: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        given = bytes(_NONCE_LENGTH) if self.settings.hsm_chooses_nonce else secrets.token_bytes(_NONCE_LENGTH)
        # A copy, since an HSM that chooses the nonce writes it into this buffer, or after the tag.
        parameters = GCMParams(bytes(bytearray(given)), aad=aad)
        answer: bytes = key.key.encrypt(secret.reveal(), mechanism=Mechanism.AES_GCM, mechanism_param=parameters)
        length = len(secret) + _TAG_LENGTH
        nonce = answer[length:] or bytes(bytearray(parameters.nonce))
        if len(nonce) != _NONCE_LENGTH:
            detail = f"the HSM chose a nonce of {len(nonce)} bytes, and python-pkcs11 unwraps with 12 bytes only"
            raise KmsConfigurationError(detail, hint="Set `mechanism: AES_KEY_WRAP`, with a key for it.")
        if not any(nonce):
            detail = "hsm_chooses_nonce is set, but the HSM chose no nonce"
            raise KmsConfigurationError(detail, hint="Remove the setting: this HSM takes the client's nonce.")
        data = nonce + answer[:length]
        if nonce != given:
            # Vendors differ in where they return their nonce: a wrong guess would lose the key.
            is_proven = False
            with suppress(pkcs11.PKCS11Error):
                is_proven = _decrypt(key, data, aad) == secret.reveal()
            if not is_proven:
                raise KmsResponseInvalidError("the HSM does not unwrap what it wrapped")
        return data

    # --- changes of master keys; each raises `KmsError` if the token, or the master key, does not allow it ---

    def list_versions(self) -> list[KeyVersion]:
        """Return all secret keys of the token that have a label, sorted by label and version."""
        with self._session("describe") as session:
            keys = sorted(_keys(session), key=lambda key: (key.master_key_id, key.version))
        return [key for key in keys if key.master_key_id]

    def create_key(self, master_key_id: str) -> None:
        """Create a master key of 256 bits; raise `KmsConfigurationError` if there is a key with this label."""
        with self._session("update", master_key_id) as session:
            if _keys(session, master_key_id):
                hint = "To give it a new version, use: pkcs11 rotate-key"
                raise KmsConfigurationError("there is a key with this label already", hint=hint)
            self._generate(session, master_key_id, 1)

    def rotate_key(self, master_key_id: str) -> int:
        """Add a version to a master key, which wraps keys from now on. Returns the version."""
        with self._session("update", master_key_id) as session:
            version = max(_versions(session, master_key_id)) + 1
            self._generate(session, master_key_id, version)
        return version

    def set_enabled(self, master_key_id: str, enabled: bool, version: int | None = None) -> None:
        """Let the token use a master key, or one version of it, or forbid it."""
        with self._session("update", master_key_id) as session:
            versions = _versions(session, master_key_id)
            if version is not None and version not in versions:
                raise MasterKeyNotFoundError(f"it has no version {version}")
            for key in versions.values() if version is None else [versions[version]]:
                key.set_enabled(self.mechanism if enabled else None)

    def _generate(self, session: pkcs11.Session, master_key_id: str, version: int) -> None:
        # A key has one purpose, and the token enforces it.
        gcm, wrap = MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT, MechanismFlag.WRAP | MechanismFlag.UNWRAP
        session.generate_key(
            KeyType.AES,
            256,
            id=version.to_bytes((version.bit_length() + 7) // 8, "big"),
            label=master_key_id,
            store=True,
            capabilities=gcm if self.mechanism == "gcm" else wrap,
            template={Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False},
        )
        _versions(session, master_key_id)  # another operator may have made the same version just now

    @contextmanager
    def _session(self, operation: str, master_key_id: str | None = None) -> Iterator[pkcs11.Session]:
        """Use a session once: after a failure, the token may have changed."""
        try:
            with self._token.session(self.limits.call_timeout_seconds) as session:
                yield session
            return
        except (KmsError, pkcs11.PKCS11Error, OSError) as error:
            failure = self._kms_error(error, operation, master_key_id)
        raise without_frames(failure.about(self.backend, operation, master_key_id))


def _decrypt(key: KeyVersion, data: bytes, aad: bytes) -> bytes:
    parameters = GCMParams(data[:_NONCE_LENGTH], aad=aad)
    data = data[_NONCE_LENGTH:]
    return cast(bytes, key.key.decrypt(data, mechanism=Mechanism.AES_GCM, mechanism_param=parameters))


_READABLE = {Attribute.TOKEN: False, Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}
"""Attributes of a key that this process has or needs: its value can be read, in this session only."""


def _wrap_by_rfc_3394(session: pkcs11.Session, key: KeyVersion, secret: SecretBytes) -> bytes:
    # C_WrapKey wraps objects only.
    kind = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.GENERIC_SECRET}
    wrapped = session.create_object(kind | _READABLE | {Attribute.VALUE: secret.reveal()})
    try:
        return cast(bytes, key.key.wrap_key(wrapped, mechanism=Mechanism.AES_KEY_WRAP))
    finally:
        wrapped.destroy()


def _unwrap_by_rfc_3394(key: KeyVersion, data: bytes) -> bytes:
    unwrapped = key.key.unwrap_key(
        ObjectClass.SECRET_KEY,
        KeyType.GENERIC_SECRET,
        data,
        mechanism=Mechanism.AES_KEY_WRAP,
        capabilities=MechanismFlag(0),
        template=_READABLE,
    )
    try:
        return cast(bytes, unwrapped[Attribute.VALUE])
    finally:
        unwrapped.destroy()


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

# PKCS#11 keeps one state for each process, which all clients share. python-pkcs11 initializes a library with
# `C_Initialize(NULL)`, the promise that one thread calls it at a time. So by default one call at a time enters a
# library, from whichever client: SoftHSM, for one, crashes otherwise.


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
