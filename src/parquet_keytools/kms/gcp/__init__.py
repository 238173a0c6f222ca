"""A KMS client of Google Cloud KMS.

A wrapped key is the base64 of the ciphertext of Cloud KMS, so any tool with the permission to call Decrypt can
unwrap it. The ciphertext hides the version of the master key that made it. The raw form is the ciphertext of a
call without additional authenticated data, as in Iceberg's `GcpKeyManagementClient`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from google.cloud.kms_v1 import KeyManagementServiceClient
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport
from google.cloud.kms_v1.types import (
    CreateCryptoKeyRequest,
    CryptoKey,
    CryptoKeyVersion,
    DecryptRequest,
    DestroyCryptoKeyVersionRequest,
    EncryptRequest,
    GetCryptoKeyRequest,
    ListCryptoKeyVersionsRequest,
    RestoreCryptoKeyVersionRequest,
)

from parquet_keytools import strict_base64
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import (
    CallerIdentity,
    KeyDeletion,
    KmsSettings,
    MasterKeyDescription,
    UnwrapRequest,
    WrapRequest,
)
from parquet_keytools.kms.gcp.connection import (
    KEY_RING,
    NAME,
    GcpConnection,
    GcpSettings,
    TokenSource,
    kms_error,
    load_credentials,
    open_client,
)
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteOperation, Time
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.runtime.threads_and_forks import OwnerProcess, PerProcess
from parquet_keytools.secret_bytes import SecretBytes

_CRYPTO_KEY = re.compile(rf"{KEY_RING.pattern}/cryptoKeys/{NAME}")
_CRYPTO_KEY_VERSION = re.compile(rf"({_CRYPTO_KEY.pattern})/cryptoKeyVersions/([1-9][0-9]{{0,8}})")
_SHORT_NAME = re.compile(NAME)
_FORM = "projects/PROJECT/locations/LOCATION/keyRings/KEY_RING/cryptoKeys/KEY"

_STATES = CryptoKeyVersion.CryptoKeyVersionState
_ENABLED = CryptoKeyVersion.CryptoKeyVersionState.ENABLED
_ENCRYPT_DECRYPT = CryptoKey.CryptoKeyPurpose.ENCRYPT_DECRYPT


class GcpKms(RemoteKmsClient):
    """Wraps and unwraps with Encrypt and Decrypt of Cloud KMS, with checksums both ways.

    Cloud KMS cannot re-encrypt: a re-wrap is Decrypt and Encrypt, and this process sees the key.

    Args:
        settings: Key ring, endpoint, credentials and limits.
        client: A client that uses gRPC, in place of the endpoint and the credentials in the settings.
            `close` leaves it open, and forked children cannot use it.
        time_source: For tests.
    """

    backend = "gcp"
    new_keys_have = frozenset({"tags"})
    Settings = GcpSettings
    address_setting = "endpoint"
    certificates_setting = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"

    def __init__(
        self,
        settings: GcpSettings | None = None,
        *,
        folder: Path | None = None,
        client: KeyManagementServiceClient | None = None,
        time_source: Time | None = None,
    ) -> None:
        self.settings = settings or GcpSettings()
        super().__init__(self.settings, time_source)
        if client is not None and not isinstance(client.transport, KeyManagementServiceGrpcTransport):
            hint = "Make it with transport='grpc'."
            raise KmsConfigurationError("the client does not use gRPC", hint=hint).about("gcp", "connect", None)
        self._folder = folder or Path()
        self._client = client
        self._owner = OwnerProcess()
        self._key_ring = self.settings.key_ring_name()
        self._aad = self.settings.aad()
        self._aad_fields: dict[str, Any] = {}
        if self._aad:
            self._aad_fields["additional_authenticated_data"] = self._aad
            self._aad_fields["additional_authenticated_data_crc32c"] = crc32c(self._aad)
        self._connections = PerProcess(self._connect)
        self._last_connection: GcpConnection | None = None

    @classmethod
    def from_settings(cls, settings: KmsSettings, folder: Path) -> Self:
        """Make a client from `GcpSettings`; it reads credentials and connects when it is first used."""
        assert isinstance(settings, GcpSettings)
        return cls(settings, folder=folder)

    def rewraps_by_itself(self, master_key_id: str, new_master_key_id: str) -> bool:
        """Return False: Cloud KMS has no request that re-wraps."""
        return False

    def close(self) -> None:
        """Close threads and the channel. A later call makes new ones."""
        super().close()
        connection = self._connections.take()
        if connection is not None and self._client is None:
            connection.close()

    def __repr__(self) -> str:
        return f"<GcpKms at {self._server()}>"

    # --- hooks ---

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return self._authenticated("wrap").each(requests, self._encrypt)

    def _unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        return self._authenticated("unwrap").each(requests, self._decrypt)

    def _authenticated(self, name: str) -> RemoteOperation:
        """Begin an operation with a fresh token, so that a failure to get one is a single error."""
        operation = self._operation(name)
        connection = self._last_connection
        if connection is None or not connection.is_ready:
            operation.call(None, lambda seconds: self._connections.get().authenticate(seconds))
        return operation

    def _encrypt(self, request: WrapRequest, seconds: float) -> str:
        name, key = self._key_name(request.master_key_id), request.key.reveal()
        message = EncryptRequest(name=name, plaintext=key, plaintext_crc32c=crc32c(key), **self._aad_fields)
        answer = self._connections.get().call("encrypt", message, seconds)
        wrong = None
        if not answer.verified_plaintext_crc32c:
            wrong = "Cloud KMS did not check the checksum of the key"
        elif self._aad and not answer.verified_additional_authenticated_data_crc32c:
            wrong = "Cloud KMS did not check the checksum of the additional authenticated data"
        elif not answer.ciphertext or answer.ciphertext_crc32c != crc32c(answer.ciphertext):
            wrong = "the checksum of the wrapped key is wrong"
        elif version_of(answer.name, name) is None:
            wrong = "the answer is about another key"
        if wrong:
            raise KmsResponseInvalidError(wrong)
        return strict_base64.encode(answer.ciphertext)

    def _decrypt(self, request: UnwrapRequest, seconds: float) -> SecretBytes:
        name = self._key_name(request.master_key_id)
        try:
            ciphertext = strict_base64.decode(request.wrapped_key)
        except ValueError:
            raise WrappedKeyInvalidError("it is not base64") from None
        message = DecryptRequest(
            name=name, ciphertext=ciphertext, ciphertext_crc32c=crc32c(ciphertext), **self._aad_fields
        )
        answer = self._connections.get().call("decrypt", message, seconds)
        if answer.plaintext_crc32c != crc32c(answer.plaintext):
            raise KmsResponseInvalidError("the checksum of the key is wrong")
        return SecretBytes(answer.plaintext)

    def probe(self, master_key_id: str) -> str | None:
        """Return a wrapped key that Cloud KMS never made: IAM is checked before ciphertexts."""
        return strict_base64.encode(secrets.token_bytes(60))

    def _describe(self, master_key_id: str) -> MasterKeyDescription:
        name = self._key_name(master_key_id)
        operation = self._operation("describe")
        get_key = GetCryptoKeyRequest(name=name)
        key = operation.call(master_key_id, lambda s: self._connections.get().call("get_crypto_key", get_key, s))
        if key.name != name:
            raise KmsResponseInvalidError("the answer is about another key")
        if key.purpose != _ENCRYPT_DECRYPT:
            raise KmsConfigurationError("the key is not for symmetric encryption (purpose ENCRYPT_DECRYPT)")
        primary = key.primary
        return MasterKeyDescription(
            master_key_id,
            enabled=bool(primary) and primary.state == _ENABLED,
            current_version=version_of(primary.name, name) if primary else None,
            enabled_versions=self._enabled_versions(operation, name, master_key_id),
            origin=_origin(key),
            rotates="rotation_period" in key,
        )

    def _create_master_key(self, master_key_id: str, tags: Mapping[str, str], policy: str | None) -> None:
        key_ring, _, name = self._key_name(master_key_id).rpartition("/cryptoKeys/")
        key = CryptoKey(purpose=_ENCRYPT_DECRYPT, labels=tags)
        request = CreateCryptoKeyRequest(parent=key_ring, crypto_key_id=name, crypto_key=key)
        self._operation("create").call(
            master_key_id, lambda seconds: self._connections.get().call("create_crypto_key", request, seconds)
        )

    def _version_dates(self, master_key_id: str) -> dict[str | None, datetime]:
        name = self._key_name(master_key_id)
        versions = self._versions(self._operation("describe"), name, master_key_id)
        return {number: version.create_time.astimezone(UTC) for number, version in versions if version.create_time}

    def _schedule_key_deletion(self, master_key_id: str, waiting_days: int | None) -> KeyDeletion:
        concerned = set(_STATES) - {_STATES.DESTROYED, _STATES.DESTROY_SCHEDULED}
        return self._change_versions("delete", master_key_id, DestroyCryptoKeyVersionRequest, concerned)

    def _cancel_key_deletion(self, master_key_id: str) -> KeyDeletion:
        concerned = {_STATES.DESTROY_SCHEDULED}
        return self._change_versions("cancel_deletion", master_key_id, RestoreCryptoKeyVersionRequest, concerned)

    def _change_versions(
        self, name: str, master_key_id: str, request: Callable[..., Any], states: Collection[Any]
    ) -> KeyDeletion:
        """Change each version in some states; a repeated call continues with the others."""
        operation, verb = self._operation(name), "destroy" if name == "delete" else "restore"
        for _, version in list(self._versions(operation, self._key_name(master_key_id), master_key_id)):
            if version.state in states:
                send = partial(self._connections.get().call, f"{verb}_crypto_key_version")
                operation.call(master_key_id, partial(send, request(name=version.name)))
        return self._key_deletion_state(master_key_id)

    def _key_deletion_state(self, master_key_id: str) -> KeyDeletion:
        name = self._key_name(master_key_id)
        try:
            versions = dict(self._versions(self._operation("describe"), name, master_key_id))
        except MasterKeyNotFoundError:
            return KeyDeletion(name, "deleted")
        states = {version.state for version in versions.values()}
        words = {number: version.state.name for number, version in versions.items()}
        if states <= {_STATES.DESTROYED}:
            return KeyDeletion(name, "deleted", words)
        if states <= {_STATES.DESTROYED, _STATES.DESTROY_SCHEDULED}:
            # The last version to go; the times of the others are in the KMS.
            times = [v.destroy_time.astimezone(UTC) for v in versions.values() if v.destroy_time]
            return KeyDeletion(name, "scheduled", words, max(times, default=None))
        return KeyDeletion(name, "usable" if _ENABLED in states else "disabled", words)

    def _caller_identity(self) -> CallerIdentity:
        self._authenticated("identify")
        tokens = self._last_connection.tokens if self._last_connection is not None else None
        if tokens is None or not tokens.email:
            return super()._caller_identity()
        return CallerIdentity(tokens.email, "the credentials of Google Cloud; Cloud KMS has no such call")

    def _translate(self, error: Exception, operation: str, master_key_id: str | None) -> KmsError:
        return kms_error(error, operation) or super()._translate(error, operation, master_key_id)

    def _server(self) -> str:
        return self.settings.endpoint if self._client is None else self._client.api_endpoint

    def _place(self) -> str:
        return ""

    def _identity(self, master_key_id: str) -> str:
        return self._key_name(master_key_id)

    def _raw_obstacle(self) -> str:
        return "Iceberg's own client sends no additional authenticated data" if self._aad else ""

    def _may_be_of_others(self, master_key_id: str) -> bool:
        return "/" in master_key_id and not master_key_id.startswith(f"{self._key_ring}/cryptoKeys/")

    def _principal(self) -> str:
        """Return the caller's identity as far as it is known without a call."""
        if self._client is not None:
            return "a client of the caller"
        if self.settings.impersonate_service_account:
            return self.settings.impersonate_service_account
        tokens = self._last_connection.tokens if self._last_connection is not None else None
        return (tokens and tokens.email) or "application default credentials"

    # --- names: `projects/*/locations/*/keyRings/*/cryptoKeys/*`, and versions below them ---

    def _key_name(self, master_key_id: str) -> str:
        """Return the resource name of a master key, given its resource name or its name in the key ring."""
        if _CRYPTO_KEY.fullmatch(master_key_id):
            return master_key_id
        if version := _CRYPTO_KEY_VERSION.fullmatch(master_key_id):
            detail = "this names one version of the key"
            hint = f"Name the key: {version[1]}. Cloud KMS finds the version."
        elif not _SHORT_NAME.fullmatch(master_key_id):
            detail, hint = "this is not the name of a key in Cloud KMS", f"Its form is {_FORM}."
        elif self._key_ring is None:
            detail = "a short name needs a key ring"
            hint = f"Set project, location and key_ring under kms, or write it in full: {_FORM}."
        else:
            return f"{self._key_ring}/cryptoKeys/{master_key_id}"
        raise KmsConfigurationError(detail, hint=hint)

    # --- connection ---

    def _connect(self) -> GcpConnection:
        if self._client is not None:
            if not self._owner.is_here:
                detail = "the client that was passed in belongs to the parent process"
                hint = "Make a client in each process, or let the configuration make it."
                raise KmsConfigurationError(detail, hint=hint, operation="connect")
            self._last_connection = GcpConnection(self._client, None)
            return self._last_connection
        settings, tokens = self.settings, None
        if not settings.insecure:
            file = settings.credentials_file
            credentials = load_credentials(
                self._folder / expanded(file) if file is not None else None,
                settings.impersonate_service_account,
                settings.impersonation_delegates,
                settings.quota_project,
            )
            tokens = TokenSource(credentials)
        self._last_connection = GcpConnection(open_client(settings.endpoint, insecure=settings.insecure), tokens)
        return self._last_connection

    def _enabled_versions(
        self, operation: RemoteOperation, name: str, master_key_id: str
    ) -> tuple[str, ...] | None:
        """Return the enabled versions, or None where the caller may not list them."""
        try:
            versions = self._versions(operation, name, master_key_id, "state=ENABLED")
            return tuple(sorted((number for number, v in versions if v.state == _ENABLED), key=int))
        except KmsAccessDeniedError:
            return None

    def _versions(
        self, operation: RemoteOperation, name: str, master_key_id: str, wanted: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """Yield the versions of a master key, with their numbers."""
        page_token = ""
        while True:
            request = ListCryptoKeyVersionsRequest(parent=name, filter=wanted, page_token=page_token)
            page = operation.call(master_key_id, partial(self._list_versions, request))
            for version in page.crypto_key_versions:
                if number := version_of(version.name, name):
                    yield number, version
            page_token = page.next_page_token
            if not page_token:
                return

    def _list_versions(self, request: ListCryptoKeyVersionsRequest, seconds: float) -> Any:
        return self._connections.get().call("list_crypto_key_versions", request, seconds)


def version_of(version_name: str, key_name: str) -> str | None:
    """Return the number in the name of a key version, or None if the version is not one of this key."""
    parts = _CRYPTO_KEY_VERSION.fullmatch(version_name)
    return parts[2] if parts and parts[1] == key_name else None


def _origin(key: CryptoKey) -> str | None:
    """Return the protection level of a key's primary version, and whether it was imported."""
    version = key.primary
    if not version:
        return None
    return f"{version.protection_level.name}, imported" if version.import_job else version.protection_level.name


# --- CRC32C (Castagnoli), the checksum of Cloud KMS ---

_REVERSED_POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_REVERSED_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))


def crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes. Wrapped keys are short, so plain Python is fast enough (ADR 7)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
