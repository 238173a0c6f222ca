"""A gRPC server that imitates Cloud KMS: real AES-GCM, versions and their states, checksums both ways."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.cloud.kms_v1.types import (
    CreateCryptoKeyRequest,
    CryptoKey,
    CryptoKeyVersion,
    DecryptRequest,
    DecryptResponse,
    DestroyCryptoKeyVersionRequest,
    EncryptRequest,
    EncryptResponse,
    GetCryptoKeyRequest,
    ListCryptoKeyVersionsRequest,
    ListCryptoKeyVersionsResponse,
    ProtectionLevel,
    RestoreCryptoKeyVersionRequest,
)
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from parquet_keytools.kms.gcp import crc32c

State = CryptoKeyVersion.CryptoKeyVersionState
KEY_RING = "projects/test-project/locations/europe-west1/keyRings/test-ring"
METHODS = {
    "Encrypt": (EncryptRequest, EncryptResponse),
    "Decrypt": (DecryptRequest, DecryptResponse),
    "GetCryptoKey": (GetCryptoKeyRequest, CryptoKey),
    "ListCryptoKeyVersions": (ListCryptoKeyVersionsRequest, ListCryptoKeyVersionsResponse),
    "CreateCryptoKey": (CreateCryptoKeyRequest, CryptoKey),
    "DestroyCryptoKeyVersion": (DestroyCryptoKeyVersionRequest, CryptoKeyVersion),
    "RestoreCryptoKeyVersion": (RestoreCryptoKeyVersionRequest, CryptoKeyVersion),
}
PAGE_SIZE = 2


class RefusalError(Exception):
    """Ends a call with a status, and details as the real service sends them."""

    def __init__(self, status: str, message: str, *details: Any) -> None:
        super().__init__(status)
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        code = code_pb2.Code.Value(status)
        self.status = rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


@dataclass
class Version:
    number: int
    state: Any = State.ENABLED
    import_job: str = ""
    tag: bytes = field(default_factory=lambda: os.urandom(16))
    cipher: AESGCM = field(default_factory=lambda: AESGCM(os.urandom(32)))


@dataclass
class Key:
    name: str
    versions: list[Version] = field(default_factory=lambda: [Version(1)])
    primary: int | None = 1
    purpose: Any = CryptoKey.CryptoKeyPurpose.ENCRYPT_DECRYPT
    protection_level: Any = ProtectionLevel.SOFTWARE
    rotation_period: datetime.timedelta | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def add_version(self) -> None:
        self.versions.append(Version(len(self.versions) + 1))
        self.primary = len(self.versions)

    def set_state(self, state: Any) -> None:
        for version in self.versions:
            version.state = state

    def described(self, version: Version) -> CryptoKeyVersion:
        return CryptoKeyVersion(
            name=f"{self.name}/cryptoKeyVersions/{version.number}",
            state=version.state,
            protection_level=self.protection_level,
            import_job=version.import_job,
            create_time=datetime.datetime.fromtimestamp(1_700_000_000 + version.number, datetime.UTC),
            destroy_time=datetime.datetime.fromtimestamp(2_000_000_000, datetime.UTC)
            if version.state == State.DESTROY_SCHEDULED
            else None,
        )


Fault = Callable[[str, Any, grpc.ServicerContext], Callable[[Any], None] | None]
"""Gets a call; may wait or raise a RefusalError, and returns how to spoil the answer."""


class FakeGcpKms:
    """The service; `endpoint` is its address."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.keys: dict[str, Key] = {}
        self.denied: set[tuple[str, str]] = set()
        self.calls: Counter[str] = Counter()
        self.metadata: list[dict[str, str]] = []
        self.under_way = self.most_under_way = 0
        self.latency_seconds = 0.0
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name), request_deserializer=asked.deserialize, response_serializer=answered.serialize
            )
            for name, (asked, answered) in METHODS.items()
        }
        service = "google.cloud.kms.v1.KeyManagementService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.endpoint = f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def add_key(self, name: str) -> Key:
        key = self.keys[f"{KEY_RING}/cryptoKeys/{name}"] = Key(f"{KEY_RING}/cryptoKeys/{name}")
        return key

    def key(self, name: str) -> Key:
        return self.keys[f"{KEY_RING}/cryptoKeys/{name}"]

    def deny(self, name: str, *methods: str) -> None:
        self.denied |= {(method, f"{KEY_RING}/cryptoKeys/{name}") for method in methods or METHODS}

    # --- faults ---

    def add_fault(self, fault: Fault, *, times: int | None = None, seconds: float | None = None) -> None:
        """Spoil the next calls: a number of them, or all calls for some seconds."""
        left = [times]
        end = time.monotonic() + seconds if seconds is not None else None
        lock = threading.Lock()

        def limited(method: str, request: Any, context: grpc.ServicerContext) -> Callable[[Any], None] | None:
            with lock:
                if left[0] == 0 or (end is not None and time.monotonic() >= end):
                    return None
                if left[0] is not None:
                    left[0] -= 1
            return fault(method, request, context)

        self._faults.append(limited)

    def fail(
        self, status: str, *details: Any, message: str = "", times: int | None = None, seconds: float | None = None
    ) -> None:
        def fault(method: str, request: Any, context: grpc.ServicerContext) -> None:
            # Like a careless service, it quotes the request.
            raise RefusalError(status, f"{message} {request!r}", *details)

        self.add_fault(fault, times=times, seconds=seconds)

    def delay(self, delay_seconds: float, *, times: int | None = None) -> None:
        self.add_fault(lambda *_: time.sleep(delay_seconds), times=times)

    def corrupt(self, spoil: Callable[[Any], None], *, times: int | None = None) -> None:
        self.add_fault(lambda *_: spoil, times=times)

    # --- the service ---

    def _handler(self, method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        work = getattr(self, f"_{method}")

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.calls[method] += 1
                self.metadata.append(dict(context.invocation_metadata()))
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                time.sleep(self.latency_seconds)
                spoils = [fault(method, request, context) for fault in list(self._faults)]
                answer = work(request)
                for spoil in spoils:
                    if spoil is not None:
                        spoil(answer)
                return answer
            except RefusalError as refusal:
                context.abort_with_status(refusal.status)
            finally:
                with self._lock:
                    self.under_way -= 1

        return handle

    def _found(self, method: str, name: str) -> Key:
        if (method, name) in self.denied:
            info = error_details_pb2.ErrorInfo(reason="IAM_PERMISSION_DENIED", domain="cloudkms.googleapis.com")
            raise RefusalError("PERMISSION_DENIED", f"denied on resource {name} (or it may not exist).", info)
        if name not in self.keys:
            raise RefusalError("NOT_FOUND", f"CryptoKey {name} not found.")
        return self.keys[name]

    @staticmethod
    def _usable(key: Key, version: Version) -> Version:
        if version.state != State.ENABLED:
            violation = error_details_pb2.PreconditionFailure.Violation(type="KEY_NOT_ENABLED", subject=key.name)
            failure = error_details_pb2.PreconditionFailure(violations=[violation])
            raise RefusalError("FAILED_PRECONDITION", f"{key.name} is not enabled: {version.state.name}.", failure)
        return version

    @staticmethod
    def _check(data: bytes, checksum: int | None, name: str) -> bool:
        if checksum is not None and checksum != crc32c(data):
            raise RefusalError(
                "INVALID_ARGUMENT", f"The checksum in field {name} did not match the data in field."
            )
        return checksum is not None

    def _Encrypt(self, request: EncryptRequest) -> EncryptResponse:  # noqa: N802
        key = self._found("Encrypt", request.name)
        verified = self._check(request.plaintext, request.plaintext_crc32c, "plaintext_crc32c")
        aad = request.additional_authenticated_data
        verified_aad = self._check(aad, request.additional_authenticated_data_crc32c, "aad_crc32c")
        if key.primary is None:
            raise RefusalError("FAILED_PRECONDITION", f"{key.name} has no primary version.")
        version = self._usable(key, key.versions[key.primary - 1])
        nonce = os.urandom(12)
        ciphertext = version.tag + nonce + version.cipher.encrypt(nonce, request.plaintext, aad)
        return EncryptResponse(
            name=f"{key.name}/cryptoKeyVersions/{version.number}",
            ciphertext=ciphertext,
            ciphertext_crc32c=crc32c(ciphertext),
            verified_plaintext_crc32c=verified,
            verified_additional_authenticated_data_crc32c=verified_aad,
            protection_level=key.protection_level,
        )

    def _Decrypt(self, request: DecryptRequest) -> DecryptResponse:  # noqa: N802
        key = self._found("Decrypt", request.name)
        aad = request.additional_authenticated_data
        self._check(request.ciphertext, request.ciphertext_crc32c, "ciphertext_crc32c")
        self._check(aad, request.additional_authenticated_data_crc32c, "aad_crc32c")
        tag, nonce, sealed = request.ciphertext[:16], request.ciphertext[16:28], request.ciphertext[28:]
        for version in key.versions:
            if version.tag == tag:
                self._usable(key, version)
                with contextlib.suppress(InvalidTag, ValueError):
                    plaintext = version.cipher.decrypt(nonce, sealed, aad)
                    return DecryptResponse(
                        plaintext=plaintext,
                        plaintext_crc32c=crc32c(plaintext),
                        used_primary=version.number == key.primary,
                    )
        raise RefusalError("INVALID_ARGUMENT", "Decryption failed: the ciphertext is invalid.")

    def _GetCryptoKey(self, request: GetCryptoKeyRequest) -> CryptoKey:  # noqa: N802
        key = self._found("GetCryptoKey", request.name)
        primary = key.described(key.versions[key.primary - 1]) if key.primary else None
        rotation_period = key.rotation_period
        return CryptoKey(name=key.name, purpose=key.purpose, primary=primary, rotation_period=rotation_period)

    def _CreateCryptoKey(self, request: CreateCryptoKeyRequest) -> CryptoKey:  # noqa: N802
        name = f"{request.parent}/cryptoKeys/{request.crypto_key_id}"
        if name in self.keys:
            raise RefusalError("ALREADY_EXISTS", f"CryptoKey {name} already exists.")
        key = self.keys[name] = Key(name, purpose=request.crypto_key.purpose)
        key.labels = dict(request.crypto_key.labels)
        return CryptoKey(name=name, purpose=key.purpose)

    def _DestroyCryptoKeyVersion(self, request: DestroyCryptoKeyVersionRequest) -> CryptoKeyVersion:  # noqa: N802
        return self._changed("DestroyCryptoKeyVersion", request.name, State.DESTROY_SCHEDULED)

    def _RestoreCryptoKeyVersion(self, request: RestoreCryptoKeyVersionRequest) -> CryptoKeyVersion:  # noqa: N802
        # As in the real service, a restored version is disabled.
        return self._changed("RestoreCryptoKeyVersion", request.name, State.DISABLED)

    def _changed(self, method: str, name: str, state: Any) -> CryptoKeyVersion:
        key = self._found(method, name.partition("/cryptoKeyVersions/")[0])
        version = key.versions[int(name.rpartition("/")[2]) - 1]
        version.state = state
        return key.described(version)

    def _ListCryptoKeyVersions(  # noqa: N802
        self, request: ListCryptoKeyVersionsRequest
    ) -> ListCryptoKeyVersionsResponse:
        key = self._found("ListCryptoKeyVersions", request.parent)
        start = int(request.page_token or 0)
        rest = start + PAGE_SIZE < len(key.versions)
        return ListCryptoKeyVersionsResponse(
            crypto_key_versions=[key.described(v) for v in key.versions[start : start + PAGE_SIZE]],
            next_page_token=str(start + PAGE_SIZE) if rest else "",
        )


def retry_info(seconds: float) -> Any:
    delay = duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


class CuttingProxy:
    """Forwards bytes to an endpoint; `cut` breaks all connections in the middle of their work."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def fake_gcp_kms(*names: str) -> Iterator[FakeGcpKms]:
    server = FakeGcpKms()
    for name in names:
        server.add_key(name)
    try:
        yield server
    finally:
        server.stop()
