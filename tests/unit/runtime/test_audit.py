"""The audit log: a record for each key, whatever happens, and no secrets in it."""

from __future__ import annotations

import base64
import io
import json
import logging
import logging.config
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_remote_kms import FakeRemoteKms
from faults import FaultyKms

from parquet_keytools import Keytools, SecretBytes, audit, parse_configuration
from parquet_keytools.errors import ColumnAccessDeniedError, KmsAccessDeniedError
from parquet_keytools.kms.client import RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms

KEY = SecretBytes.random(128)
MASTER_KEYS = {"footer": os.urandom(16), "pii": os.urandom(16)}
TABLE = pa.table({"a": [1, 2], "b": [3, 4]})


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def facts(self, *names: str) -> list[Any]:
        found = [tuple(getattr(record, name) for name in names) for record in self.records]
        return [fact[0] for fact in found] if len(names) == 1 else found


@pytest.fixture
def log() -> Iterator[Collected]:
    logger, handler = logging.getLogger("parquet_keytools.audit"), Collected()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def in_memory(*master_key_ids: str) -> InMemoryKms:
    return InMemoryKms({master_key_id: os.urandom(16) for master_key_id in master_key_ids})


def audited(kms: Any) -> Any:
    kms.audit_log = True
    return kms


def keytools(**kms: Any) -> Keytools:
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    return Keytools(
        parse_configuration(
            {
                "version": 1,
                "kms": {"type": "in_memory", "keys": keys, "audit_log": True, **kms},
                "tables": {
                    "t": {"footer_key": "footer", "column_keys": {"pii": ["a"]}, "unlisted_columns": "plaintext"}
                },
            }
        )
    )


def test_off_unless_asked_for(log: Collected) -> None:
    wrap_one(in_memory("k"), KEY, "k")
    assert log.records == []


def test_a_record_for_each_key(log: Collected) -> None:
    kms = audited(in_memory("k1", "k2"))
    with audit.about("/data/x.parquet"):
        wrapped = kms.wrap_many([WrapRequest(KEY, "k1"), WrapRequest(KEY, "k2"), WrapRequest(KEY, "k3")])
    kms.unwrap_many([UnwrapRequest(wrapped[0], "k1"), UnwrapRequest(wrapped[0], "k2")])
    facts = log.facts("operation", "master_key_id", "outcome", "subject")
    assert facts == [
        ("wrap", "k1", "ok", "/data/x.parquet"),
        ("wrap", "k2", "ok", "/data/x.parquet"),
        ("wrap", "k3", "MasterKeyNotFoundError", "/data/x.parquet"),
        ("unwrap", "k1", "ok", None),
        ("unwrap", "k2", "WrappedKeyInvalidError", None),
    ]
    (record, *_) = log.records
    assert (record.levelname, record.process, record.backend) == ("INFO", os.getpid(), "in_memory")  # type: ignore[attr-defined]
    assert "\n" not in record.getMessage() and "'k1'" in record.getMessage()


def test_a_rewrap_names_both_master_keys(log: Collected) -> None:
    kms = audited(in_memory("old", "new"))
    wrapped = wrap_one(kms, KEY, "old")
    log.records.clear()
    kms.rewrap_many([RewrapRequest(wrapped, "old", "new")])
    assert ("rewrap", "old", "new") in log.facts("operation", "master_key_id", "new_master_key_id")


