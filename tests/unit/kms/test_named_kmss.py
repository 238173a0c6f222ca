"""One client for several KMSs: routing of requests, texts of errors, and a KMS that does not answer."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from parquet_keytools import SecretBytes, telemetry
from parquet_keytools.errors import (
    KeyNotAvailableError,
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    kms_failure,
)
from parquet_keytools.kms.client import RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import rewrap_one, unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.named import NamedKmss

KEY = SecretBytes(bytes(range(16)))


class Switched(InMemoryKms):
    """Can be switched off; counts its calls."""

    is_off = False
    asked = 0

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        self.asked += 1
        if self.is_off:
            raise KmsUnavailableError("no answer")
        return super()._wrap_many(requests)


@pytest.fixture
def eu() -> Switched:
    return Switched({"a": None, "b": None})


@pytest.fixture
def us() -> Switched:
    return Switched({"a": None, "alias/x::y": None})


@pytest.fixture
def kmss(eu: Switched, us: Switched) -> NamedKmss:
    return NamedKmss({"eu": eu, "us": us}, "eu")


def test_each_request_goes_to_its_kms(kmss: NamedKmss, eu: Switched, us: Switched) -> None:
    wrapped = {name: wrap_one(kmss, KEY, name) for name in ("eu::a", "us::a", "us::alias/x::y")}
    assert all(unwrap_one(kmss, text, name) == KEY for name, text in wrapped.items())
    assert unwrap_one(kmss, wrapped["eu::a"], "a") == KEY, "the default KMS"
    with pytest.raises(WrappedKeyInvalidError):
        unwrap_one(kmss, wrapped["eu::a"], "us::a")
    assert eu.call_counts == {"wrap": 1, "unwrap": 2} and us.call_counts == {"wrap": 2, "unwrap": 3}
    assert kmss.call_counts == {"wrap": 3, "unwrap": 5}
    assert kmss.master_key_ids() == frozenset({"eu::a", "eu::b", "us::a", "us::alias/x::y"})
    assert kmss.describe("us::a").master_key_id == kmss.identity("us::a") == "us::a"
    assert kmss.unwrap_raw(kmss.wrap_raw(KEY, "us::a"), "us::a") == KEY


def test_outcomes_are_in_the_order_of_the_requests(kmss: NamedKmss, us: Switched) -> None:
    us.deny("a")
    names = ["us::a", "eu::a", "xx::a", "us::alias/x::y", "eu::none", "eu::a"]
    outcomes = kmss.wrap_many([WrapRequest(KEY, name) for name in names])
    denied, first, nowhere, other, unknown, last = outcomes
    assert isinstance(denied, KmsAccessDeniedError) and (denied.kms, denied.master_key_id) == ("us", "us::a")
    assert str(denied).startswith("us (in_memory): wrap with master key 'us::a': access denied")
    assert isinstance(first, str) and isinstance(other, str) and isinstance(last, str) and first != last
    assert isinstance(nowhere, KmsConfigurationError) and "'xx'" in str(nowhere)
    assert isinstance(unknown, MasterKeyNotFoundError) and unknown.master_key_id == "eu::none"


def test_a_key_is_rewrapped_from_one_kms_to_another(kmss: NamedKmss) -> None:
    wrapped = wrap_one(kmss, KEY, "eu::a")
    assert not kmss.rewraps_by_itself("eu::a", "us::a") and kmss.rewraps_by_itself("eu::a", "eu::b")
    assert unwrap_one(kmss, rewrap_one(kmss, wrapped, "eu::a", "us::a"), "us::a") == KEY
    requests = [RewrapRequest(wrapped, "eu::a", new) for new in ("us::a", "eu::b", "eu::a")]
    for request, text in zip(requests, kmss.rewrap_many(requests), strict=True):
        assert isinstance(text, str) and unwrap_one(kmss, text, request.new_master_key_id) == KEY


def test_kmss_answer_at_the_same_time(kmss: NamedKmss, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    wrap = InMemoryKms._wrap_many

    def together(self: InMemoryKms, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        both.wait()
        return wrap(self, requests)

    monkeypatch.setattr(Switched, "_wrap_many", together)
    assert all(
        isinstance(text, str) for text in kmss.wrap_many([WrapRequest(KEY, "eu::a"), WrapRequest(KEY, "us::a")])
    )


def test_a_kms_that_does_not_answer_is_left_alone_for_a_while(
    kmss: NamedKmss, eu: Switched, us: Switched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("parquet_keytools.kms.named.time.monotonic", lambda: now[0])
    us.is_off = True
    requests = [WrapRequest(KEY, "eu::a"), WrapRequest(KEY, "us::a")]
    for tries in (1, 0, 0):
        fine, down = kmss.wrap_many(requests)
        assert isinstance(fine, str) and isinstance(down, KmsUnavailableError)
        assert (down.tries, down.kms, down.others_may_answer) == (tries, "us", True)
        assert ("not attempted" in str(down)) == (tries == 0) and kms_failure(down) is None
    assert us.asked == 1
    # The others may be down, too: then all other files would fail.
    eu.is_off = True
    outcomes = kmss.wrap_many(requests)
    outcomes = kmss.wrap_many(requests)
    assert all(
        isinstance(kms_failure(error), KmsUnavailableError) for error in outcomes if isinstance(error, KmsError)
    )
    eu.is_off = us.is_off = False
    now[0] = 61.0
    assert all(isinstance(text, str) for text in kmss.wrap_many(requests))


class Waiting(InMemoryKms):
    """Does not answer until its time is over."""

    def __init__(self) -> None:
        super().__init__({"a": None})
        self.is_over = threading.Event()
        self.ends: list[float] = []

    def _wrap_many(self, requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        # A signal also ends the wait of the main thread.
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        assert self.is_over.wait(30)
        raise KmsUnavailableError("no answer")

    def end_within(self, seconds: float) -> None:
        self.ends.append(seconds)
        self.is_over.set()


def test_an_interruption_does_not_wait_for_a_kms_that_is_down(eu: Switched) -> None:
    waiting = Waiting()
    kmss = NamedKmss({"eu": eu, "us": waiting})
    with pytest.raises(KeyboardInterrupt):
        kmss.wrap_many([WrapRequest(KEY, "eu::a"), WrapRequest(KEY, "us::a")])
    assert waiting.ends == [0, math.inf]


@pytest.mark.parametrize(
    ("written", "instance", "meant"),
    [
        ("a", "us", "us::a"),
        ("a", "DEFAULT", "eu::a"),
        ("a", "", "eu::a"),
        ("a", None, "eu::a"),
        ("us::a", "eu", "us::a"),
        ("us::a", "nowhere", "us::a"),
        ("arn:aws:kms:eu::x", "us", "us::arn:aws:kms:eu::x"),
        ("::a", "us", "us::::a"),
        ("us::a::b", "us", "us::a::b"),
    ],
)
def test_what_files_mean(kmss: NamedKmss, written: str, instance: str | None, meant: str) -> None:
    assert kmss.id_of_file(written, instance) == meant
    assert kmss.id_of_file(kmss.id_in_file(meant, instance), instance) == meant


@pytest.mark.parametrize(
    ("written", "instance"), [("a", "nowhere"), ("nowhere::a", "eu"), ("a", "https://evil.example"), ("a", "Eu")]
)
def test_what_files_cannot_mean(kmss: NamedKmss, written: str, instance: str) -> None:
    with pytest.raises(KeyNotAvailableError, match=r"the file names the KMS .*, and the configuration has no KMS"):
        kmss.id_of_file(written, instance)


def test_without_a_default_a_file_has_to_name_its_kms(eu: Switched) -> None:
    kmss = NamedKmss({"eu": eu})
    with pytest.raises(KeyNotAvailableError, match="does not name the KMS of the master key 'a'"):
        kmss.id_of_file("a", "DEFAULT")
    (outcome,) = kmss.unwrap_many([UnwrapRequest("x", "a")])
    assert isinstance(outcome, KmsConfigurationError) and "there is no default" in str(outcome)


def test_trust_is_per_kms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryKms, "_may_be_of_others", lambda *_: True)
    kmss = NamedKmss({"eu": InMemoryKms({"a": None}), "us": InMemoryKms({"a": None})})
    kmss.trust(["eu::a"])
    assert unwrap_one(kmss, wrap_one(kmss, KEY, "eu::a"), "eu::a") == KEY
    with pytest.raises(KmsError, match="us::a"):
        unwrap_one(kmss, wrap_one(kmss, KEY, "us::a"), "us::a")


def test_spans_and_metrics_name_the_kms(kmss: NamedKmss) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.use_providers(MeterProvider([reader]), tracers)
    try:
        kmss.wrap_many([WrapRequest(KEY, "eu::a"), WrapRequest(KEY, "us::a")])
        spans: list[Any] = [dict(span.attributes or {}) for span in exporter.get_finished_spans()]
    finally:
        telemetry.use_providers(None, None)
    assert sorted(span["parquet_keytools.kms"] for span in spans) == ["eu", "us"]


def test_closing_closes_all(kmss: NamedKmss, tmp_path: Path) -> None:
    kmss.close()
    with pytest.raises(NotImplementedError):
        NamedKmss.from_settings(NamedKmss.Settings(type="named", kmss={}), tmp_path)  # type: ignore[call-arg]
