"""A KMS client for AWS KMS.

A wrapped key is base64 of the ciphertext blob that `Encrypt` returned. The blob names, in a form that only AWS can
read, the master key and the key material that made it. No master key leaves AWS, and `ReEncrypt` rotates a wrapped
key without unwrapping it here. The raw form is the blob of a call without encryption context, as in Iceberg's
`AwsKeyManagementClient`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
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
from parquet_keytools.kms.contract import (
    KmsSettings,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, Time
from parquet_keytools.runtime.fork_safety import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

_MAX_BLOB_LENGTH = 6_144
"""Of a ciphertext blob, in bytes. AWS refuses longer blobs."""
_ARN = re.compile(r"arn:(aws[a-z-]*):kms:([a-z0-9-]+):([0-9]{12}):(key|alias)/([A-Za-z0-9/_-]{1,256})")
_KEY_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}")
_MULTI_REGION = "mrk-"

_USAGE, _SPEC = "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT"


@dataclass(frozen=True)
class AwsMasterKeyDescription(MasterKeyDescription):
    """AWS KMS's description of a master key.

    Attributes:
        current_version: Id of the key material that wraps now, or None if unknown. AWS does not say which key
            material made a wrapped key.
        arn: The key's ARN, also where the master key is named by an alias.
        state: State in the words of AWS, such as `Enabled` or `PendingDeletion`.
    """

    arn: str = ""
    state: str = ""


class AwsKms(RemoteKmsClient):
    """Wraps and unwraps with master keys in AWS KMS, named by key id, key ARN, alias or alias ARN.

    Args:
        settings: Endpoint, credentials and limits; all have defaults.
        session: A boto3 session to use in place of a session made from the settings.
        client: A boto3 client for KMS. Disable its retries. Pass a session instead where processes fork.
        time_source: For tests.
    """

    backend = "aws"
    Settings = AwsSettings
    address_setting = "endpoint_url"
    certificates_setting = "ca_bundle"

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
        """Make a client from `AwsSettings`; it looks for credentials and connects when it is first used."""
        assert isinstance(settings, AwsSettings)
        return cls(settings, folder=folder)

    def close(self) -> None:
        """Close threads and connections. A later call makes new ones."""
        super().close()
        self._connection.close()

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._operation("wrap").each(requests, self._encrypt)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._operation("unwrap").each(requests, self._decrypt)

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return self._operation("rewrap").each(requests, self._re_encrypt)

    def _encrypt(self, request: WrapRequest, seconds: float) -> str:
        until = time.monotonic() + seconds
        answer = self._connection.call(
            "encrypt",
            seconds,
            KeyId=_in_region(request.master_key_id),
            Plaintext=request.key.reveal(),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id, until)
        return _wrapped_key_in(answer)

    def _decrypt(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        until = time.monotonic() + seconds
        answer = self._connection.call(
            "decrypt",
            seconds,
            # Without KeyId, AWS uses the key that the blob names, which may be an attacker's own.
            KeyId=_in_region(request.master_key_id),
            CiphertextBlob=_blob_in(request.wrapped_key),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id, until)
        return checked_key(answer.get("Plaintext"))

    def _re_encrypt(self, request: RewrapRequest, seconds: float) -> str:
        until = time.monotonic() + seconds
        try:
            answer = self._connection.call(
                "re_encrypt",
                seconds,
                SourceKeyId=_in_region(request.master_key_id),
                DestinationKeyId=_in_region(request.new_master_key_id),
                CiphertextBlob=_blob_in(request.wrapped_key),
                SourceEncryptionContext=self._settings.encryption_context,
                DestinationEncryptionContext=self._settings.encryption_context,
            )
        except ClientError as error:
            concerned = _concerned(error, request)
            failure = self._translate(error, "rewrap", concerned).about(self.backend, "rewrap", concerned)
        else:
            self._check_identity(answer.get("SourceKeyId"), request.master_key_id, until)
            self._check_identity(answer.get("KeyId"), request.new_master_key_id, until)
            return _wrapped_key_in(answer)
        raise failure

    def _describe(self, master_key_id: str) -> AwsMasterKeyDescription:
        def send(seconds: float) -> AwsMasterKeyDescription:
            until = time.monotonic() + seconds
            answer = self._connection.call("describe_key", seconds, KeyId=_in_region(master_key_id))
            metadata = answer["KeyMetadata"]
            arn = _answered(metadata.get("Arn"), master_key_id)
            if (metadata.get("KeyUsage", _USAGE), metadata.get("KeySpec", _SPEC)) != (_USAGE, _SPEC):
                detail = "it is not a symmetric encryption key"
                raise KmsConfigurationError(
                    detail, hint="Choose a key with KeySpec SYMMETRIC_DEFAULT and KeyUsage ENCRYPT_DECRYPT."
                )
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

        return self._operation("describe").call(master_key_id, send)

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        hint = hint_for_missing_key(master_key_id, self._connection.region) if master_key_id else None
        return aws_error(error, hint) or super()._translate(error, operation, master_key_id)

    def _server(self) -> str:
        return self._connection.address

    def _principal(self) -> str:
        """Return the caller's identity as far as the settings show it, without a call."""
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
        # Key ids and aliases name keys in the caller's own account.
        return master_key_id.startswith("arn:")

    def _check_identity(self, key_id: object, master_key_id: str, until: float) -> None:
        """Check that an answer is about the requested master key.

        The target of an alias is remembered, and looked up again when an answer is about another key.
        """
        arn = _answered(key_id, master_key_id)
        if not is_alias(master_key_id):
            return
        with self._aliases_lock:
            if master_key_id in self._aliases and self._aliases[master_key_id] in (arn, None):
                return
        found = self._resolved(master_key_id, until)
        with self._aliases_lock:
            self._aliases[master_key_id] = found
        if found not in (arn, None):
            raise KmsResponseInvalidError(_ABOUT_ANOTHER, master_key_id=master_key_id)

    def _resolved(self, alias: str, until: float) -> KmsArn | None:
        """Return the target of an alias, or None if this principal may not look it up."""
        try:
            answer = self._connection.call("describe_key", _left(until), KeyId=alias)
        except ClientError as error:
            if isinstance(aws_error(error), KmsAccessDeniedError):
                return None
            raise
        return _answered(answer["KeyMetadata"].get("Arn"), alias)

    def _rotates(self, arn: str, until: float) -> bool | None:
        try:
            answer = self._connection.call("get_key_rotation_status", _left(until), KeyId=arn)
        except (ClientError, BotoCoreError):
            return None
        rotates = answer.get("KeyRotationEnabled")
        return rotates if isinstance(rotates, bool) else None


