"""A KMS client for AWS KMS.

A wrapped key is base64 of the ciphertext blob that `Encrypt` returned. AWS keeps in it, hidden, which key and
which key material made it. No master key leaves AWS, and with `ReEncrypt` no wrapped key has to be unwrapped here
to be rotated. The raw form is the blob of a call without encryption context, as that of Iceberg's
`AwsKeyManagementClient`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.aws.connection import AwsConnection, AwsSettings
from parquet_keytools.kms.aws.errors import aws_error
from parquet_keytools.kms.contract import KmsSettings, MasterKeyDescription, RewrapRequest
from parquet_keytools.kms.remote_client import RemoteKmsClient, Time
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

_MAX_BLOB_LENGTH = 6_144
"""Of a ciphertext blob, in bytes: AWS refuses longer ones."""
_ARN = re.compile(r"arn:(aws[a-z-]*):kms:([a-z0-9-]+):([0-9]{12}):(key|alias)/([A-Za-z0-9/_-]{1,256})")
_KEY_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}")
_MULTI_REGION = "mrk-"

_USAGE, _SPEC = "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT"


@dataclass(frozen=True)
class AwsMasterKeyDescription(MasterKeyDescription):
    """What AWS KMS says of a master key.

    Attributes:
        current_version: Id of the key material that wraps now, or None where AWS does not say. AWS does not
            say which one made a wrapped key.
        arn: The key's ARN; that of an alias is resolved.
        state: As AWS names it, such as `Enabled` or `PendingDeletion`.
    """

    arn: str = ""
    state: str = ""


class AwsKms(RemoteKmsClient):
    """Wraps and unwraps with master keys in AWS KMS, named by key id, key ARN, alias or alias ARN.

    Args:
        settings: Where to connect to, as whom, and the limits; all have defaults.
        session: A boto3 session to be used in place of one made from the settings.
        client: A ready boto3 client for KMS. It should not retry by itself. Where processes fork, give a
            session.
        time_source: For tests.
    """

    backend = "aws"
    Settings = AwsSettings

    def __init__(
        self,
        settings: AwsSettings | None = None,
        *,
        folder: Path | None = None,
        session: Any = None,
        client: Any = None,
        time_source: Time | None = None,
    ) -> None:
        self._settings = settings or AwsSettings()
        super().__init__(self._settings, time_source)
        if session is not None and client is not None:
            raise ValueError("give either a session or a client")
        if client is not None and self._settings.assume_role is not None:
            raise ValueError("a ready client cannot assume a role; give a session")
        self._given = "client" if client is not None else "session" if session is not None else ""
        self._connection = AwsConnection(self._settings, folder or Path(), session, client)
        self._aliases: dict[str, KmsArn | None] = {}
        self._aliases_lock = ForkSafeLock()

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client of `AwsSettings`; it connects, and looks for credentials, when it is first used."""
        assert isinstance(settings, AwsSettings)
        return cls(settings, folder=folder)

    def close(self) -> None:
        """Give back threads and connections. A call after this makes new ones."""
        super().close()
        self._connection.close()

    # --- hooks ---

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        def send(seconds: float) -> str:
            until = time.monotonic() + seconds
            answer = self._connection.call(
                "encrypt",
                seconds,
                KeyId=_in_region(master_key_id),
                Plaintext=key.reveal(),
                EncryptionContext=self._settings.encryption_context,
            )
            self._check_identity(answer.get("KeyId"), master_key_id, "wrap", until)
            return self._wrapped_key(answer, "wrap", master_key_id)

        return self._call("wrap", master_key_id, send)

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        blob = self._blob(wrapped_key, "unwrap", master_key_id)

        def send(seconds: float) -> SecretBytes:
            until = time.monotonic() + seconds
            answer = self._connection.call(
                "decrypt",
                seconds,
                # Without it AWS takes whichever key the blob names: an attacker's own would do.
                KeyId=_in_region(master_key_id),
                CiphertextBlob=blob,
                EncryptionContext=self._settings.encryption_context,
            )
            self._check_identity(answer.get("KeyId"), master_key_id, "unwrap", until)
            key = answer.get("Plaintext")
            return self._call_facts("unwrap", master_key_id).checked_key(key if isinstance(key, bytes) else b"")

        return self._call("unwrap", master_key_id, send)

    def _rewrap(self, request: RewrapRequest) -> str:
        blob = self._blob(request.wrapped_key, "rewrap", request.master_key_id)

        def send(seconds: float) -> str:
            until = time.monotonic() + seconds
            try:
                answer = self._connection.call(
                    "re_encrypt",
                    seconds,
                    SourceKeyId=_in_region(request.master_key_id),
                    DestinationKeyId=_in_region(request.new_master_key_id),
                    CiphertextBlob=blob,
                    SourceEncryptionContext=self._settings.encryption_context,
                    DestinationEncryptionContext=self._settings.encryption_context,
                )
            except ClientError as error:
                failure = self._translate(error, "rewrap", _concerned(error, request))
            else:
                self._check_identity(answer.get("SourceKeyId"), request.master_key_id, "rewrap", until)
                self._check_identity(answer.get("KeyId"), request.new_master_key_id, "rewrap", until)
                return self._wrapped_key(answer, "rewrap", request.new_master_key_id)
            raise failure

        return self._call("rewrap", request.master_key_id, send)

    def _describe(self, master_key_id: str) -> AwsMasterKeyDescription:
        def send(seconds: float) -> AwsMasterKeyDescription:
            until = time.monotonic() + seconds
            metadata = self._connection.call("describe_key", seconds, KeyId=_in_region(master_key_id))[
                "KeyMetadata"
            ]
            arn = self._answered(metadata.get("Arn"), master_key_id, "describe")
            if (metadata.get("KeyUsage", _USAGE), metadata.get("KeySpec", _SPEC)) != (_USAGE, _SPEC):
                detail = "it is not a symmetric key for encryption"
                hint = "Choose one with KeySpec SYMMETRIC_DEFAULT and KeyUsage ENCRYPT_DECRYPT."
                raise self._kms_error(KmsConfigurationError, "describe", master_key_id, detail, hint)
            state = str(metadata.get("KeyState", ""))
            return AwsMasterKeyDescription(
                master_key_id,
                enabled=state == "Enabled",
                current_version=metadata.get("CurrentKeyMaterialId"),
                origin=metadata.get("Origin"),
                arn=str(arn),
                state=state,
                rotates=self._rotates(str(arn), until),
            )

        return self._call("describe", master_key_id, send)

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        hint = hint_for_missing_key(master_key_id, self._connection.region) if master_key_id else None
        return aws_error(error, operation, master_key_id, hint) or super()._translate(
            error, operation, master_key_id
        )

    def _server(self) -> str:
        return self._connection.address

    def _principal(self) -> str:
        """Return who asks the KMS, as far as the settings say; no call is made for it."""
        if self._settings.assume_role is not None:
            return f"{self._settings.assume_role.role_arn}/{self._settings.assume_role.session_name}"
        if self._given:
            return f"a {self._given} of the caller"
        if self._settings.profile is not None:
            return f"profile {self._settings.profile}"
        return "access key" if self._settings.access_key_id is not None else "default credentials"

    def _identity(self, master_key_id: str) -> str:
        arn = KmsArn.parse(master_key_id)
        if arn is not None and arn.kind == "key":
            return as_asked(master_key_id, self._connection.region)
        return self._describe(master_key_id).arn

    def _raw_obstacle(self) -> str:
        return "Iceberg's own client sends no encryption_context" if self._settings.encryption_context else ""

    def _may_be_of_others(self, master_key_id: str) -> bool:
        # Key ids and aliases mean keys of the caller's own account.
        return master_key_id.startswith("arn:")

    # --- what goes in and what comes back ---

    def _blob(self, wrapped_key: str, operation: str, master_key_id: str) -> bytes:
        try:
            blob = strict_base64.decode(wrapped_key)
        except ValueError:
            blob = b""
        if not 0 < len(blob) <= _MAX_BLOB_LENGTH:
            raise self._kms_error(WrappedKeyInvalidError, operation, master_key_id, "it was not made by AWS KMS")
        return blob

    def _wrapped_key(self, answer: dict[str, Any], operation: str, master_key_id: str) -> str:
        blob = answer.get("CiphertextBlob")
        if not isinstance(blob, bytes) or not 0 < len(blob) <= _MAX_BLOB_LENGTH:
            raise self._kms_error(
                KmsResponseInvalidError, operation, master_key_id, "there is no wrapped key in it"
            )
        return strict_base64.encode(blob)

    def _answered(self, key_id: object, master_key_id: str, operation: str) -> KmsArn:
        """Return the key of an answer, which may be the one that was asked for."""
        arn = KmsArn.parse(key_id)
        if arn is None or not may_stand_for(as_asked(master_key_id, arn.region), arn):
            raise self._about_another(operation, master_key_id)
        return arn

    def _about_another(self, operation: str, master_key_id: str) -> KmsError:
        return self._kms_error(KmsResponseInvalidError, operation, master_key_id, "it is about another master key")

    def _check_identity(self, key_id: object, master_key_id: str, operation: str, until: float) -> None:
        """Check that an answer is about the master key that was asked for.

        Which key an alias stands for is remembered, and asked for again when an answer is about another one.
        """
        arn = self._answered(key_id, master_key_id, operation)
        if not is_alias(master_key_id):
            return
        with self._aliases_lock:
            if master_key_id in self._aliases and self._aliases[master_key_id] in (arn, None):
                return
        found = self._resolved(master_key_id, operation, until)
        with self._aliases_lock:
            self._aliases[master_key_id] = found
        if found not in (arn, None):
            raise self._about_another(operation, master_key_id)

    def _resolved(self, alias: str, operation: str, until: float) -> KmsArn | None:
        """Return the key that an alias stands for, or None where this principal may not know."""
        try:
            answer = self._connection.call("describe_key", _left(until), KeyId=alias)
        except ClientError as error:
            if isinstance(self._translate(error, operation, alias), KmsAccessDeniedError):
                return None
            raise
        return self._answered(answer["KeyMetadata"].get("Arn"), alias, operation)

    def _rotates(self, arn: str, until: float) -> bool | None:
        try:
            answer = self._connection.call("get_key_rotation_status", _left(until), KeyId=arn)
        except (ClientError, BotoCoreError):
            return None
        rotates = answer.get("KeyRotationEnabled")
        return rotates if isinstance(rotates, bool) else None


