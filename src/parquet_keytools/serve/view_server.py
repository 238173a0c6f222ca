"""The HTTP server: its limits of connections, size and time, and the lines that engines use to read from it.

Requests are parsed strictly: a proxy in front of this server must not read the same bytes as another request.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import re
import secrets
import socket
import socketserver
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import quote

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.serve.requests_and_answers import (
    BUCKET,
    REGION,
    BegunReads,
    KeyPair,
    RefusedRequestError,
    ServedAnswer,
    ServedRange,
    ServedRequest,
    answer_http,
    answer_s3,
    error_document,
    logged_outcome,
    redirect_to_folder,
    refusal_of,
    write_access,
)
from parquet_keytools.serve.served_tree import ServedTree

# --- one connection ---

_IDLE_SECONDS = 60.0
"""Time limit for the next request of an idle connection."""

HEAD_SECONDS = 10.0
"""Time limit for a request head after its first byte, and for the first byte of a connection."""

SEND_SECONDS = 120.0
"""Time limit for sending one chunk."""

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20
"""Limits for reading from a client that still sends, so that it reads the response before the end."""

_CHUNK_BYTES = 1 << 20
_LAST_STATUSES = (400, 405, 408, 414, 421, 431)
"""After these statuses the connection closes: the client may interpret the bytes that follow differently."""

_METHODS = ("GET", "HEAD")

_MAX_HEAD_BYTES = 32 * 1024
_MAX_LINE_BYTES = 16 * 1024
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/(\d)\.(\d)\r\n")
_HEADER_LINE = re.compile(rb"(" + _TOKEN + rb"):([\t -~\x80-\xff]*)\r\n")
"""RFC 9112, sections 3 and 5: no space before the colon, no line folding, no bare CR or LF."""

_VERSIONS = ("HTTP/1.0", "HTTP/1.1")


class ClientGoneError(Exception):
    """The client closed the connection, or stopped reading from it."""


class ViewConnection(BaseHTTPRequestHandler):
    """Handles one connection over HTTP/1.1, with plain HTTP or S3 requests."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Replace the input stream by a stream with limits."""
        super().setup()
        self._head = HeadReader(self.connection, HEAD_SECONDS)
        self.rfile = self._input = io.BufferedReader(self._head)
        self._is_first = True
        self._lingers = False

    def finish(self) -> None:
        """Read what the client still sends, so that a TCP reset does not discard the response."""
        if self._lingers:
            with contextlib.suppress(OSError):
                # Not `SSLSocket.shutdown`: see `cut_off`.
                socket.socket.shutdown(self.connection, socket.SHUT_WR)
                end, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
                while left > 0 and (seconds := end - time.monotonic()) > 0:
                    self.connection.settimeout(seconds)
                    if not (count := len(self.connection.recv(65536))):
                        break
                    left -= count
        super().finish()

    def handle_one_request(self) -> None:
        """Read one request and send the response."""
        self.close_connection = True
        self.protocol = self._key = self.command = self.requestline = ""
        self.request_version = self.protocol_version
        try:
            self._head.begin(HEAD_SECONDS if self._is_first else _IDLE_SECONDS)
            self._is_first = False
            if self._input.peek(1):
                self._head.begin(HEAD_SECONDS)
                self._answer()
        except (OSError, ClientGoneError):
            # The client can no longer receive an error response.
            self.close_connection = True

    def version_string(self) -> str:
        """Return the value of the `Server` header."""
        return "parquet-keytools"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the access log has a record of each request."""

    def _routed(self, request: ServedRequest) -> ServedAnswer:
        """Return the response of HTTP or S3 to an allowed host name and an authenticated client."""
        server = self.server
        if (request.header("host") or "").lower() not in server.hosts:
            raise RefusedRequestError(421, "InvalidRequest", "The server does not accept this host name.")
        keep = partial(server.keep, self.connection)
        first, slash, key = request.path.removeprefix("/").partition("/")
        if hmac.compare_digest(first.encode(), server.token.encode()):
            self.protocol, self._key = "http", key
            keep()
            if not slash:
                return redirect_to_folder(request)
            return answer_http(server.tree, request, key, server.begun_reads)
        if server.key_pair is not None:
            self.protocol, self._key = "s3", key if first == BUCKET else ""
            return answer_s3(server.tree, server.key_pair, request, server.begun_reads, keep)
        raise RefusedRequestError(404, "NoSuchKey", "There is no such file.")

    def _answer(self) -> None:
        try:
            answer = self._routed(self._request())
            if isinstance(answer.body, ServedRange) and self.command != "HEAD":
                self._send_file(answer, answer.body)
            else:
                self._send(answer)
        except ClientGoneError:
            raise
        except Exception as error:
            self._refuse(error)

    def _request(self) -> ServedRequest:
        """Return the request, or refuse it."""
        try:
            self.command, target, version = read_request_line(self._input)
            headers = read_headers(self._input)
        except TimeoutError:
            raise RefusedRequestError(408, "RequestTimeout", "The request came too slowly.") from None
        except OSError:
            raise ClientGoneError from None
        tokens = {part.strip().lower() for value in headers.get("connection", ()) for part in value.split(",")}
        self.close_connection = version != "HTTP/1.1" or "close" in tokens
        raw_path, _, raw_query = target.partition("?")
        request = ServedRequest(self.command, raw_path, raw_query, headers, self.client_address[0])
        if version not in _VERSIONS:
            raise RefusedRequestError(505, "InvalidRequest", "This version of HTTP is not supported.")
        if self.command not in _METHODS:
            raise RefusedRequestError(405, "MethodNotAllowed", "This server only reads.", {"Allow": "GET, HEAD"})
        has_body = "transfer-encoding" in headers or request.header("content-length") not in (None, "0")
        if has_body or not target.startswith("/"):
            raise RefusedRequestError(400, "InvalidRequest", "This is not a valid request for a file.")
        return request

    def _send_file(self, answer: ServedAnswer, body: ServedRange) -> None:
        sent, failure = 0, None
        try:
            # Open and read before the status is sent, so that an early error gets its own status.
            with body.opened as read:
                chunk = read(body.start, min(_CHUNK_BYTES, body.length))
                try:
                    self._send_head(answer, body.length)
                    while True:
                        self.send_bytes(chunk)
                        sent += len(chunk)
                        if sent == body.length:
                            break
                        chunk = read(body.start + sent, min(_CHUNK_BYTES, body.length - sent))
                except BaseException as error:
                    # The status has been sent, so only closing the connection can signal the error.
                    failure = error
                    self.close_connection = True
                    if not isinstance(error, Exception):
                        raise
                finally:
                    self._log(answer.status, failure, body=body, sent=sent)
        finally:
            if failure is not None:
                cut_off(self.connection)

    def _refuse(self, error: Exception) -> None:
        refusal = refusal_of(error, self.server.tree)
        body, kind = f"{refusal}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8"
        if self.server.key_pair is not None and self.protocol != "http":
            body, kind = error_document(refusal), "application/xml"
        if refusal.status >= 500 or refusal.status in _LAST_STATUSES:
            self.close_connection = self._lingers = True
        self._send(ServedAnswer(refusal.status, {**refusal.headers, "Content-Type": kind}, body), error)

    def _send(self, answer: ServedAnswer, error: Exception | None = None) -> None:
        body = answer.body
        try:
            self._send_head(answer, body.length if isinstance(body, ServedRange) else len(body))
            if isinstance(body, bytes) and self.command != "HEAD":
                self.send_bytes(body)
        except ClientGoneError as gone:
            self._log(answer.status, error or gone)
            raise
        self._log(answer.status, error)

    def _send_head(self, answer: ServedAnswer, length: int) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        # Caches must not store decrypted data, and browsers must not guess its type.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.close_connection:
            self.send_header("Connection", "close")
        with self._sending():
            self.end_headers()

    def send_bytes(self, content: bytes) -> None:
        """Send a part of an answer."""
        with self._sending():
            self.connection.sendall(content)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Raise `ClientGoneError` for a failed connection, since failed storage raises `OSError`, too."""
        try:
            # The limit is for the whole block, not for each part of it that the socket sends.
            self.connection.settimeout(SEND_SECONDS)
            yield
        except OSError:
            raise ClientGoneError from None

    def _log(
        self, status: int, error: BaseException | None = None, *, body: ServedRange | None = None, sent: int = 0
    ) -> None:
        start, length = (body.start, body.length) if body else (None, None)
        key_pair = self.server.key_pair
        outcome, reason = logged_outcome(error)
        write_access(
            {
                "client": f"{self.client_address[0]}:{self.client_address[1]}",
                "protocol": self.protocol,
                "method": self.command,
                "key": self._key,
                "start": start,
                "length": length,
                "sent": sent,
                "status": status,
                "outcome": outcome,
                "reason": reason,
            },
            [self.server.token, *([key_pair.secret.reveal().decode()] if key_pair else [])],
        )


