"""A small AWS KMS over HTTP: the parts that moto lacks, and faults on the way.

It has master keys with versions and states, aliases, permissions and encryption contexts, and encrypts with real
AES-GCM. Each request uses up one of `faults`.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

REGION = "eu-west-1"
ACCOUNT = "111122223333"

Json = dict[str, Any]


class RefusalError(Exception):
    """An error that AWS KMS answers with."""

    def __init__(self, code: str, message: str = "", status: int = 400) -> None:
        super().__init__(code)
        self.code, self.message, self.status = code, message, status


@dataclass
class Key:
    """A master key."""

    key_id: str
    region: str = REGION
    state: str = "Enabled"
    denied: set[str] = field(default_factory=set)
    usage: str = "ENCRYPT_DECRYPT"
    versions: list[bytes] = field(default_factory=lambda: [AESGCM.generate_key(256)])
    material_ids: list[str] = field(default_factory=lambda: [uuid.uuid4().hex])

    @property
    def arn(self) -> str:
        return f"arn:aws:kms:{self.region}:{ACCOUNT}:key/{self.key_id}"

    def rotate(self) -> None:
        self.versions.append(AESGCM.generate_key(256))
        self.material_ids.append(uuid.uuid4().hex)


@dataclass
class Reply:
    """What goes over the wire."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    pause_seconds: float = 0.0
    drip_seconds: float = 0.0


Fault = Callable[[str, Json, Reply], Reply]
"""Takes the operation, the request and the correct reply; returns the reply to send."""