def _in_region(master_key_id: str) -> Callable[[str], str]:
    return lambda region: as_asked(master_key_id, region)


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.1)


def _concerned(error: ClientError, request: RewrapRequest) -> str:
    """Return which of the two master keys of a ReEncrypt an error is about: its text says so."""
    text = str(error.response.get("Error", {}).get("Message", ""))
    name, new_name = (id_.rpartition("/")[2] for id_ in (request.master_key_id, request.new_master_key_id))
    if "kms:ReEncryptTo" in text or (new_name in text and name not in text):
        return request.new_master_key_id
    return request.master_key_id


# --- names of master keys: key id, key ARN, alias, alias ARN ---


@dataclass(frozen=True)
class KmsArn:
    """ARN of a key or an alias.

    Attributes:
        partition: `aws`, `aws-cn`, `aws-us-gov`, ...
        account: Whose it is, 12 digits.
        kind: `key` or `alias`.
        name: The key id, or the alias without `alias/`.
    """

    partition: str
    region: str
    account: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: object) -> KmsArn | None:
        """Return what an ARN says, or None for anything else."""
        parts = _ARN.fullmatch(text) if isinstance(text, str) else None
        return cls(*parts.groups()) if parts else None

    @property
    def is_multi_region_key(self) -> bool:
        """Whether the key has, or may have, replicas in other regions, all with the same key id."""
        return self.kind == "key" and self.name.startswith(_MULTI_REGION)

    def __str__(self) -> str:
        return f"arn:{self.partition}:kms:{self.region}:{self.account}:{self.kind}/{self.name}"


