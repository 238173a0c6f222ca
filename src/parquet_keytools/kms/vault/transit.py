"""The transit engine: what it is sent and what it answers, for batches of keys and about a master key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvac.api.secrets_engines import Transit

from parquet_keytools import strict_base64
from parquet_keytools.errors import KmsAccessDeniedError, KmsConfigurationError, KmsError, KmsResponseInvalidError
from parquet_keytools.kms.contract import (
    KEY_LENGTHS_BYTES,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.vault.connection import VaultConnection
from parquet_keytools.kms.vault.errors import Reason, TransitCall, VaultRefusal, reason_of, refusal_error
from parquet_keytools.secret_bytes import SecretBytes

_KEY_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,254}[A-Za-z0-9_])?")
_WRAPPED_KEY = re.compile(r"vault:v([1-9][0-9]{0,8}):([A-Za-z0-9+/]+={0,2})")

_NO_TYPE = "none"
"""The engine creates a missing key when a token may, with the type that the request asks for. This is none, so
the engine refuses; of a key that exists it does not look at the type."""

_LEAST_ADDED_BYTES = 28
"""A nonce of at least 12 bytes and a tag of 16 come with each wrapped key."""

# These authenticate what they encrypt. With RSA anybody who has the public key could make wrapped keys.
_TYPES = ("aes256-gcm96", "aes128-gcm96", "chacha20-poly1305", "xchacha20-poly1305")


@dataclass(frozen=True)
class TransitKey:
    """A key of the transit engine.

    Attributes:
        type: What it is for, such as `aes256-gcm96`.
        derived: Whether each context has its own key.
        latest_version: The version that wraps.
        min_decryption_version: The oldest version that unwraps.
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

    def mistake(self, call: TransitCall, *, with_context: bool) -> KmsError | None:
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


def unreadable_with_context(call: TransitCall) -> KmsError:
    """Return the error for a key of which nobody can say whether it takes a context."""
    detail = "whether it is a derived key cannot be read, and the server ignores a context if it is not"
    hint = f"Allow `read` on {call.mount_point}/keys/{call.master_key_id}."
    return call.error(KmsAccessDeniedError, detail, hint)


def is_key_name(text: str) -> bool:
    """Return whether the engine could have a key of this name; it may come from a file."""
    return _KEY_NAME.fullmatch(text) is not None and ".." not in text


def version_in(wrapped_key: str) -> str | None:
    """Return the version that stands in a wrapped key, or None where it is none of a transit engine."""
    parts = _WRAPPED_KEY.fullmatch(wrapped_key)
    return parts[1] if parts else None


def parts_of(wrapped_key: object) -> tuple[int, bytes] | None:
    """Return version and ciphertext of a wrapped key, or None where it is none."""
    parts = _WRAPPED_KEY.fullmatch(wrapped_key) if isinstance(wrapped_key, str) else None
    if parts is None:
        return None
    with contextlib.suppress(ValueError):
        return int(parts[1]), strict_base64.decode(parts[2])
    return None


@dataclass(frozen=True)
class TransitEngine:
    """The engine at a mount point. Each method makes one request."""

    mount_point: str
    context: bytes | None

    def wrap(
        self, connection: VaultConnection, call: TransitCall, batch: Sequence[WrapRequest]
    ) -> list[str | KmsError]:
        """Wrap keys with the master key of a call."""
        items = [{"plaintext": strict_base64.encode(request.key.reveal())} for request in batch]
        results = self._results(connection, call, "encrypt", items)
        return [_wrapped_key_in(result, call, request.key) for request, result in zip(batch, results, strict=True)]

    def unwrap(
        self, connection: VaultConnection, call: TransitCall, batch: Sequence[UnwrapRequest | RewrapRequest]
    ) -> list[SecretBytes | KmsError]:
        """Unwrap keys with the master key of a call."""
        items = [{"ciphertext": request.wrapped_key} for request in batch]
        return [_key_in(result, call) for result in self._results(connection, call, "decrypt", items)]

    def rewrap(
        self, connection: VaultConnection, call: TransitCall, batch: Sequence[RewrapRequest]
    ) -> list[str | KmsError]:
        """Re-wrap keys under the current version of the master key of a call."""
        items = [{"ciphertext": request.wrapped_key} for request in batch]
        return [_wrapped_key_in(result, call) for result in self._results(connection, call, "rewrap", items)]

    def read_key(self, connection: VaultConnection, name: str) -> TransitKey:
        """Return what the engine says of a master key."""
        transit: Any = Transit(connection)
        return TransitKey.read(name, transit.read_key(name, mount_point=self.mount_point))

    def _results(
        self, connection: VaultConnection, call: TransitCall, action: str, items: list[dict[str, str]]
    ) -> list[Mapping[str, Any]]:
        """Send a batch and return what the answer has for each item."""
        if self.context is not None:
            context = strict_base64.encode(self.context)
            items = [{**item, "context": context} for item in items]
        body: dict[str, object] = {"batch_input": items}
        if action == "encrypt":
            body["type"] = _NO_TYPE
        if action != "rewrap":
            body["partial_failure_response_code"] = 200
        answer = connection.post(f"/v1/{self.mount_point}/{action}/{call.master_key_id}", json=body)
        data = answer.get("data")
        results = data.get("batch_results") if isinstance(data, Mapping) else None
        if (
            not isinstance(results, list)
            or len(results) != len(items)
            or not all(isinstance(result, Mapping) for result in results)
        ):
            raise call.error(KmsResponseInvalidError, "the number of answers is not that of the requests")
        return results


def _failure_in(result: Mapping[str, Any], call: TransitCall) -> KmsError | None:
    """Return why the server failed for one item of a batch, or None."""
    text = result.get("error")
    if not text:
        return None
    reason = reason_of([text])
    if reason is Reason.UNKNOWN:
        return call.error(KmsResponseInvalidError, "it refused for a reason that is not known")
    return refusal_error(VaultRefusal(400, reason), call)


def _wrapped_key_in(
    result: Mapping[str, Any], call: TransitCall, key: SecretBytes | None = None
) -> str | KmsError:
    """Return the wrapped key in a result, if it can be one."""
    if failure := _failure_in(result, call):
        return failure
    text = result.get("ciphertext")
    parts = parts_of(text)
    if parts is None:
        raise call.error(KmsResponseInvalidError, "what it sent is no wrapped key")
    version, data = parts
    if "key_version" in result and result["key_version"] != version:
        raise call.error(KmsResponseInvalidError, "it contradicts itself about the version of the master key")
    least = (len(key) if key is not None else min(KEY_LENGTHS_BYTES)) + _LEAST_ADDED_BYTES
    if len(data) < least or (key is not None and key.reveal() in data):
        raise call.error(KmsResponseInvalidError, "what it sent is no wrapped key")
    return str(text)


def _key_in(result: Mapping[str, Any], call: TransitCall) -> SecretBytes | KmsError:
    """Return the key in a result, if it can be one."""
    if failure := _failure_in(result, call):
        return failure
    text, data = result.get("plaintext"), b""
    with contextlib.suppress(ValueError):
        data = strict_base64.decode(text) if isinstance(text, str) else b""
    return call.checked_key(data)
