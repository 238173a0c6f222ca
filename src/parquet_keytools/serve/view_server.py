"""The server: who may ask for what, where it listens, and what one has to know to use it."""

from __future__ import annotations

import hmac
import secrets
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from parquet_keytools.serve.bounded_server import BoundedServer
from parquet_keytools.serve.connection import ViewConnection
from parquet_keytools.serve.http_front import answer_http
from parquet_keytools.serve.requests_and_answers import RefusedRequestError, ServedAnswer, ServedRequest
from parquet_keytools.serve.s3_front import BUCKET, S3Front, error_document
from parquet_keytools.serve.s3_signature import KeyPair, SignatureCheck
from parquet_keytools.serve.served_tree import ServedTree

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 256
_POLL_SECONDS = 0.05
"""So often the server looks whether it shall end."""


class ViewServer:
    """Serves a tree; used in a `with` block, at whose end all connections end.

    Args:
        tree: What is served.
        address: The IP address to listen on.
        port: There; 0 takes a free one.
        tls: Certificate and key; None only where the address is of this machine alone.
        host_names: What clients may call this server; its address is always among them.
        with_s3: Whether it answers as S3, too.

    Attributes:
        url: Of the folder that is served, with the secret that opens it.
        endpoint: For S3 clients.
        key_pair: For S3 clients; None without S3.
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
        router = _Router(tree, token, self.key_pair)
        handler = type("_Connection", (_RoutedConnection,), {"router": router})
        self._server = BoundedServer((address, port), handler, tls=tls, max_connections=max_connections)
        port = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        own = {host, *host_names} | ({LOOPBACK, "localhost", "[::1]"} if address in (LOOPBACK, "::1") else set())
        default = 443 if tls else 80
        # Others are names that lead here without our will: pages of strangers use them (DNS rebinding).
        router.hosts = frozenset({f"{name.lower()}:{port}" for name in own} | (own if port == default else set()))
        self.endpoint = f"{'https' if tls else 'http'}://{host_names[0] if host_names else host}:{port}"
        self.url = f"{self.endpoint}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="serve", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.end()


class _Router:
    """Knows which part of the server a request is for."""

    hosts: frozenset[str] = frozenset()

    def __init__(self, tree: ServedTree, token: str, key_pair: KeyPair | None) -> None:
        self._tree = tree
        self._token = token.encode()
        self._s3 = S3Front(tree, SignatureCheck(key_pair)) if key_pair else None

    @property
    def with_s3(self) -> bool:
        """Whether it answers as S3, too."""
        return self._s3 is not None

    def route(
        self, request: ServedRequest, connection: ViewConnection
    ) -> tuple[str, str, Callable[[], ServedAnswer]]:
        """Return protocol, key, and what makes the answer.

        Raises:
            RefusedRequestError: The server is not called so, or the request has no secret.
        """
        if (request.header("host") or "").lower() not in self.hosts:
            raise RefusedRequestError(421, "InvalidRequest", "This server is not called so.")
        first, slash, key = request.path.removeprefix("/").partition("/")
        if slash and hmac.compare_digest(first.encode(), self._token):
            connection.keep()
            return "http", key, partial(answer_http, self._tree, request, key, connection.seen_before)
        if self._s3 is not None:
            # A path may hold the secret in the wrong place, and keys are logged.
            return (
                "s3",
                key if first == BUCKET and self._token.decode() not in key else "",
                partial(self._s3.answer, request, connection.seen_before, connection.keep),
            )
        raise RefusedRequestError(404, "NoSuchKey", "There is no such file.")


class _RoutedConnection(ViewConnection):
    router: _Router

    def route(self, request: ServedRequest) -> tuple[str, str, Callable[[], ServedAnswer]]:
        return self.router.route(request, self)

    def error_body(self, refusal: RefusedRequestError) -> tuple[bytes, str]:
        if self.router.with_s3 and self.protocol != "http":
            return error_document(refusal), "application/xml"
        return super().error_body(refusal)
