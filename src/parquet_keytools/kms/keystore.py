"""A KMS client with master keys in a keystore file on this machine, under a passphrase.

`keystore_file` describes the file. A wrapped key is `keystore:v<version>:<base64 of nonce (12 bytes),
ciphertext, tag (16 bytes)>`; its AAD binds the master key identifier and the version. The raw form is nonce,
ciphertext and tag without AAD. It names no version, so each version is tried, the newest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self

from cryptography.exceptions import InvalidTag
from pydantic import SecretStr, model_validator

from parquet_keytools import strict_base64
from parquet_keytools.errors import KmsError, MasterKeyDisabledError, WrappedKeyInvalidError, value_or_raise
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract import KmsSettings, MasterKeyDescription, UnwrapRequest, WrapRequest
from parquet_keytools.kms.keystore_file import Keystore, OpenKeystore, binding
from parquet_keytools.kms.passphrase import PassphraseSource, passphrase_from_file, passphrase_from_text
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes

_WRAPPED_KEY = re.compile(r"keystore:v([1-9][0-9]{0,8}):([A-Za-z0-9+/=]+)")


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
        """Return the path of the file, and the source of its passphrase. Relative paths start at `folder`."""
        passphrase: PassphraseSource
        if self.passphrase_file is not None:
            passphrase = partial(passphrase_from_file, folder / expanded(self.passphrase_file))
        else:
            assert self.passphrase is not None
            passphrase = partial(_passphrase_of, self.passphrase)
        return folder / expanded(self.path), passphrase


class KeystoreKms(KmsClient):
    """Wraps and unwraps with the master keys of a keystore file, and detects each change of the file."""

    backend = "keystore"
    Settings = KeystoreSettings

    def __init__(self, path: Path, passphrase: PassphraseSource) -> None:
        super().__init__()
        self._keystore = Keystore(path, passphrase)

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client from `KeystoreSettings`; it reads the file when it is first used."""
        assert isinstance(settings, KeystoreSettings)
        return cls(*settings.located(folder))

    def master_key_ids(self) -> frozenset[str]:
        """Return the identifiers of all master keys. They are not authenticated: this needs no passphrase.

        Raises:
            KmsConfigurationError: The file is missing, or readable for other users.
            KmsResponseInvalidError: It is not a keystore.
        """
        return value_or_raise(self._outcome("list", None, self._keystore.master_key_ids))

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that a wrapped key names, or None if no keystore made it."""
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        return parts[1] if parts else None

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        # Opened once for all keys, so that a wrong passphrase costs one run of scrypt.
        opened = self._keystore.open()
        return [
            self._outcome("wrap", r.master_key_id, self._wrap, opened, r.key, r.master_key_id) for r in requests
        ]

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        opened = self._keystore.open()
        return [
            self._outcome("unwrap", r.master_key_id, self._unwrap, opened, r.wrapped_key, r.master_key_id)
            for r in requests
        ]

    def _wrap(self, opened: OpenKeystore, key: SecretBytes, master_key_id: str) -> str:
        current = opened.master_key(master_key_id).versions[-1].version
        master_key = self._usable(opened, master_key_id, current)
        wrapped = wrap_key(master_key, key, binding("wrapped key", master_key_id, current))
        return f"keystore:v{current}:{wrapped}"

    def _unwrap(self, opened: OpenKeystore, wrapped_key: str, master_key_id: str) -> SecretBytes:
        versions = opened.master_key(master_key_id).versions
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
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
            try:
                key = unwrap_key(opened.key(master_key_id, version), strict_base64.encode(wrapped_key), b"")
            except InvalidTag:
                continue
            self._usable(opened, master_key_id, version.version)
            return key
        raise WrappedKeyInvalidError

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        master_key = self._keystore.open().master_key(master_key_id)
        enabled = [str(v.version) for v in master_key.versions if v.enabled and master_key.enabled]
        current = str(master_key.versions[-1].version)
        return MasterKeyDescription(
            master_key_id,
            enabled=current in enabled,
            current_version=current,
            enabled_versions=tuple(enabled),
            origin="keystore",
        )

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


def _passphrase_of(setting: SecretStr) -> SecretBytes:
    return passphrase_from_text(setting.get_secret_value())
