"""What the transit engine says of a master key, and whether that can wrap as the configuration wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parquet_keytools.errors import KmsAccessDeniedError, KmsConfigurationError, KmsError
from parquet_keytools.kms.client import MasterKeyDescription
from parquet_keytools.kms.vault_errors import CallFacts, Reason, VaultRefusal

# These authenticate what they encrypt. With RSA anybody who has the public key could make wrapped keys.
_TYPES = ("aes256-gcm96", "aes128-gcm96", "chacha20-poly1305", "xchacha20-poly1305")


@dataclass(frozen=True)
class TransitKey:
    """A key of the transit engine.

    Attributes:
        name: Its name.
        type: What it is for, such as `aes256-gcm96`.
        derived: Whether each context has its own key.
        latest_version: The version that wraps.
        min_decryption_version: The oldest version that unwraps.
        soft_deleted: Whether it waits for its deletion.
        imported: Whether its bytes were made elsewhere.
        rotates: Whether the engine makes new versions by itself; None where it does not say.
    """

    name: str
    type: str
    derived: bool
    latest_version: int
    min_decryption_version: int
    soft_deleted: bool
    imported: bool
    rotates: bool | None

    @classmethod
    def read(cls, name: str, answer: Mapping[str, Any]) -> TransitKey:
        """Return what an answer says of the key asked for.

        Raises:
            VaultRefusal: It says nothing of it, or contradicts itself.
        """
        data = answer.get("data")
        if not isinstance(data, Mapping) or data.get("name") != name or not isinstance(data.get("type"), str):
            raise VaultRefusal(200, Reason.NOT_JSON)
        period = data.get("auto_rotate_period")
        latest, oldest = data.get("latest_version"), data.get("min_decryption_version", 1)
        if type(latest) is not int or type(oldest) is not int or not 0 <= oldest <= latest or latest < 1:
            raise VaultRefusal(200, Reason.NOT_JSON)
        return cls(
            name=name,
            type=data["type"],
            derived=data.get("derived") is True,
            latest_version=latest,
            min_decryption_version=max(oldest, 1),
            soft_deleted=data.get("soft_deleted") is True,
            imported=data.get("imported_key") is True,
            rotates=period > 0 if type(period) is int else None,
        )

    def description(self) -> MasterKeyDescription:
        """Return it in the words of the contract."""
        enabled = not self.soft_deleted and self.type in _TYPES
        versions = range(self.min_decryption_version, self.latest_version + 1) if enabled else ()
        return MasterKeyDescription(
            self.name,
            enabled=enabled,
            current_version=str(self.latest_version),
            enabled_versions=tuple(map(str, versions)),
            origin="imported" if self.imported else "transit",
            rotates=self.rotates,
        )

    def mistake(self, call: CallFacts, *, with_context: bool) -> KmsError | None:
        """Return why it must not be used as the configuration says, or None."""
        if self.type not in _TYPES:
            detail = f"it is of type {self.type[:40]!r}, which does not protect wrapped keys from being altered"
            return call.error(KmsConfigurationError, detail, f"Use a key of type {', '.join(_TYPES)}.")
        if self.derived and not with_context:
            detail = "it is a derived key, which needs a context"
            return call.error(KmsConfigurationError, detail, "Set context in the configuration.")
        if with_context and not self.derived:
            detail = "it is not a derived key: the server would ignore the context without a word"
            hint = "Create the key with derived=true, or leave context out of the configuration."
            return call.error(KmsConfigurationError, detail, hint)
        return None


def unreadable_with_context(call: CallFacts) -> KmsError:
    """Return the error for a key of which nobody can say whether it takes a context."""
    detail = "whether it is a derived key cannot be read, and the server ignores a context if it is not"
    hint = f"Allow `read` on {call.mount_point}/keys/{call.master_key_id}."
    return call.error(KmsAccessDeniedError, detail, hint)
