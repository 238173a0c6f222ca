"""A KMS client for AWS KMS.

A wrapped key is base64 of the ciphertext blob that `Encrypt` returned. The blob names, in a form that only AWS can
read, the master key and the key material that made it. No master key leaves AWS, and `ReEncrypt` rotates a wrapped
key without unwrapping it here. The raw form is the blob of a call without encryption context, as in Iceberg's
`AwsKeyManagementClient`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import boto3
import botocore.session
from botocore import exceptions as sdk
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    CredentialResolver,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
)
from pydantic import AfterValidator, Field, SecretStr, model_validator

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    MasterKeyDescription,
    RewrapRequest,
    StrictSettings,
    UnwrapRequest,
    WrapRequest,
    checked_key,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings, Time
from parquet_keytools.kms.transport import (
    SILENT,
    Meaning,
    SdkLogs,
    check_certificates,
    mistake_in_url,
    retry_after_seconds,
    tls_failure,
    unreachable_because,
)
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import OwnerProcess, PerProcess
from parquet_keytools.secret_bytes import SecretBytes

T = TypeVar("T")

_MAX_CONTEXT_LENGTH = 8_192


def _checked_context(context: dict[str, str]) -> dict[str, str]:
    if any(not name for name in context):
        raise ValueError("a name in the encryption context may not be empty")
    if any(name.lower().startswith("aws:") for name in context):
        raise ValueError("names in the encryption context may not start with `aws:`, which AWS reserves")
    if sum(len(name) + len(value) for name, value in context.items()) > _MAX_CONTEXT_LENGTH:
        raise ValueError(f"the encryption context may not have more than {_MAX_CONTEXT_LENGTH} characters")
    return context


EncryptionContext = Annotated[dict[str, str], AfterValidator(_checked_context)]


class AssumeRoleSettings(StrictSettings):
    """A role to assume with the other credentials."""

    role_arn: str = Field(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/.+$", description="The role's ARN.")
    session_name: str = Field(
        default="parquet-keytools",
        pattern=r"^[A-Za-z0-9_=,.@-]{2,64}$",
        description="CloudTrail records it with each call.",
    )
    external_id: SecretStr | None = Field(
        default=None, description="External id that a role of another account may require; best as `${VARIABLE}`."
    )
    duration_seconds: int = Field(
        default=3600,
        ge=900,
        le=43_200,
        description="Lifetime of its credentials; they are renewed before they expire.",
    )
    endpoint_url: str | None = Field(default=None, description="URL of STS, if it is not the public endpoint.")


class AwsSettings(RemoteKmsSettings):
    """Settings of AWS KMS; for missing settings, the AWS SDK searches its usual places."""

    type: Literal["aws"] = "aws"
    region: str | None = Field(
        default=None, pattern=r"^[a-z]{2}(-[a-z0-9]+)+$", description="Region of the KMS, such as eu-west-1."
    )
    endpoint_url: str | None = Field(
        default=None, description="URL of the KMS, if it is not the public endpoint: for example a VPC endpoint."
    )
    allow_http: bool = Field(default=False, description="Allow an endpoint on another machine without TLS.")
    use_fips_endpoint: bool = Field(default=False, description="Use AWS's FIPS endpoints.")
    ca_bundle: Path | None = Field(
        default=None, description="PEM file of certificates to trust instead of the SDK's certificates."
    )
    profile: str | None = Field(default=None, description="Profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Credentials for tests. Without them, the SDK searches its usual places."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    session_token: SecretStr | None = Field(default=None, description="Belongs to access_key_id.")
    assume_role: AssumeRoleSettings | None = Field(
        default=None, description="A role to assume with these credentials."
    )
    encryption_context: EncryptionContext = Field(
        default_factory=dict,
        description="Bound to each wrapped key, needed to unwrap it, and written to CloudTrail in plaintext.",
        json_schema_extra={"default": {}},
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("give either profile or access_key_id")
        if self.use_fips_endpoint and self.endpoint_url is not None:
            raise ValueError("give either endpoint_url or use_fips_endpoint")
        for url in (self.endpoint_url, self.assume_role and self.assume_role.endpoint_url):
            if url and (mistake := mistake_in_url(url, "endpoint_url", allow_http=self.allow_http)):
                raise ValueError(mistake)
        return self


# --- names of master keys: key id, key ARN, alias, alias ARN ---

_ARN = re.compile(r"arn:(aws[a-z-]*):kms:([a-z0-9-]+):([0-9]{12}):(key|alias)/([A-Za-z0-9/_-]{1,256})")
_KEY_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|mrk-[0-9a-f]{32}")
_MULTI_REGION = "mrk-"


@dataclass(frozen=True)
class KmsArn:
    """ARN of a key or an alias."""

    partition: str  # aws, aws-cn, aws-us-gov, ...
    region: str
    account: str
    kind: str  # key or alias
    name: str  # the key id, or the alias without `alias/`

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
    name = answered.name if arn.kind == "alias" else arn.name
    return replace(arn, kind="key", name=name) == answered


def hint_for_missing_key(master_key_id: str, region: str | None) -> str | None:
    """Return the likely mistake in an identifier that the KMS does not know, or None."""
    arn = KmsArn.parse(master_key_id)
    if arn and region and arn.region != region and not arn.is_multi_region_key:
        return f"It is in {arn.region}, but the configuration uses the KMS of {region}: set `region`."
    if arn is None and not re.search("[/:]", master_key_id) and not _KEY_ID.fullmatch(master_key_id):
        return (
            f"This is neither a key id, an ARN nor an alias: an alias is written {f'alias/{master_key_id}'!r}. "
            "Under `master_keys` you can name any of them."
        )
    return None


# --- the client ---

_deadline_of_call: ContextVar[float | None] = ContextVar("deadline_of_call", default=None)
"""The deadline of the current attempt, on the monotonic clock; None outside of calls of this package."""


def _timed(send: Callable[..., T]) -> Callable[..., T]:
    """Return an attempt for `RemoteOperation`: all its requests share its seconds, the last argument."""

    def attempt(*arguments: Any) -> T:
        token = _deadline_of_call.set(time.monotonic() + arguments[-1])
        try:
            with _sdk_logs.silenced():
                return send(*arguments[:-1])
        finally:
            _deadline_of_call.reset(token)

    return attempt


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
        folder: Path = Path(),
        *,
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
        self._connection = AwsConnection(self._settings, folder, session, client)
        self._aliases: dict[str, KmsArn | None] = {}

    def close(self) -> None:
        """Close threads and connections. A later call makes new ones."""
        super().close()
        self._connection.close()

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._operation("wrap").each(requests, _timed(self._encrypt))

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._operation("unwrap").each(requests, _timed(self._decrypt))

    def _rewrap_many(self, requests: Sequence[RewrapRequest]) -> list[str | KmsError]:
        return self._operation("rewrap").each(requests, _timed(self._re_encrypt))

    def _encrypt(self, request: WrapRequest) -> str:
        answer = self._connection.call(
            "encrypt",
            KeyId=request.master_key_id,
            Plaintext=request.key.reveal(),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id)
        return _wrapped_key_in(answer)

    def _decrypt(self, request: UnwrapRequest) -> SecretBytes:
        answer = self._connection.call(
            "decrypt",
            # Without KeyId, AWS uses the key that the blob names, which may be an attacker's own.
            KeyId=request.master_key_id,
            CiphertextBlob=_blob_in(request.wrapped_key),
            EncryptionContext=self._settings.encryption_context,
        )
        self._check_identity(answer.get("KeyId"), request.master_key_id)
        return checked_key(answer.get("Plaintext"))

    def _re_encrypt(self, request: RewrapRequest) -> str:
        answer = self._re_encrypted(
            request.master_key_id, request.new_master_key_id, _blob_in(request.wrapped_key)
        )
        self._check_identity(answer.get("SourceKeyId"), request.master_key_id)
        self._check_identity(answer.get("KeyId"), request.new_master_key_id)
        return _wrapped_key_in(answer)

    def _re_encrypted(self, master_key_id: str, new_master_key_id: str, blob: bytes | None) -> dict[str, Any]:
        """Re-encrypt a blob, or without one ask whether the caller may; errors name one of the master keys."""
        context = self._settings.encryption_context
        try:
            return self._connection.call(
                "re_encrypt",
                SourceKeyId=master_key_id,
                DestinationKeyId=new_master_key_id,
                SourceEncryptionContext=context,
                DestinationEncryptionContext=context,
                **(_DRY_RUN if blob is None else {"CiphertextBlob": blob}),
            )
        except ClientError as error:
            if blob is None and _is_permitted(error):
                raise
            concerned = _concerned(error, master_key_id, new_master_key_id)
            failure = self._translate(error, "rewrap", concerned)
            raise failure.about(self.backend, "rewrap", concerned) from None

    def dry_run(self, moves: Sequence[tuple[str, str | None]]) -> list[KmsError | None]:
        """Ask AWS KMS whether the caller may decrypt, or re-encrypt to another key; it ignores ciphertexts."""
        name = "rewrap" if any(new for _, new in moves) else "unwrap"
        return self._operation(name).each(moves, _timed(self._try), itemgetter(0))

    def _try(self, move: tuple[str, str | None]) -> None:
        master_key_id, new_master_key_id = move
        try:
            if new_master_key_id is None:
                context = self._settings.encryption_context
                self._connection.call("decrypt", KeyId=master_key_id, EncryptionContext=context, **_DRY_RUN)
            else:
                self._re_encrypted(master_key_id, new_master_key_id, None)
        except ParamValidationError:
            raise KmsConfigurationError(
                "this version of boto3 cannot ask what is permitted", hint="Install boto3 1.42.50 or later."
            ) from None
        except ClientError as error:
            if _is_permitted(error):
                return
            raise
        raise KmsResponseInvalidError("it answered a dry run as if it was none")

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        def send() -> MasterKeyDescription:
            arn, metadata = self._key_metadata(master_key_id)
            if (metadata.get("KeyUsage", _USAGE), metadata.get("KeySpec", _SPEC)) != (_USAGE, _SPEC):
                hint = "Choose a key with KeySpec SYMMETRIC_DEFAULT and KeyUsage ENCRYPT_DECRYPT."
                raise KmsConfigurationError("it is not a symmetric encryption key", hint=hint)
            return MasterKeyDescription(
                master_key_id,
                enabled=metadata.get("KeyState") == "Enabled",
                current_version=metadata.get("CurrentKeyMaterialId"),
                origin=metadata.get("Origin"),
                rotates=self._rotates(str(arn)),
            )

        return self._operation("describe").call(master_key_id, _timed(send))

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        arn = KmsArn.parse(master_key_id)
        alias = master_key_id if arn is None else f"alias/{arn.name}" if arn.kind == "alias" else ""
        if not alias.startswith("alias/"):
            hint = "Name new master keys by an alias, such as `alias/tenant-{tenant}`."
            raise KmsConfigurationError("AWS KMS itself chooses the id of a key", hint=hint)
        given = {"Policy": policy} if policy else {}

        def create() -> None:
            pairs = [{"TagKey": name, "TagValue": value} for name, value in tags.items()]
            key = self._connection.call("create_key", Tags=pairs, **given)["KeyMetadata"]
            made = KmsArn.parse(key.get("Arn"))
            try:
                if arn and (made is None or (made.account, made.region) != (arn.account, arn.region)):
                    raise KmsConfigurationError("it is in another account or region than these credentials")
                self._connection.call("create_alias", AliasName=alias, TargetKeyId=key["KeyId"])
            except BaseException:
                # Without its alias, it would stay and cost money.
                with contextlib.suppress(Exception):
                    self._connection.call("schedule_key_deletion", KeyId=key["KeyId"], PendingWindowInDays=7)
                raise

        self._operation("create").call(master_key_id, _timed(create))

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        def send() -> dict[str | None, datetime]:
            arn, metadata = self._key_metadata(master_key_id)
            dates: dict[str | None, object] = {None: metadata.get("CreationDate")}
            parameters = {"KeyId": str(arn), "IncludeKeyMaterial": "ALL_KEY_MATERIAL"}
            try:
                while True:
                    page = self._connection.call("list_key_rotations", **parameters)
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

        return self._operation("describe").call(master_key_id, _timed(send))

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        def schedule() -> None:
            _, metadata = self._key_metadata(master_key_id)
            # The answer to an earlier attempt may have been lost.
            if metadata.get("KeyState") not in _PENDING:
                _refuse_replicas(metadata)
                days = self.waiting_days[-1] if waiting_days is None else waiting_days
                self._connection.call("schedule_key_deletion", KeyId=metadata["KeyId"], PendingWindowInDays=days)

        self._operation("delete").call(master_key_id, _timed(schedule))
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        try:
            arn, metadata = self._described(master_key_id)
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
        def cancel() -> None:
            _, metadata = self._key_metadata(master_key_id)
            if metadata.get("KeyState") in _PENDING:
                self._connection.call("cancel_key_deletion", KeyId=metadata["KeyId"])

        self._operation("cancel_deletion").call(master_key_id, _timed(cancel))
        return self._key_deletion_state(master_key_id)

    def _caller_identity(self) -> CallerIdentity:
        if self._given == "client":
            return super()._caller_identity()
        name = self._operation("identify").call(None, _timed(self._connection.caller))
        return CallerIdentity(name, "sts:GetCallerIdentity")

    def _described(self, master_key_id: str) -> tuple[KmsArn, dict[str, Any]]:
        describe = _timed(partial(self._key_metadata, master_key_id))
        return self._operation("describe").call(master_key_id, describe)

    def _key_metadata(self, master_key_id: str) -> tuple[KmsArn, dict[str, Any]]:
        metadata = self._connection.call("describe_key", KeyId=master_key_id)["KeyMetadata"]
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
        return str(self._described(master_key_id)[0])

    def _raw_obstacle(self) -> str:
        return "Iceberg's own client sends no encryption_context" if self._settings.encryption_context else ""

    def _may_be_of_others(self, master_key_id: str) -> bool:
        # Key ids and aliases name keys in the caller's own account.
        return master_key_id.startswith("arn:")

    def _check_identity(self, key_id: object, master_key_id: str) -> None:
        """Check that an answer is about the requested master key.

        The target of an alias is remembered, None if this principal may not look it up. It is looked up again when
        an answer is about another key.
        """
        arn = _answered(key_id, master_key_id)
        if not is_alias(master_key_id):
            return
        if self._aliases.get(master_key_id, "") in (arn, None):
            return
        found = None
        try:
            found, _ = self._key_metadata(master_key_id)
        except ClientError as error:
            if not isinstance(aws_error(error), KmsAccessDeniedError):
                raise
        self._aliases[master_key_id] = found
        if found not in (arn, None):
            raise KmsResponseInvalidError(_ABOUT_ANOTHER, master_key_id=master_key_id)

    def _rotates(self, arn: str) -> bool | None:
        try:
            rotates = self._connection.call("get_key_rotation_status", KeyId=arn).get("KeyRotationEnabled")
        except (ClientError, BotoCoreError):
            return None
        return rotates if isinstance(rotates, bool) else None


# --- checks of requests and answers ---

_ABOUT_ANOTHER = "it is about another master key"
_DRY_RUN: dict[str, Any] = {"DryRun": True, "DryRunModifiers": ["IGNORE_CIPHERTEXT"]}


def _is_permitted(error: ClientError) -> bool:
    return error.response.get("Error", {}).get("Code") == "DryRunOperationException"


def _blob_in(wrapped_key: str) -> bytes:
    blob = strict_base64.decode_or_empty(wrapped_key)
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


# --- the connection ---


_sdk_logs = SdkLogs("boto3", "botocore")

_SHARE_OF_CONNECTING = 0.4
"""Of the timeout of one attempt; the rest is for the answer."""


class AwsConnection:
    """Sends requests with a boto3 client, which it makes for the first request of each process.

    A client of the caller is used with its own credentials, retries and timeouts.
    """

    def __init__(self, settings: AwsSettings, folder: Path, session: Any = None, client: Any = None) -> None:
        self._settings = settings
        self._folder = folder
        self._session = session
        self._given_client = client
        self._owner = OwnerProcess()
        self._clients: PerProcess[Any] = PerProcess(self._make_client)

    @property
    def region(self) -> str | None:
        """The region of the KMS, if it is known without a client."""
        if self._given_client is not None:
            return str(self._given_client.meta.region_name)
        return self._settings.region or getattr(self._session, "region_name", None)

    @property
    def address(self) -> str:
        """The address of the KMS, if it is known without a client."""
        url = self._settings.endpoint_url if self._given_client is None else self._given_client.meta.endpoint_url
        region = f"region {self.region}" if self.region else ""
        return ", ".join(filter(None, [url, region]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a request, and once more with new credentials if the KMS says that they have expired.

        A clock may be wrong, or they were revoked. ARNs of multi-Region keys are changed to the client's region.
        """
        client = self._clients.get()
        try:
            return self._send(client, method, parameters)
        except ClientError as error:
            if self._given_client is not None or code_of(error) not in EXPIRED_CREDENTIALS:
                raise
        if self._clients.get() is client:
            self._clients.take()
        return self._send(self._clients.get(), method, parameters)

    def close(self) -> None:
        """Close the client's connections, unless the caller made the client."""
        client = self._clients.take()
        if client is not None and self._given_client is None:
            client.close()

    def _send(self, client: Any, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        region = client.meta.region_name
        given = {
            name: as_asked(value, region) if name.endswith("KeyId") else value
            for name, value in parameters.items()
        }
        answer: dict[str, Any] = getattr(client, method)(**given)
        return answer

    def _make_client(self) -> Any:
        client = self._given_client
        if client is None:
            client = self._opened(self._own_session().client, "kms", self._settings.endpoint_url)
        else:
            self._check_endpoint(client)
            if not self._owner.is_here:
                # A forked child drops its copies of the parent's connections, and opens its own.
                client.close()
        _sdk_logs.add_filters()
        return client

    def _own_session(self) -> Any:
        session = self._session or _base_session(self._settings)
        return session if self._settings.assume_role is None else self._session_in_role(session)

    def caller(self) -> str:
        """Return the ARN of the caller, from STS."""
        role = self._settings.assume_role
        url = role.endpoint_url if role else None
        with contextlib.closing(self._opened(self._own_session().client, "sts", url)) as client:
            return str(client.get_caller_identity()["Arn"])

    def _session_in_role(self, base: Any) -> Any:
        """Return a session with the role's credentials, which it renews before they expire."""
        role = self._settings.assume_role
        assert role is not None
        source = base.get_credentials()
        if source is None:
            raise NoCredentialsError

        def make_client(service: str, **credentials: Any) -> Any:
            return self._opened(base.client, service, role.endpoint_url, **credentials)

        arguments = {"RoleSessionName": role.session_name, "DurationSeconds": role.duration_seconds}
        if role.external_id is not None:
            arguments["ExternalId"] = role.external_id.get_secret_value()
        fetcher = AssumeRoleCredentialFetcher(make_client, source, role.role_arn, extra_args=arguments)

        def fetch() -> dict[str, Any]:
            # The SDK lets one thread after the other request them, and each would wait again for a silent STS.
            if _seconds_left() <= 0:
                raise ReadTimeoutError(endpoint_url="STS")
            credentials: dict[str, Any] = fetcher.fetch_credentials()
            return credentials

        session = botocore.session.Session(profile=self._profile)
        providers = CredentialResolver([_RoleProvider(fetch)])
        session.register_component("credential_provider", providers)
        return boto3.Session(botocore_session=session, region_name=self._settings.region or base.region_name)

    def _opened(self, make: Callable[..., Any], service: str, endpoint_url: str | None, **credentials: str) -> Any:
        """Return a client of the SDK with the limits of the settings."""
        self._check_certificates()
        limits = self._settings
        connect_timeout = limits.call_timeout_seconds * _SHARE_OF_CONNECTING
        config = Config(  # type: ignore[call-arg, unused-ignore]  # the stubs do not have all
            connect_timeout=connect_timeout,
            read_timeout=limits.call_timeout_seconds - connect_timeout,
            max_pool_connections=limits.max_concurrent_calls,
            # Only RemoteKmsClient retries: two policies on top of each other would multiply the attempts.
            retries={"total_max_attempts": 1, "mode": "standard"},
            tcp_keepalive=True,
            use_fips_endpoint=limits.use_fips_endpoint or None,
            # Otherwise, an endpoint of the environment would override the FIPS endpoint.
            ignore_configured_endpoint_urls=limits.use_fips_endpoint or None,
            # For CloudTrail. The SDK's own user agent takes a tenth of the time of each call.
            user_agent=f"parquet-keytools Boto3/{boto3.__version__} Botocore/{botocore.__version__}",
        )
        options: dict[str, Any] = {"region_name": limits.region, "verify": self._ca_bundle, "config": config}
        options |= {"endpoint_url": endpoint_url, **credentials}
        client = make(service, **options)
        self._check_endpoint(client)
        if client.meta.endpoint_url.startswith("http:") and not self._settings.allow_http:
            # The endpoint is on this machine. A proxy of the environment is not, and would see plaintext keys.
            client.close()
            options["config"] = config.merge(Config(proxies={}))
            client = make(service, **options)
        client.meta.events.register(f"before-call.{service}", _set_read_timeout)
        return client

    def _check_endpoint(self, client: Any) -> None:
        if mistake := mistake_in_url(
            client.meta.endpoint_url, "endpoint_url", allow_http=self._settings.allow_http
        ):
            hint = "The environment or the AWS configuration files may have set it; `allow_http` allows it."
            raise KmsConfigurationError(mistake, operation="connect", hint=hint)

    @property
    def _ca_bundle(self) -> str | None:
        bundle = self._settings.ca_bundle
        return None if bundle is None else str(self._folder / expanded(bundle))

    @property
    def _profile(self) -> str | None:
        """The profile whose certificates and endpoints the SDK uses."""
        if self._session is not None and self._session.profile_name != "default":
            return str(self._session.profile_name)
        return self._settings.profile

    def _check_certificates(self) -> None:
        """Check the certificates in the settings, the environment and the AWS configuration files."""
        configured = botocore.session.Session(profile=self._profile).get_config_variable("ca_bundle")
        bundles = [self._ca_bundle, configured, os.environ.get("REQUESTS_CA_BUNDLE")]
        if "" in bundles:
            # Some versions of the SDK then verify no certificates.
            detail = "AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, or ca_bundle in the AWS configuration files, is empty"
            hint = "Unset it, or name a file of certificates."
            raise KmsConfigurationError(detail, operation="connect", hint=hint)
        bundle = next(filter(None, bundles), None)
        if bundle is not None:
            check_certificates(bundle)


class _RoleProvider(CredentialProvider):
    """Provides the credentials of a role, which are requested when the first request is signed."""

    METHOD = "parquet-keytools-assume-role"

    def __init__(self, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._fetch = fetch

    def load(self) -> Any:
        return DeferredRefreshableCredentials(self._fetch, "assume-role")


def _base_session(settings: AwsSettings) -> boto3.Session:
    def text(secret: Any) -> str | None:
        return None if secret is None else secret.get_secret_value()

    return boto3.Session(
        aws_access_key_id=text(settings.access_key_id),
        aws_secret_access_key=text(settings.secret_access_key),
        aws_session_token=text(settings.session_token),
        region_name=settings.region,
        profile_name=settings.profile,
    )


def _set_read_timeout(context: dict[str, Any], **_: Any) -> None:
    """Limit a request to the time left. Older versions of botocore have one timeout for all requests."""
    if _deadline_of_call.get() is not None:
        context["read_timeout"] = max(_seconds_left() * (1 - _SHARE_OF_CONNECTING), 0.001)


def _seconds_left() -> float:
    deadline = _deadline_of_call.get()
    return float("inf") if deadline is None else deadline - time.monotonic()


# --- the meaning of errors ---

# Only the codes listed here appear in errors, never a text of the SDK, which may contain the request. Invalid
# credentials do not mean that the master key is denied: with "access denied", a reader that hides denied columns
# would silently return fewer columns.

_CREDENTIALS_HINT = (
    "Check the AWS credentials of this process: `aws sts get-caller-identity` prints their owner, and whether "
    "they are valid."
)
_CLOCK_HINT = "Check this machine's clock, then the AWS credentials of this process."
_GRANT_HINT = (
    "Request the permission in the key's policy or in IAM. AWS gives the same error for a key that does not exist "
    "in another account."
)
_CONTEXT_HINT = (
    "AWS does not say which: check that the file was written with this `encryption_context`, then restore the "
    "file if it was altered."
)
_OTHER_KEY_HINT = (
    "If an alias was moved to another key since the file was written, name the key by its ARN under `master_keys`."
)
_KEY_USAGE_HINT = "Choose a symmetric key for encryption: KeySpec SYMMETRIC_DEFAULT, KeyUsage ENCRYPT_DECRYPT."
_REQUEST_HINT = "Check the identifier of the master key, and `encryption_context`."

_NO_CREDENTIALS = Meaning(KmsConfigurationError, "there are no usable AWS credentials", _CREDENTIALS_HINT)
_UNAVAILABLE = Meaning(KmsUnavailableError)
_THROTTLED = Meaning(KmsThrottledError)

EXPIRED_CREDENTIALS = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
"""Codes that new credentials may resolve."""

# Codes -> the meaning of all of them.
_CODES = {
    "AccessDeniedException AccessDenied": Meaning(KmsAccessDeniedError, "", _GRANT_HINT),
    "InvalidGrantTokenException": Meaning(KmsAccessDeniedError, "a grant token is not valid"),
    "NotFoundException": Meaning(MasterKeyNotFoundError),
    "InvalidArnException": Meaning(MasterKeyNotFoundError, "its ARN is not valid"),
    "InvalidAliasNameException": Meaning(MasterKeyNotFoundError, "its alias is not valid"),
    "XksKeyNotFoundException": Meaning(MasterKeyNotFoundError, "the external key store does not have it"),
    "DisabledException": Meaning(MasterKeyDisabledError),
    "InvalidCiphertextException": Meaning(
        WrappedKeyInvalidError, "it was altered, or the encryption context is another one", _CONTEXT_HINT
    ),
    "IncorrectKeyException": Meaning(WrappedKeyInvalidError, "another master key wrapped it", _OTHER_KEY_HINT),
    "InvalidKeyUsageException UnsupportedOperationException": Meaning(
        KmsConfigurationError, "the master key cannot wrap", _KEY_USAGE_HINT
    ),
    "ValidationException": Meaning(
        KmsConfigurationError, "AWS does not accept the form of the request", _REQUEST_HINT
    ),
    "DryRunOperationException": Meaning(KmsResponseInvalidError, "it answered as if to a dry run"),
    "KeyUnavailableException": Meaning(KmsUnavailableError, "the master key is not available now"),
    "DependencyTimeoutException": Meaning(KmsUnavailableError, "it timed out within AWS"),
    "CloudHsmClusterNotActiveException CustomKeyStoreInvalidStateException XksProxyUriUnreachableException "
    "XksProxyInvalidResponseException XksProxyVpcEndpointServiceNotFoundException": Meaning(
        KmsUnavailableError, "the master key's own key store cannot be reached"
    ),
    "XksProxyIncorrectAuthenticationCredentialException XksProxyInvalidConfigurationException "
    "XksKeyInvalidConfigurationException": Meaning(
        KmsConfigurationError, "the external key store is configured wrongly"
    ),
    "KMSInternalException InternalFailure InternalServiceError ServiceUnavailable ServiceUnavailableException "
    "RequestTimeout RequestTimeoutException IDPCommunicationError": _UNAVAILABLE,
    "ThrottlingException Throttling ThrottledException RequestThrottled RequestThrottledException "
    "RequestLimitExceeded LimitExceededException TooManyRequestsException": _THROTTLED,
    " ".join(EXPIRED_CREDENTIALS): Meaning(
        KmsConfigurationError, "the AWS credentials have expired", _CREDENTIALS_HINT
    ),
    "RequestExpired RequestTimeTooSkewed SignatureDoesNotMatch InvalidSignatureException "
    "IncompleteSignature": Meaning(
        KmsConfigurationError, "AWS does not accept the signature of the request", _CLOCK_HINT
    ),
    "UnrecognizedClientException InvalidClientTokenId InvalidAccessKeyId AuthFailure OptInRequired": Meaning(
        KmsConfigurationError, "AWS does not know these credentials", _CREDENTIALS_HINT
    ),
    "MissingAuthenticationToken MissingAuthenticationTokenException": _NO_CREDENTIALS,
}
_MEANINGS = {code: meaning for codes, meaning in _CODES.items() for code in codes.split()}

# Text of a KMSInvalidStateException -> its meaning.
_STATES = {
    "pending deletion": Meaning(
        MasterKeyDisabledError,
        "it is pending deletion",
        "Cancel the deletion in the KMS at once: after it, the data under this key is lost.",
    ),
    "pending replica deletion": Meaning(MasterKeyDisabledError, "it is pending the deletion of its replicas"),
    "pending import": Meaning(MasterKeyDisabledError, "its key material is not imported"),
    "creating": Meaning(KmsUnavailableError, "the master key is being created"),
    "updating": Meaning(KmsUnavailableError, "the master key is being updated"),
    "unavailable": Meaning(MasterKeyDisabledError, "its key store is not connected"),
    "disabled": Meaning(MasterKeyDisabledError),
}

_NAME_OF_KEY = re.compile(r"(arn:|alias/)\S+")
"""An alias may contain any word, also the name of a state."""

_SDK_MEANINGS: dict[tuple[type[Exception], ...], Meaning] = {
    (sdk.ConnectTimeoutError, sdk.ReadTimeoutError): Meaning(KmsUnavailableError, SILENT),
    (
        sdk.ConnectionError,
        sdk.HTTPClientError,
        sdk.ResponseStreamingError,
        sdk.MetadataRetrievalError,
    ): _UNAVAILABLE,
    (sdk.NoRegionError, sdk.InvalidRegionError): Meaning(
        KmsConfigurationError, "the region is not known", "Set `region`, or AWS_REGION."
    ),
    (sdk.ProfileNotFound,): Meaning(KmsConfigurationError, "there is no such profile", "Check `profile`."),
    (
        *(sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError, sdk.SSOError),
        *(sdk.TokenRetrievalError, sdk.NoAuthTokenError, sdk.RefreshWithMFAUnsupportedError),
    ): _NO_CREDENTIALS,
    (sdk.ParamValidationError,): Meaning(
        KmsConfigurationError, "the SDK does not accept the request", _REQUEST_HINT
    ),
    (sdk.BotoCoreError,): Meaning(KmsConfigurationError),
}


def code_of(error: ClientError) -> str:
    """Return the code of an error if it is listed here; other codes must not be shown."""
    code = error.response.get("Error", {}).get("Code")
    if not isinstance(code, str):
        return ""
    # Some answers have a namespace before the code, or a URL after it.
    code = code.rpartition("#")[2].partition(":")[0]
    return code if code in _MEANINGS or code == "KMSInvalidStateException" else ""


def aws_error(error: Exception, hint_for_missing_key: str | None = None) -> KmsError | None:
    """Return the `KmsError` that replaces an exception of the SDK, or None for any other exception."""
    wait = 0.0
    if isinstance(error, ClientError):
        facts: dict[str, Any] = dict(error.response.get("ResponseMetadata") or {})
        meaning, source = _meaning_of_answer(error, facts.get("HTTPStatusCode"))
        wait = retry_after_seconds((facts.get("HTTPHeaders") or {}).get("retry-after"))
    else:
        in_sdk, source = _meaning_in_sdk(error), type(error).__name__
        if in_sdk is None:
            return None
        meaning = in_sdk
    kind, known, hint = meaning
    if kind is MasterKeyNotFoundError and hint_for_missing_key:
        hint = hint_for_missing_key
    if kind is KmsConfigurationError and hint is None:
        hint = "Check the configuration of AWS on this machine."
    if kind is KmsUnavailableError and not known:
        known = unreachable_because(error)
    return Meaning(kind, f"{known} ({source})" if known else source, hint).error(wait)


def _meaning_of_answer(error: ClientError, status: object) -> tuple[Meaning, str]:
    """Return the meaning of an answer, and the code or status that shows it."""
    code = code_of(error)
    role = " of sts:AssumeRole" if error.operation_name == "AssumeRole" else ""
    if code == "KMSInvalidStateException":
        text = _NAME_OF_KEY.sub("", str(error.response.get("Error", {}).get("Message", ""))).lower()
        other = Meaning(MasterKeyDisabledError, "its state does not allow this")
        return next((meaning for state, meaning in _STATES.items() if state in text), other), code
    if code:
        meaning = _MEANINGS[code]
        if role and meaning.kind is KmsAccessDeniedError:
            # Not the master key is denied, but the role.
            hint = "Check `assume_role` and its trust policy."
            meaning = Meaning(KmsConfigurationError, "the role may not be assumed", hint)
        return meaning, code + role
    if not isinstance(status, int):
        return Meaning(KmsResponseInvalidError), f"an unknown error{role}"
    source = f"HTTP status {status}{role}"
    if status >= 500:
        return _UNAVAILABLE, source
    if status == 429:
        return _THROTTLED, source
    redirect = "a redirect, which is not followed" if 300 <= status < 400 else ""
    return Meaning(KmsResponseInvalidError, redirect), source


def _meaning_in_sdk(error: Exception) -> Meaning | None:
    if isinstance(error, sdk.SSLError) and (found := tls_failure(error, "endpoint_url", "ca_bundle")):
        return found
    if type(error) is sdk.HTTPClientError and isinstance(
        error.kwargs.get("error"), (TypeError, ValueError, LookupError)
    ):
        # The SDK failed to parse an answer, such as a redirect with status 303.
        return Meaning(KmsResponseInvalidError, "the SDK cannot read it")
    return next((meaning for kinds, meaning in _SDK_MEANINGS.items() if isinstance(error, kinds)), None)
