"""The process beside a JVM of Spark that asks the KMS: `python -m parquet_keytools.spark.kms_worker`.

It takes requests on stdin and answers on stdout (`transport`), and ends with the end of stdin. What it says to
people goes to stderr, which the JVM logs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from parquet_keytools.errors import KEY_REFUSALS, ConfigurationError, KeytoolsError, value_or_raise
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.iceberg.key_chain import IcebergKeys
from parquet_keytools.kms.client import KEY_LENGTHS_BYTES, KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.kms.registry import make_client
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.spark.table_options import TableRequests, WriteRequests, id_of_jvm
from parquet_keytools.spark.transport import (
    PREAMBLE,
    Frame,
    KeyRequest,
    MalformedFrameError,
    Operation,
    Status,
    frame_bytes,
    kms_for_spark,
    prove_keys,
    read_frame,
    read_key_request,
    received_configuration,
    refuse_generated_keys,
)

THREADS = 32
"""How many requests are answered at a time."""


class KmsWorker:
    """Answers requests with the KMS of one configuration.

    Nothing else may be written to `answers`. The client is that of the configuration in the first frame, if none
    is given.
    """

    def __init__(self, requests: BinaryIO, answers: BinaryIO, kms: KmsClient | None = None) -> None:
        self._requests = requests
        self._answers = answers
        self._answers_lock = threading.Lock()
        self._kms = kms
        self._work: dict[int, Callable[[bytes], bytes]] = {
            Operation.START: self._start,
            Operation.STATISTICS: self._statistics,
        }
        if kms is not None:
            self._work |= _key_work(kms)

    def run(self) -> int:
        """Serve until the end of the requests; returns the exit status."""
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
            status, content = Status.OK, self._work_for(frame.kind)(frame.content)
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

    def _work_for(self, operation: int) -> Callable[[bytes], bytes]:
        if operation in self._work:
            return self._work[operation]
        if operation in set(Operation):
            raise ConfigurationError("the worker was given no configuration")
        # The jar is of another version than this.
        raise ConfigurationError(f"the worker knows no operation {operation}")

    def _start(self, content: bytes) -> bytes:
        folder, _, text = content.partition(b"\n")
        configuration = received_configuration(text.decode(), Path(os.fsdecode(folder)))
        kms = make_client(kms_for_spark(configuration), configuration.folder)
        refuse_generated_keys(kms)
        keys = KeyService(configuration, kms, time.monotonic)
        iceberg = IcebergKeys(keys)

        def wrap_kek(content: bytes) -> bytes:
            request = read_key_request(content)
            return iceberg.wrap_kek(_key_to_wrap(request), request.master_key_id)

        def unwrap_kek(content: bytes) -> bytes:
            request = read_key_request(content)
            return iceberg.kek(request.key, request.master_key_id).reveal()

        self._kms = kms
        self._work |= _key_work(kms)
        self._work |= {
            Operation.CHECK: TableRequests(configuration, kms).check,
            Operation.CHECK_WRITE: partial(_check_write, WriteRequests(keys), kms),
            Operation.WRAP_KEK: wrap_kek,
            Operation.UNWRAP_KEK: unwrap_kek,
        }
        tables = configuration.tables.values()
        facts = {
            "templates": any(table.has_templates for table in tables),
            "values": any(table.value_columns for table in tables),
        }
        return " ".join(name for name, is_so in facts.items() if is_so).encode()

    def _statistics(self, _: bytes) -> bytes:
        counts = Counter[str]() if self._kms is None else self._kms.call_counts
        found = {"process": os.getpid(), "wrap keys": counts["wrap"], "unwrap keys": counts["unwrap"]}
        return json.dumps(found).encode()


def _key_work(kms: KmsClient) -> dict[int, Callable[[bytes], bytes]]:
    """Return what wraps and unwraps the keys of files."""

    def wrap(content: bytes) -> bytes:
        request = read_key_request(content)
        wanted = WrapRequest(_key_to_wrap(request), id_of_jvm(kms, request.master_key_id))
        return value_or_raise(kms.wrap_many([wanted])[0]).encode()

    def unwrap(content: bytes) -> bytes:
        request = read_key_request(content)
        wanted = UnwrapRequest(request.key.decode("ascii", "replace"), id_of_jvm(kms, request.master_key_id))
        return value_or_raise(kms.unwrap_many([wanted])[0]).reveal()

    return {Operation.WRAP: wrap, Operation.UNWRAP: unwrap}


def _check_write(writes: WriteRequests, kms: KmsClient, content: bytes) -> bytes:
    """Compare a write with its table; return the options that name its keys, as JSON.

    Where the request says so, the KMS wraps a key with each of the master keys first.
    """
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
    """Let what we log, the audit log too, go to the log of the JVM; what others log may hold secrets."""
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
    answers.write(PREAMBLE)
    answers.flush()
    worker = KmsWorker(sys.stdin.buffer, answers)
    status = worker.run()
    # A call to the KMS that hangs does not keep this process.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(serve_jvm())
