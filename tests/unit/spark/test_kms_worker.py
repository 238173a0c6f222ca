"""The worker by itself: in this process with pipes, and as the process that Spark starts."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fake_spark import key_request_bytes
from pyspark.sql.types import LongType, StructField, StructType

from parquet_keytools import Keytools, SecretBytes, load_configuration
from parquet_keytools.errors import KmsAccessDeniedError, KmsError, KmsUnavailableError
from parquet_keytools.kms.client import UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.spark.kms_worker import (
    Frame,
    KeyRequest,
    KmsWorker,
    Operation,
    Status,
    frame_bytes,
    read_frame,
)
from parquet_keytools.spark.session import carried, carried_file

MASTER_KEYS = {"footer": os.urandom(16), "pii": os.urandom(16), "arn:aws:kms:1,2;3": os.urandom(16)}
KEY = bytes(range(16))


class SlowKms(InMemoryKms):
    """Answers when a test releases it."""

    def __init__(self) -> None:
        super().__init__({name: SecretBytes(key) for name, key in MASTER_KEYS.items()})
        self.may_answer = threading.Event()
        self.busy = threading.Semaphore(0)

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        self.busy.release()
        assert self.may_answer.wait(30)
        return super()._wrap_many(requests)


class RefusingKms(InMemoryKms):
    def __init__(self, error: Exception) -> None:
        super().__init__({name: SecretBytes(key) for name, key in MASTER_KEYS.items()})
        self.error = error

    def unwrap_many(self, requests: Sequence[UnwrapRequest]) -> list[SecretBytes | KmsError]:
        if isinstance(self.error, KmsError):
            return [self.error for _ in requests]
        raise self.error


class Asker:
    """The other end of the pipes."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self.requests = requests
        self.answers = answers

    def send(self, request_id: int, kind: int, content: bytes = b"") -> None:
        self.requests.write(frame_bytes(Frame(request_id, kind, content)))
        self.requests.flush()

    def answer(self) -> Frame:
        frame = read_frame(self.answers)
        assert frame is not None
        return frame

    def ask(self, kind: int, content: bytes = b"") -> Frame:
        self.send(77, kind, content)
        return self.answer()

    def wrap(self, key: bytes = KEY, master_key_id: str = "pii") -> Frame:
        return self.ask(Operation.WRAP, key_request_bytes(KeyRequest(master_key_id, key)))


@contextmanager
def worker(kms: InMemoryKms) -> Iterator[Asker]:
    """Run a worker in a thread, and check that it ends with the end of its requests."""
    (request_end, send_end), (answer_end, reply_end) = os.pipe(), os.pipe()
    with (
        os.fdopen(request_end, "rb") as requests,
        os.fdopen(reply_end, "wb") as replies,
        os.fdopen(answer_end, "rb") as answers,
    ):
        statuses: list[int] = []
        running = KmsWorker(requests, replies, kms)
        thread = threading.Thread(target=lambda: statuses.append(running.run()))
        thread.start()
        with os.fdopen(send_end, "wb") as sender:
            yield Asker(sender, answers)
        thread.join(20)
        assert statuses == [0]


@pytest.fixture
def kms() -> SlowKms:
    return SlowKms()


def test_wrap_and_unwrap(kms: SlowKms) -> None:
    kms.may_answer.set()
    with worker(kms) as asker:
        wrapped = asker.wrap()
        assert (wrapped.request_id, wrapped.kind) == (77, Status.OK)
        assert unwrap_one(kms, wrapped.content.decode(), "pii").reveal() == KEY
        back = asker.ask(Operation.UNWRAP, key_request_bytes(KeyRequest("pii", wrapped.content)))
        assert (back.kind, back.content) == (Status.OK, KEY)


