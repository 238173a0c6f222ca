"""One connection: requests, read strictly within limits of size and time, and answers.

Strictly, for whoever stands before this server must not have read another request.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from parquet_keytools.serve.requests_and_answers import (
    BegunReads,
    RefusedRequestError,
    ServedAnswer,
    ServedRange,
    ServedRequest,
    answer_http,
    logged_outcome,
    redirect_to_folder,
    refusal_of,
    write_access,
)
from parquet_keytools.serve.s3_front import BUCKET, KeyPair, answer_s3, error_document
from parquet_keytools.serve.served_tree import FileReader, ServedTree

if TYPE_CHECKING:
    from parquet_keytools.serve.view_server import BoundedServer

_IDLE_SECONDS = 60.0
"""So long a connection waits for its next request."""

_HEAD_SECONDS = 10.0
"""So long a request takes to come, once its first byte is here; also the first one of a connection."""

_SEND_SECONDS = 120.0
"""So long a client takes for one chunk."""

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20
"""So long, and for so many bytes, a client that still sends is listened to: then it comes to read its answer."""

_CHUNK_BYTES = 1 << 20
_LAST_STATUSES = (400, 405, 408, 414, 421, 431)
"""Who sends such requests may mean something else by the bytes that follow them."""

_METHODS = ("GET", "HEAD")

_MAX_HEAD_BYTES = 32 * 1024
_MAX_LINE_BYTES = 16 * 1024
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/(\d)\.(\d)\r\n")
_HEADER_LINE = re.compile(rb"(" + _TOKEN + rb"):([\t -~\x80-\xff]*)\r\n")
"""RFC 9112, 3 and 5: no spaces before the colon, no line that continues another one, no bare CR or LF."""

_VERSIONS = ("HTTP/1.0", "HTTP/1.1")


class ClientGoneError(Exception):
    """The client takes no more bytes."""


class ViewConnection(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 with one client, as HTTP or S3; `ViewServer` sets what all its connections share.

    Attributes:
        protocol: Of the request: `http` or `s3`; empty until that is known.
    """

    server: BoundedServer
    tree: ServedTree
    token: str
    key_pair: KeyPair | None
    begun_reads: BegunReads
    hosts: frozenset[str] = frozenset()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Read within limits."""
        super().setup()
        self._head = HeadReader(self.connection, _HEAD_SECONDS)
        self.rfile = self._input = io.BufferedReader(self._head)
        self._is_first = True
        self._lingers = False
        self._begin_request()

    def finish(self) -> None:
        """Let a client that sent what was not read have its answer: it would be reset else."""
        if self._lingers:
            with contextlib.suppress(OSError):
                # Not that of SSLSocket: see `cut_off`.
                socket.socket.shutdown(self.connection, socket.SHUT_WR)
                end, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
                while left > 0 and (seconds := end - time.monotonic()) > 0:
                    self.connection.settimeout(seconds)
                    if not (count := len(self.connection.recv(65536))):
                        break
                    left -= count
        super().finish()

    def handle_one_request(self) -> None:
        """Read a request, and answer it."""
        self._begin_request()
        try:
            self._head.begin(_HEAD_SECONDS if self._is_first else _IDLE_SECONDS)
            self._is_first = False
            if self._input.peek(1):
                self._head.begin(_HEAD_SECONDS)
                self._answer()
        except (OSError, ClientGoneError):
            # There is nobody to say it to.
            self.close_connection = True

    def _begin_request(self) -> None:
        self.close_connection = True
        self.protocol = self._key = self.command = self.requestline = ""
        self.request_version = self.protocol_version

    def keep(self) -> None:
        """Keep the connection when there are too many: its client has shown a secret."""
        self.server.keep(self.connection)

    def version_string(self) -> str:
        """Return what the server calls itself."""
        return "parquet-keytools"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: each request has its record in the log of accesses."""

    def _routed(self, request: ServedRequest) -> ServedAnswer:
        """Return the answer of HTTP or S3; refuse other names of the server, and requests without its secret."""
        if (request.header("host") or "").lower() not in self.hosts:
            raise RefusedRequestError(421, "InvalidRequest", "This server is not called so.")
        first, slash, key = request.path.removeprefix("/").partition("/")
        reads = self.begun_reads.of_client(self.client_address[0])
        if hmac.compare_digest(first.encode(), self.token.encode()):
            self.protocol, self._key = "http", key
            self.keep()
            if not slash:
                return redirect_to_folder(request)
            return answer_http(self.tree, request, key, reads)
        if self.key_pair is not None:
            self.protocol, self._key = "s3", key if first == BUCKET else ""
            return answer_s3(self.tree, self.key_pair, request, reads, self.keep)
        raise RefusedRequestError(404, "NoSuchKey", "There is no such file.")

    def _answer(self) -> None:
        try:
            answer = self._routed(self._request())
            if isinstance(answer.body, ServedRange) and self.command != "HEAD":
                self._send_file(answer, answer.body)
            else:
                try:
                    self._send(answer)
                except ClientGoneError as error:
                    self._log(answer.status, error)
                    raise
                self._log(answer.status)
        except ClientGoneError:
            raise
        except Exception as error:
            self._refuse(error)

    def _request(self) -> ServedRequest:
        """Return the request; refuse one that we do not answer."""
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
        request = ServedRequest(self.command, raw_path, raw_query, headers)
        if version not in _VERSIONS:
            raise RefusedRequestError(505, "InvalidRequest", "This version of HTTP is not spoken here.")
        if self.command not in _METHODS:
            raise RefusedRequestError(405, "MethodNotAllowed", "This server only reads.", {"Allow": "GET, HEAD"})
        has_body = "transfer-encoding" in headers or request.header("content-length") not in (None, "0")
        if has_body or not target.startswith("/"):
            raise RefusedRequestError(400, "InvalidRequest", "This is no valid request for a file.")
        return request

    def _send_file(self, answer: ServedAnswer, body: ServedRange) -> None:
        sent, failure = 0, None
        try:
            with contextlib.ExitStack() as stack:
                # Before the status is sent: what is wrong from the start has a status of its own.
                reader = stack.enter_context(body.opened)
                chunk = self._chunk(reader, body, 0)
                try:
                    self._send_head(answer, body.length)
                    while True:
                        self._send_bytes(chunk)
                        sent += len(chunk)
                        if sent == body.length:
                            break
                        chunk = self._chunk(reader, body, sent)
                except BaseException as error:
                    # The status has been sent: all that is left to do is to end early.
                    failure = error
                    self.close_connection = True
                    if not isinstance(error, Exception):
                        raise
                finally:
                    self._log(answer.status, failure, body=body, sent=sent)
        finally:
            if failure is not None:
                cut_off(self.connection)

    @staticmethod
    def _chunk(reader: FileReader, body: ServedRange, sent: int) -> bytes:
        return reader.read(body.start + sent, min(_CHUNK_BYTES, body.length - sent))

    def _refuse(self, error: Exception) -> None:
        refusal = refusal_of(error, self.tree)
        body, kind = f"{refusal}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8"
        if self.key_pair is not None and self.protocol != "http":
            body, kind = error_document(refusal), "application/xml"
        if refusal.status >= 500 or refusal.status in _LAST_STATUSES:
            self.close_connection = self._lingers = True
        try:
            self._send(ServedAnswer(refusal.status, {**refusal.headers, "Content-Type": kind}, body))
        finally:
            self._log(refusal.status, error)

    def _send(self, answer: ServedAnswer) -> None:
        body = answer.body
        length = body.length if isinstance(body, ServedRange) else len(body)
        self._send_head(answer, length)
        if isinstance(body, bytes) and self.command != "HEAD" and answer.status != 304:
            self._send_bytes(body)

    def _send_head(self, answer: ServedAnswer, length: int) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 304:
            self.send_header("Content-Length", str(length))
        # What is decrypted is kept by nobody on the way, and shown by no browser as something else.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.close_connection:
            self.send_header("Connection", "close")
        with self._sending():
            self.end_headers()

    def _send_bytes(self, content: bytes) -> None:
        with self._sending():
            self.connection.sendall(content)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Tell a client that is gone from storage that is: both are an `OSError`."""
        try:
            # The time is that of all that is sent in the block, not of each part that goes out.
            self.connection.settimeout(_SEND_SECONDS)
            yield
        except OSError:
            raise ClientGoneError from None

    def _log(
        self, status: int, error: BaseException | None = None, *, body: ServedRange | None = None, sent: int = 0
    ) -> None:
        start, length = (body.start, body.length) if body else (None, None)
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
            [self.token, *([self.key_pair.secret.reveal().decode()] if self.key_pair else [])],
        )


def cut_off(connection: socket.socket) -> None:
    """End a connection at once, so that no client takes what it has for all."""
    with contextlib.suppress(OSError):
        # Not that of SSLSocket: it drops TLS first, and what another thread then sends would go out in plaintext.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class HeadReader(io.RawIOBase):
    """Reads what a client sends, up to a time and a size."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Allow one more request, in so many seconds."""
        self._deadline = time.monotonic() + seconds
        self._left = _MAX_HEAD_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; refuse too many, and those that come too slowly (`TimeoutError`)."""
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
    """Return method, target, and version; refuse a line that we do not answer."""
    line = stream.readline(_MAX_LINE_BYTES + 1)
    if line == b"\r\n":
        # Some clients end a request with one line too many (RFC 9112, 2.2).
        line = stream.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise RefusedRequestError(414, "InvalidURI", "The URL is too long.")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise RefusedRequestError(400, "InvalidRequest", "The request line is not valid.")
    method, target = found[1].decode(), found[2].decode()
    return method, target, f"HTTP/{found[3].decode()}.{found[4].decode()}"


def read_headers(stream: io.BufferedReader[Any]) -> dict[str, tuple[str, ...]]:
    """Return headers: name in lower case -> its values, in their order; refuse a line that is none."""
    headers: dict[str, list[str]] = defaultdict(list)
    while (line := stream.readline()) != b"\r\n":
        found = _HEADER_LINE.fullmatch(line)
        if found is None:
            raise RefusedRequestError(400, "InvalidRequest", "The headers are not valid.")
        headers[found[1].decode().lower()].append(found[2].decode("latin-1").strip())
    return {name: tuple(values) for name, values in headers.items()}
