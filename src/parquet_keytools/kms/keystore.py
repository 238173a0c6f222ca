"""A KMS client whose master keys are in a keystore file on this machine, under a passphrase.

`keystore_document` describes the file. A wrapped key is `keystore:v<version>:<base64 of nonce (12 bytes),
ciphertext, tag (16 bytes)>`; its AAD binds the master key identifier and the version. The raw form is nonce,
ciphertext and tag without AAD, so it names no version: each is tried, the newest first.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Literal, Self

from cryptography.exceptions import InvalidTag
from pydantic import SecretStr, model_validator

from parquet_keytools import strict_base64
from parquet_keytools.errors import MasterKeyDisabledError, WrappedKeyInvalidError
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract import KmsSettings, MasterKeyDescription
from parquet_keytools.kms.keystore_document import binding
from parquet_keytools.kms.keystore_file import Keystore, OpenKeystore
from parquet_keytools.kms.passphrase import PassphraseSource, passphrase_from_file, passphrase_from_text
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes

_WRAPPED_KEY = re.compile(r"keystore:v([1-9][0-9]{0,8}):([A-Za-z0-9+/=]+)")


class KeystoreSettings(KmsSettings):
    """Settings of the keystore; relative paths start at the configuration's folder.

    Attributes:
        passphrase: Its passphrase, best as `${VARIABLE}` of the environment; or
        passphrase_file: a file with its passphrase, which nobody but its owner may read.
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
        """Return the path of the file and what gives its passphrase, from the configuration's folder on."""
        passphrase: PassphraseSource
        if self.passphrase_file is not None:
            passphrase = partial(passphrase_from_file, folder / expanded(self.passphrase_file))
        else:
            assert self.passphrase is not None
            passphrase = partial(_passphrase_of, self.passphrase)
        return folder / expanded(self.path), passphrase


class KeystoreKms(KmsClient):
    """Wraps and unwraps with the master keys of a keystore file, and sees at once when the file changes."""

    backend = "keystore"
    Settings = KeystoreSettings

    def __init__(self, path: Path, passphrase: PassphraseSource) -> None:
        super().__init__()
        self._keystore = Keystore(path, passphrase)

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client of `KeystoreSettings`; nothing is read before it is first used."""
        assert isinstance(settings, KeystoreSettings)
        return cls(*settings.located(folder))

    def master_key_ids(self) -> frozenset[str]:
        """Return the identifiers of all master keys, read without the passphrase and so not authenticated.

        Raises:
            KmsConfigurationError: The file is missing, or others than its owner may read it.
            KmsResponseInvalidError: It is not a keystore.
        """
        return self._guard("list", None, self._keystore.master_key_ids)

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        """Return the version that stands in a wrapped key, or None where it is none of a keystore."""
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        return parts[1] if parts else None

    # --- hooks ---

    def _prepare(self, operation: str) -> None:
        """Open the keystore: one that cannot be opened costs one run of scrypt and not many."""
        self._keystore.open()

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        opened = self._keystore.open()
        current = opened.master_key(master_key_id, "wrap").versions[-1].version
        master_key = self._usable(opened, master_key_id, current, "wrap")
        wrapped = wrap_key(master_key, key, binding("wrapped key", master_key_id, current))
        return f"keystore:v{current}:{wrapped}"

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        opened = self._keystore.open()
        versions = opened.master_key(master_key_id, "unwrap").versions
        parts = _WRAPPED_KEY.fullmatch(wrapped_key)
        if not parts:
            raise self._kms_error(WrappedKeyInvalidError, "unwrap", master_key_id, "it was not made by a keystore")
        version = int(parts[1])
        if version > len(versions):
            detail = f"this keystore has no version {version} of it"
            raise self._kms_error(WrappedKeyInvalidError, "unwrap", master_key_id, detail)
        master_key = self._usable(opened, master_key_id, version, "unwrap")
        try:
            return unwrap_key(master_key, parts[2], binding("wrapped key", master_key_id, version))
        except InvalidTag:
            raise self._kms_error(WrappedKeyInvalidError, "unwrap", master_key_id) from None

    def _raw_obstacle(self) -> str:
        return ""

    def _wrap_raw(self, key: SecretBytes, master_key_id: str) -> bytes:
        opened = self._keystore.open()
        current = opened.master_key(master_key_id, "wrap").versions[-1].version
        return strict_base64.decode(wrap_key(self._usable(opened, master_key_id, current, "wrap"), key, b""))

    def _unwrap_raw(self, wrapped_key: bytes, master_key_id: str) -> SecretBytes:
        opened = self._keystore.open()
        for version in reversed(opened.master_key(master_key_id, "unwrap").versions):
            try:
                key = unwrap_key(opened.key(master_key_id, version), strict_base64.encode(wrapped_key), b"")
            except InvalidTag:
                continue
            self._usable(opened, master_key_id, version.version, "unwrap")
            return key
        raise self._kms_error(WrappedKeyInvalidError, "unwrap", master_key_id)

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        master_key = self._keystore.open().master_key(master_key_id, "describe")
        enabled = [str(v.version) for v in master_key.versions if v.enabled and master_key.enabled]
        current = str(master_key.versions[-1].version)
        return MasterKeyDescription(
            master_key_id,
            enabled=current in enabled,
            current_version=current,
            enabled_versions=tuple(enabled),
            origin="keystore",
        )

    def _usable(self, opened: OpenKeystore, master_key_id: str, version: int, operation: str) -> SecretBytes:
        """Return the bytes of one version of a master key that exists, unless it is disabled."""
        master_key = opened.master_key(master_key_id, operation)
        wanted = master_key.versions[version - 1]
        if not (master_key.enabled and wanted.enabled):
            detail = f"version {version}" if master_key.enabled else ""
            hint = "Enable it with `parquet-keytools keystore enable`, or ask its owner to."
            raise self._kms_error(MasterKeyDisabledError, operation, master_key_id, detail, hint)
        return opened.key(master_key_id, wanted)


def _passphrase_of(setting: SecretStr) -> SecretBytes:
    return passphrase_from_text(setting.get_secret_value())