# --- checks of requests and answers ---

_ABOUT_ANOTHER = "it is about another master key"


def _blob_in(wrapped_key: str) -> bytes:
    try:
        blob = strict_base64.decode(wrapped_key)
    except ValueError:
        blob = b""
    if not 0 < len(blob) <= _MAX_BLOB_LENGTH:
        raise WrappedKeyInvalidError("it was not made by AWS KMS")
    return blob


def _wrapped_key_in(answer: dict[str, Any]) -> str:
    blob = answer.get("CiphertextBlob")
    if not isinstance(blob, bytes) or not 0 < len(blob) <= _MAX_BLOB_LENGTH:
        raise KmsResponseInvalidError("it contains no wrapped key")
    return strict_base64.encode(blob)


def _answered(key_id: object, master_key_id: str) -> KmsArn:
    """Return the ARN in an answer, or raise if it cannot be the requested master key."""
    arn = KmsArn.parse(key_id)
    if arn is None or not may_stand_for(as_asked(master_key_id, arn.region), arn):
        raise KmsResponseInvalidError(_ABOUT_ANOTHER, master_key_id=master_key_id)
    return arn


def _in_region(master_key_id: str) -> Callable[[str], str]:
    return lambda region: as_asked(master_key_id, region)


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.1)


def _concerned(error: ClientError, request: RewrapRequest) -> str:
    """Return which of the two master keys the error of a ReEncrypt is about, by its text."""
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
        account: Account of the owner, 12 digits.
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
        """Return the parts of an ARN, or None for any other text."""
        parts = _ARN.fullmatch(text) if isinstance(text, str) else None
        return cls(*parts.groups()) if parts else None

    @property
    def is_multi_region_key(self) -> bool:
        """Whether the key can have replicas in other regions, all with the same key id."""
        return self.kind == "key" and self.name.startswith(_MULTI_REGION)

    def __str__(self) -> str:
        return f"arn:{self.partition}:kms:{self.region}:{self.account}:{self.kind}/{self.name}"


def as_asked(master_key_id: str, region: str | None) -> str:
    """Return the identifier of a master key for the KMS of a region.

    A multi-Region key has a replica in each of its regions, and the KMS of a region knows only its own replica. A
    file names the replica in the region of its writer; a reader in another region must request the replica there.
    """
    arn = KmsArn.parse(master_key_id)
    if arn and arn.is_multi_region_key and region:
        return str(replace(arn, region=region))
    return master_key_id


def is_alias(master_key_id: str) -> bool:
    """Return whether an identifier is an alias, which can be moved from one key to another."""
    arn = KmsArn.parse(master_key_id)
    return arn.kind == "alias" if arn else master_key_id.startswith("alias/")


def may_stand_for(asked: str, answered: KmsArn) -> bool:
    """Return whether the key in an answer can be the requested key.

    For an alias, this checks only account and region: the KMS alone knows its target.
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
    """Return the likely mistake in an identifier that the KMS does not know, or None."""
    arn = KmsArn.parse(master_key_id)
    if arn and region and arn.region != region and not arn.is_multi_region_key:
        return f"It is in {arn.region}, but the configuration uses the KMS of {region}: set `region`."
    if (
        arn is None
        and "/" not in master_key_id
        and ":" not in master_key_id
        and not _KEY_ID.fullmatch(master_key_id)
    ):
        return (
            f"This is neither a key id, an ARN nor an alias: an alias is written {f'alias/{master_key_id}'!r}. "
            "Under `master_keys` you can name any of them."
        )
    return None
