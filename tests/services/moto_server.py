"""A moto server in this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import moto.kms.models
from moto.core.exceptions import JsonRESTError
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

# moto makes an RSA key for each master key, also for symmetric keys, which never use it.
moto.kms.models.generate_private_key = cache(moto.kms.models.generate_private_key)
# For each request, it would list the folder of moto's modules, and write a line of a log that nobody reads.
DomainDispatcherApplication.get_backend_for_host = cache(  # type: ignore[method-assign]
    DomainDispatcherApplication.get_backend_for_host
)
logging.getLogger("werkzeug").setLevel(logging.ERROR)

_unchecked = moto.kms.models.KmsBackend.decrypt


def _decrypt(
    self: Any, ciphertext_blob: bytes, encryption_context: dict[str, str], key_id: str | None = None
) -> Any:
    """Refuse a key that is pending deletion, as AWS does and moto does not."""
    answer = _unchecked(self, ciphertext_blob, encryption_context, key_id)
    state = self.keys[answer[1].rpartition("/")[2]].key_state
    if state == "PendingDeletion":
        raise JsonRESTError("KMSInvalidStateException", f"{answer[1]} is pending deletion.")
    return answer


moto.kms.models.KmsBackend.decrypt = _decrypt  # type: ignore[method-assign]


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run a separate server; yields its URL."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
