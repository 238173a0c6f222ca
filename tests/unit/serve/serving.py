"""A server over files in memory or in a folder, and a client that sends any bytes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from parquet_keytools.serve.fuse_mount import MountedTree
from parquet_keytools.serve.requests_and_answers import KeyPair
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer


def memory_files(files: dict[str, bytes]) -> MemoryFileSystem:
    """Return a separate file system with these files."""

    class OwnFiles(MemoryFileSystem):
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012
        cachable = False

    filesystem = OwnFiles()
    for key, content in files.items():
        filesystem.pipe_file(f"/root/{key}", content)
    return filesystem


def tree_of(filesystem: MemoryFileSystem, *, only: str | None = None) -> ServedTree:
    """Return the files of `memory_files` as they are served."""
    return ServedTree(DirFileSystem("/root", filesystem), only=only)


@contextlib.contextmanager
def served(files: dict[str, bytes] | MemoryFileSystem, **options: Any) -> Iterator[ViewServer]:
    """Serve in-memory files."""
    filesystem = memory_files(files) if isinstance(files, dict) else files
    with ViewServer(tree_of(filesystem), **options) as server:
        yield server


def ask(
    server: ViewServer, key: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request below the secret path, on a new connection; the key is sent unchanged."""
    with contextlib.closing(connected(server)) as connection:
        return asked(connection, server, key, method, headers)


def opened_by(mounted: MountedTree, path: str, flags: int = os.O_RDONLY) -> Any:
    """Open a file as the kernel does, and return the handle."""
    handle = SimpleNamespace(flags=flags, fh=0, direct_io=False)
    assert mounted.open(path, handle) == 0
    return handle


def client_of(server: ViewServer, key_pair: KeyPair | None = None) -> Any:
    """Return an S3 client."""
    pair = key_pair or server.key_pair
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=pair.access_key_id,
        aws_secret_access_key=pair.secret.reveal().decode(),
        region_name="eu-central-1",
        config=Config(signature_version="s3v4", retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def connected(server: ViewServer) -> HTTPConnection:
    """Return a connection."""
    return HTTPConnection(urlsplit(server.url).netloc, timeout=30)


def asked(
    connection: HTTPConnection,
    server: ViewServer,
    key: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Send a request on a connection."""
    connection.request(method, urlsplit(server.url).path + key, headers=headers or {})
    response: HTTPResponse = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


def said(server: ViewServer, request: bytes) -> bytes:
    """Send bytes, and return everything until the server closes the connection."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(request.replace(b"HOST", parts.netloc.encode()).replace(b"PATH", parts.path.encode()))
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""