def cut_off(connection: socket.socket) -> None:
    """Close a connection at once, so that the client does not take a partial response for a complete one."""
    with contextlib.suppress(OSError):
        # Not `SSLSocket.shutdown`: it drops TLS first, and another thread would then send plaintext.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class HeadReader(io.RawIOBase):
    """Reads from a connection until a deadline and up to a number of bytes."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Allow one more request head within `seconds`."""
        self._deadline = time.monotonic() + seconds
        self._left = _MAX_HEAD_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes, unless the deadline has passed or the request head is too long."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise RefusedRequestError(431, "InvalidRequest", "The headers are too long.")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


def read_request_line(stream: io.BufferedReader[Any]) -> tuple[str, str, str]:
    """Return method, target and version."""
    line = stream.readline(_MAX_LINE_BYTES + 1)
    if line == b"\r\n":
        # Some clients send an extra empty line after a request (RFC 9112, section 2.2).
        line = stream.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise RefusedRequestError(414, "InvalidURI", "The URL is too long.")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise RefusedRequestError(400, "InvalidRequest", "The request line is not valid.")
    method, target = found[1].decode(), found[2].decode()
    return method, target, f"HTTP/{found[3].decode()}.{found[4].decode()}"


def read_headers(stream: io.BufferedReader[Any]) -> dict[str, tuple[str, ...]]:
    """Return the headers: name in lower case -> values, in the order of the request."""
    headers: dict[str, list[str]] = defaultdict(list)
    while (line := stream.readline()) != b"\r\n":
        found = _HEADER_LINE.fullmatch(line)
        if found is None:
            raise RefusedRequestError(400, "InvalidRequest", "The headers are not valid.")
        headers[found[1].decode().lower()].append(found[2].decode("latin-1").strip())
    return {name: tuple(values) for name, values in headers.items()}


