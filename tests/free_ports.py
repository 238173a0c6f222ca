"""Ports for servers that have to be told theirs, and that others connect to later."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that is free on all addresses of this machine, and that nobody gets by chance.

    The system gives ports of a range of its own to outgoing connections, and to whoever binds to port 0. One of
    these could be taken before its server starts, or while it restarts.
    """
    highest = int(_RANGE.read_text().split()[0]) - 1 if _RANGE.exists() else 32_767
    for _ in range(1000):
        port = _LOWEST + secrets.randbelow(highest - _LOWEST + 1)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"no port from {_LOWEST} to {highest} is free")