def test_what_the_kms_is_not_even_asked_for_is_recorded(log: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KMS's own log cannot show that an attacker put a file under their own master key in place."""
    monkeypatch.setattr(InMemoryKms, "_may_be_of_others", lambda self, master_key_id: master_key_id == "theirs")
    kms = audited(in_memory("ours", "theirs"))
    kms.trust(["ours"])
    requests = [UnwrapRequest("QUJD", "theirs"), UnwrapRequest("QUJD", "theirs"), UnwrapRequest("é", "ours")]
    kms.unwrap_many(requests)
    kms.rewrap_many([RewrapRequest("QUJD", "theirs", "ours")])
    assert kms.call_counts == {}
    assert log.facts("operation", "master_key_id", "new_master_key_id", "outcome") == [
        ("unwrap", "theirs", None, "MasterKeyNotTrustedError"),
        ("unwrap", "ours", None, "WrappedKeyInvalidError"),
        ("rewrap", "theirs", "ours", "MasterKeyNotTrustedError"),
    ]


def test_who(log: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    kms = audited(in_memory("k"))
    wrap_one(kms, KEY, "k")
    monkeypatch.setattr(InMemoryKms, "_principal", lambda self: "arn:aws:iam::1:role/etl")
    wrap_one(kms, KEY, "k")

    def raising(self: object) -> str:
        raise OSError("s.CANARY")

    monkeypatch.setattr(InMemoryKms, "_principal", raising)
    wrap_one(kms, KEY, "k")
    default, own, unknown = log.facts("principal")
    assert "@" in default and (own, unknown) == ("arn:aws:iam::1:role/etl", "unknown")


def test_an_interrupted_operation_is_recorded(log: Collected) -> None:
    """The KMS may have completed it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wrap_one(audited(FakeRemoteKms(interrupted)), KEY, "k")
    assert log.facts("outcome") == ["KeyboardInterrupt"]


# --- which file ---


def test_files_of_the_facade(log: Collected, tmp_path: Path) -> None:
    tools = keytools(instance_id="eu-1")
    paths = [tmp_path / "d" / f"{number}.parquet" for number in range(3)]
    paths[0].parent.mkdir()
    for path in paths:
        log.records.clear()
        tools.clear_caches()
        tools.write_table(TABLE, path)
        assert log.facts("operation", "subject", "kms_instance") == [("wrap", str(path), "eu-1")] * 2
    log.records.clear()
    tools.read_table(paths[0])
    assert set(log.facts("operation", "subject")) == {("unwrap", str(paths[0]))}
    log.records.clear()
    tools.read_table(paths[0])
    assert log.records == [], "served from the cache"
    dataset = tools.dataset(paths[0].parent)
    assert log.records == [], "the first file is that of the cache"
    dataset.to_table()
    assert set(log.facts("operation", "subject")) == {("unwrap", str(paths[0].parent))}
    log.records.clear()
    tools.clear_caches()
    tools.verify_file(paths[1])
    tools.decrypt_file(paths[2], tmp_path / "plain.parquet")
    tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "again.parquet")
    assert set(log.facts("subject")) == {str(paths[1]), str(paths[2]), str(tmp_path / "again.parquet")}
    log.records.clear()
    tools.clear_caches()
    tools.write_dataset(TABLE, tmp_path / "set")
    tools.encryption_properties("t", TABLE.schema, tmp_path / "by_arrow.parquet")
    assert set(log.facts("subject")) == {str(tmp_path / "set")}


def test_a_refused_read_is_recorded(log: Collected, tmp_path: Path) -> None:
    keytools().write_table(TABLE, tmp_path / "x.parquet")
    kms = audited(FaultyKms(MASTER_KEYS))
    kms.fail("refused", "pii")
    tools = Keytools(keytools().configuration, kms=kms)
    log.records.clear()
    tools.read_table(tmp_path / "x.parquet", columns=["b"])
    assert log.facts("master_key_id", "outcome") == [("footer", "ok")]
    with pytest.raises(ColumnAccessDeniedError):
        tools.read_table(tmp_path / "x.parquet")
    assert log.facts("master_key_id", "outcome")[-1] == ("pii", KmsAccessDeniedError.__name__)


def test_the_subject_follows_into_the_threads_of_a_client(log: Collected) -> None:
    seen: list[tuple[str, str | None]] = []
    kms = audited(FakeRemoteKms(lambda _, key, __: seen.append((key, audit.current_subject()))))

    def work(number: int) -> None:
        with audit.about(f"file {number}"):
            kms.wrap_many([WrapRequest(KEY, f"{number}") for _ in range(10)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(20)))
    assert sorted(seen) == sorted((f"{number}", f"file {number}") for number in range(20) for _ in range(10))
    assert set(log.facts("master_key_id", "subject")) == {(f"{n}", f"file {n}") for n in range(20)}
    kms.close()


def test_the_inner_subject_counts() -> None:
    with audit.about("data set"):
        with audit.about("file"):
            assert audit.current_subject() == "file"
        assert audit.current_subject() == "data set"
    assert audit.current_subject() is None


# --- logging ---


def test_it_comes_whatever_the_level_of_the_root_logger(log: Collected) -> None:
    assert logging.getLogger().getEffectiveLevel() == logging.WARNING
    wrap_one(audited(in_memory("k")), KEY, "k")
    assert len(log.records) == 1


def test_its_own_level_counts(log: Collected) -> None:
    logger = logging.getLogger("parquet_keytools.audit")
    logger.setLevel(logging.ERROR)
    try:
        wrap_one(audited(in_memory("k")), KEY, "k")
    finally:
        logger.setLevel(logging.NOTSET)
    assert log.records == []


class FailingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("disk full")


def test_a_failing_handler_breaks_and_hides_nothing(
    log: Collected, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, handler = logging.getLogger("parquet_keytools.audit"), FailingHandler()
    logger.addHandler(handler)
    kms = audited(in_memory("k"))
    try:
        assert unwrap_one(kms, wrap_one(kms, KEY, "k"), "k") == KEY
        assert len(log.records) == 2
        assert capsys.readouterr().err.count("an audit record was lost: OSError") == 2
        monkeypatch.setattr(logging, "raiseExceptions", False)
        wrap_one(kms, KEY, "k")
        assert capsys.readouterr().err == ""
    finally:
        logger.removeHandler(handler)


def test_an_audit_log_without_a_handler_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who enables it without a target gets an error at once."""
    audit.warn_of_no_handler.cache_clear()
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    kms = audited(in_memory("k"))
    for _ in range(3):
        wrap_one(kms, KEY, "k")
    assert [r.name for r in caplog.records if "has no handler" in r.getMessage()] == ["parquet_keytools"]


def test_as_json() -> None:
    stream = io.StringIO()
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": "parquet_keytools.audit.JsonFormatter"}},
            "handlers": {"audit": {"class": "logging.StreamHandler", "stream": stream, "formatter": "json"}},
            "loggers": {"parquet_keytools.audit": {"handlers": ["audit"], "propagate": False}},
        }
    )
    try:
        kms = audited(in_memory("k"))
        with audit.about("s3:bucket/ü\n2026 forged"):
            wrap_one(kms, KEY, "k")
    finally:
        logger = logging.getLogger("parquet_keytools.audit")
        logger.handlers.clear()
        logger.propagate = True
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert line.isascii() and record["time"].endswith("+00:00")
    assert {key: record[key] for key in ("operation", "outcome", "master_key_id", "subject", "process")} == {
        "operation": "wrap",
        "outcome": "ok",
        "master_key_id": "k",
        "subject": "s3:bucket/ü\n2026 forged",
        "process": os.getpid(),
    }


