"""The process beside a JVM of Spark that calls the KMS: `python -m parquet_keytools.spark.kms_worker`.

It takes requests on stdin and answers on stdout; the JVM logs its stderr. A frame is the length of the rest (4
bytes, big endian), a request id (8), an operation or a status (1), and the content; `WorkerProcess.java` is the
other side.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from parquet_keytools.errors import KEY_REFUSALS, ConfigurationError, KeytoolsError, value_or_raise
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.key_chain import IcebergKeys
from parquet_keytools.kms.client import KEY_LENGTHS_BYTES, KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.kms.registry import make_client
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.spark.session import (
    kms_for_spark,
    prove_keys,
    received_configuration,
    refuse_generated_keys,
)
from parquet_keytools.spark.table_options import TableRequests, WriteRequests, id_of_jvm

THREADS = 32
"""How many requests are answered at a time."""

MOST_BYTES = 1 << 24
"""Of a frame, its length not counted."""

_LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">QB")
_NAME_LENGTH = struct.Struct(">H")


class Operation(enum.IntEnum):
    """Kinds of requests."""

    START = 1
    WRAP = 2
    UNWRAP = 3
    CHECK = 5
    WRAP_KEK = 6
    UNWRAP_KEK = 7
    CHECK_WRITE = 8


class Status(enum.IntEnum):
    """Kinds of answers."""

    OK = 0
    DENIED = 1
    FAILED = 2


class MalformedFrameError(ValueError):
    """A stream is not frames, or the content of a frame is not a request."""


@dataclass(frozen=True)
class Frame:
    """One request, or its answer with the same id; `kind` is an `Operation` or a `Status`."""

    request_id: int
    kind: int
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class KeyRequest:
    """A request to wrap or unwrap: a master key as files name it, and a key or a wrapped key."""

    master_key_id: str
    key: bytes = field(repr=False)


def read_frame(stream: BinaryIO) -> Frame | None:
    """Return the next frame, or None at the end of the stream."""
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
    """Return the bytes of a frame."""
    length = _HEADER.size + len(frame.content)
    return _LENGTH.pack(length) + _HEADER.pack(frame.request_id, frame.kind) + frame.content


def read_key_request(content: bytes) -> KeyRequest:
    """Parse a request to wrap or unwrap; errors do not quote it."""
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


class KmsWorker:
    """Answers requests with a KMS client, or with the KMS of the configuration in the first frame."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, kms: KmsClient | None = None) -> None:
        self._requests = requests
        self._answers = answers
        self._answers_lock = threading.Lock()
        self._work: dict[int, Callable[[bytes], bytes]] = {Operation.START: self._start}
        self._key_work: dict[int, Callable[[KeyRequest], bytes]] = {}
        if kms is not None:
            self._take(kms)

    def run(self) -> int:
        """Serve until the end of the requests, and return the exit status."""
        pool = ThreadPoolExecutor(THREADS)
        try:
            while (frame := read_frame(self._requests)) is not None:
                if frame.kind == Operation.START:
                    # What follows needs its keys.
                    self._answer(frame)
                else:
                    pool.submit(self._answer, frame)
        except MalformedFrameError as error:
            _say(f"ends: {error}")
            return 1
        finally:
            # The JVM is gone: a KMS that does not answer must not keep this process.
            pool.shutdown(wait=False)
        return 0

    def _answer(self, frame: Frame) -> None:
        try:
            if frame.kind in self._key_work:
                status, content = Status.OK, self._key_work[frame.kind](read_key_request(frame.content))
            elif frame.kind in self._work:
                status, content = Status.OK, self._work[frame.kind](frame.content)
            else:
                # Unknown operations are of a jar of another version.
                is_known = frame.kind in set(Operation)
                what = "was given no configuration" if is_known else f"knows no operation {frame.kind}"
                raise ConfigurationError(f"the worker {what}")
        except (KeytoolsError, MalformedFrameError) as error:
            # Denied: parquet-java reads the other columns then.
            status = Status.DENIED if isinstance(error, KEY_REFUSALS) else Status.FAILED
            content = str(error).encode(errors="replace")
        except Exception as error:
            # Its text may hold anything, keys included.
            status, content = Status.FAILED, f"unexpected {type(error).__name__}".encode()
        data = frame_bytes(Frame(frame.request_id, status, content))
        # Where the JVM is gone, the end of the requests follows.
        with self._answers_lock, suppress(OSError):
            self._answers.write(data)
            self._answers.flush()

    def _take(self, kms: KmsClient) -> None:
        def wrap(request: KeyRequest) -> bytes:
            wanted = WrapRequest(_key_to_wrap(request), id_of_jvm(kms, request.master_key_id))
            return value_or_raise(kms.wrap_many([wanted])[0]).encode()

        def unwrap(request: KeyRequest) -> bytes:
            wanted = UnwrapRequest(request.key.decode("ascii", "replace"), id_of_jvm(kms, request.master_key_id))
            return value_or_raise(kms.unwrap_many([wanted])[0]).reveal()

        self._key_work |= {Operation.WRAP: wrap, Operation.UNWRAP: unwrap}

    def _start(self, content: bytes) -> bytes:
        folder, _, text = content.partition(b"\n")
        configuration = received_configuration(text.decode(), Path(os.fsdecode(folder)))
        kms = make_client(kms_for_spark(configuration), configuration.folder)
        refuse_generated_keys(kms)
        keys = KeyService(configuration, kms, time.monotonic)
        iceberg = IcebergKeys(keys)
        self._take(kms)
        self._work |= {
            Operation.CHECK: TableRequests(configuration, kms).check,
            Operation.CHECK_WRITE: partial(_check_write, WriteRequests(keys), kms),
        }
        self._key_work |= {
            Operation.WRAP_KEK: lambda request: iceberg.wrap_kek(_key_to_wrap(request), request.master_key_id),
            Operation.UNWRAP_KEK: lambda request: iceberg.kek(request.key, request.master_key_id).reveal(),
        }
        tables = configuration.tables.values()
        facts = {
            "templates": any(table.has_templates for table in tables),
            "values": any(table.value_columns for table in tables),
        }
        return " ".join(name for name, is_so in facts.items() if is_so).encode()


