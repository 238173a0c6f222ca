"""The server: who may ask for what, where it listens, and the lines that engines read from it with."""

from __future__ import annotations

import hmac
import secrets
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import quote

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

        class Connection(_RoutedConnection):
            """A connection to this server."""

        Connection.tree, Connection.token = tree, token
        Connection.s3 = S3Front(tree, SignatureCheck(self.key_pair)) if self.key_pair else None
        self._server = BoundedServer((address, port), Connection, tls=tls, max_connections=max_connections)
        port = self._server.server_port
        host = f"[{address}]" if ":" in address else address
        own = {host, *host_names} | ({LOOPBACK, "localhost", "[::1]"} if address in (LOOPBACK, "::1") else set())
        without_port = own if port == (443 if tls else 80) else set()
        # Others are names that lead here without our will: pages of strangers use them (DNS rebinding).
        Connection.hosts = frozenset({f"{name.lower()}:{port}" for name in own} | without_port)
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


class _RoutedConnection(ViewConnection):
    """Knows which part of the server a request is for; `ViewServer` sets what all its connections share."""

    tree: ServedTree
    token: str
    s3: S3Front | None
    hosts: frozenset[str] = frozenset()

    def route(self, request: ServedRequest) -> tuple[str, str, Callable[[], ServedAnswer]]:
        """Return protocol, key, and what makes the answer.

        Raises:
            RefusedRequestError: The server is not called so, or the request has no secret.
        """
        if (request.header("host") or "").lower() not in self.hosts:
            raise RefusedRequestError(421, "InvalidRequest", "This server is not called so.")
        first, slash, key = request.path.removeprefix("/").partition("/")
        if slash and hmac.compare_digest(first.encode(), self.token.encode()):
            self.keep()
            return "http", key, partial(answer_http, self.tree, request, key, self.seen_before)
        if self.s3 is not None:
            # A path may hold the secret in the wrong place, and keys are logged.
            shown = key if first == BUCKET and self.token not in key else ""
            return "s3", shown, partial(self.s3.answer, request, self.seen_before, self.keep)
        raise RefusedRequestError(404, "NoSuchKey", "There is no such file.")

    def error_body(self, refusal: RefusedRequestError) -> tuple[bytes, str]:
        """Return the body of a refusal, and its type."""
        if self.s3 is not None and self.protocol != "http":
            return error_document(refusal), "application/xml"
        return super().error_body(refusal)


def http_lines(url: str, key: str) -> dict[str, str]:
    """Return a line for each engine that reads one file over HTTP.

    Args:
        url: Of the folder that is served, with its slash.
        key: Of the file.
    """
    file = url + quote(key)
    return {
        "DuckDB": f"select * from '{file}';",  # noqa: S608
        "Polars": f'pl.scan_parquet("{file}")',
        "ClickHouse": f"select * from url('{file}', Parquet);",  # noqa: S608
    }


def s3_lines(endpoint: str, key_pair: KeyPair, *, region: str = "us-east-1") -> dict[str, str]:
    """Return lines for each engine that reads all files as S3.

    Args:
        endpoint: Scheme, host and port.
        key_pair: The credentials.
        region: Any will do.
    """
    scheme, _, host = endpoint.partition("://")
    key_id, secret = key_pair.access_key_id, key_pair.secret.reveal().decode()
    is_tls = scheme == "https"
    options = {
        "aws_endpoint_url": endpoint,
        "aws_access_key_id": key_id,
        "aws_secret_access_key": secret,
        "aws_region": region,
    } | ({} if is_tls else {"aws_allow_http": "true"})
    return {
        "DuckDB": (
            f"create secret (type s3, key_id '{key_id}', secret '{secret}', region '{region}', endpoint '{host}', "
            f"url_style 'path', use_ssl {str(is_tls).lower()}); from 's3://{BUCKET}/**/*.parquet';"
        ),
        "Polars": f'pl.scan_parquet("s3://{BUCKET}/**/*.parquet", storage_options={options!r})',
        "ClickHouse": (
            f"select * from s3('{endpoint}/{BUCKET}/**/*.parquet', '{key_id}', '{secret}', 'Parquet');"  # noqa: S608
        ),
    }
