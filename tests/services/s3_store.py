"""moto's S3 server, a proxy that counts the traffic, and hooks that tests put on requests."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import botocore.config
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from moto.s3.models import s3_backends
from moto_server import moto_server
from pyarrow import fs as pafs

from parquet_keytools.rotation.s3_replacement import client_of

BUCKET = "bucket"
_KEYS = {"aws_access_key_id": "access", "aws_secret_access_key": "secret", "region_name": "us-east-1"}

OnRequest = Callable[[str, AWSPreparedRequest], AWSResponse | None]
"""Called with the operation and the request before boto3 sends it; an answer replaces the store's."""


class CountingProxy:
    """Forwards bytes to a port, and counts them in both directions."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._lock = threading.Lock()
        self.bytes_moved = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    self.bytes_moved += len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class S3Store:
    """The server, and the actions of others there, which bypass the proxy."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        url = self._running.enter_context(moto_server())
        self.proxy = CountingProxy(int(url.rpartition(":")[2]))
        make_client: Any = boto3.client
        self.client = make_client(
            "s3",
            endpoint_url=url,
            config=botocore.config.Config(proxies={}),
            **_KEYS,
        )
        self.client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        self.proxy.close()
        self._running.close()

    def filesystem(self, **options: Any) -> pafs.S3FileSystem:
        """Return Arrow's file system, through the proxy."""
        keys = {"access_key": "access", "secret_key": "secret"}
        return pafs.S3FileSystem(
            **{**keys, **options},
            endpoint_override=f"127.0.0.1:{self.proxy.port}",
            scheme="http",
            region="us-east-1",
        )

    def put(self, key: str, data: bytes, **headers: Any) -> str:
        etag: str = self.client.put_object(Bucket=BUCKET, Key=key, Body=data, **headers)["ETag"]
        return etag

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def names(self) -> list[str]:
        """Return the keys of all objects except Arrow's folder markers."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return sorted(one["Key"] for one in found if not one["Key"].endswith("/"))

    def uploads(self) -> list[str]:
        """Return the ids of unfinished uploads."""
        return [
            found["UploadId"] for found in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        ]

    def clear(self) -> None:
        s3_backends.reset()
        self.client.create_bucket(Bucket=BUCKET)


@contextlib.contextmanager
def on_request(filesystem: pafs.S3FileSystem, hook: OnRequest) -> Iterator[None]:
    """Call a hook for each request that our boto3 client of a file system sends."""

    def handler(request: AWSPreparedRequest, event_name: str, **_: Any) -> AWSResponse | None:
        return hook(event_name.rpartition(".")[2], request)

    events = client_of(filesystem).meta.events
    events.register("before-send.s3", handler)
    try:
        yield
    finally:
        events.unregister("before-send.s3", handler)


def refusal(request: AWSPreparedRequest, status: int, code: str) -> AWSResponse:
    """Return a store's refusal as an answer."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()

    class Raw:
        def stream(self) -> Iterator[bytes]:
            yield body

    headers: Any = {"Content-Type": "application/xml"}
    return AWSResponse(request.url, status, headers, Raw())


def etag_in(request: AWSPreparedRequest) -> str | None:
    """Return the condition of a request; for a copy, the condition on its source."""
    value = request.headers.get("If-Match") or request.headers.get("x-amz-copy-source-if-match")
    return value.decode() if isinstance(value, bytes) else value


def key_in(request: AWSPreparedRequest) -> str:
    match = re.search(rf"/{BUCKET}/([^?]*)", request.url)
    assert match is not None
    return match[1]