def as_asked(master_key_id: str, region: str | None) -> str:
    """Return how to name a master key to the KMS of a region.

    A multi-Region key has a replica in each of its regions, and each KMS knows only its own. A file written in
    one region names that region's replica; its reader in another one has to ask for the replica there.
    """
    arn = KmsArn.parse(master_key_id)
    if arn and arn.is_multi_region_key and region:
        return str(replace(arn, region=region))
    return master_key_id


def is_alias(master_key_id: str) -> bool:
    """Return whether an identifier is an alias, which may be moved from one key to another."""
    arn = KmsArn.parse(master_key_id)
    return arn.kind == "alias" if arn else master_key_id.startswith("alias/")


def may_stand_for(asked: str, answered: KmsArn) -> bool:
    """Return whether the key of an answer may be the one that was asked for.

    Of an alias that is all that its name can tell; which key it stands for, only the KMS knows.
    """
    arn = KmsArn.parse(asked)
    if answered.kind != "key":
        return False
    if arn is None:
        return is_alias(asked) or answered.name == asked
    same_place = (arn.partition, arn.region, arn.account) == (
        answered.partition,
        answered.region,
        answered.account,
    )
    return same_place and (arn.kind == "alias" or arn.name == answered.name)


def hint_for_missing_key(master_key_id: str, region: str | None) -> str | None:
    """Return what is likely wrong with an identifier that the KMS does not know, or None."""
    arn = KmsArn.parse(master_key_id)
    if arn and region and arn.region != region and not arn.is_multi_region_key:
        return f"It is in {arn.region}, but the configuration asks the KMS of {region}: set `region`."
    if (
        arn is None
        and "/" not in master_key_id
        and ":" not in master_key_id
        and not _KEY_ID.fullmatch(master_key_id)
    ):
        return (
            f"This is neither a key id, an ARN nor an alias: an alias is written {f'alias/{master_key_id}'!r}. "
            "Under `master_keys` a name can be given to any of them."
        )
    return None
