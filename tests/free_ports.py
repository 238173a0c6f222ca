"""Ports for servers that need a fixed port, and that others connect to later."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_LOWEST, _HIGHEST = 10_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that is free on all addresses of this machine, and that no other process gets by chance.

    The system assigns ports of its own range to outgoing connections, and to sockets bound to port 0. One of
    these could be taken before its server starts, or while it restarts. Where the range leaves none, the system
    picks a port of its range.
    """
    first, last = map(int, _RANGE.read_text().split()) if _RANGE.exists() else (32_768, _HIGHEST)
    others = [port for port in range(_LOWEST, _HIGHEST + 1) if not first <= port <= last]
    for port in [*secrets.SystemRandom().sample(others, min(len(others), 1000)), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise RuntimeError("no port is free")