@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_keks_of_iceberg_have_the_raw_form(kms: SlowKms, configuration: Path) -> None:
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"master_keys": {"short": "pii"}}))
    request = key_request_bytes(KeyRequest("arn:aws:kms:1,2;3", KEY))
    with worker(kms) as asker:
        before = asker.ask(Operation.WRAP_KEK, request)
        assert (before.kind, before.content) == (Status.FAILED, b"the worker was given no configuration")
        assert asker.ask(Operation.START, b"\n" + carried_file(str(configuration)).encode()).kind == Status.OK
        wrapped = asker.ask(Operation.WRAP_KEK, request)
        # The identifier is used as it is: nothing is encoded in a table's metadata.
        assert wrapped.kind == Status.OK and len(wrapped.content) == 12 + 16 + 16
        key = AESGCM(MASTER_KEYS["arn:aws:kms:1,2;3"])
        assert key.decrypt(wrapped.content[:12], wrapped.content[12:], None) == KEY
        for name in ("short", "pii"):
            by = asker.ask(Operation.WRAP_KEK, key_request_bytes(KeyRequest(name, KEY))).content
            back = asker.ask(Operation.UNWRAP_KEK, key_request_bytes(KeyRequest("pii", by)))
            assert (back.kind, back.content) == (Status.OK, KEY)
        for by, content, text in (
            ("pii", wrapped.content, b"master key 'pii': the wrapped key"),
            ("nobody", wrapped.content, b"no such master key"),
        ):
            refused = asker.ask(Operation.UNWRAP_KEK, key_request_bytes(KeyRequest(by, content)))
            assert refused.kind != Status.OK and text in refused.content
        short = asker.ask(Operation.WRAP_KEK, key_request_bytes(KeyRequest("pii", KEY[:5])))
        assert short.kind == Status.FAILED and b"16, 24 or 32 bytes, not 5" in short.content
        template = asker.ask(Operation.WRAP_KEK, key_request_bytes(KeyRequest("of-{tenant}", KEY)))
        assert template.kind == Status.FAILED and b"an Iceberg table has one master key" in template.content


def test_files_are_compared_with_their_table(kms: SlowKms, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "{version: 1, kms: {type: in_memory, keys: {footer: AAECAwQFBgcICQoLDA0ODw==, pii: "
        "AAECAwQFBgcICQoLDA0ODg==}}, tables: {t: {footer_key: footer, "
        "column_keys: {pii: [a]}, unlisted_columns: plaintext}}}"
    )
    request = {"table": "", "file": "f.parquet", "algorithm": "AES_GCM_V1", "footer_key": "footer"}
    with worker(kms) as asker:
        before = asker.ask(Operation.CHECK, json.dumps(request).encode())
        assert (before.kind, before.content) == (Status.FAILED, b"the worker was given no configuration")
        assert asker.ask(Operation.START, b"\n" + carried_file(str(path)).encode()).kind == Status.OK
        assert asker.ask(Operation.CHECK, json.dumps(request).encode()).kind == Status.OK
        refused = asker.ask(Operation.CHECK, json.dumps(request | {"footer_key": "pii"}).encode())
        assert refused.kind == Status.FAILED and b"f.parquet" in refused.content and b"'t'" in refused.content
        for content in (b"", b"[]", b"{}", b"\xff"):
            unreadable = asker.ask(Operation.CHECK, content)
            assert unreadable.kind == Status.FAILED
            assert unreadable.content.startswith(b"unexpected ")


