"""The server, its limit of connections, and the lines that engines use to read from it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import quote

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.serve.connection import ViewConnection, cut_off
from parquet_keytools.serve.requests_and_answers import BegunReads
from parquet_keytools.serve.s3_front import BUCKET, REGION, KeyPair
from parquet_keytools.serve.served_tree import ServedTree

_REFUSED_BINDS = {
    errno.EADDRINUSE: (": another program uses this port", "Choose another --port; 0 is a free one."),
    errno.EACCES: (": ports below 1024 need root privileges", "Choose another --port; 0 is a free one."),
    errno.EADDRNOTAVAIL: (": this machine does not have this address", "Choose another --address."),
}
_END_SECONDS = 5.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedServer(ThreadingHTTPServer):
    """Accepts connections and handles each in its own thread.

    Args:
        address: IP address and port; port 0 selects a free port.
        handler: Makes the handler of a connection.
        tls: TLS context, or None. The thread of the connection does the handshake.
        max_connections: Most connections at the same time. A further connection replaces the oldest connection
            without authentication, so that unauthenticated clients cannot lock out others. If all connections are
            authenticated, the further connection gets status 503.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_port = False
    """Newer versions of Python let two servers share a port, so that requests reach either server."""

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[..., Any],
        *,
        tls: ssl.SSLContext | None,
        max_connections: int,
    ) -> None:
        if ipaddress.ip_address(address[0]).version == 6:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._max_connections = max_connections
        self._open: dict[socket.socket, threading.Thread] = {}
        self._kept: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind the address without a DNS look-up of the host name, which can be slow.

        Raises:
            ConfigurationError: The address or port is not available.
        """
        try:
            socketserver.TCPServer.server_bind(self)
        except OSError as error:
            address, port = self.server_address[:2]
            place = f"[{address!s}]:{port}" if self.address_family == socket.AF_INET6 else f"{address!s}:{port}"
            what, hint = _REFUSED_BINDS.get(error.errno or 0, (f": {error.strerror}", "Choose another --address."))
            raise ConfigurationError(f"the server cannot listen on {place}{what}.", hint=hint) from None
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

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
            request.settimeout(_END_SECONDS)
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

    def end(self) -> None:
        """Stop accepting, close all connections, and wait up to 5 seconds for their threads."""
        self.shutdown()
        self.server_close()
        with self._lock:
            left = dict(self._open)
        for connection in left:
            cut_off(connection)
        deadline = time.monotonic() + _END_SECONDS
        for thread in left.values():
            thread.join(max(0.0, deadline - time.monotonic()))


LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 256
_POLL_SECONDS = 0.05
"""Interval at which the server checks whether to stop."""


class ViewServer:
    """Serves a tree within a `with` block, whose end closes all connections.

    Args:
        tree: The tree to serve.
        address: IP address to listen on.
        port: Port to listen on; 0 selects a free port.
        tls: Certificate and key; may be None only for a loopback address.
        host_names: Names that clients may use for this server, besides its address.
        with_s3: Whether to serve S3, too.
        max_connections: Most connections at the same time.

    Attributes:
        url: URL of the served folder; it contains the secret.
        endpoint: URL for S3 clients.
        key_pair: Credentials for S3 clients; None without S3.
    """

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
        self.key_pair = KeyPair() if with_s3 else None
        token = secrets.token_urlsafe(24)

        class Connection(ViewConnection):
            """A connection to this server."""

        Connection.tree, Connection.token, Connection.key_pair = tree, token, self.key_pair
        Connection.begun_reads = BegunReads()
        self._server = BoundedServer((address, port), Connection, tls=tls, max_connections=max_connections)
        port = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        own = {host, *host_names} | ({LOOPBACK, "localhost", "[::1]"} if address in (LOOPBACK, "::1") else set())
        without_port = own if port == (443 if tls else 80) else set()
        # Refuse all other names: a malicious web page can point its own name at this address (DNS rebinding).
        Connection.hosts = frozenset({f"{name.lower()}:{port}" for name in own} | without_port)
        self.endpoint = f"{'https' if tls else 'http'}://{host_names[0] if host_names else host}:{port}"
        self.url = f"{self.endpoint}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="serve", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()


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
