"""A KMS in the memory of this process, for tests, demos and first steps.

It wraps like the in-memory KMS in parquet-java's tests: AES-GCM with the UTF-8 bytes of the master key identifier
as AAD. A wrapped key does not name the version of the master key that made it. The raw form has no AAD, as in
Iceberg's tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from cryptography.exceptions import InvalidTag
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import (
    KEY_LENGTHS_BYTES,
    KeyDeletion,
    KmsSettings,
    MasterKeyDescription,
    SingleKeyKmsClient,
)
from parquet_keytools.secret_bytes import SecretBytes

KeyBytes = SecretBytes | bytes


def _decode_master_key(text: SecretStr) -> SecretBytes:
    key = SecretBytes(strict_base64.decode_or_empty(text.get_secret_value()))
    if len(key) not in KEY_LENGTHS_BYTES:
        raise ValueError("a master key is base64 of 16, 24 or 32 bytes")
    return key


def _check_master_key(text: SecretStr) -> SecretStr:
    _decode_master_key(text)
    return text


def _all_spellings_as_one(keys: object) -> object:
    """Return name -> list of versions, for each way to write `keys`."""
    if isinstance(keys, list):
        if len({name for name in keys if isinstance(name, str)}) != len(keys):
            raise ValueError("in a list, each master key is a name that occurs once")
        keys = dict.fromkeys(keys)
    if not isinstance(keys, dict):
        return keys
    if any(versions in ([], ()) for versions in keys.values()):
        raise ValueError("a master key has at least one version; write null for a key to be generated")
    return {
        name: versions if versions is None or isinstance(versions, list | tuple) else [versions]
        for name, versions in keys.items()
    }


MasterKeyText = Annotated[SecretStr, AfterValidator(_check_master_key)]
MasterKeys = Annotated[
    dict[Annotated[str, Field(min_length=1)], tuple[MasterKeyText, ...] | None],
    BeforeValidator(
        _all_spellings_as_one, json_schema_input_type=list[str] | dict[str, SecretStr | list[SecretStr] | None]
    ),
]


class InMemorySettings(KmsSettings):
    """Settings of the in-memory KMS.

    Attributes:
        keys: Names of master keys, each to be generated; or name -> base64 of the key, base64 of each version with
            the oldest first, or null for a key to be generated.
    """

    type: Literal["in_memory"] = "in_memory"
    keys: MasterKeys


@dataclass
class _Version:
    key: SecretBytes
    enabled: bool = True


@dataclass
class _MasterKey:
    versions: list[_Version]
    enabled: bool = True
    denied: bool = False
    generated: bool = False


class InMemoryKms(SingleKeyKmsClient):
    """Keeps master keys in memory, with versions. Tests can disable and deny them.

    Args:
        keys: Master key identifier -> its key of 16, 24 or 32 bytes, its versions with the oldest first, or None
            for a random key of 256 bits.
    """

    backend = "in_memory"
    Settings = InMemorySettings

    def __init__(self, keys: Mapping[str, KeyBytes | Sequence[KeyBytes] | None]) -> None:
        super().__init__()
        self._master_keys: dict[str, _MasterKey] = {}
        for master_key_id, versions in keys.items():
            self.create_key(master_key_id, versions)

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a KMS with the keys in `InMemorySettings`."""
        assert isinstance(settings, InMemorySettings)
        keys: dict[str, Sequence[KeyBytes] | None] = {
            master_key_id: None if versions is None else [_decode_master_key(text) for text in versions]
            for master_key_id, versions in settings.keys.items()
        }
        return cls(keys)

    @property
    def has_generated_keys(self) -> bool:
        """Whether a key was generated here, which another process with the same settings would not have."""
        return any(master_key.generated for master_key in list(self._master_keys.values()))

    def master_key_ids(self) -> frozenset[str]:
        """Return the identifiers of all master keys."""
        return frozenset(list(self._master_keys))

    # --- operations of a KMS administrator ---

    def create_key(self, master_key_id: str, key: KeyBytes | Sequence[KeyBytes] | None = None) -> None:
        """Create a master key with the given key or versions, or with a random key of 256 bits.

        Raises:
            ValueError: The identifier is empty or taken, or a key does not have 16, 24 or 32 bytes.
        """
        if not master_key_id or master_key_id in self._master_keys:
            raise ValueError(f"the master key identifier {master_key_id!r} is empty or taken")
        given = SecretBytes.random(256) if key is None else key
        versions = [given] if isinstance(given, SecretBytes | bytes) else given
        if not versions:
            raise ValueError(f"the master key {master_key_id!r} has no version")
        self._master_keys[master_key_id] = _MasterKey(list(map(_version, versions)), generated=key is None)

    def add_version(self, master_key_id: str, key: KeyBytes | None = None) -> int:
        """Rotate a master key to the given key, or to a random key. Returns the new version."""
        master_key = self._existing(master_key_id, "update")
        version = _version(SecretBytes.random(256) if key is None else key)
        with self._lock:
            master_key.generated |= key is None
            master_key.versions.append(version)
            return len(master_key.versions)

    def disable(self, master_key_id: str, version: int | None = None) -> None:
        """Disable a master key, or one version of it, counted from 1."""
        self._switchable(master_key_id, version).enabled = False

    def enable(self, master_key_id: str, version: int | None = None) -> None:
        """Enable a master key, or one version of it."""
        self._switchable(master_key_id, version).enabled = True

    def deny(self, master_key_id: str) -> None:
        """Refuse each request for a master key, as without permission."""
        self._existing(master_key_id, "update").denied = True

    def allow(self, master_key_id: str) -> None:
        """Undo `deny`."""
        self._existing(master_key_id, "update").denied = False

    # --- hooks ---

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return self._wrap_with(key, master_key_id, master_key_id.encode())

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        return self._unwrap_with(wrapped_key, master_key_id, master_key_id.encode())

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        return strict_base64.decode(self._wrap_with(key, master_key_id, b""))

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        return self._unwrap_with(strict_base64.encode(wrapped_key), master_key_id, b"")

    def _wrap_with(self, key: SecretBytes, master_key_id: str, aad: bytes) -> str:
        master_key = self._usable(master_key_id, "wrap")
        current = master_key.versions[-1]
        if not current.enabled:
            raise MasterKeyDisabledError("its current version")
        return wrap_key(current.key, key, aad)

    def _unwrap_with(self, wrapped_key: str, master_key_id: str, aad: bytes) -> SecretBytes:
        for version in reversed(list(self._usable(master_key_id, "unwrap").versions)):
            try:
                key = unwrap_key(version.key, wrapped_key, aad)
            except InvalidTag:
                continue
            if not version.enabled:
                raise MasterKeyDisabledError("the version needed")
            return key
        raise WrappedKeyInvalidError

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        master_key = self._existing(master_key_id, "describe")
        if master_key.denied:
            raise KmsAccessDeniedError
        versions = list(master_key.versions)
        return MasterKeyDescription(
            master_key_id,
            enabled=master_key.enabled and versions[-1].enabled,
            current_version=str(len(versions)),
            origin="generated" if master_key.generated else "configuration",
        )

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        self._master_keys.pop(master_key_id, None)
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        master_key = self._master_keys.get(master_key_id)
        versions = [] if master_key is None else [master_key.enabled and v.enabled for v in master_key.versions]
        return KeyDeletion.of_versions(master_key_id, {str(n): enabled for n, enabled in enumerate(versions, 1)})

    def _existing(self, master_key_id: str, operation: str) -> _MasterKey:
        if master_key := self._master_keys.get(master_key_id):
            return master_key
        raise MasterKeyNotFoundError(backend=self.backend, operation=operation, master_key_id=master_key_id)

    def _usable(self, master_key_id: str, operation: str) -> _MasterKey:
        master_key = self._existing(master_key_id, operation)
        if master_key.denied:
            raise KmsAccessDeniedError
        if not master_key.enabled:
            raise MasterKeyDisabledError
        return master_key

    def _switchable(self, master_key_id: str, version: int | None) -> _MasterKey | _Version:
        master_key = self._existing(master_key_id, "update")
        if version is None:
            return master_key
        if not 1 <= version <= len(master_key.versions):
            raise ValueError(f"the master key {master_key_id!r} has no version {version}")
        return master_key.versions[version - 1]


def _version(key: KeyBytes) -> _Version:
    secret = key if isinstance(key, SecretBytes) else SecretBytes(key)
    if len(secret) not in KEY_LENGTHS_BYTES:
        raise ValueError(f"a master key has 16, 24 or 32 bytes, not {len(secret)}")
    return _Version(secret)
