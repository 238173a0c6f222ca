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

import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import pkcs11
from pkcs11.constants import Attribute, MechanismFlag, ObjectClass
from pkcs11.mechanisms import GCMParams, KeyType, Mechanism
from pydantic import Field, SecretStr, model_validator

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.client import (
    KmsSettings,
    MasterKeyDescription,
    R,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.passphrase import PassphraseSource, passphrase_from_file, passphrase_from_text
from parquet_keytools.kms.pkcs11.token import TokenAccess, TokenName, check_present, errors_named, meaning
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings, Time
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

_KEYS_IN_ONE_CALL = 64
"""Other threads wait for a session for as long as it takes to wrap or unwrap this number of keys."""


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

    def access(self, folder: Path) -> TokenAccess:
        """Return what is needed to use the token. Relative paths start at `folder`; no file is read yet."""
        module, setting = os.path.realpath(folder / expanded(self.module)), self.pin
        pin: PassphraseSource
        if self.pin_file is not None:
            pin = partial(passphrase_from_file, folder / expanded(self.pin_file), what="PIN", backend="pkcs11")
        else:
            assert setting is not None
            pin = lambda: passphrase_from_text(setting.get_secret_value(), what="PIN", backend="pkcs11")  # noqa: E731
        name = TokenName(self.token_label, self.serial, self.slot)
        return TokenAccess(module, name, pin, self.max_sessions)


# --- master keys in a token ---

_MECHANISMS = {"AES_GCM": "gcm", "AES_KEY_WRAP": "kw"}
_USES = {
    # mechanism in a wrapped key -> attributes that allow it to wrap and to unwrap
    "gcm": {"wrap": Attribute.ENCRYPT, "unwrap": Attribute.DECRYPT},
    "kw": {"wrap": Attribute.WRAP, "unwrap": Attribute.UNWRAP},
}


class KeyVersion:
    """One version of a master key: an AES key of a token.

    Attributes:
        key: The object, in one session.
        master_key_id: Its label.
        version: Its number, from `CKA_ID`; 0 if that is no number.
        origin: Where it was generated; None if the token does not say.
        obstacle: Why this client does not use the key, or an empty string.
    """

    def __init__(self, key: pkcs11.SecretKey) -> None:
        self.key: Any = key  # its methods depend on its attributes
        kinds = [Attribute.KEY_TYPE, Attribute.SENSITIVE, Attribute.EXTRACTABLE, Attribute.LOCAL]
        wanted = [Attribute.LABEL, Attribute.ID, *kinds, *_USES["gcm"].values(), *_USES["kw"].values()]
        # A token may keep attributes to itself: then they are missing.
        self._attributes = found = key.get_attributes(wanted)
        self.master_key_id = str(found.get(Attribute.LABEL, ""))
        number = found.get(Attribute.ID, b"")
        self.version = int.from_bytes(number, "big") if 1 <= len(number) <= 4 else 0
        is_local = found.get(Attribute.LOCAL)
        self.origin = None if is_local is None else "generated in the token" if is_local else "imported"
        if found.get(Attribute.KEY_TYPE) != KeyType.AES:
            self.obstacle = "it is not an AES key"
        elif found.get(Attribute.SENSITIVE) is not True:
            self.obstacle = "the token shows its value: CKA_SENSITIVE is not true"
        elif found.get(Attribute.EXTRACTABLE) is not False:
            self.obstacle = "it can leave the token: CKA_EXTRACTABLE is not false"
        else:
            self.obstacle = ""

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
    if 0 in versions:
        detail = "the CKA_ID of one of its keys is no version: an integer from 1 in 1 to 4 bytes"
        raise KmsConfigurationError(
            detail, hint="Set it with the vendor's tool, such as 01 for the first version."
        )
    if len(versions) < len(keys):
        detail = "two keys in the token have this label and the same CKA_ID"
        raise KmsConfigurationError(
            detail, hint="Find out which of them wrapped keys, and change the other's label."
        )
    return versions


# --- the client ---

_WRAPPED_KEY = re.compile(r"pkcs11:v([1-9][0-9]{0,9}):(gcm|kw):([A-Za-z0-9+/]+={0,2})")
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

    Args:
        time_source: For tests.
    """

    backend = "pkcs11"
    Settings = Pkcs11Settings

    def __init__(
        self, settings: Pkcs11Settings, folder: Path = Path(), *, time_source: Time | None = None
    ) -> None:
        super().__init__(settings, time_source)
        self.settings = settings
        self._access = settings.access(folder)
        self.mechanism = _MECHANISMS[settings.mechanism]

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client from `Pkcs11Settings`; it reads files and logs in when it is first used."""
        assert isinstance(settings, Pkcs11Settings)
        return cls(settings, folder)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that a wrapped key names, or None if this client did not make it."""
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        return parts[1] if parts else None

    def close(self) -> None:
        """Log out, unless another client of this process uses the token."""
        self._access.close()
        super().close()

    def _server(self) -> str:
        return f"{self._access.name} of {self._access.library}"

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        known = meaning(error)
        return known.error() if known is not None else super()._translate(error, operation, master_key_id)

    # --- hooks ---

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        return value_or_raise(self._wrap_many([WrapRequest(key, master_key_id)])[0]).encode("ascii")

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        # Bytes that are not ASCII become a text that is refused as an invalid wrapped key.
        request = UnwrapRequest(wrapped_key.decode("ascii", "replace"), master_key_id)
        return value_or_raise(self._unwrap_many([request])[0])

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._in_batches("wrap", requests, self._wrap)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._in_batches("unwrap", requests, self._unwrap)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        def read(seconds: float) -> MasterKeyDescription:
            with self._access.session(seconds) as session:
                versions = list(_versions(session, master_key_id).values())
            return MasterKeyDescription(
                master_key_id,
                enabled=versions[-1].may("wrap", self.mechanism),
                current_version=str(versions[-1].version),
                enabled_versions=tuple(str(each.version) for each in versions if each.may("unwrap")),
                origin=versions[-1].origin,
                rotates=False,
            )

        return self._operation("describe").call(master_key_id, read)

    def _in_batches(
        self, name: str, requests: Sequence[R], use: Callable[[pkcs11.Session, dict[int, KeyVersion], R], T]
    ) -> list[T | KmsError]:
        """Send the requests in batches, each for one master key and in one session."""
        of_key: dict[str, list[R]] = defaultdict(list)
        for request in requests:
            of_key[request.master_key_id].append(request)
        size = _KEYS_IN_ONE_CALL
        batches = [
            of_one[start : start + size] for of_one in of_key.values() for start in range(0, len(of_one), size)
        ]

        def send(batch: Sequence[R], seconds: float) -> list[T | KmsError]:
            outcomes: list[T | KmsError] = []
            with self._access.session(seconds) as session:
                versions = _versions(session, batch[0].master_key_id)
                for request in batch:
                    # Errors of the library are not caught: they concern the whole batch.
                    try:
                        outcomes.append(use(session, versions, request))
                    except KmsError as refusal:
                        outcomes.append(refusal.about(self.backend, name, request.master_key_id))
            return outcomes

        answers = self._operation(name).each(batches, send, lambda batch: batch[0].master_key_id)
        outcomes: dict[int, T | KmsError] = {}
        for batch, answer in zip(batches, answers, strict=True):
            if isinstance(answer, KmsError):
                outcomes |= dict.fromkeys(map(id, batch), answer)
            else:
                outcomes |= dict(zip(map(id, batch), answer, strict=True))
        return [outcomes[id(request)] for request in requests]

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
        data = b""
        with suppress(ValueError):
            data = strict_base64.decode(parts[3]) if parts else b""
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

    # --- changes of master keys ---

    def list_versions(self) -> list[KeyVersion]:
        """Return all secret keys of the token that have a label, sorted by label and version.

        Raises:
            KmsError: The token cannot be used.
        """

        def read(seconds: float) -> list[KeyVersion]:
            with self._access.session(seconds) as session:
                keys = sorted(_keys(session), key=lambda key: (key.master_key_id, key.version))
            return [key for key in keys if key.master_key_id]

        return self._operation("describe").call(None, read)

    def create_key(self, master_key_id: str) -> None:
        """Create a master key of 256 bits in the token, sensitive and not extractable.

        Raises:
            KmsConfigurationError: There is a key with this label.
            KmsError: The token does not allow it.
        """

        def create(session: pkcs11.Session) -> None:
            if _keys(session, master_key_id):
                hint = "To give it a new version, use: pkcs11 rotate-key"
                raise KmsConfigurationError("there is a key with this label already", hint=hint)
            self._generate(session, master_key_id, 1)

        self._change(master_key_id, create)

    def rotate_key(self, master_key_id: str) -> int:
        """Add a version to a master key, which wraps keys from now on. Returns the version.

        Raises:
            MasterKeyNotFoundError: There is no such master key.
            KmsError: The token does not allow it.
        """

        def rotate(session: pkcs11.Session) -> int:
            version = max(_versions(session, master_key_id)) + 1
            self._generate(session, master_key_id, version)
            return version

        return self._change(master_key_id, rotate)

    def set_enabled(self, master_key_id: str, enabled: bool, version: int | None = None) -> None:
        """Let the token use a master key, or one version of it, or forbid it.

        Raises:
            MasterKeyNotFoundError: There is no such master key, or no such version of it.
            KmsError: The token does not allow it.
        """

        def change(session: pkcs11.Session) -> None:
            versions = _versions(session, master_key_id)
            if version is not None and version not in versions:
                raise MasterKeyNotFoundError(f"it has no version {version}")
            for number, key in versions.items():
                if version in (None, number):
                    key.set_enabled(self.mechanism if enabled else None)

        self._change(master_key_id, change)

    def _generate(self, session: pkcs11.Session, master_key_id: str, version: int) -> None:
        is_gcm = self.mechanism == "gcm"
        session.generate_key(
            KeyType.AES,
            256,
            id=version.to_bytes((version.bit_length() + 7) // 8, "big"),
            label=master_key_id,
            store=True,
            # A key has one purpose, and the token enforces it.
            capabilities=(
                MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT
                if is_gcm
                else MechanismFlag.WRAP | MechanismFlag.UNWRAP
            ),
            template={Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False},
        )
        _versions(session, master_key_id)  # another operator may have made the same version just now

    def _change(self, master_key_id: str, change: Callable[[pkcs11.Session], T]) -> T:
        """Make a change once: after a failure, the token may have changed."""

        def once() -> T:
            with self._access.session(self.limits.call_timeout_seconds) as session:
                return change(session)

        return value_or_raise(self._outcome("update", master_key_id, once))


def _decrypt(key: KeyVersion, data: bytes, aad: bytes) -> bytes:
    parameters = GCMParams(data[:_NONCE_LENGTH], aad=aad)
    data = data[_NONCE_LENGTH:]
    return cast(bytes, key.key.decrypt(data, mechanism=Mechanism.AES_GCM, mechanism_param=parameters))


def _wrap_by_rfc_3394(session: pkcs11.Session, key: KeyVersion, secret: SecretBytes) -> bytes:
    # C_WrapKey wraps objects only.
    wrapped = session.create_object(
        {
            Attribute.CLASS: ObjectClass.SECRET_KEY,
            Attribute.KEY_TYPE: KeyType.GENERIC_SECRET,
            Attribute.TOKEN: False,
            Attribute.SENSITIVE: False,
            Attribute.EXTRACTABLE: True,
            Attribute.VALUE: secret.reveal(),
        }
    )
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
        # Its value is needed here, so it is readable, in this session only.
        template={Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True},
    )
    try:
        return cast(bytes, unwrapped[Attribute.VALUE])
    finally:
        unwrapped.destroy()