# --- all connections ---

END_SECONDS = 5.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 256
_POLL_SECONDS = 0.05
"""Interval at which the server checks whether to stop."""


class ViewServer(socketserver.ThreadingTCPServer):
    """Serves a tree within a `with` block, whose end closes all connections; each has its own thread.

    A connection beyond the limit replaces the oldest connection without authentication, so that unauthenticated
    clients cannot lock out others. If all are authenticated, it gets status 503.

    `tls` may be None only for a loopback address. `url`, of the served folder, contains the secret; `endpoint` and
    `key_pair` are for S3 clients.
    """

    # Not `HTTPServer`: it looks up the host name in DNS, and lets two servers share a port.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        tree: ServedTree,
        *,
        address: str = LOOPBACK,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        host_names: Sequence[str] = (),
        with_s3: bool = False,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.tree = tree
        self.key_pair = KeyPair() if with_s3 else None
        self.token = secrets.token_urlsafe(24)
        self.begun_reads = BegunReads()
        self._tls = tls
        self._max_connections = max_connections
        self._open: dict[socket.socket, threading.Thread] = {}
        self._kept: set[socket.socket] = set()
        self._lock = threading.Lock()
        host = address
        if ":" in address:
            self.address_family, host = socket.AF_INET6, f"[{address}]"
        try:
            super().__init__((address, port), ViewConnection)
        except OSError as error:
            raise ConfigurationError(
                f"the server cannot listen on {host}:{port}: {error.strerror}.",
                hint="Choose another --port, 0 is a free one, or another --address.",
            ) from None
        port = int(self.server_address[1])
        own = {host, *host_names} | ({LOOPBACK, "localhost", "[::1]"} if address in (LOOPBACK, "::1") else set())
        without_port = own if port == (443 if tls else 80) else set()
        # Refuse all other names: a malicious web page can point its own name at this address (DNS rebinding).
        self.hosts = frozenset({f"{name.lower()}:{port}" for name in own} | without_port)
        self.endpoint = f"{'https' if tls else 'http'}://{host_names[0] if host_names else host}:{port}"
        self.url = f"{self.endpoint}/{self.token}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="serve", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop accepting, close all connections, and wait up to 5 seconds for their threads."""
        self.shutdown()
        self.server_close()
        with self._lock:
            left = dict(self._open)
        for connection in left:
            cut_off(connection)
        deadline = time.monotonic() + END_SECONDS
        for thread in left.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, or refuse the connection."""
        with self._lock:
            if len(self._open) >= self._max_connections:
                self._give_up_one()
            if len(self._open) < self._max_connections:
                thread = threading.Thread(
                    target=self.process_request_thread, args=(request, client_address), daemon=True
                )
                thread.start()
                self._open[request] = thread
                return
        if self._tls is None:
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
        self.shutdown_request(request)

    def keep(self, connection: socket.socket) -> None:
        """Protect a connection from eviction: its client has authenticated."""
        with self._lock:
            if connection in self._open:
                self._kept.add(connection)

    def _give_up_one(self) -> None:
        """Close the oldest unprotected connection; the caller holds the lock."""
        for connection in self._open:
            if connection not in self._kept:
                cut_off(connection)
                # Its thread was waiting for the client and ends now.
                del self._open[connection]
                return

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        secure = None
        try:
            if self._tls is None:
                super().process_request_thread(request, client_address)
                return
            request.settimeout(END_SECONDS)
            secure = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                if (thread := self._open.pop(request, None)) is None:
                    raise ConnectionAbortedError("evicted for another connection")
                self._open[secure] = thread
            # Outside the lock, so that a slow handshake does not block other connections.
            secure.do_handshake()
            super().process_request_thread(secure, client_address)
        except OSError:
            # The TLS handshake failed, or the connection was evicted.
            self.close_request(secure or request)
        finally:
            with self._lock:
                self._open.pop(secure or request, None)
                self._open.pop(request, None)
                self._kept.discard(secure or request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the handler logs errors; only disconnected clients arrive here."""


