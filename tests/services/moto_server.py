"""A server of moto in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import moto.kms.models
from moto.server import ThreadedMotoServer

# moto makes an RSA key for each master key, also for those that are symmetric and never use it.
moto.kms.models.generate_private_key = cache(moto.kms.models.generate_private_key)


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run a server of its own; yields its URL."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
