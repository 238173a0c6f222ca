"""The head of a request, read strictly: whoever stands before this server must not have read another one."""

from __future__ import annotations

import io
import re
import socket
import time
from collections import defaultdict
from typing import Any

from parquet_keytools.serve.requests_and_answers import RefusedRequestError

_MAX_HEAD_BYTES = 32 * 1024
_MAX_LINE_BYTES = 16 * 1024
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/(\d)\.(\d)\r\n")
_HEADER_LINE = re.compile(rb"(" + _TOKEN + rb"):([\t -~\x80-\xff]*)\r\n")
"""RFC 9112, 3 and 5: no spaces before the colon, no line that continues another one, no bare CR or LF."""

VERSIONS = ("HTTP/1.0", "HTTP/1.1")


class HeadReader(io.RawIOBase):
    """Reads what a client sends, up to a time and a size.

    Args:
        connection: To the client.
        seconds: How long the first request may take.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Allow one more request, in so many seconds."""
        self._deadline = time.monotonic() + seconds
        self._left = _MAX_HEAD_BYTES

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes.

        Raises:
            RefusedRequestError: They are too many.
            TimeoutError: They come too slowly.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise RefusedRequestError(431, "InvalidRequest", "The headers are too long.")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


def read_request_line(stream: io.BufferedReader[Any]) -> tuple[str, str, str]:
    """Return method, target, and version.

    Raises:
        RefusedRequestError: The line is none that we answer.
        OSError: The client is gone, or too slow.
    """
    line = stream.readline(_MAX_LINE_BYTES + 1)
    if line == b"\r\n":
        # Some clients end a request with one line too many (RFC 9112, 2.2).
        line = stream.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise RefusedRequestError(414, "InvalidURI", "The URL is too long.")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise RefusedRequestError(400, "InvalidRequest", "The request line is not valid.")
    method, target = found[1].decode(), found[2].decode()
    return method, target, f"HTTP/{found[3].decode()}.{found[4].decode()}"


def read_headers(stream: io.BufferedReader[Any]) -> dict[str, tuple[str, ...]]:
    """Return headers: name in lower case -> its values, in their order.

    Raises:
        RefusedRequestError: A line is no header.
        OSError: The client is gone, or too slow.
    """
    headers: dict[str, list[str]] = defaultdict(list)
    while (line := stream.readline()) != b"\r\n":
        found = _HEADER_LINE.fullmatch(line)
        if found is None:
            raise RefusedRequestError(400, "InvalidRequest", "The headers are not valid.")
        headers[found[1].decode().lower()].append(found[2].decode("latin-1").strip())
    return {name: tuple(values) for name, values in headers.items()}