def test_a_line_break_in_a_name_forges_no_record(log: Collected) -> None:
    kms = audited(in_memory("k"))
    with audit.about("x\noperation='unwrap' \u2028 \x1b[2J"):
        kms.wrap_many([WrapRequest(KEY, "no\r\nsuch")])
    (text,) = [record.getMessage() for record in log.records]
    assert len(text.splitlines()) == 1 and "\x1b" not in text


def test_nothing_secret_is_in_it(log: Collected, tmp_path: Path) -> None:
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "x.parquet")
    tools.read_table(tmp_path / "x.parquet")
    kms = audited(FaultyKms(MASTER_KEYS))
    wrapped = wrap_one(kms, KEY, "pii")
    unwrap_one(kms, wrapped, "pii")
    for failure in ("timeout", "foreign"):
        kms.fail(failure)
        kms.wrap_many([WrapRequest(KEY, "pii")])
    text = "".join(f"{vars(record)} {audit.JsonFormatter().format(record)}" for record in log.records)
    secrets = [*MASTER_KEYS.values(), *kms.keys_seen, KEY.reveal()]
    spellings = [text for key in secrets for text in (key.hex(), base64.b64encode(key).decode()[:16], repr(key))]
    assert len(log.records) > 6
    assert not any(spelling in text for spelling in [*spellings, wrapped, wrapped[:20], "CANARY"])


def test_threads_that_share_a_load_have_one_record(log: Collected, tmp_path: Path) -> None:
    """One KMS call unwraps all keys; its record names the file of the caller that made it."""
    path = tmp_path / "x.parquet"
    keytools().write_table(TABLE, path)
    kms = audited(FaultyKms(MASTER_KEYS))
    tools = Keytools(keytools().configuration, kms=kms)
    gate = threading.Event()
    kms.before_answer = lambda: gate.wait(1)
    log.records.clear()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tools.read_table, path) for _ in range(8)]
        gate.set()
        for future in futures:
            future.result(20)
    assert log.facts("operation", "subject") == [("unwrap", str(path))] * 2