class FakeKms:
    """The service; `serve` puts it behind a socket."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.aliases: dict[str, str] = {}
        self.log: list[tuple[str, Json, Json]] = []
        self.faults: list[Fault] = []
        self.always: Fault | None = None
        self.expired_access_keys: set[str] = set()
        self.authorizations: list[str] = []
        self.policy: list[Json] | None = None
        """The statements of the caller's IAM policy; None allows everything."""
        self.latency_seconds = 0.0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        return Counter(operation for operation, _, _ in self.log)

    def add_key(self, alias: str | None = None, **facts: Any) -> Key:
        key = Key(**({"key_id": str(uuid.uuid4())} | facts))
        self.keys[key.key_id] = key
        if alias:
            self.aliases[f"alias/{alias}"] = key.key_id
        return key

    # --- the operations ---

    def answer(self, operation: str, request: Json) -> Json:
        action = {
            "Encrypt": self._encrypt,
            "Decrypt": self._decrypt,
            "ReEncrypt": self._re_encrypt,
            "DescribeKey": self._describe_key,
            "GetKeyRotationStatus": self._rotation_status,
            "ListKeyRotations": self._rotations,
        }
        return action[operation](request)

    def find(self, name: str) -> Key:
        prefix = f"arn:aws:kms:{REGION}:{ACCOUNT}:"
        if name.startswith("arn:"):
            if not name.startswith(prefix):
                raise RefusalError("NotFoundException", f"Invalid arn {name.split(':')[3]}")
            name = name[len(prefix) :].removeprefix("key/")
        if name.startswith("alias/"):
            if name not in self.aliases:
                raise RefusalError("NotFoundException", f"Alias {prefix}{name} is not found.")
            name = self.aliases[name]
        if name not in self.keys:
            raise RefusalError("NotFoundException", f"Key '{prefix}key/{name}' does not exist")
        return self.keys[name]

    def _is_allowed(self, action: str, key: Key, context: dict[str, str]) -> bool:
        def allows(statement: Json) -> bool:
            wanted = statement.get("Condition", {}).get("StringEquals", {})
            return (
                f"kms:{action}" in statement["Action"]
                and key.arn in statement["Resource"]
                and all(context.get(name.rpartition(":")[2]) == value for name, value in wanted.items())
            )

        return self.policy is None or any(map(allows, self.policy))

    def _usable(self, name: str, action: str, context: dict[str, str]) -> Key:
        key = self.find(name)
        if action in key.denied or "*" in key.denied or not self._is_allowed(action, key, context):
            message = (
                f"User: arn:aws:iam::{ACCOUNT}:user/x is not authorized to perform: kms:{action} on: {key.arn}"
            )
            raise RefusalError("AccessDeniedException", message)
        if key.usage != "ENCRYPT_DECRYPT":
            raise RefusalError("InvalidKeyUsageException", f"{key.arn} key usage is {key.usage}")
        if key.state == "Disabled":
            raise RefusalError("DisabledException", f"{key.arn} is disabled.")
        if key.state == "KeyUnavailable":
            raise RefusalError("KeyUnavailableException", "", 500)
        if key.state != "Enabled":
            words = {
                "PendingDeletion": "pending deletion",
                "PendingImport": "pending import",
                "Creating": "creating",
                "Unavailable": "unavailable",
            }
            raise RefusalError("KMSInvalidStateException", f"{key.arn} is {words[key.state]}.")
        return key

    @staticmethod
    def _seal(key: Key, plaintext: bytes, context: dict[str, str]) -> bytes:
        nonce = uuid.uuid4().bytes[:12]
        version = len(key.versions) - 1
        header = key.key_id.encode() + bytes([0, version]) + nonce
        return header + AESGCM(key.versions[version]).encrypt(nonce, plaintext, _aad(context))

    def _open(self, blob: bytes, asked: Key, context: dict[str, str]) -> bytes:
        key_id, zero, rest = blob.partition(b"\0")
        made_by = self.keys.get(key_id.decode("latin-1")) if zero else None
        if made_by is None or len(rest) < 29 or rest[0] >= len(made_by.versions):
            raise RefusalError("InvalidCiphertextException")
        if made_by.key_id != asked.key_id:
            message = "The key ID in the request does not identify a CMK that can perform this operation."
            raise RefusalError("IncorrectKeyException", message)
        try:
            return AESGCM(made_by.versions[rest[0]]).decrypt(rest[1:13], rest[13:], _aad(context))
        except InvalidTag:
            raise RefusalError("InvalidCiphertextException") from None

    def _encrypt(self, request: Json) -> Json:
        key = self._usable(request["KeyId"], "Encrypt", request.get("EncryptionContext", {}))
        plaintext = base64.b64decode(request["Plaintext"])
        blob = self._seal(key, plaintext, request.get("EncryptionContext", {}))
        return {"KeyId": key.arn, "CiphertextBlob": base64.b64encode(blob).decode()}

    def _decrypt(self, request: Json) -> Json:
        key = self._usable(request["KeyId"], "Decrypt", request.get("EncryptionContext", {}))
        _end_dry_run(request)
        plaintext = self._open(
            base64.b64decode(request["CiphertextBlob"]), key, request.get("EncryptionContext", {})
        )
        return {"KeyId": key.arn, "Plaintext": base64.b64encode(plaintext).decode()}

    def _re_encrypt(self, request: Json) -> Json:
        source = self._usable(request["SourceKeyId"], "ReEncryptFrom", request.get("SourceEncryptionContext", {}))
        destination = self._usable(
            request["DestinationKeyId"], "ReEncryptTo", request.get("DestinationEncryptionContext", {})
        )
        _end_dry_run(request)
        blob = base64.b64decode(request["CiphertextBlob"])
        plaintext = self._open(blob, source, request.get("SourceEncryptionContext", {}))
        blob = self._seal(destination, plaintext, request.get("DestinationEncryptionContext", {}))
        return {
            "SourceKeyId": source.arn,
            "KeyId": destination.arn,
            "CiphertextBlob": base64.b64encode(blob).decode(),
        }

    def _describe_key(self, request: Json) -> Json:
        key = self.find(request["KeyId"])
        if "DescribeKey" in key.denied:
            raise RefusalError("AccessDeniedException", "not authorized to perform: kms:DescribeKey")
        metadata = {
            "AWSAccountId": ACCOUNT,
            "KeyId": key.key_id,
            "Arn": key.arn,
            "CreationDate": time.time(),
            "Enabled": key.state == "Enabled",
            "KeyState": key.state,
            "KeyUsage": key.usage,
            "KeySpec": "SYMMETRIC_DEFAULT" if key.usage == "ENCRYPT_DECRYPT" else "RSA_2048",
            "Origin": "AWS_KMS",
            "CurrentKeyMaterialId": key.material_ids[-1],
        }
        return {"KeyMetadata": metadata}

    def _rotation_status(self, request: Json) -> Json:
        key = self.find(request["KeyId"])
        if "GetKeyRotationStatus" in key.denied:
            raise RefusalError("AccessDeniedException", "not authorized to perform: kms:GetKeyRotationStatus")
        return {"KeyId": key.arn, "KeyRotationEnabled": True, "RotationPeriodInDays": 365}

    def _rotations(self, request: Json) -> Json:
        """One key material on each page; the first one has no rotation date."""
        key = self.find(request["KeyId"])
        if "ListKeyRotations" in key.denied:
            raise RefusalError("AccessDeniedException", "not authorized to perform: kms:ListKeyRotations")
        assert request["IncludeKeyMaterial"] == "ALL_KEY_MATERIAL"
        number = int(request.get("Marker", 0))
        rotation: Json = {"KeyId": key.key_id, "KeyMaterialId": key.material_ids[number]}
        if number:
            rotation["RotationDate"] = 1_700_000_000 + number
        more = number + 1 < len(key.material_ids)
        return {"Rotations": [rotation], "Truncated": more} | ({"NextMarker": str(number + 1)} if more else {})

    # --- the wire ---

    def reply(self, operation: str, body: bytes, authorization: str) -> Reply:
        request = json.loads(body)
        with self.lock:
            self.authorizations.append(authorization)
            fault = self.faults.pop(0) if self.faults else self.always
        try:
            for access_key in self.expired_access_keys:
                if f"Credential={access_key}/" in authorization:
                    raise RefusalError(
                        "ExpiredTokenException", "The security token included in the request is expired"
                    )
            answer = self.answer(operation, request)
            right = Reply(200, json.dumps(answer).encode())
        except RefusalError as refusal:
            answer = {"__type": refusal.code, "message": refusal.message}
            right = Reply(refusal.status, json.dumps(answer).encode())
        with self.lock:
            self.log.append((operation, request, answer))
        return fault(operation, request, right) if fault else right


