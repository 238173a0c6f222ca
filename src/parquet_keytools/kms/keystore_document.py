"""The content of a keystore file: its format and its cryptography.

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
  ASCII, without white space: nobody without the passphrase can enable, rename, swap, add or drop anything.
- Versions count from 1; the last one is the current one.

What this cannot detect: that the whole file was put back to an older state of itself.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from parquet_keytools import strict_base64
from parquet_keytools.errors import KmsConfigurationError, KmsResponseInvalidError
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.contract import CallFacts
from parquet_keytools.secret_bytes import SecretBytes

_CONNECT = CallFacts("keystore", "connect")

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
        raise ValueError("a master key identifier has 1 to 256 printable characters, no space at its ends")
    return text


MasterKeyId = Annotated[str, AfterValidator(_check_master_key_id)]
Salt = Annotated[str, AfterValidator(_base64_of(_SALT_LENGTH))]
Digest = Annotated[str, AfterValidator(_base64_of(32))]
WrappedMasterKey = Annotated[str, AfterValidator(_base64_of(12 + MASTER_KEY_LENGTH_BITS // 8 + 16))]


class _Part(BaseModel):
    """A part of the document: nothing unknown in it, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ScryptParameters(_Part):
    """How slow it is to make keys of the passphrase (RFC 7914, section 2)."""

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
    """A master key: its versions, the current one last. A disabled key has no version that may be used."""

    enabled: bool
    versions: tuple[MasterKeyVersion, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if [version.version for version in self.versions] != list(range(1, len(self.versions) + 1)):
            raise ValueError("versions do not count from 1")
        return self


@dataclass(frozen=True)
class PassphraseKeys:
    """What is made of a passphrase."""

    wrap: SecretBytes
    mac: SecretBytes
    check: SecretBytes

    @classmethod
    def derive(cls, passphrase: SecretBytes, scrypt: ScryptParameters) -> Self:
        """Run scrypt; this takes time and memory on purpose."""
        salt = strict_base64.decode(scrypt.salt)
        root = Scrypt(salt=salt, length=32, n=scrypt.n, r=scrypt.r, p=scrypt.p).derive(passphrase.reveal())

        def expand(name: str) -> SecretBytes:
            info = f"{FORMAT} {FORMAT_VERSION} {name}".encode()
            return SecretBytes(HKDFExpand(SHA256(), length=32, info=info).derive(root))

        return cls(expand("wrap"), expand("mac"), expand("check"))


class KeystoreDocument(_Part):
    """The whole document; whoever got it has to `verify` it before using anything in it."""

    format: Literal["parquet-keytools keystore"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    scrypt: ScryptParameters
    passphrase_check: Digest
    master_keys: dict[MasterKeyId, MasterKey]
    mac: Digest

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """Return the document that some bytes are.

        Raises:
            KmsResponseInvalidError: They are not a keystore of this format version.
        """
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
        """Check that the keys are those of this document, and that it is as its owner made it.

        Raises:
            KmsConfigurationError: The passphrase was wrong.
            KmsResponseInvalidError: The document was altered.
        """
        if not hmac.compare_digest(self.passphrase_check, strict_base64.encode(keys.check.reveal())):
            hint = "Check the passphrase; where it is right, restore the file from a backup."
            raise _CONNECT.error(KmsConfigurationError, f"the passphrase is not that of {path}", hint)
        if not hmac.compare_digest(self.mac, self._mac(keys)):
            raise _not_authentic(f"{path} was altered, or is damaged")

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return json.dumps(self.model_dump(), indent=1).encode("ascii") + b"\n"

    def _mac(self, keys: PassphraseKeys) -> str:
        canonical = json.dumps(self.model_dump(exclude={"mac"}), sort_keys=True, separators=(",", ":"))
        return strict_base64.encode(hmac.digest(keys.mac.reveal(), canonical.encode("ascii"), "sha256"))


def wrap_master_key(keys: PassphraseKeys, key: SecretBytes, master_key_id: str, version: int) -> str:
    """Wrap a master key with the passphrase's key."""
    return wrap_key(keys.wrap, key, binding("master key", master_key_id, version))


def unwrap_master_key(keys: PassphraseKeys, version: MasterKeyVersion, master_key_id: str) -> SecretBytes:
    """Return a master key of a document that is verified.

    Raises:
        KmsResponseInvalidError: It does not belong to this place of the document.
    """
    aad = binding("master key", master_key_id, version.version)
    try:
        return unwrap_key(keys.wrap, version.wrapped_master_key, aad)
    except InvalidTag:
        pass
    raise _not_authentic(f"version {version.version} of {master_key_id!r} was altered, or is damaged")


def binding(purpose: str, master_key_id: str, version: int) -> bytes:
    """Return the AAD that binds a wrapped key to what it is: JSON, so that no two are the same bytes."""
    return json.dumps([FORMAT, FORMAT_VERSION, purpose, master_key_id, version]).encode("ascii")


def _not_authentic(detail: str) -> KmsResponseInvalidError:
    return _CONNECT.error(KmsResponseInvalidError, detail, "Restore the keystore from a backup.")
