"""A keystore file: opened with its passphrase, followed when others change it, changed in one step.

Readers take no lock: a change replaces the file as a whole. Writers lock, read again, then write, so that any
number of processes may change a keystore at once. Nothing here takes a master key away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from parquet_keytools.errors import KmsConfigurationError, MasterKeyNotFoundError, OutputError
from parquet_keytools.kms.contract import CallFacts
from parquet_keytools.kms.keystore_document import (
    DEFAULT_SCRYPT_N,
    MASTER_KEY_LENGTH_BITS,
    KeystoreDocument,
    MasterKey,
    MasterKeyId,
    MasterKeyVersion,
    PassphraseKeys,
    ScryptParameters,
    unwrap_master_key,
    wrap_master_key,
)
from parquet_keytools.kms.passphrase import (
    FileIdentity,
    PassphraseSource,
    exclusive_lock,
    identity,
    read_private_file,
    replace_private_file,
)
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

Clock = Callable[[], datetime]

_MAX_FILE_LENGTH = 16 * 2**20
_MIN_NEW_PASSPHRASE_LENGTH = 8


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class OpenKeystore:
    """A keystore as it was at one moment, authenticated."""

    document: KeystoreDocument
    keys: PassphraseKeys
    identity: FileIdentity

    @property
    def master_keys(self) -> dict[str, MasterKey]:
        """The master keys by their identifiers."""
        return self.document.master_keys

    def master_key(self, master_key_id: str, operation: str) -> MasterKey:
        """Return a master key, or raise `MasterKeyNotFoundError` for the operation."""
        if found := self.master_keys.get(master_key_id):
            return found
        raise CallFacts("keystore", operation, master_key_id).error(MasterKeyNotFoundError)

    def key(self, master_key_id: str, version: MasterKeyVersion) -> SecretBytes:
        """Return the bytes of one version of a master key."""
        return unwrap_master_key(self.keys, version, master_key_id)


class Keystore:
    """A keystore file and its passphrase. Nothing is read before it is needed.

    Args:
        path: The file.
        passphrase: Gives its passphrase.
        clock: Gives the time at which keys are created.

    Every method that reads raises `KmsConfigurationError` where the file is missing, may be read by others,
    or has another passphrase, and `KmsResponseInvalidError` where it was altered. Every method that writes
    raises `OutputError` where the file system fails; then the old state is in place, or the new one complete.
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
            passphrase: Gives its passphrase.
            exist_ok: Take a keystore that another process has created just before.
            scrypt_n: Cost of making keys of the passphrase.
            clock: Gives the time at which keys are created.

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
        """Return the identifiers of all master keys, not authenticated: this needs no passphrase."""
        content, _ = self._read()
        return frozenset(KeystoreDocument.parse(content, self.path).master_keys)

    def open(self) -> OpenKeystore:
        """Return the keystore as it is now. Keys are made of the passphrase only when that has changed."""
        # One thread reads, the others wait: scrypt takes time and memory.
        with self._lock:
            if self._opened is None or self._opened.identity != identity(self.path):
                self._opened = self._load(self._opened)
            return self._opened

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
            max_length=_MAX_FILE_LENGTH,
            hint_if_missing=f"Create it with: parquet-keytools keystore create-key NAME --path '{self.path}'",
        )

    # --- changing ---

    def create_key(self, master_key_id: str) -> None:
        """Create a master key of 256 bits.

        Raises:
            KmsConfigurationError: There is one of this identifier already, or it is not a valid one.
        """
        try:
            TypeAdapter(MasterKeyId).validate_python(master_key_id)
        except ValidationError:
            detail = "a master key identifier has 1 to 256 printable characters, and no space at its ends"
            raise _refused(detail) from None
        with self._changing() as (opened, master_keys):
            if master_key_id in master_keys:
                detail = f"there is a master key {master_key_id!r} already"
                raise _refused(detail, hint="To give it a new version, use: keystore rotate-key")
            first = self._new_version(opened, master_key_id, 1)
            master_keys[master_key_id] = MasterKey(enabled=True, versions=(first,))

    def rotate_key(self, master_key_id: str) -> int:
        """Give a master key a new version, which now wraps keys. Returns the version.

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
        """Enable or disable a master key, or one version of it. A disabled key has no usable version.

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
                call = CallFacts("keystore", "update", master_key_id)
                raise call.error(MasterKeyNotFoundError, f"it has no version {version}", hint)
            master_keys[master_key_id] = changed

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
            master_keys = {
                master_key_id: master_key.model_copy(
                    update={
                        "versions": tuple(
                            _wrapped_anew(opened, keys, master_key_id, version) for version in master_key.versions
                        )
                    }
                )
                for master_key_id, master_key in opened.master_keys.items()
            }
            _write(target, master_keys, scrypt, keys)
        self._passphrase = new_passphrase

    def _new_version(self, opened: OpenKeystore, master_key_id: str, version: int) -> MasterKeyVersion:
        key = SecretBytes.random(MASTER_KEY_LENGTH_BITS)
        return MasterKeyVersion(
            version=version,
            created=self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            enabled=True,
            wrapped_master_key=wrap_master_key(opened.keys, key, master_key_id, version),
        )

    @contextmanager
    def _changing(self) -> Iterator[tuple[OpenKeystore, dict[str, MasterKey]]]:
        """Give the master keys as they are now, to be changed; write them unless an error is raised."""
        self.open()  # scrypt before the lock, not under it
        with self._writing() as target:
            opened = self._load(self._opened)
            master_keys = dict(opened.master_keys)
            yield opened, master_keys
            _write(target, master_keys, opened.document.scrypt, opened.keys)

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """Give the file behind all symbolic links, with no other writer at it."""
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
    if len(content) > _MAX_FILE_LENGTH:
        raise _refused(f"the keystore would be longer than {_MAX_FILE_LENGTH} bytes, and could not be read")
    replace_private_file(target, content)


def _wrapped_anew(
    opened: OpenKeystore, keys: PassphraseKeys, master_key_id: str, version: MasterKeyVersion
) -> MasterKeyVersion:
    key = opened.key(master_key_id, version)
    wrapped = wrap_master_key(keys, key, master_key_id, version.version)
    return version.model_copy(update={"wrapped_master_key": wrapped})


def _long_enough(passphrase: SecretBytes) -> SecretBytes:
    if len(passphrase) < _MIN_NEW_PASSPHRASE_LENGTH:
        raise _refused(f"a new passphrase has at least {_MIN_NEW_PASSPHRASE_LENGTH} bytes")
    return passphrase


def _refused(detail: str, *, hint: str = "") -> KmsConfigurationError:
    return CallFacts("keystore", "update").error(KmsConfigurationError, detail, hint)