def test_writes_are_compared_with_their_table_and_prove_their_keys(
    kms: SlowKms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "parquet_keytools.audit")
    path = tmp_path / "keys" / "c.yaml"
    path.parent.mkdir()
    keystore = Keystore.create(tmp_path / "k.json", lambda: passphrase_from_text("of a test"), scrypt_n=2**14)
    for name in ("footer", "pii"):
        keystore.create_key(name)
    path.write_text(
        "{version: 1, kms: {type: keystore, path: ../k.json, passphrase: of a test, audit_log: true}, "
        "tables: {t: {footer_key: footer, "
        "column_keys: {pii: [a]}, unlisted_columns: plaintext}}}"
    )
    options = Keytools.from_yaml(path).spark_options("t", StructType([StructField("a", LongType())]))
    write = {"table": "t", "schema": "{}", "expected": "a", "columns": [["a"]], "options": options}
    with worker(kms) as asker:
        before = asker.ask(Operation.CHECK_WRITE, json.dumps(write).encode())
        assert (before.kind, before.content) == (Status.FAILED, b"the worker was given no configuration")
        assert asker.ask(Operation.START, b"\n" + carried_file(str(path)).encode()).kind == Status.OK
        for content, keys in ((write, 0), (write | {"keys": True}, 2)):
            assert asker.ask(Operation.CHECK_WRITE, json.dumps(content).encode()).kind == Status.OK
            assert caplog.text.count("operation='wrap' ") == keys
        refused = asker.ask(Operation.CHECK_WRITE, json.dumps(write | {"columns": [["b"]]}).encode())
        assert refused.kind == Status.FAILED and b"new are [b]" in refused.content
        keystore.set_enabled("pii", enabled=False)
        denied = asker.ask(Operation.CHECK_WRITE, json.dumps(write | {"keys": True}).encode())
        assert denied.kind == Status.DENIED and b"pii" in denied.content
        for content in (b"", b"[]", b"{}", b"\xff"):
            unreadable = asker.ask(Operation.CHECK_WRITE, content)
            assert unreadable.kind == Status.FAILED
            assert unreadable.content.startswith(b"unexpected ")


def test_identifiers_come_encoded(kms: SlowKms) -> None:
    kms.may_answer.set()
    with worker(kms) as asker:
        assert asker.wrap(master_key_id="arn%3Aaws%3Akms%3A1%2C2%3B3").kind == Status.OK


def test_a_request_that_waits_for_the_kms_holds_up_no_other(kms: SlowKms) -> None:
    with worker(kms) as asker:
        asker.send(1, Operation.WRAP, key_request_bytes(KeyRequest("pii", os.urandom(16))))
        assert kms.busy.acquire(timeout=20)
        asker.send(2, Operation.WRAP, key_request_bytes(KeyRequest("footer", os.urandom(16))))
        assert kms.busy.acquire(timeout=20)
        assert asker.ask(Operation.CHECK).request_id == 77
        kms.may_answer.set()
        assert {asker.answer().request_id for _ in range(2)} == {1, 2}
        assert kms.call_counts == {"wrap": 2}


def test_every_answer_goes_to_its_request(kms: SlowKms) -> None:
    kms.may_answer.set()
    keys = {request_id: os.urandom(16) for request_id in range(300)}
    sent = list(keys.items())
    with worker(kms) as asker:

        def send() -> None:
            for request_id, key in sent:
                asker.send(request_id, Operation.WRAP, key_request_bytes(KeyRequest("pii", key)))

        sender = threading.Thread(target=send)
        sender.start()
        for _ in sent:
            answer = asker.answer()
            assert unwrap_one(kms, answer.content.decode(), "pii").reveal() == keys.pop(answer.request_id)
        sender.join()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "no master key id"),
        (b"\0\xff", "ends within its master key id"),
        (b"\0\2\xff\xff" + KEY, "not UTF-8"),
        (key_request_bytes(KeyRequest("pii", b"short")), "16, 24 or 32 bytes, not 5"),
        (key_request_bytes(KeyRequest("nobody", KEY)), "no such master key"),
    ],
)
def test_a_bad_request_gets_an_error_and_the_next_one_its_answer(kms: SlowKms, content: bytes, text: str) -> None:
    kms.may_answer.set()
    with worker(kms) as asker:
        answer = asker.ask(Operation.WRAP, content)
        assert answer.kind != Status.OK and text in answer.content.decode()
        assert KEY not in answer.content
        assert asker.wrap().kind == Status.OK


