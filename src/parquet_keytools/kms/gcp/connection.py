"""A channel to Cloud KMS with its credentials, kept apart from forks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from google.api_core.exceptions import Unauthenticated
from google.cloud.kms_v1 import KeyManagementServiceClient
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport

from parquet_keytools.kms.gcp.credentials import SDK_LOGS, TokenSource, email_of

_OPTIONS = [
    # A call to a KMS that comes back must not wait for the two minutes that gRPC would.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Finds a connection that a network in between has forgotten, so that calls do not time out on it for minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The retries are ours; and a channel of ours does not inherit another one's state.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


_LONGEST_FORK_WAIT_SECONDS = 10.0
"""Then the fork goes on all the same: a hung call must not hang whoever starts a process."""


class CallGate:
    """Lets calls through, any number at a time, but none while the process forks.

    A process that forks while another of its threads is inside gRPC gets a child in which the next use of gRPC may
    crash. So a fork waits until the calls of this package are done, and calls that begin wait for the fork.
    """

    def __init__(self) -> None:
        self.renew()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Close the gate, and wait for the calls under way."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._calls, _LONGEST_FORK_WAIT_SECONDS)

    def after_fork(self) -> None:
        """Open the gate again in the parent."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def renew(self) -> None:
        """Reset the gate; a child has none of its parent's calls."""
        self._changed = threading.Condition()
        self._calls = 0
        self._forks = 0


GRPC_CALLS = CallGate()
"""One for all clients of a process: a call of any of them would break a fork."""

os.register_at_fork(
    before=GRPC_CALLS.before_fork,
    after_in_parent=GRPC_CALLS.after_fork,
    after_in_child=GRPC_CALLS.renew,
)


class GcpConnection:
    """Sends calls to Cloud KMS, each once, unless its token is refused.

    Args:
        client: Used as it is, but for its retries and timeouts.
        tokens: Who we are; None where the client knows itself.
        owned: Whether the client is closed with this.
    """

    def __init__(self, client: Any, tokens: TokenSource | None, *, owned: bool) -> None:
        self.client = client
        self.tokens = tokens
        self._owned = owned
        self._url = f"https://{getattr(client, 'api_endpoint', '')}/"

    @property
    def email(self) -> str | None:
        """Email of the service account, if it is known without a call."""
        if self.tokens is not None:
            return self.tokens.email
        return email_of(getattr(getattr(self.client, "transport", None), "_credentials", None))

    @property
    def is_ready(self) -> bool:
        """Whether the next call needs no new token."""
        return self.tokens is None or self.tokens.is_fresh

    def call(self, method: str, request: Any, seconds: float) -> Any:
        """Send one request, within so many seconds, those for a new token included.

        One whose token is refused is sent again with another one.
        """
        deadline = time.monotonic() + seconds
        headers = self.authenticate(seconds)
        try:
            return self._send(method, request, headers, deadline)
        except Unauthenticated:
            if self.tokens is None or not self.tokens.refused(headers, deadline - time.monotonic()):
                raise
        return self._send(method, request, self.authenticate(deadline - time.monotonic()), deadline)

    def _send(self, method: str, request: Any, headers: Sequence[tuple[str, str]], deadline: float) -> Any:
        with SDK_LOGS.silenced(), GRPC_CALLS:
            left = max(deadline - time.monotonic(), 0.001)
            return getattr(self.client, method)(request=request, retry=None, timeout=left, metadata=headers)

    def authenticate(self, seconds: float) -> Sequence[tuple[str, str]]:
        """Return the headers that say who we are."""
        return self.tokens.headers(self._url, seconds) if self.tokens is not None else ()

    def close(self) -> None:
        """Close the client if it is ours."""
        if self._owned:
            self.client.transport.close()


def open_client(endpoint: str, *, insecure: bool) -> KeyManagementServiceClient:
    """Return a client with a channel of its own; it connects when it is first used.

    Args:
        endpoint: Host, with a port where it is not 443.
        insecure: Without TLS.
    """
    with GRPC_CALLS:
        if insecure:
            # A proxy of the environment is not on this machine.
            channel = grpc.insecure_channel(endpoint, [*_OPTIONS, ("grpc.enable_http_proxy", 0)])
        else:
            channel = grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(), _OPTIONS)
        return KeyManagementServiceClient(
            transport=KeyManagementServiceGrpcTransport(host=endpoint, channel=channel)
        )
