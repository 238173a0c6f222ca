"""What goes through Spark to our processes of Python: a configuration, and frames over pipes.

A configuration goes in Spark's own, where everyone may read it, without secrets: environment variables are
expanded where the worker runs, and a file with secrets in it stays where it is; then only its path travels.

A frame is its length (4 bytes, big endian, of what follows), a request id (8), an operation or a status (1),
and the content. `WorkerProcess.java` is the other side.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from parquet_keytools.config.document import DocumentSource, yaml_path_text
from parquet_keytools.config.loader import load_configuration, restore_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, KmsError
from parquet_keytools.kms.client import KmsClient, KmsSettings, WrapRequest
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.secret_bytes import SecretBytes


def carried(configuration: Configuration) -> str:
    """Return a configuration as text; refuse one that holds secrets itself, or did not come from a document."""
    source = configuration.source
    if source is None:
        raise ConfigurationError(
            "a configuration that was put together in Python cannot be sent to Spark's executors.",
            hint="Make it with load_configuration, or with parse_configuration from a mapping.",
        )
    if source.redacted_paths:
        if source.path is None:
            places = ", ".join(map(yaml_path_text, source.redacted_paths))
            raise ConfigurationError(
                f"the configuration holds secrets itself, which must not be sent to executors: {places}.",
                hint="Put each into an environment variable and write ${NAME} in its place, or load the "
                "configuration from a YAML file that every node can read.",
            )
        return carried_file(str(source.path))
    parts = {
        "file": source.file,
        "path": None if source.path is None else str(source.path),
        "folder": str(source.folder),
        "lines": [[list(path), line] for path, line in sorted(source.lines.items(), key=str)],
        "document": source.document,
    }
    return json.dumps(parts, sort_keys=True)


def carried_file(path: str) -> str:
    """Return what makes a worker load a file: a path, or the name of one of Spark's files (`spark.files`)."""
    return json.dumps({"load": path})


def configuration_identity(configuration: Configuration) -> str:
    """Return what is the same for two configurations that say the same, wherever their files are. No secret."""
    document = None if configuration.source is None else configuration.source.document
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]


def received_configuration(text: str, files_folder: Path) -> Configuration:
    """Make the configuration again, where it arrived.

    The text is what `carried` or `carried_file` returned. Relative paths start where Spark puts its files.

    Raises:
        ConfigurationError: An environment variable is not set here, or a file is missing or has mistakes.
    """
    parts = json.loads(text)
    if "load" in parts:
        return load_configuration(files_folder / expanded(parts["load"]))
    return restore_configuration(
        DocumentSource(
            parts["file"],
            None if parts["path"] is None else Path(parts["path"]),
            Path(parts["folder"]),
            {tuple(path): line for path, line in parts["lines"]},
            parts["document"],
        )
    )


def kms_for_spark(configuration: Configuration) -> KmsSettings:
    """Return the settings of the KMS that Spark's own reader and writer need; refuse a configuration without."""
    if configuration.kms is None:
        raise ConfigurationError(
            "the configuration has no kms, and Spark does not support data keys.",
            hint="Read and write with Keytools, or with parquet-keytools spark.",
        )
    return configuration.kms


def refuse_generated_keys(kms: KmsClient | None) -> None:
    """Refuse a KMS client that another process cannot make again: it generated its master keys itself."""
    if getattr(kms, "has_generated_keys", False):
        raise ConfigurationError(
            "the in_memory KMS generates master keys, and every executor would have different ones.",
            hint="Write the keys into the configuration, or use a keystore.",
        )


def prove_keys(kms: KmsClient, master_key_ids: Iterable[str]) -> None:
    """Have the KMS wrap a random key with each master key; raise the `KmsError` of the first that it refuses."""
    for outcome in kms.wrap_many([WrapRequest(SecretBytes.random(128), name) for name in master_key_ids]):
        if isinstance(outcome, KmsError):
            raise outcome


PREAMBLE = b"\x89PKTW1\r\n"
"""What a worker sends before its first frame; what Python's start-up may print comes before that."""

MOST_BYTES = 1 << 24
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
    CHECK_WRITE = 8


class Status(enum.IntEnum):
    """What an answer is."""

    OK = 0
    DENIED = 1
    FAILED = 2


class MalformedFrameError(ValueError):
    """A stream is not frames, or the content of a frame is not a request."""


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
    """The content of a request to wrap or unwrap: a master key as files name it, and a key or a wrapped key."""

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
    """Return what a request to wrap or unwrap says, or raise `MalformedFrameError`, which does not quote it."""
    if len(content) < _NAME_LENGTH.size:
        raise MalformedFrameError("the request has no master key id")
    (length,) = _NAME_LENGTH.unpack_from(content)
    name = content[_NAME_LENGTH.size : _NAME_LENGTH.size + length]
    if len(name) < length:
        raise MalformedFrameError("the request ends within its master key id")
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise MalformedFrameError("the request's master key id is empty, or not UTF-8")
    return KeyRequest(text, content[_NAME_LENGTH.size + length :])
