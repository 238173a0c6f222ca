"""A fake of Azure Key Vault and Managed HSM: no emulator exists, and no test ran against the real service.

It answers, over HTTPS, the REST calls that this package makes, as Microsoft documents them: the challenge, keys
and their versions, wrapkey, unwrapkey, encrypt, decrypt, deletedkeys. RSA and AES are real. It also stands in for
the token issuers: the endpoints of App Service and of virtual machines for a managed identity, and Entra ID.
Clients call Entra ID by its real name, through a proxy that routes these connections to the fake.

A vault must name the domain that it lies in. The fake listens at `127.0.0.1:PORT`, so its domain is `0.0.1:PORT`.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import ipaddress
import json
import os
import select
import socket
import ssl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from azure.core.credentials import AccessToken
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap
from cryptography.x509.oid import NameOID

ENTRA = "login.microsoftonline.com"
PAGE_SIZE = 2
OAEP = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
WRAP_OPERATIONS = ("wrapKey", "unwrapKey")
ALL_OPERATIONS = (*WRAP_OPERATIONS, "encrypt", "decrypt")


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@cache
def rsa_key(number: int) -> rsa.RSAPrivateKey:
    """Return an RSA key from a small pool, since making one is slow."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


_rsa_numbers = iter(range(10**9))


class RefusalError(Exception):
    """Ends a call with a status and an error in the service's format."""

    def __init__(self, status: int, code: str, message: str = "", inner: str = "", **headers: str) -> None:
        super().__init__(status)
        error: dict[str, Any] = {"code": code, "message": message}
        if inner:
            error["innererror"] = {"code": inner}
        self.answer = status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": error}


@dataclass
class Version:
    kty: str
    created: int
    enabled: bool = True
    nbf: int | None = None
    exp: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    aes: bytes = field(default_factory=lambda: os.urandom(32))
    rsa: int = field(default_factory=lambda: next(_rsa_numbers) % 12)

    @property
    def attributes(self) -> dict[str, Any]:
        facts = {"enabled": self.enabled, "nbf": self.nbf, "exp": self.exp, "created": self.created}
        return {name: value for name, value in facts.items() if value is not None}


@dataclass
class Key:
    name: str
    kty: str
    operations: tuple[str, ...]
    versions: list[Version] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def add_version(self) -> Version:
        self.versions.append(Version(self.kty, 1_700_000_000 + len(self.versions)))
        return self.versions[-1]


Raw = tuple[int, dict[str, str], Any]
Fault = Callable[[str, str, dict[str, Any]], Raw | None]
"""Gets method, path and content of a call; may wait, and returns an answer instead of the service's."""


