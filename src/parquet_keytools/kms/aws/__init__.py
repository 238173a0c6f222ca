"""A KMS client for AWS KMS.

A wrapped key is base64 of the ciphertext blob that `Encrypt` returned. The blob names, in a form that only AWS can
read, the master key and the key material that made it. No master key leaves AWS, and `ReEncrypt` rotates a wrapped
key without unwrapping it here. The raw form is the blob of a call without encryption context, as in Iceberg's
`AwsKeyManagementClient`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.aws.connection import (
    AwsConnection,
    AwsSettings,
    KmsArn,
    as_asked,
    aws_error,
    hint_for_missing_key,
    is_alias,
    may_stand_for,
)
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    KmsSettings,
    MasterKeyDescription,
    RewrapRequest,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, Time
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock
from parquet_keytools.secret_bytes import SecretBytes

_MAX_BLOB_LENGTH = 6_144
"""Of a ciphertext blob, in bytes. AWS refuses longer blobs."""

_PENDING = ("PendingDeletion", "PendingReplicaDeletion")

_USAGE, _SPEC = "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT"


class AwsKms(RemoteKmsClient):
    """Wraps and unwraps with master keys in AWS KMS, named by key id, key ARN, alias or alias ARN.

    Args:
        settings: Endpoint, credentials and limits; all have defaults.
        session: A boto3 session to use in place of a session made from the settings.
        client: A boto3 client for KMS, in place of the endpoint, the region and the credentials in the settings.
            Disable its retries. `close` leaves it open.
        time_source: For tests.
    """

    backend = "aws"
    new_keys_have = frozenset({"tags", "policy"})
    Settings = AwsSettings
    address_setting = "endpoint_url"
    certificates_setting = "ca_bundle"
    waiting_days = range(7, 31)

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
            raise ValueError("a client of the caller cannot assume a role; give a session")
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
        deadline = time.monotonic() + seconds
        answer = self._connection.call(
            "encrypt",
            deadline,
            KeyId=request.master_key_id,
            Plaintext=request.key.reveal(),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id, deadline)
        return _wrapped_key_in(answer)

    def _decrypt(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        deadline = time.monotonic() + seconds
        answer = self._connection.call(
            "decrypt",
            deadline,
            # Without KeyId, AWS uses the key that the blob names, which may be an attacker's own.
            KeyId=request.master_key_id,
            CiphertextBlob=_blob_in(request.wrapped_key),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id, deadline)
        return checked_key(answer.get("Plaintext"))

    def _re_encrypt(self, request: RewrapRequest, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        try:
            answer = self._connection.call(
                "re_encrypt",
                deadline,
                SourceKeyId=request.master_key_id,
                DestinationKeyId=request.new_master_key_id,
                CiphertextBlob=_blob_in(request.wrapped_key),
                SourceEncryptionContext=self._settings.encryption_context,
                DestinationEncryptionContext=self._settings.encryption_context,
            )
        except ClientError as error:
            concerned = _concerned(error, request.master_key_id, request.new_master_key_id)
            failure = self._translate(error, "rewrap", concerned)
            raise failure.about(self.backend, "rewrap", concerned) from None
        self._check_identity(answer.get("SourceKeyId"), request.master_key_id, deadline)
        self._check_identity(answer.get("KeyId"), request.new_master_key_id, deadline)
        return _wrapped_key_in(answer)

    def dry_run(self, moves: Sequence[tuple[str, str | None]]) -> list[KmsError | None]:
        """Ask AWS KMS whether the caller may decrypt, or re-encrypt to another key; it ignores ciphertexts."""
        name = "rewrap" if any(new for _, new in moves) else "unwrap"
        return self._operation(name).each(moves, self._try, itemgetter(0))

    def _try(self, move: tuple[str, str | None], seconds: float) -> None:
        master_key_id, new_master_key_id = move
        deadline = time.monotonic() + seconds
        dry: dict[str, Any] = {"DryRun": True, "DryRunModifiers": ["IGNORE_CIPHERTEXT"]}
        context = self._settings.encryption_context
        try:
            if new_master_key_id is None:
                self._connection.call("decrypt", deadline, KeyId=master_key_id, EncryptionContext=context, **dry)
            else:
                self._connection.call(
                    "re_encrypt",
                    deadline,
                    SourceKeyId=master_key_id,
                    DestinationKeyId=new_master_key_id,
                    SourceEncryptionContext=context,
                    DestinationEncryptionContext=context,
                    **dry,
                )
        except ParamValidationError:
            raise KmsConfigurationError(
                "this version of boto3 cannot ask what is permitted", hint="Install boto3 1.42.50 or later."
            ) from None
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "DryRunOperationException":
                return
            if new_master_key_id is not None:
                concerned = _concerned(error, master_key_id, new_master_key_id)
                failure = self._translate(error, "rewrap", concerned)
                raise failure.about(self.backend, "rewrap", concerned) from None
            raise
        raise KmsResponseInvalidError("it answered a dry run as if it was none")

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        def send(seconds: float) -> MasterKeyDescription:
            deadline = time.monotonic() + seconds
            arn, metadata = self._key_metadata(master_key_id, deadline)
            if (metadata.get("KeyUsage", _USAGE), metadata.get("KeySpec", _SPEC)) != (_USAGE, _SPEC):
                hint = "Choose a key with KeySpec SYMMETRIC_DEFAULT and KeyUsage ENCRYPT_DECRYPT."
                raise KmsConfigurationError("it is not a symmetric encryption key", hint=hint)
            return MasterKeyDescription(
                master_key_id,
                enabled=metadata.get("KeyState") == "Enabled",
                current_version=metadata.get("CurrentKeyMaterialId"),
                origin=metadata.get("Origin"),
                rotates=self._rotates(str(arn), deadline),
            )

        return self._operation("describe").call(master_key_id, send)

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        arn = KmsArn.parse(master_key_id)
        alias = master_key_id if arn is None else f"alias/{arn.name}" if arn.kind == "alias" else ""
        if not alias.startswith("alias/"):
            hint = "Name new master keys by an alias, such as `alias/tenant-{tenant}`."
            raise KmsConfigurationError("AWS KMS itself chooses the id of a key", hint=hint)
        given = {"Policy": policy} if policy else {}

        def create(seconds: float) -> None:
            deadline = time.monotonic() + seconds
            pairs = [{"TagKey": name, "TagValue": value} for name, value in tags.items()]
            key = self._connection.call("create_key", deadline, Tags=pairs, **given)["KeyMetadata"]
            made = KmsArn.parse(key.get("Arn"))
            try:
                if arn and (made is None or (made.account, made.region) != (arn.account, arn.region)):
                    raise KmsConfigurationError("it is in another account or region than these credentials")
                self._connection.call("create_alias", deadline, AliasName=alias, TargetKeyId=key["KeyId"])
            except BaseException:
                # Without its alias, it would stay and cost money.
                with contextlib.suppress(Exception):
                    self._connection.call(
                        "schedule_key_deletion", deadline, KeyId=key["KeyId"], PendingWindowInDays=7
                    )
                raise

        self._operation("create").call(master_key_id, create)

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        def send(seconds: float) -> dict[str | None, datetime]:
            deadline = time.monotonic() + seconds
            arn, metadata = self._key_metadata(master_key_id, deadline)
            dates: dict[str | None, object] = {None: metadata.get("CreationDate")}
            parameters = {"KeyId": str(arn), "IncludeKeyMaterial": "ALL_KEY_MATERIAL"}
            try:
                while True:
                    page = self._connection.call("list_key_rotations", deadline, **parameters)
                    for rotation in page.get("Rotations", ()):
                        if material := rotation.get("KeyMaterialId"):
                            # Only the first key material was not made by a rotation.
                            dates[material] = rotation.get("RotationDate", metadata.get("CreationDate"))
                    if not page.get("Truncated"):
                        break
                    parameters["Marker"] = page["NextMarker"]
            except (AttributeError, ParamValidationError):
                # A boto3 that does not know the call, or its parameter.
                pass
            except ClientError as error:
                # It needs another permission than DescribeKey, and not all keys have rotations.
                if isinstance(aws_error(error), KmsThrottledError | KmsUnavailableError):
                    raise
            return {name: date.astimezone(UTC) for name, date in dates.items() if isinstance(date, datetime)}

        return self._operation("describe").call(master_key_id, send)

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        def schedule(seconds: float) -> None:
            deadline = time.monotonic() + seconds
            _, metadata = self._key_metadata(master_key_id, deadline)
            # The answer to an earlier attempt may have been lost.
            if metadata.get("KeyState") not in _PENDING:
                _refuse_replicas(metadata)
                days = self.waiting_days[-1] if waiting_days is None else waiting_days
                self._connection.call(
                    "schedule_key_deletion", deadline, KeyId=metadata["KeyId"], PendingWindowInDays=days
                )

        self._operation("delete").call(master_key_id, schedule)
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        def send(seconds: float) -> tuple[KmsArn, dict[str, Any]]:
            return self._key_metadata(master_key_id, time.monotonic() + seconds)

        try:
            arn, metadata = self._operation("describe").call(master_key_id, send)
        except MasterKeyNotFoundError:
            return KeyDeletion(master_key_id, "deleted")
        word, date = str(metadata.get("KeyState")), metadata.get("DeletionDate")
        current = metadata.get("CurrentKeyMaterialId")
        answer = {"KeyState": word} | ({"DeletionDate": date.isoformat()} if isinstance(date, datetime) else {})
        return KeyDeletion(
            str(arn),
            "scheduled" if word in _PENDING else "usable" if word == "Enabled" else "disabled",
            {str(current): word} if current else {},
            date.astimezone(UTC) if isinstance(date, datetime) else None,
            answer,
        )

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        def cancel(seconds: float) -> None:
            deadline = time.monotonic() + seconds
            _, metadata = self._key_metadata(master_key_id, deadline)
            if metadata.get("KeyState") in _PENDING:
                self._connection.call("cancel_key_deletion", deadline, KeyId=metadata["KeyId"])

        self._operation("cancel_deletion").call(master_key_id, cancel)
        return self._key_deletion_state(master_key_id)

    def _caller_identity(self) -> CallerIdentity:
        if self._given == "client":
            return super()._caller_identity()
        return CallerIdentity(
            self._operation("identify").call(
                None, lambda seconds: self._connection.caller(time.monotonic() + seconds)
            ),
            "sts:GetCallerIdentity",
        )

    def _key_metadata(self, master_key_id: str, deadline: float) -> tuple[KmsArn, dict[str, Any]]:
        metadata = self._connection.call("describe_key", deadline, KeyId=master_key_id)["KeyMetadata"]
        return _answered(metadata.get("Arn"), master_key_id), metadata

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

    def _place(self) -> str:
        return ""

    def _identity(self, master_key_id: str) -> str:
        arn = KmsArn.parse(master_key_id)
        if arn is not None and arn.kind == "key":
            return as_asked(master_key_id, self._connection.region)

        def send(seconds: float) -> str:
            return str(self._key_metadata(master_key_id, time.monotonic() + seconds)[0])

        return self._operation("describe").call(master_key_id, send)

    def _raw_obstacle(self) -> str:
        return "Iceberg's own client sends no encryption_context" if self._settings.encryption_context else ""

    def _may_be_of_others(self, master_key_id: str) -> bool:
        # Key ids and aliases name keys in the caller's own account.
        return master_key_id.startswith("arn:")

    def _check_identity(self, key_id: object, master_key_id: str, deadline: float) -> None:
        """Check that an answer is about the requested master key.

        The target of an alias is remembered, and looked up again when an answer is about another key.
        """
        arn = _answered(key_id, master_key_id)
        if not is_alias(master_key_id):
            return
        with self._aliases_lock:
            if master_key_id in self._aliases and self._aliases[master_key_id] in (arn, None):
                return
        found = self._resolved(master_key_id, deadline)
        with self._aliases_lock:
            self._aliases[master_key_id] = found
        if found not in (arn, None):
            raise KmsResponseInvalidError(_ABOUT_ANOTHER, master_key_id=master_key_id)

    def _resolved(self, alias: str, deadline: float) -> KmsArn | None:
        """Return the target of an alias, or None if this principal may not look it up."""
        try:
            return self._key_metadata(alias, deadline)[0]
        except ClientError as error:
            if isinstance(aws_error(error), KmsAccessDeniedError):
                return None
            raise

    def _rotates(self, arn: str, deadline: float) -> bool | None:
        try:
            answer = self._connection.call("get_key_rotation_status", deadline, KeyId=arn)
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


def _refuse_replicas(metadata: dict[str, Any]) -> None:
    """Refuse to delete one of several keys with the same key material, which would still unwrap."""
    regions = metadata.get("MultiRegionConfiguration") or {}
    if regions.get("MultiRegionKeyType") == "REPLICA" or regions.get("ReplicaKeys"):
        hint = "Delete its replicas in all other Regions first, then the primary key."
        raise KmsConfigurationError("other Regions have replicas of it, which would still unwrap", hint=hint)


def _concerned(error: ClientError, master_key_id: str, new_master_key_id: str) -> str:
    """Return which of the two master keys the error of a ReEncrypt is about, by its text."""
    text = str(error.response.get("Error", {}).get("Message", ""))
    name, new_name = (id_.rpartition("/")[2] for id_ in (master_key_id, new_master_key_id))
    if "kms:ReEncryptTo" in text or (new_name in text and name not in text):
        return new_master_key_id
    return master_key_id