def _end_dry_run(request: Json) -> None:
    """End a dry run as AWS documents it; without parsing the ciphertext, if it is to be ignored."""
    if request.get("DryRun"):
        assert request["DryRunModifiers"] == ["IGNORE_CIPHERTEXT"] and "CiphertextBlob" not in request
        raise RefusalError("DryRunOperationException", "The request would have succeeded.", 412)


def _aad(context: dict[str, str]) -> bytes:
    return json.dumps(context, sort_keys=True).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeKms

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["X-Amz-Target"].removeprefix("TrentService.")
        fake = self.fake
        with fake.lock:
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        try:
            if fake.latency_seconds:
                time.sleep(fake.latency_seconds)
            reply = fake.reply(operation, body, self.headers["Authorization"] or "")
        finally:
            with fake.lock:
                fake.at_once -= 1
        try:
            self._send(reply)
        except OSError:
            self.close_connection = True

    def _send(self, reply: Reply) -> None:
        time.sleep(reply.pause_seconds)
        if reply.status == 0:
            self._hang_up()
            return
        self.send_response(reply.status)
        headers = {"Content-Type": "application/x-amz-json-1.1", "x-amzn-RequestId": str(uuid.uuid4())}
        for name, value in (headers | {"Content-Length": str(len(reply.body))} | reply.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if reply.drip_seconds:
            for byte in reply.body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(reply.drip_seconds)
        else:
            self.wfile.write(reply.body[: reply.cut_at])
        if reply.cut_at is not None:
            self.wfile.flush()
            self._hang_up()

    def do_GET(self) -> None:
        self.do_POST()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serve(fake: FakeKms, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a free loopback port. Yields the URL."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- faults ---


def refuse(code: str, status: int = 400, message: str = "", **headers: str) -> Fault:
    """Answer with an error code."""
    body = json.dumps({"__type": code, "message": message}).encode()
    return lambda operation, request, reply: Reply(status, body, headers)


def html(status: int, text: str = "") -> Fault:
    """Answer as a proxy does."""
    body = f"<html><body><h1>{status}</h1>{text}</body></html>".encode()
    return lambda operation, request, reply: Reply(status, body, {"Content-Type": "text/html"})


def redirect(url: str, status: int = 307) -> Fault:
    """Redirect the client."""
    return lambda operation, request, reply: Reply(status, b"", {"Location": url})


def slow(seconds: float) -> Fault:
    """Answer late."""

    def fault(operation: str, request: Json, reply: Reply) -> Reply:
        reply.pause_seconds = seconds
        return reply

    return fault


def hang_up(operation: str, request: Json, reply: Reply) -> Reply:
    """Close the connection without an answer."""
    return Reply(0, b"")


def cut(operation: str, request: Json, reply: Reply) -> Reply:
    """Close the connection in the middle of the answer."""
    reply.cut_at = len(reply.body) // 2
    return reply


def changed(**fields: Any) -> Fault:
    """Answer with other values for some fields; None removes a field."""

    def fault(operation: str, request: Json, reply: Reply) -> Reply:
        answer = {name: value for name, value in (json.loads(reply.body) | fields).items() if value is not None}
        reply.body = json.dumps(answer).encode()
        return reply

    return fault
