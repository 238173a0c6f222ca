"""A server of HTTP that nobody can exhaust: bounded connections, and none that waits for ever."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from parquet_keytools.errors import ConfigurationError

_REFUSED_BINDS = {
    errno.EADDRINUSE: (": another program has this port", "Choose another --port; 0 is a free one."),
    errno.EACCES: (": ports below 1024 are for root", "Choose another --port; 0 is a free one."),
    errno.EADDRNOTAVAIL: (": this machine does not have this address", "Choose another --address."),
}
_END_SECONDS = 5.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedServer(ThreadingHTTPServer):
    """Takes connections, each in a thread of its own.

    Args:
        address: An IP address and a port; 0 takes a free one.
        handler: Makes the handler of a connection.
        tls: For TLS; the handshake is in the thread of the connection.
        max_connections: At the same time. One more takes the place of the oldest whose client has shown no
            secret, for such a client could else lock out all others. If all have shown one, it gets 503.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_port = False
    """Newer versions of Python let two servers take one port, and each gets what was sent to the other."""

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
        """Bind, without the look-up of our own name in the DNS, which can take long.

        Raises:
            ConfigurationError: This address or port is not free.
        """
        try:
            socketserver.TCPServer.server_bind(self)
        except OSError as error:
            address, port = self.server_address[:2]
            place = f"[{address!s}]:{port}" if self.address_family == socket.AF_INET6 else f"{address!s}:{port}"
            what, hint = _REFUSED_BINDS.get(error.errno or 0, (f": {error.strerror}", "Choose another --address."))
            raise ConfigurationError(f"{place} cannot be listened on{what}.", hint=hint) from None
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, or refuse it."""
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
        """Give the place of a connection to no other: its client has shown a secret."""
        with self._lock:
            if connection in self._open:
                self._kept.add(connection)

    def _give_up_one(self) -> None:
        """End the oldest connection that is not kept; call with the lock held."""
        for connection in self._open:
            if connection not in self._kept:
                cut_off(connection)
                # Its thread only waits for its client, and ends now.
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
                    raise ConnectionAbortedError("given up for another one")
                self._open[secure] = thread
            # The handshake must not keep others from connecting.
            secure.do_handshake()
            super().process_request_thread(secure, client_address)
        except OSError:
            # No TLS, or given up.
            self.close_request(secure or request)
        finally:
            with self._lock:
                self._open.pop(secure or request, None)
                self._open.pop(request, None)
                self._kept.discard(secure or request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the handler logs, and what is left are clients that went away."""

    def end(self) -> None:
        """Take no more connections, end those that are open, and wait for their threads."""
        self.shutdown()
        self.server_close()
        with self._lock:
            left = dict(self._open)
        for connection in left:
            cut_off(connection)
        deadline = time.monotonic() + _END_SECONDS
        for thread in left.values():
            thread.join(max(0.0, deadline - time.monotonic()))


def cut_off(connection: socket.socket) -> None:
    """End a connection at once, so that no client takes what it has for all."""
    with contextlib.suppress(OSError):
        # Not that of SSLSocket: it drops TLS first, and what another thread then sends would go out in plaintext.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
