"""A KMS client with master keys in a keystore file on this machine, under a passphrase.

A wrapped key is `keystore:v<version>:<base64 of nonce (12 bytes), ciphertext, tag (16 bytes)>`; its AAD binds the
master key identifier and the version. The raw form is nonce, ciphertext and tag without AAD. It names no version,
so each version is tried, the newest first.

Readers of the file take no lock: a change replaces the file as a whole. Writers lock, read again, then write, so
that any number of processes can change a keystore at once.

A keystore is one JSON document in UTF-8:

    {
      "format": "parquet-keytools keystore",
      "format_version": 1,
      "scrypt": {"n": 131072, "r": 8, "p": 1, "salt": "<base64, 16 bytes>"},
      "passphrase_check": "<base64, 32 bytes>",
      "master_keys": {
        "<master key identifier>": {
          "enabled": true,
          "versions": [
            {
              "version": 1,
              "created": "2026-01-31T12:00:00Z",
              "enabled": true,
              "wrapped_master_key": "<base64 of nonce (12), ciphertext (32), tag (16)>"
            }
          ]
        }
      },
      "mac": "<base64, 32 bytes>"
    }

- scrypt (RFC 7914) makes 32 bytes of the passphrase; of these HKDF-Expand with SHA-256 (RFC 5869) makes three
  values of 32 bytes, with the info `parquet-keytools keystore 1 <name>`: `wrap`, `mac` and `check`.
- `passphrase_check` is the value `check`: it distinguishes a wrong passphrase from an altered file.
- A master key is wrapped with the value `wrap` by AES-256-GCM. The AAD binds its identifier and its version.
- `mac` is HMAC-SHA256 under the value `mac` over the document without `mac`, as JSON with sorted names, in
  ASCII, without white space: without the passphrase, no entry can be enabled, renamed, swapped, added or removed.
- Versions count from 1; the last one is the current one.

What this cannot detect: that the whole file was put back to an older state of itself.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    OutputError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import (
    KeyDeletion,
    KmsClient,
    KmsSettings,
    MasterKeyDescription,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.passphrase import (
    FileIdentity,
    PassphraseSource,
    exclusive_lock,
    identity,
    passphrase_source,
    read_private_file,
    replace_private_file,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

Clock = Callable[[], datetime]

MAX_FILE_LENGTH = 16 * 2**20
_MIN_NEW_PASSPHRASE_LENGTH = 8

# --- the document and its cryptography ---

FORMAT: Final = "parquet-keytools keystore"
FORMAT_VERSION: Final = 1
DEFAULT_SCRYPT_N = 2**17
"""With r = 8: 128 MiB and about a third of a second (OWASP's first choice for scrypt)."""

MASTER_KEY_LENGTH_BITS = 256
_SALT_LENGTH = 16
# A hostile file must not exhaust memory (128 * n * r bytes, here at most 512 MiB) or time (n * r * p).
_MAX_SCRYPT_WORK = 2**22


def _base64_of(length: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        if len(strict_base64.decode(text)) != length:
            raise ValueError(f"not base64 of {length} bytes")
        return text

    return check


def _check_master_key_id(text: str) -> str:
    if not 1 <= len(text) <= 256 or not text.isprintable() or text != text.strip():
        raise ValueError("a master key identifier has 1 to 256 printable characters, and no space at its ends")
    return text


MasterKeyId = Annotated[str, AfterValidator(_check_master_key_id)]
Salt = Annotated[str, AfterValidator(_base64_of(_SALT_LENGTH))]
Digest = Annotated[str, AfterValidator(_base64_of(32))]
WrappedMasterKey = Annotated[str, AfterValidator(_base64_of(12 + MASTER_KEY_LENGTH_BITS // 8 + 16))]


class _Part(BaseModel):
    """A part of the document: unknown fields are refused, values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ScryptParameters(_Part):
    """Cost of deriving keys from the passphrase (RFC 7914, section 2)."""

    n: int = Field(ge=2**14)
    r: int = Field(ge=8)
    p: int = Field(ge=1)
    salt: Salt

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.n & (self.n - 1):
            raise ValueError("n is not a power of two")
        if self.n * self.r * self.p > _MAX_SCRYPT_WORK:
            raise ValueError("n, r and p ask for too much memory and time")
        return self

    @classmethod
    def fresh(cls, n: int = DEFAULT_SCRYPT_N) -> Self:
        """Return parameters with a new salt."""
        return cls(n=n, r=8, p=1, salt=strict_base64.encode(secrets.token_bytes(_SALT_LENGTH)))


class MasterKeyVersion(_Part):
    """One version of a master key."""

    version: int
    created: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
    enabled: bool
    wrapped_master_key: WrappedMasterKey


class MasterKey(_Part):
    """A master key and its versions, the current version last. No version of a disabled key can be used."""

    enabled: bool
    versions: tuple[MasterKeyVersion, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if [version.version for version in self.versions] != list(range(1, len(self.versions) + 1)):
            raise ValueError("versions do not count from 1")
        return self


@dataclass(frozen=True)
class PassphraseKeys:
    """The keys that are derived from a passphrase."""

    wrap: SecretBytes
    mac: SecretBytes
    check: SecretBytes

    @classmethod
    def derive(cls, passphrase: SecretBytes, scrypt: ScryptParameters) -> Self:
        """Run scrypt, which takes time and memory on purpose."""
        salt = strict_base64.decode(scrypt.salt)
        root = Scrypt(salt=salt, length=32, n=scrypt.n, r=scrypt.r, p=scrypt.p).derive(passphrase.reveal())

        def expand(name: str) -> SecretBytes:
            info = f"{FORMAT} {FORMAT_VERSION} {name}".encode()
            return SecretBytes(HKDFExpand(SHA256(), length=32, info=info).derive(root))

        return cls(expand("wrap"), expand("mac"), expand("check"))


class KeystoreDocument(_Part):
    """The whole document. Call `verify` before you use anything in it."""

    format: Literal["parquet-keytools keystore"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    scrypt: ScryptParameters
    passphrase_check: Digest
    master_keys: dict[MasterKeyId, MasterKey]
    mac: Digest

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """Parse a document; raise `KmsResponseInvalidError` unless it is one of this format version."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _not_authentic(f"{path} is not a keystore that can be read here ({where!r}: {first['msg']})")

    @classmethod
    def sealed(
        cls, master_keys: dict[MasterKeyId, MasterKey], scrypt: ScryptParameters, keys: PassphraseKeys
    ) -> Self:
        """Return an authenticated document."""
        check = strict_base64.encode(keys.check.reveal())
        blank = strict_base64.encode(bytes(32))
        document = cls(scrypt=scrypt, passphrase_check=check, master_keys=master_keys, mac=blank)
        return document.model_copy(update={"mac": document._mac(keys)})

    def verify(self, keys: PassphraseKeys, path: Path) -> None:
        """Check that the keys belong to this document, and that the document was not altered."""
        if not hmac.compare_digest(self.passphrase_check, strict_base64.encode(keys.check.reveal())):
            hint = "Check the passphrase; if it is right, restore the file from a backup."
            detail = f"the passphrase does not belong to {path}"
            raise KmsConfigurationError(detail, backend="keystore", operation="connect", hint=hint)
        if not hmac.compare_digest(self.mac, self._mac(keys)):
            raise _not_authentic(f"{path} was altered, or is damaged")

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return json.dumps(self.model_dump(), indent=1).encode("ascii") + b"\n"

    def _mac(self, keys: PassphraseKeys) -> str:
        canonical = json.dumps(self.model_dump(exclude={"mac"}), sort_keys=True, separators=(",", ":"))
        return strict_base64.encode(hmac.digest(keys.mac.reveal(), canonical.encode("ascii"), "sha256"))


def binding(purpose: str, master_key_id: str, version: int) -> bytes:
    """Return the AAD that binds a wrapped key to its purpose and place: JSON, so that it is unambiguous."""
    return json.dumps([FORMAT, FORMAT_VERSION, purpose, master_key_id, version]).encode("ascii")


def _not_authentic(detail: str) -> KmsResponseInvalidError:
    hint = "Restore the keystore from a backup."
    return KmsResponseInvalidError(detail, backend="keystore", operation="connect", hint=hint)


# --- the file ---


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class OpenKeystore:
    """The authenticated content of a keystore at one moment."""

    document: KeystoreDocument
    keys: PassphraseKeys
    identity: FileIdentity

    @property
    def master_keys(self) -> dict[str, MasterKey]:
        """The master keys by their identifiers."""
        return self.document.master_keys

    def master_key(self, master_key_id: str, operation: str = "") -> MasterKey:
        """Return a master key, or raise `MasterKeyNotFoundError`."""
        if found := self.master_keys.get(master_key_id):
            return found
        raise MasterKeyNotFoundError(backend="keystore", operation=operation, master_key_id=master_key_id)

    def key(self, master_key_id: str, version: MasterKeyVersion) -> SecretBytes:
        """Return the bytes of one version of a master key, which must belong to this place in the document."""
        try:
            aad = binding("master key", master_key_id, version.version)
            return unwrap_key(self.keys.wrap, version.wrapped_master_key, aad)
        except InvalidTag:
            detail = f"version {version.version} of {master_key_id!r} was altered, or is damaged"
            raise _not_authentic(detail) from None

    def check(self) -> None:
        """Unwrap each version of each master key; raise `KmsResponseInvalidError` if one is damaged."""
        for master_key_id, master_key in self.master_keys.items():
            for version in master_key.versions:
                self.key(master_key_id, version)


class Keystore:
    """A keystore file and its passphrase. The file is read when it is first needed.

    Args:
        path: The file.
        passphrase: Returns its passphrase.
        clock: Returns the time, for new keys.

    Every method that reads raises `KmsConfigurationError` if the file is missing, is readable for other users, or
    has another passphrase, and `KmsResponseInvalidError` if it was altered. Every method that writes raises
    `OutputError` if the file system fails; the file then has its old or its new content, complete.
    """

    def __init__(self, path: Path, passphrase: PassphraseSource, *, clock: Clock = _now) -> None:
        self.path = path
        self._passphrase = passphrase
        self._clock = clock
        self._lock = ForkSafeLock()
        self._opened: OpenKeystore | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        passphrase: PassphraseSource,
        *,
        exist_ok: bool = False,
        scrypt_n: int = DEFAULT_SCRYPT_N,
        clock: Clock = _now,
    ) -> Self:
        """Create a keystore without master keys.

        Args:
            path: The file.
            passphrase: Returns its passphrase.
            exist_ok: Open an existing keystore.
            scrypt_n: Cost of deriving keys from the passphrase.
            clock: Returns the time, for new keys.

        Raises:
            KmsConfigurationError: The file exists already, or the passphrase is too short.
        """
        keystore = cls(path, passphrase, clock=clock)
        new_passphrase = _long_enough(passphrase())
        with keystore._writing() as target:
            if target.exists():
                if exist_ok:
                    return keystore
                raise _refused(f"{path} exists already")
            scrypt = ScryptParameters.fresh(scrypt_n)
            _write(target, {}, scrypt, PassphraseKeys.derive(new_passphrase, scrypt))
        return keystore

    # --- reading ---

    def master_key_ids(self) -> frozenset[str]:
        """Return the identifiers of all master keys. They are not authenticated: this needs no passphrase."""
        content, _ = self._read()
        return frozenset(KeystoreDocument.parse(content, self.path).master_keys)

    def open(self) -> OpenKeystore:
        """Return the current content of the keystore. scrypt runs only after a change of the passphrase."""
        # One thread at a time, because scrypt takes time and memory.
        with self._lock:
            if self._opened is None or self._opened.identity != identity(self.path):
                self._opened = self._load(self._opened)
            return self._opened

    def back_up(self, copy: Path) -> OpenKeystore:
        """Copy the keystore to a new file that only its owner may read, and open the copy.

        Every version of every master key is unwrapped, in the keystore and in the copy. The copy has the same
        passphrase, which is not part of it.

        Args:
            copy: The file to write.

        Returns:
            The content of the copy.

        Raises:
            KmsConfigurationError: There is a file of this name already.
            OutputError: The copy cannot be written.
        """
        opened = self.open()
        opened.check()
        backup = Keystore(copy, self._passphrase)
        with backup._writing() as target:
            if target.exists():
                raise _refused(f"{copy} exists already", hint="Name a new file for each backup.")
            replace_private_file(target, opened.document.to_bytes())
        copied = backup.open()
        copied.check()
        return copied

    def _load(self, known: OpenKeystore | None) -> OpenKeystore:
        content, file_identity = self._read()
        document = KeystoreDocument.parse(content, self.path)
        if known and known.document.scrypt == document.scrypt:
            keys = known.keys
        else:
            keys = PassphraseKeys.derive(self._passphrase(), document.scrypt)
        document.verify(keys, self.path)
        return OpenKeystore(document, keys, file_identity)

    def _read(self) -> tuple[bytes, FileIdentity]:
        return read_private_file(
            self.path,
            max_length=MAX_FILE_LENGTH,
            hint_if_missing="Restore it from a backup: with new master keys, even of the same names, existing "
            "files are unreadable. If there never was a keystore, create one with: "
            f"parquet-keytools keystore create-key NAME --path '{self.path}'",
        )

    # --- changing ---

    def create_key(self, master_key_id: str) -> None:
        """Create a master key of 256 bits.

        Raises:
            KmsConfigurationError: The identifier exists already, or is not valid.
        """
        try:
            _check_master_key_id(master_key_id)
        except ValueError as error:
            raise _refused(str(error)) from None
        with self._changing() as (opened, master_keys):
            if master_key_id in master_keys:
                detail = f"there is a master key {master_key_id!r} already"
                raise _refused(detail, hint="To give it a new version, use: keystore rotate-key")
            first = self._new_version(opened, master_key_id, 1)
            master_keys[master_key_id] = MasterKey(enabled=True, versions=(first,))

    def rotate_key(self, master_key_id: str) -> int:
        """Add a version to a master key, which wraps keys from now on. Returns the version.

        Raises:
            MasterKeyNotFoundError: There is no such master key.
        """
        with self._changing() as (opened, master_keys):
            master_key = opened.master_key(master_key_id, "update")
            version = self._new_version(opened, master_key_id, len(master_key.versions) + 1)
            versions = (*master_key.versions, version)
            master_keys[master_key_id] = master_key.model_copy(update={"versions": versions})
            return version.version

    def set_enabled(self, master_key_id: str, enabled: bool, version: int | None = None) -> None:
        """Enable or disable a master key, or one version of it. No version of a disabled key can be used.

        Raises:
            MasterKeyNotFoundError: There is no such master key, or no such version of it.
        """
        with self._changing() as (opened, master_keys):
            master_key = opened.master_key(master_key_id, "update")
            if version is None:
                changed = master_key.model_copy(update={"enabled": enabled})
            elif 1 <= version <= len(master_key.versions):
                versions = list(master_key.versions)
                versions[version - 1] = versions[version - 1].model_copy(update={"enabled": enabled})
                changed = master_key.model_copy(update={"versions": tuple(versions)})
            else:
                hint = f"Its versions are 1 to {len(master_key.versions)}."
                missing = MasterKeyNotFoundError(f"it has no version {version}", hint=hint)
                raise missing.about("keystore", "update", master_key_id)
            master_keys[master_key_id] = changed

    def destroy_key(self, master_key_id: str) -> None:
        """Remove a master key with all its versions. Only a backup of the keystore still has it.

        Raises:
            MasterKeyNotFoundError: There is no such master key.
        """
        with self._changing() as (opened, master_keys):
            opened.master_key(master_key_id, "delete")
            del master_keys[master_key_id]

    def change_passphrase(self, new_passphrase: PassphraseSource) -> None:
        """Re-wrap all master keys under another passphrase. Old copies of the file keep the old one.

        Raises:
            KmsConfigurationError: The new passphrase is too short.
        """
        passphrase = _long_enough(new_passphrase())
        with self._writing() as target:
            opened = self._load(self._opened)
            scrypt = ScryptParameters.fresh(opened.document.scrypt.n)
            keys = PassphraseKeys.derive(passphrase, scrypt)
            master_keys = dict(opened.master_keys)
            for master_key_id, master_key in opened.master_keys.items():
                versions = []
                for version in master_key.versions:
                    key = opened.key(master_key_id, version)
                    wrapped = _wrapped_master_key(keys, key, master_key_id, version.version)
                    versions.append(version.model_copy(update={"wrapped_master_key": wrapped}))
                master_keys[master_key_id] = master_key.model_copy(update={"versions": tuple(versions)})
            _write(target, master_keys, scrypt, keys)
        self._passphrase = new_passphrase

    def _new_version(self, opened: OpenKeystore, master_key_id: str, version: int) -> MasterKeyVersion:
        key = SecretBytes.random(MASTER_KEY_LENGTH_BITS)
        return MasterKeyVersion(
            version=version,
            created=self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            enabled=True,
            wrapped_master_key=_wrapped_master_key(opened.keys, key, master_key_id, version),
        )

    @contextmanager
    def _changing(self) -> Iterator[tuple[OpenKeystore, dict[str, MasterKey]]]:
        """Yield the current master keys, to be changed; write them unless an error is raised."""
        self.open()  # scrypt before the lock, not under it
        with self._writing() as target:
            opened = self._load(self._opened)
            master_keys = dict(opened.master_keys)
            yield opened, master_keys
            _write(target, master_keys, opened.document.scrypt, opened.keys)

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """Yield the file behind all symbolic links, while no other process writes it."""
        try:
            target = Path(os.path.realpath(self.path))
            with exclusive_lock(target):
                yield target
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"the keystore {self.path} cannot be changed: {reason}.") from None


def _write(
    target: Path, master_keys: dict[str, MasterKey], scrypt: ScryptParameters, keys: PassphraseKeys
) -> None:
    content = KeystoreDocument.sealed(master_keys, scrypt, keys).to_bytes()
    if len(content) > MAX_FILE_LENGTH:
        raise _refused(f"the keystore would be longer than {MAX_FILE_LENGTH} bytes, and could not be read")
    replace_private_file(target, content)


def _wrapped_master_key(keys: PassphraseKeys, key: SecretBytes, master_key_id: str, version: int) -> str:
    return wrap_key(keys.wrap, key, binding("master key", master_key_id, version))


def _long_enough(passphrase: SecretBytes) -> SecretBytes:
    if len(passphrase) < _MIN_NEW_PASSPHRASE_LENGTH:
        raise _refused(f"a new passphrase has at least {_MIN_NEW_PASSPHRASE_LENGTH} bytes")
    return passphrase


def _refused(detail: str, *, hint: str = "") -> KmsConfigurationError:
    return KmsConfigurationError(detail, backend="keystore", operation="update", hint=hint)


# --- the client ---

_WRAPPED_KEY = re.compile(r"keystore:v(?P<version>[1-9][0-9]{0,8}):([A-Za-z0-9+/=]+)")


class KeystoreSettings(KmsSettings):
    """Settings of the keystore; relative paths start at the configuration's folder.

    Attributes:
        passphrase: Its passphrase, best as `${VARIABLE}` of the environment; or
        passphrase_file: a file with its passphrase, which only its owner may read.
    """

    type: Literal["keystore"] = "keystore"
    path: Path
    passphrase: SecretStr | None = None
    passphrase_file: Path | None = None

    @model_validator(mode="after")
    def _one_passphrase(self) -> Self:
        if (self.passphrase is None) == (self.passphrase_file is None):
            raise ValueError("give either passphrase or passphrase_file")
        return self

    def located(self, folder: Path) -> tuple[Path, PassphraseSource]:
        """Return the path of the file, and the source of its passphrase."""
        return folder / expanded(self.path), passphrase_source(self.passphrase, self.passphrase_file, folder)


class KeystoreKms(KmsClient):
    """Wraps and unwraps with the master keys of a keystore file, and detects each change of the file."""

    backend = "keystore"
    Settings = KeystoreSettings
    wrapped_key_form = _WRAPPED_KEY

    def __init__(self, path: Path, passphrase: PassphraseSource) -> None:
        super().__init__()
        self._keystore = Keystore(path, passphrase)

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client from `KeystoreSettings`; it reads the file when it is first used."""
        assert isinstance(settings, KeystoreSettings)
        return cls(*settings.located(folder))

    def master_key_ids(self) -> frozenset[str]:
        """Return the identifiers of all master keys. They are not authenticated: this needs no passphrase."""
        return value_or_raise(self._outcome("list", None, self._keystore.master_key_ids))

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        # Opened once for all keys, so that a wrong passphrase costs one run of scrypt.
        opened = self._keystore.open()
        return [self._outcome("wrap", r.master_key_id, self._wrap, opened, r) for r in requests]

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        opened = self._keystore.open()
        return [self._outcome("unwrap", r.master_key_id, self._unwrap, opened, r) for r in requests]

    def _wrap(self, opened: OpenKeystore, request: WrapRequest) -> str:
        master_key_id = request.master_key_id
        current = opened.master_key(master_key_id).versions[-1].version
        master_key = self._usable(opened, master_key_id, current)
        wrapped = wrap_key(master_key, request.key, binding("wrapped key", master_key_id, current))
        return f"keystore:v{current}:{wrapped}"

    def _unwrap(self, opened: OpenKeystore, request: UnwrapRequest) -> SecretBytes:
        master_key_id = request.master_key_id
        versions = opened.master_key(master_key_id).versions
        parts = _WRAPPED_KEY.fullmatch(request.wrapped_key)
        if not parts:
            raise WrappedKeyInvalidError("it was not made by a keystore")
        version = int(parts[1])
        if version > len(versions):
            raise WrappedKeyInvalidError(f"this keystore has no version {version} of it")
        master_key = self._usable(opened, master_key_id, version)
        try:
            return unwrap_key(master_key, parts[2], binding("wrapped key", master_key_id, version))
        except InvalidTag:
            raise WrappedKeyInvalidError from None

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        opened = self._keystore.open()
        current = opened.master_key(master_key_id).versions[-1].version
        return strict_base64.decode(wrap_key(self._usable(opened, master_key_id, current), key, b""))

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        opened = self._keystore.open()
        for version in reversed(opened.master_key(master_key_id).versions):
            with suppress(InvalidTag):
                key = unwrap_key(opened.key(master_key_id, version), strict_base64.encode(wrapped_key), b"")
                self._usable(opened, master_key_id, version.version)
                return key
        raise WrappedKeyInvalidError

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        master_key = self._keystore.open().master_key(master_key_id)
        current = master_key.versions[-1]
        return MasterKeyDescription(
            master_key_id,
            enabled=master_key.enabled and current.enabled,
            current_version=str(current.version),
            origin="keystore",
        )

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        self._keystore.create_key(master_key_id)

    def _place(self) -> str:
        return os.path.realpath(self._keystore.path)

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        if master_key_id in self._keystore.open().master_keys:
            self._keystore.destroy_key(master_key_id)
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        master_key = self._keystore.open().master_keys.get(master_key_id)
        versions = () if master_key is None else master_key.versions
        enabled = {str(v.version): master_key is not None and master_key.enabled and v.enabled for v in versions}
        return KeyDeletion.of_versions(master_key_id, enabled)

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        versions = self._keystore.open().master_key(master_key_id).versions
        return {str(version.version): datetime.fromisoformat(version.created) for version in versions}

    def _usable(self, opened: OpenKeystore, master_key_id: str, version: int) -> SecretBytes:
        """Return the bytes of one version of a master key that exists, unless it is disabled."""
        master_key = opened.master_key(master_key_id)
        wanted = master_key.versions[version - 1]
        if not (master_key.enabled and wanted.enabled):
            detail = f"version {version}" if master_key.enabled else ""
            raise MasterKeyDisabledError(
                detail, hint="Enable it with `parquet-keytools keystore enable`, or ask its owner to."
            )
        return opened.key(master_key_id, wanted)