class FakeVault:
    """The service; `url` is where it listens, and `ca_file` the certificate to trust."""

    def __init__(self, folder: Path) -> None:
        self.keys: dict[str, Key] = {}
        self.deleted: dict[str, Key] = {}
        self.denied: set[tuple[str, str]] = set()
        self.tokens: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.without_token: list[bytes] = []
        self.scopes: list[tuple[str, dict[str, Any]]] = []
        self.logins: list[tuple[str, dict[str, str]]] = []
        self.accepts: Callable[[dict[str, str]], bool] = lambda form: True
        self.under_way = self.most_under_way = 0
        self.latency_seconds = 0.0
        self.faults: list[Fault] = []
        self.spoil: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda verb, answer: answer
        self._lock = threading.Lock()
        self.ca_file, chain = _certificates(folder)
        vault = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, content = vault.answer(self.command, self.path, dict(self.headers), body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Quiet: clients that give up close their connections."""

        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        host = f"127.0.0.1:{self._server.server_port}"
        self.url, self.domain = f"https://{host}", host.partition(".")[2]
        self.resource = f"https://{self.domain}"
        self.challenge = f'Bearer authorization="https://login.example/a-tenant", resource="{self.resource}"'
        self._proxy = Server(("127.0.0.1", 0), type("Proxy", (_Proxy,), {"vault": self}))
        for server in (self._server, self._proxy):
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        for server in (self._server, self._proxy):
            server.shutdown()
            server.server_close()

    # --- what an operator does ---

    def add_key(self, name: str, kty: str = "RSA", operations: tuple[str, ...] = ALL_OPERATIONS) -> Key:
        key = self.keys[name.lower()] = Key(name, kty, operations)
        key.add_version()
        return key

    def deny(self, name: str, *verbs: str) -> None:
        every = ("get", "versions", "wrapkey", "unwrapkey", "encrypt", "decrypt")
        self.denied |= {(verb, name.lower()) for verb in verbs or every}

    def delete(self, name: str) -> None:
        self.deleted[name.lower()] = self.keys.pop(name.lower())

    def credential(self) -> FakeCredential:
        return FakeCredential(self)

    def new_token(self) -> str:
        token = f"secret-token-{uuid.uuid4().hex}"
        self.tokens.add(token)
        return token

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a managed identity, and of the certificate to trust."""
        return {
            "REQUESTS_CA_BUNDLE": str(self.ca_file),
            "IDENTITY_ENDPOINT": f"{self.url}/msi/token",
            "IDENTITY_HEADER": "secret-header",
            "NO_PROXY": "127.0.0.1",
        }

    def environment_of_entra(self) -> dict[str, str]:
        """Return environment variables that make this fake Entra ID and a machine's own token endpoint."""
        proxy = f"http://127.0.0.1:{self._proxy.server_port}"
        proxies = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
        return {"REQUESTS_CA_BUNDLE": str(self.ca_file), **proxies}

    def fail(self, answer: Raw | RefusalError, *, times: int = -1, verb: str = "") -> None:
        """Answer the next calls of a verb, or of any verb, in this way: a given number of them, or all."""
        left = [times]
        raw = answer.answer if isinstance(answer, RefusalError) else answer

        def fault(method: str, path: str, content: dict[str, Any]) -> Raw | None:
            if left[0] == 0 or not path.endswith(verb):
                return None
            left[0] -= 1
            if isinstance(raw[2], dict) and "error" in raw[2]:
                # Like a careless service, it quotes the request.
                return raw[0], raw[1], {"error": {**raw[2]["error"], "asked": content}}
            return raw

        self.faults.append(fault)

    # --- the service ---

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Raw:
        parts = urlsplit(target)
        if parts.path == "/msi/token":
            return self._identity(parts.query, headers)
        if headers.get("Host") == ENTRA:
            return self._entra(parts.path, dict(parse_qsl(body.decode())))
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            time.sleep(self.latency_seconds)
            if token not in self.tokens:
                self.without_token.append(body)
                self.calls["challenge"] += 1
                refused = {"code": "Unauthorized", "message": "AKV10000: Request is missing a Bearer token."}
                return 401, {"WWW-Authenticate": self.challenge}, {"error": refused}
            content = json.loads(body) if body else {}
            for fault in list(self.faults):
                if (answer := fault(method, parts.path, content)) is not None:
                    with self._lock:
                        self.calls["fault"] += 1
                    return answer
            assert parse_qs(parts.query)["api-version"] == ["7.4"]
            return 200, {}, self._called(method, parts.path.strip("/").split("/"), parts.query, content)
        except RefusalError as refusal:
            return refusal.answer
        finally:
            with self._lock:
                self.under_way -= 1

    def _identity(self, query: str, headers: dict[str, str]) -> Raw:
        if headers.get("X-IDENTITY-HEADER") != "secret-header":
            return 403, {}, {"error": "forbidden"}
        self.scopes.append((parse_qs(query)["resource"][0], {}))
        ends = int(time.time()) + 3600
        return 200, {}, {"access_token": self.new_token(), "expires_on": str(ends), "token_type": "Bearer"}

    def _entra(self, path: str, form: dict[str, str]) -> Raw:
        tenant = path.split("/")[1]
        here = f"https://{ENTRA}/{tenant}"
        if path.endswith("/openid-configuration"):
            endpoints = {
                "authorization_endpoint": f"{here}/authorize",
                "token_endpoint": f"{here}/oauth2/v2.0/token",
            }
            return 200, {}, {"issuer": f"{here}/v2.0", **endpoints}
        if path == "/common/discovery/instance":
            aliases = {"preferred_network": ENTRA, "preferred_cache": ENTRA, "aliases": [ENTRA]}
            return 200, {}, {"tenant_discovery_endpoint": f"{here}/openid-configuration", "metadata": [aliases]}
        self.logins.append((path, form))
        if not self.accepts(form):
            # Like a careless service, it quotes the request.
            text = f"AADSTS7000215: Invalid client secret provided: {form}"
            return 401, {}, {"error": "invalid_client", "error_description": text, "error_codes": [7000215]}
        return 200, {}, {"access_token": self.new_token(), "expires_in": 3600, "token_type": "Bearer"}

    def machine_identity(self, query: str, headers: dict[str, str]) -> Raw:
        if headers.get("Metadata") != "true":
            return 400, {}, {"error": "invalid_request"}
        self.scopes.append((parse_qs(query)["resource"][0], {}))
        issued = {"access_token": self.new_token(), "expires_in": "3600", "token_type": "Bearer"}
        return 200, {}, issued | {"expires_on": str(int(time.time()) + 3600)}

    def _called(self, method: str, path: list[str], query: str, content: dict[str, Any]) -> dict[str, Any]:
        kind, name, *rest = path
        if kind == "deletedkeys":
            with self._lock:
                self.calls["deletedkeys"] += 1
            if name.lower() not in self.deleted:
                raise _missing(name)
            if (method, rest) == ("POST", ["recover"]):
                self.keys[name.lower()] = self.deleted.pop(name.lower())
                return {}
            return {
                "recoveryId": f"{self.url}/deletedkeys/{name}",
                "scheduledPurgeDate": 2_000_000_000,
                "attributes": {"recoveryLevel": "Recoverable+Purgeable"},
            }
        assert kind == "keys"
        if method == "DELETE":
            if name.lower() not in self.keys:
                raise _missing(name)
            self.delete(name)
            return {"scheduledPurgeDate": 2_000_000_000}
        verb = {"POST": rest[-1] if rest else "", "GET": "versions" if rest == ["versions"] else "get"}[method]
        with self._lock:
            self.calls[verb] += 1
        if (verb, name.lower()) in self.denied:
            message = "Caller is not authorized to perform action on resource.\r\nAssignment: (not found)"
            raise RefusalError(403, "Forbidden", message, "ForbiddenByRbac")
        if verb == "create":
            # An existing key gets another version.
            made = self.add_key(name, content["kty"], tuple(content["key_ops"]))
            made.tags = content["tags"]
            return {"key": {"kid": f"{self.url}/keys/{name}/{made.versions[-1].id}", "kty": made.kty}}
        key = self.keys.get(name.lower())
        if key is None:
            raise _missing(name)
        if verb == "versions":
            return self._versions(key, query)
        wanted = rest[0] if (rest and method == "GET") or len(rest) > 1 else ""
        version = next((v for v in key.versions if v.id == wanted), None) if wanted else key.versions[-1]
        if version is None:
            raise _missing(f"{name}/{wanted}")
        if not version.enabled:
            raise RefusalError(
                403, "Forbidden", f"Operation {verb} is not allowed on a disabled key.", "KeyDisabled"
            )
        kid = f"{self.url}/keys/{key.name}/{version.id}"
        if verb == "get":
            described: dict[str, Any] = {"kid": kid, "kty": key.kty, "key_ops": list(key.operations)}
            if "RSA" in key.kty:
                numbers = rsa_key(version.rsa).public_key().public_numbers()
                described |= {"n": encoded(numbers.n.to_bytes(256)), "e": encoded(numbers.e.to_bytes(3))}
            return self.spoil(verb, {"key": described, "attributes": version.attributes})
        now = time.time()
        if verb in ("wrapkey", "encrypt") and version.exp is not None and version.exp <= now:
            raise RefusalError(
                403, "Forbidden", f"Operation {verb} is not allowed on an expired key.", "KeyExpired"
            )
        if verb not in {operation.lower() for operation in key.operations}:
            text = f"Operation {verb} is not permitted on this key."
            raise RefusalError(403, "Forbidden", text, "KeyOperationForbidden")
        try:
            return self.spoil(verb, {"kid": kid, **_operated(verb, key.kty, version, content)})
        except (ValueError, InvalidTag, InvalidUnwrap):
            raise RefusalError(400, "BadParameter", f"The parameter is incorrect: {content}") from None

    def _versions(self, key: Key, query: str) -> dict[str, Any]:
        start = int(parse_qs(query).get("$skiptoken", ["0"])[0])
        page = key.versions[start : start + PAGE_SIZE]
        following = start + PAGE_SIZE
        link = f"{self.url}/keys/{key.name}/versions?api-version=7.4&$skiptoken={following}"
        entries = [{"kid": f"{self.url}/keys/{key.name}/{v.id}", "attributes": v.attributes} for v in page]
        return self.spoil(
            "versions", {"value": entries, "nextLink": link if following < len(key.versions) else None}
        )


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Routes connections to Entra ID to the fake, answers for a virtual machine, and refuses all others."""

    vault: FakeVault

    def do_CONNECT(self) -> None:
        if self.path != f"{ENTRA}:443":
            self.send_error(403)
            return
        host = urlsplit(self.vault.url)
        with socket.create_connection((host.hostname or "", host.port or 0)) as other:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: other, other: self.connection}
            is_open = True
            while is_open:
                for end in select.select(list(ends), [], [])[0]:
                    ends[end].sendall(data := end.recv(65536))
                    is_open &= bool(data)
        self.close_connection = True

    def do_GET(self) -> None:
        """The metadata endpoint of a virtual machine, at the same address in each."""
        parts = urlsplit(self.path)
        status, content = 404, {}
        if (parts.hostname, parts.path) == ("169.254.169.254", "/metadata/identity/oauth2/token"):
            status, _, content = self.vault.machine_identity(parts.query, dict(self.headers))
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _missing(name: str) -> RefusalError:
    text = f"A key with (name/id) {name} was not found in this key vault. If you recently deleted this key you may"
    return RefusalError(404, "KeyNotFound", text)


def _operated(verb: str, kty: str, version: Version, content: dict[str, Any]) -> dict[str, str]:
    algorithm, value = content["alg"], decoded(content["value"])
    is_rsa = kty.startswith("RSA")
    if algorithm == "RSA-OAEP-256" and is_rsa and verb == "wrapkey":
        return {"value": encoded(rsa_key(version.rsa).public_key().encrypt(value, OAEP))}
    if algorithm == "RSA-OAEP-256" and is_rsa and verb == "unwrapkey":
        return {"value": encoded(rsa_key(version.rsa).decrypt(value, OAEP))}
    if algorithm == "A256KW" and not is_rsa and verb == "wrapkey":
        return {"value": encoded(aes_key_wrap(version.aes, value))}
    if algorithm == "A256KW" and not is_rsa and verb == "unwrapkey":
        return {"value": encoded(aes_key_unwrap(version.aes, value))}
    if algorithm == "A256GCM" and not is_rsa and verb == "encrypt":
        nonce = os.urandom(12)
        sealed = AESGCM(version.aes).encrypt(nonce, value, decoded(content.get("aad", "")))
        return {"value": encoded(sealed[:-16]), "iv": encoded(nonce), "tag": encoded(sealed[-16:])}
    if algorithm == "A256GCM" and not is_rsa and verb == "decrypt":
        sealed = value + decoded(content["tag"])
        aad = decoded(content.get("aad", ""))
        return {"value": encoded(AESGCM(version.aes).decrypt(decoded(content["iv"]), sealed, aad))}
    raise ValueError


class FakeCredential:
    """A credential like those of azure-identity, whose tokens the fake accepts."""

    def __init__(self, vault: FakeVault) -> None:
        self._vault = vault
        self.lifetime_seconds = 3600.0
        self.failure: Exception | None = None

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        self._vault.scopes.append((scopes[0], options))
        if self.failure is not None:
            raise self.failure
        return AccessToken(self._vault.new_token(), int(time.time() + self.lifetime_seconds))


def _certificates(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and Entra ID, and the same one with its key. Returns both files."""
    key = rsa_key(0)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake vault")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(ENTRA)]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder.mkdir(parents=True, exist_ok=True)
    trusted, chain = folder / "vault.crt", folder / "vault.pem"
    trusted.write_bytes(pem)
    chain.write_bytes(pem + secret)
    return trusted, chain


@contextlib.contextmanager
def fake_vault(folder: Path, *names: str, kty: str = "RSA") -> Iterator[FakeVault]:
    vault = FakeVault(folder)
    for name in names:
        vault.add_key(name, kty)
    try:
        yield vault
    finally:
        vault.stop()