def test_an_operation_of_another_version(kms: SlowKms) -> None:
    with worker(kms) as asker:
        answer = asker.ask(200)
        assert (answer.kind, answer.content) == (Status.FAILED, b"the worker knows no operation 200")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (
            KmsAccessDeniedError(backend="b", operation="unwrap", master_key_id="pii"),
            Status.DENIED,
            "access denied",
        ),
        (KmsUnavailableError(backend="b", operation="unwrap"), Status.FAILED, "is unavailable"),
        (RuntimeError("canary of a key"), Status.FAILED, "unexpected RuntimeError"),
    ],
)
def test_errors_have_our_text_and_no_other(error: Exception, status: Status, text: str) -> None:
    with worker(RefusingKms(error)) as asker:
        answer = asker.ask(Operation.UNWRAP, key_request_bytes(KeyRequest("pii", b"wrapped")))
        assert answer.kind == status and text in answer.content.decode()
        assert b"canary" not in answer.content


# --- the process ---


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "tables": {"t": {"footer_key": "footer", "unlisted_columns": "plaintext"}},
    }
    path.write_text(json.dumps(document))
    return path


class WorkerProcess(Asker):
    def __init__(self, **environment: str) -> None:
        command = [sys.executable, "-P", "-m", "parquet_keytools.spark.kms_worker"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        super().__init__(self.process.stdin, self.process.stdout)

    def start(self, text: str) -> Frame:
        return self.ask(Operation.START, b"/\n" + text.encode())

    def end(self) -> tuple[int, bytes, bytes]:
        stdout, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    started = WorkerProcess()
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")
def test_the_process_serves_until_the_end_of_stdin(process: WorkerProcess, configuration: Path) -> None:
    # The file holds secrets: only its path travels.
    text = carried(load_configuration(configuration))
    assert process.start(text).kind == Status.OK
    assert process.wrap().kind == Status.OK
    process.process.send_signal(signal.SIGINT)
    assert process.wrap().kind == Status.OK, "Ctrl-C is for its JVM"
    status, stdout, stderr = process.end()
    assert (status, stdout) == (0, b"")
    assert not any(key in stderr or base64.b64encode(key) in stderr for key in (KEY, *MASTER_KEYS.values()))


def test_requests_before_the_start_are_refused_and_malformed_frames_end_it(process: WorkerProcess) -> None:
    assert process.wrap().content == b"the worker was given no configuration"
    process.requests.write(b"GET / HTTP/1.1\r\n\r\n")
    status, stdout, stderr = process.end()
    assert (status, stdout) == (1, b"")
    assert b"frame" in stderr and b"Traceback" not in stderr


def test_what_is_no_configuration_is_refused(kms: SlowKms, configuration: Path) -> None:
    configuration.write_text(
        "{version: 1, kms: {type: in_memory, keys: [footer]}, tables: {t: {footer_key: footer, "
        "unlisted_columns: plaintext}}}"
    )
    for carried_text, text in (
        ("{", b"unexpected "),
        ('{"load": 5}', b"unexpected "),
        (carried_file("/nowhere/c.yaml"), b"/nowhere/c.yaml: there is no such file"),
        (carried_file(str(configuration)), b"every executor would have different ones"),
    ):
        with worker(kms) as asker:
            answer = asker.ask(Operation.START, b"\n" + carried_text.encode())
        assert answer.kind == Status.FAILED and text in answer.content


def test_a_program_that_prints_does_not_come_between_the_frames(tmp_path: Path, configuration: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "def chatter():\n"
        "    while not os.path.sameopenfile(1, 2):\n"
        "        time.sleep(0.01)\n"
        "    while True:\n"
        "        print('noise' * 100, flush=True)\n"
        "        time.sleep(0.01)\n"
        "import sys\n"
        "if any('kms_worker' in a for a in sys.orig_argv):\n"
        "    timer = threading.Timer(0.1, chatter); timer.daemon = True; timer.start()\n"
    )
    process = WorkerProcess(PYTHONPATH=str(tmp_path))
    assert process.start(carried_file(str(configuration))).kind == Status.OK
    for _ in range(200):
        assert process.wrap().kind == Status.OK
        threading.Event().wait(0.005)
    assert process.end()[0] == 0