def _check_write(writes: WriteRequests, kms: KmsClient, content: bytes) -> bytes:
    """Compare a write with its table, prove its keys if asked, and return the options that name them, as JSON."""
    master_key_ids, options = writes.check(content)
    if json.loads(content).get("keys"):
        prove_keys(kms, master_key_ids)
    return json.dumps(options).encode()


def _key_to_wrap(request: KeyRequest) -> SecretBytes:
    if len(request.key) not in KEY_LENGTHS_BYTES:
        raise MalformedFrameError(f"a key to be wrapped has 16, 24 or 32 bytes, not {len(request.key)}")
    return SecretBytes(request.key)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _log_to_stderr() -> None:
    """Pass on our logs, the audit log too, to the log of the JVM; logs of other packages may hold secrets."""
    logging.getLogger().addHandler(logging.NullHandler())
    ours = logging.getLogger("parquet_keytools")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def serve_jvm() -> int:
    """Serve the JVM that started this process."""
    # Ctrl-C at a terminal reaches this process too; its JVM decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Tracebacks quote what exceptions say, and that may be a key.
    sys.excepthook = lambda kind, error, trace: _say(f"ends: unexpected {kind.__name__}")
    threading.excepthook = lambda arguments: _say(f"a thread ended: unexpected {arguments.exc_type.__name__}")
    # Whatever else prints to stdout must not come between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _log_to_stderr()
    worker = KmsWorker(sys.stdin.buffer, answers)
    status = worker.run()
    # A call to the KMS that hangs does not keep this process.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(serve_jvm())
