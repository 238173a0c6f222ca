"""The process beside a JVM of Spark that asks the KMS: `python -m parquet_keytools.spark.kms_worker`.

It takes requests on stdin and answers on stdout (`transport`), and ends with the end of stdin. What it says to
people goes to stderr, which the JVM logs.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import KEY_REFUSALS, KeytoolsError, KmsError
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

THREADS = 4
"""So many calls to the KMS at a time; what comes meanwhile waits, and goes together in the next one."""

MOST_TOGETHER = 1000
"""So many keys, at most, the KMS client is asked for together."""

_NO_CONFIGURATION = b"the worker was given no configuration"

_COUNTS = ("wrap calls", "wrap keys", "unwrap calls", "unwrap keys")

T = TypeVar("T")


class WaitingRequests:
    """A queue of requests, from which several threads take all that have the same operation."""

    def __init__(self) -> None:
        self._waiting: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, request: Frame) -> None:
        """Add a request."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def take(self) -> list[Frame]:
        """Wait for requests, and return the first with all others of its operation; nothing after the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            taken: list[Frame] = []
            others: deque[Frame] = deque()
            for request in self._waiting:
                same = not taken or request.kind == taken[0].kind
                (taken if same and len(taken) < MOST_TOGETHER else others).append(request)
            self._waiting = others
            if others:
                self._changed.notify()
            return taken

    def close(self) -> None:
        """Let every thread end that waits; what waits is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Statistics:
    """How much the KMS was asked by this process. Counts only, no names."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()

    def add(self, operation: str, keys: int) -> None:
        """Count one call for so many keys."""
        with self._changed:
            self._counts[f"{operation} calls"] += 1
            self._counts[f"{operation} keys"] += keys
            self._changed.notify_all()

    def as_dict(self) -> dict[str, int]:
        """Return all counts."""
        with self._changed:
            return {name: self._counts[name] for name in _COUNTS}

    def say_changes(self) -> None:
        """Tell people of every change, without end: soon at first, and then once a minute."""
        said = dict.fromkeys(_COUNTS, 0)
        for seconds in itertools.chain(itertools.repeat(1.0, 30), itertools.repeat(60.0)):
            with self._changed:
                while all(self._counts[name] == count for name, count in said.items()):
                    self._changed.wait()
            # What comes within a moment is reported together.
            time.sleep(seconds)
            said = self.as_dict()
            _say("KMS requests so far: " + ", ".join(f"{count} {name}" for name, count in said.items()))


class KmsWorker:
    """Answers requests with the KMS of one configuration.

    Nothing else may be written to `answers`. The client is that of the configuration in the first frame, if none
    is given.
    """

    def __init__(self, requests: BinaryIO, answers: BinaryIO, kms: KmsClient | None = None) -> None:
        self.statistics = Statistics()
        self._requests = requests
        self._answers = answers
        self._answers_lock = threading.Lock()
        self._waiting = WaitingRequests()
        self._kms = kms
        self._tables: TableRequests | None = None
        self._writes: WriteRequests | None = None
        self._iceberg: IcebergKeys | None = None

    def run(self) -> int:
        """Serve until the end of the requests; returns the exit status."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        status = 0
        try:
            while (frame := read_frame(self._requests)) is not None:
                self._take(frame)
        except MalformedFrameError as error:
            _say(f"ends: {error}")
            status = 1
        self._waiting.close()
        for thread in threads:
            # Whoever asked is gone: a KMS that does not answer must not keep this process.
            thread.join(1.0)
        return status

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case Operation.WRAP | Operation.UNWRAP if self._kms is None:
                self._answer(frame, Status.FAILED, _NO_CONFIGURATION)
            case Operation.WRAP_KEK | Operation.UNWRAP_KEK if self._iceberg is None:
                self._answer(frame, Status.FAILED, _NO_CONFIGURATION)
            case Operation.CHECK_WRITE if self._writes is None:
                self._answer(frame, Status.FAILED, _NO_CONFIGURATION)
            case (
                Operation.WRAP
                | Operation.UNWRAP
                | Operation.WRAP_KEK
                | Operation.UNWRAP_KEK
                | Operation.CHECK_WRITE
            ):
                self._waiting.put(frame)
            case Operation.CHECK if self._tables is not None:
                self._answer_with(frame, self._tables.check, "a file cannot be compared with its table")
            case Operation.CHECK:
                self._answer(frame, Status.FAILED, _NO_CONFIGURATION)
            case Operation.START:
                self._answer_with(frame, self._start, "the configuration cannot be loaded")
            case Operation.STATISTICS:
                self._answer(
                    frame, Status.OK, json.dumps({"process": os.getpid()} | self.statistics.as_dict()).encode()
                )
            case _:
                # The jar is of another version than this.
                self._answer(frame, Status.FAILED, f"the worker knows no operation {frame.kind}".encode())

    def _start(self, content: bytes) -> bytes:
        folder, _, text = content.partition(b"\n")
        configuration = received_configuration(text.decode(), Path(os.fsdecode(folder)))
        kms = _kms_of(configuration)
        keys = KeyService(configuration, kms, time.monotonic)
        self._kms = kms
        self._tables = TableRequests(configuration, kms)
        self._writes = WriteRequests(keys)
        self._iceberg = IcebergKeys(keys)
        tables = configuration.tables.values()
        facts = {
            "templates": any(table.has_templates for table in tables),
            "values": any(table.value_columns for table in tables),
        }
        return " ".join(name for name, is_so in facts.items() if is_so).encode()

    def _check_write(self, content: bytes) -> bytes:
        """Compare a write with its table; return the options that name its keys, as JSON.

        Where the request says so, the KMS wraps a key with each of the master keys first.
        """
        assert self._kms is not None and self._writes is not None
        master_key_ids, options = self._writes.check(content)
        if json.loads(content).get("keys"):
            self.statistics.add("wrap", len(master_key_ids))
            prove_keys(self._kms, master_key_ids)
        return json.dumps(options).encode()

    def _answer_with(self, frame: Frame, work: Callable[[bytes], bytes], failure: str) -> None:
        try:
            status, content = Status.OK, work(frame.content)
        except KmsError as error:
            self._refuse(frame, error)
            return
        except KeytoolsError as error:
            status, content = Status.FAILED, str(error).encode(errors="replace")
        except Exception as error:
            status, content = Status.FAILED, f"{failure}: {type(error).__name__}".encode()
        self._answer(frame, status, content)

    def _serve(self) -> None:
        while frames := self._waiting.take():
            try:
                self._work(Operation(frames[0].kind), frames)
            except Exception as error:
                # Its text may hold anything, keys included.
                for frame in frames:
                    self._answer(frame, Status.FAILED, f"unexpected {type(error).__name__}".encode())

    def _work(self, operation: Operation, frames: Sequence[Frame]) -> None:
        """Answer requests of one operation: `_take` let them pass as soon as there were keys."""
        kms, iceberg = self._kms, self._iceberg
        if operation is Operation.WRAP and kms is not None:
            wraps = self._readable(frames, lambda p: WrapRequest(_key_to_wrap(p), id_of_jvm(kms, p.master_key_id)))
            self._answer_all("wrap", wraps, kms.wrap_many, str.encode)
        elif operation is Operation.UNWRAP and kms is not None:
            unwraps = self._readable(
                frames,
                lambda p: UnwrapRequest(p.key.decode("ascii", "replace"), id_of_jvm(kms, p.master_key_id)),
            )
            self._answer_all("unwrap", unwraps, kms.unwrap_many, SecretBytes.reveal)
        elif operation is Operation.WRAP_KEK and iceberg is not None:
            keks = self._readable(frames, lambda p: (_key_to_wrap(p), p.master_key_id))
            self._answer_each("wrap", keks, lambda request: iceberg.wrap_kek(*request))
        elif operation is Operation.CHECK_WRITE:
            for frame in frames:
                self._answer_with(frame, self._check_write, "the write cannot be compared with its table")
        elif iceberg is not None:
            requests = self._readable(frames, lambda p: p)
            self._answer_each("unwrap", requests, lambda p: iceberg.kek(p.key, p.master_key_id).reveal())

    def _readable(self, frames: Sequence[Frame], request: Callable[[KeyRequest], T]) -> list[tuple[Frame, T]]:
        """Return the requests in the frames, after the frames without one were answered."""
        readable = []
        for frame in frames:
            try:
                readable.append((frame, request(read_key_request(frame.content))))
            except (ValueError, KeytoolsError) as error:
                self._answer(frame, Status.FAILED, str(error).encode(errors="replace"))
        return readable

    def _answer_all(
        self,
        operation: str,
        requests: Sequence[tuple[Frame, T]],
        call: Callable[[list[T]], Sequence[object]],
        content: Callable[..., bytes],
    ) -> None:
        if not requests:
            return
        outcomes = call([request for _, request in requests])
        self.statistics.add(operation, len(requests))
        for (frame, _), outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, KmsError):
                self._refuse(frame, outcome)
            else:
                self._answer(frame, Status.OK, content(outcome))

    def _answer_each(
        self, operation: str, requests: Sequence[tuple[Frame, T]], call: Callable[[T], bytes]
    ) -> None:
        for frame, request in requests:
            self.statistics.add(operation, 1)
            try:
                answer = call(request)
            except KeytoolsError as error:
                self._refuse(frame, error)
            else:
                self._answer(frame, Status.OK, answer)

    def _refuse(self, frame: Frame, error: KeytoolsError) -> None:
        # parquet-java reads the other columns then.
        status = Status.DENIED if isinstance(error, KEY_REFUSALS) else Status.FAILED
        self._answer(frame, status, str(error).encode(errors="replace"))

    def _answer(self, frame: Frame, status: Status, content: bytes) -> None:
        data = frame_bytes(Frame(frame.request_id, status, content))
        with self._answers_lock:
            try:
                self._answers.write(data)
                self._answers.flush()
            except OSError:
                # The JVM is gone; the end of the requests follows.
                return


def _key_to_wrap(request: KeyRequest) -> SecretBytes:
    if len(request.key) not in KEY_LENGTHS_BYTES:
        raise ValueError(f"a key to be wrapped has 16, 24 or 32 bytes, not {len(request.key)}")
    return SecretBytes(request.key)


def _kms_of(configuration: Configuration) -> KmsClient:
    kms = make_client(kms_for_spark(configuration), configuration.folder)
    refuse_generated_keys(kms)
    return kms


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
    threading.Thread(target=worker.statistics.say_changes, daemon=True).start()
    status = worker.run()
    # A call to the KMS that hangs does not keep this process.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(serve_jvm())