def http_lines(url: str, key: str) -> dict[str, str]:
    """Return a line per engine that reads one file over HTTP; the folder URL ends with a slash."""
    file = url + quote(key)
    return {
        "DuckDB": f"select * from '{file}';",  # noqa: S608
        "Polars": f'pl.scan_parquet("{file}")',
        "ClickHouse": f"select * from url('{file}', Parquet);",  # noqa: S608
    }


def s3_lines(endpoint: str, key_pair: KeyPair) -> dict[str, str]:
    """Return a line per engine that reads all files over S3."""
    scheme, _, host = endpoint.partition("://")
    key_id, secret = key_pair.access_key_id, key_pair.secret.reveal().decode()
    is_tls = scheme == "https"
    options = {
        "aws_endpoint_url": endpoint,
        "aws_access_key_id": key_id,
        "aws_secret_access_key": secret,
        "aws_region": REGION,
    } | ({} if is_tls else {"aws_allow_http": "true"})
    return {
        "DuckDB": (
            f"create secret (type s3, key_id '{key_id}', secret '{secret}', region '{REGION}', endpoint '{host}', "
            f"url_style 'path', use_ssl {str(is_tls).lower()}); from 's3://{BUCKET}/**/*.parquet';"
        ),
        "Polars": f'pl.scan_parquet("s3://{BUCKET}/**/*.parquet", storage_options={options!r})',
        "ClickHouse": (
            f"select * from s3('{endpoint}/{BUCKET}/**/*.parquet', '{key_id}', '{secret}', 'Parquet');"  # noqa: S608
        ),
    }
