"""What goes over the pipes between a JVM of Spark and its KMS worker; `WorkerProcess.java` is the other side.

A frame is its length (4 bytes, big endian, of what follows), a request id (8), an operation or a status (1), and
the content.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import BinaryIO

PREAMBLE = b"\x89PKTW1\r\n"
"""What a worker sends before its first frame; what Python's start-up may print comes before that."""

MOST_BYTES = 1 << 20
"""Of a frame, its length not counted."""

_LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">QB")
_NAME_LENGTH = struct.Struct(">H")


class Operation(enum.IntEnum):
    """What a frame asks for."""

    START = 1
    WRAP = 2
    UNWRAP = 3
    STATISTICS = 4
    CHECK = 5
    WRAP_KEK = 6
    UNWRAP_KEK = 7


class Status(enum.IntEnum):
    """What an answer is."""

    OK = 0
    DENIED = 1
    FAILED = 2


class MalformedFrameError(Exception):
    """What came is no frame, so that nobody knows where the next one starts."""


@dataclass(frozen=True)
class Frame:
    """One request, or one answer.

    Attributes:
        request_id: The answer has that of its request.
        kind: An `Operation` or a `Status`; any byte, where another version is on the other side.
        content: May be a key.
    """

    request_id: int
    kind: int
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class KeyRequest:
    """The content of a request to wrap or unwrap.

    Attributes:
        master_key_id: As the file writes it, or the metadata of a table of Iceberg.
        key: The key to be wrapped, or the wrapped key.
    """

    master_key_id: str
    key: bytes = field(repr=False)


def read_frame(stream: BinaryIO) -> Frame | None:
    """Return the next frame, or None at the end of the stream.

    Raises:
        MalformedFrameError: The length cannot be one, or the stream ends within a frame.
    """
    start = stream.read(_LENGTH.size)
    if not start:
        return None
    if len(start) < _LENGTH.size:
        raise MalformedFrameError("the stream ends within the length of a frame")
    (length,) = _LENGTH.unpack(start)
    if not _HEADER.size <= length <= MOST_BYTES:
        raise MalformedFrameError(f"a frame cannot have {length} bytes")
    rest = stream.read(length)
    if len(rest) < length:
        raise MalformedFrameError(f"the stream ends after {len(rest)} of the {length} bytes of a frame")
    request_id, kind = _HEADER.unpack_from(rest)
    return Frame(request_id, kind, rest[_HEADER.size :])


def frame_bytes(frame: Frame) -> bytes:
    """Return a frame as it is sent."""
    length = _HEADER.size + len(frame.content)
    return _LENGTH.pack(length) + _HEADER.pack(frame.request_id, frame.kind) + frame.content


def read_key_request(content: bytes) -> KeyRequest:
    """Return what the content of a request to wrap or unwrap says.

    Raises:
        ValueError: It is no such content; the text of the error does not quote it.
    """
    if len(content) < _NAME_LENGTH.size:
        raise ValueError("the request has no master key id")
    (length,) = _NAME_LENGTH.unpack_from(content)
    name = content[_NAME_LENGTH.size : _NAME_LENGTH.size + length]
    if len(name) < length:
        raise ValueError("the request ends within its master key id")
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise ValueError("the request's master key id is empty, or not UTF-8")
    return KeyRequest(text, content[_NAME_LENGTH.size + length :])
