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

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import pkcs11
from pkcs11.constants import Attribute, MechanismFlag, ObjectClass
from pkcs11.mechanisms import GCMParams, KeyType, Mechanism

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
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
from parquet_keytools.kms.pkcs11.token import Pkcs11Settings, Token, check_present, errors_named, meaning
from parquet_keytools.kms.remote_client import RemoteKmsClient
from parquet_keytools.secret_bytes import SecretBytes

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
                enabled_versions=tuple(str(each.version) for each in versions if each.may("unwrap")),
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
