"""What OpenTelemetry receives, and that nothing depends on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_remote_kms import FakeRemoteKms
from faults import TurnedClock
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from virtual_time import VirtualTime

from parquet_keytools import Keytools, SecretBytes, parse_configuration, telemetry
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    MasterKeyNotFoundError,
)
from parquet_keytools.keys.key_wrapping import KekCache
from parquet_keytools.kms.client import WrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one

KEY = SecretBytes(b"CANARY-of-a-key!")


class Watched:
    """OpenTelemetry with everything in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        telemetry.use_providers(MeterProvider([self.reader]), self.tracers)

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Return attributes and value, or count, of each series of a metric."""
        data = self.reader.get_metrics_data()
        return [
            (
                {key.removeprefix("parquet_keytools."): value for key, value in (point.attributes or {}).items()},
                getattr(point, "value", None) or getattr(point, "count", None),
            )
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == f"parquet_keytools.{name}"
            for point in metric.data.data_points
        ]

    def sum(self, name: str) -> float:
        """Return the sum of a histogram over all its series."""
        data = self.reader.get_metrics_data()
        return sum(
            getattr(point, "sum", 0.0)
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == f"parquet_keytools.{name}"
            for point in metric.data.data_points
        )

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans.get_finished_spans() if span.name == f"parquet_keytools.{name}"]


@pytest.fixture
def watched() -> Iterator[Watched]:
    yield Watched()
    telemetry.use_providers()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("parquet_keytools."): value for key, value in (span.attributes or {}).items()}


def refuse_k2(operation: str, master_key_id: str, seconds: float) -> None:
    if master_key_id == "k2":
        raise KmsAccessDeniedError(backend="fake_remote", operation=operation, master_key_id=master_key_id)


# --- metrics ---


def test_keys_and_calls(watched: Watched) -> None:
    kms = FakeRemoteKms(refuse_k2)
    kms.wrap_many([WrapRequest(KEY, f"k{number}") for number in range(5)])
    kms.describe("k1")
    wrap = {"backend": "fake_remote", "operation": "wrap"}
    ok, denied = {"outcome": "ok"}, {"outcome": "KmsAccessDeniedError"}
    assert watched.points("kms.keys") == [(wrap | ok, 4), (wrap | denied, 1)]
    assert watched.points("kms.operation.keys") == [(wrap, 1)]
    describe = {"backend": "fake_remote", "operation": "describe"}
    expected = {(*(wrap | ok).values(), 4), (*(wrap | denied).values(), 1), (*(describe | ok).values(), 1)}
    for name in ("kms.calls", "kms.call.duration"):
        assert {(*labels.values(), number) for labels, number in watched.points(name)} == expected
    kms.close()


def test_retries_and_waits(watched: Watched) -> None:
    errors = iter([KmsThrottledError(backend="fake_remote", operation="wrap")] * 2)

    def on_try(*_: object) -> None:
        for error in errors:
            raise error

    kms = FakeRemoteKms(on_try, max_calls_per_second=50)
    wrap_one(kms, KEY, "k")
    wrap_one(kms, KEY, "k")
    about = {"backend": "fake_remote", "operation": "wrap"}
    assert watched.points("kms.retries") == [(about | {"error": "KmsThrottledError"}, 2)]
    ((labels, number),) = watched.points("kms.throttle.wait")
    assert labels == about and number >= 1
    assert watched.points("kms.calls") == [(about | {"outcome": "ok"}, 2)]


@pytest.mark.parametrize(("name", "seconds"), [("kms.call.duration", 6.0), ("kms.throttle.wait", 2.0)])
def test_how_long_calls_take_and_wait(watched: Watched, name: str, seconds: float) -> None:
    clock = VirtualTime()
    # One call every 4 seconds: the second one waits for half of them, and then takes as long as the first.
    kms = FakeRemoteKms(lambda *_: clock.advance(2), clock.source(), max_calls_per_second=0.25)
    wrap_one(kms, KEY, "k")
    wrap_one(kms, KEY, "k")
    assert watched.sum(name) == pytest.approx(seconds)


def test_a_call_about_no_master_key_names_none(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    kms = FakeRemoteKms()
    kms.telemetry_key_ids = True
    kms._operation("connect").call(None, lambda _: None)
    kms._operation("wrap").call("k1", lambda _: None)
    assert [attributes(span).get("master_key_id") for span in watched.named("kms.call")] == [None, "k1"]
    assert caplog.records == []


def test_the_cache(watched: Watched) -> None:
    cache: KekCache[str, str] = KekCache(TurnedClock(), "unwrapped")

    def load(keys: list[str]) -> list[str | KmsError]:
        return [*keys]

    cache.get_many(["a", "b"], load, 10)
    cache.get_many(["a", "b", "c", "a"], load, 10)
    assert {(point["result"], number) for point, number in watched.points("kek_cache.requests")} == {
        ("hit", 2),
        ("miss", 3),
    }


# --- spans ---


def test_a_span_for_the_operation_and_one_for_each_call_in_it(watched: Watched) -> None:
    """They are connected although the calls are made in other threads."""
    kms = FakeRemoteKms(refuse_k2)
    with watched.tracers.get_tracer("application").start_as_current_span("job") as job:
        kms.wrap_many([WrapRequest(KEY, f"k{number}") for number in range(5)])
    (operation,) = watched.named("kms.wrap")
    assert operation.parent is not None and operation.parent.span_id == job.get_span_context().span_id
    assert attributes(operation) == {
        "backend": "fake_remote",
        "keys": 5,
        "keys_failed": 1,
        "error.type": "KmsAccessDeniedError",
    }
    calls = watched.named("kms.call")
    assert {call.parent.span_id for call in calls if call.parent} == {operation.context.span_id}
    assert sorted(attributes(call)["tries"] for call in calls) == [1] * 5
    assert sum(not call.status.is_ok for call in calls) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN
    kms.close()


def test_describe(watched: Watched) -> None:
    def missing(operation: str, master_key_id: str, seconds: float) -> None:
        raise MasterKeyNotFoundError(backend="b", operation=operation, master_key_id=master_key_id)

    with pytest.raises(MasterKeyNotFoundError):
        FakeRemoteKms(missing).describe("k")
    (span,) = watched.named("kms.describe")
    assert not span.status.is_ok and attributes(span)["error.type"] == "MasterKeyNotFoundError"


def test_retries_are_events(watched: Watched) -> None:
    errors = iter([ConnectionResetError("s.CANARY")] * 2)

    def on_try(*_: object) -> None:
        for error in errors:
            raise error

    wrap_one(FakeRemoteKms(on_try), KEY, "k")
    (call,) = watched.named("kms.call")
    assert [event.name for event in call.events] == ["retry"] * 2
    assert attributes(call)["tries"] == 3


def test_no_master_key_is_named_unless_it_is_asked_for(watched: Watched) -> None:
    kms = FakeRemoteKms(refuse_k2)
    kms.wrap_many([WrapRequest(KEY, "k1"), WrapRequest(KEY, "k2")])
    text = "".join(span.to_json() for span in watched.spans.get_finished_spans())
    assert "k1" not in text and "k2" not in text
    kms.telemetry_key_ids = True
    kms.wrap_many([WrapRequest(KEY, "k1"), WrapRequest(KEY, "k2")])
    assert attributes(watched.named("kms.wrap")[-1])["master_key_ids"] == ("k1", "k2")
    assert {attributes(call).get("master_key_id") for call in watched.named("kms.call")} == {None, "k1", "k2"}
    metrics = watched.reader.get_metrics_data()
    assert metrics is not None and "k1" not in metrics.to_json()
    kms.close()


def test_the_configuration_asks_for_it(watched: Watched, tmp_path: Path) -> None:
    kms = {"type": "in_memory", "keys": ["footer", "pii"], "telemetry_key_ids": True}
    tables = {"t": {"footer_key": "footer", "column_keys": {"pii": ["a"]}, "unlisted_columns": "plaintext"}}
    tools = Keytools(parse_configuration({"version": 1, "kms": kms, "tables": tables}))
    tools.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    assert {attributes(span)["master_key_ids"] for span in watched.named("kms.wrap")} == {("footer",), ("pii",)}


def test_nothing_secret_is_in_it(watched: Watched) -> None:
    def foreign(*_: object) -> None:
        raise RuntimeError("s.CANARY of a response")

    kms = FakeRemoteKms(foreign, max_tries=2)
    kms.telemetry_key_ids = True
    with pytest.raises(KmsError):
        wrap_one(kms, KEY, "k")
    kms.on_try = lambda *_: None
    wrapped = wrap_one(kms, KEY, "k")
    unwrap_one(kms, wrapped, "k")
    metrics = watched.reader.get_metrics_data()
    text = "".join(span.to_json() for span in watched.spans.get_finished_spans())
    text += metrics.to_json() if metrics else ""
    assert "CANARY" not in text and wrapped not in text and KEY.reveal().hex() not in text


# --- it may break, or be missing ---


class BrokenProcessor(SpanProcessor):
    """Raises whenever it is called."""

    def on_start(self, *_: object, **__: object) -> None:
        raise RuntimeError("on_start")

    def on_end(self, *_: object, **__: object) -> None:
        raise RuntimeError("on_end")


class BrokenExporter(InMemorySpanExporter):
    """Raises on every export."""

    def export(self, spans: object) -> Any:
        raise RuntimeError("export")


class Broken:
    """Fails every operation."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("broken", ["processor", "providers", "instruments", "exporter"])
def test_what_breaks_in_it_breaks_nothing_else(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracers = TracerProvider()
    if broken == "processor":
        tracers.add_span_processor(BrokenProcessor())
        telemetry.use_providers(MeterProvider(), tracers)
    elif broken == "exporter":
        tracers.add_span_processor(SimpleSpanProcessor(BrokenExporter()))
        telemetry.use_providers(MeterProvider(), tracers)
    elif broken == "providers":
        telemetry.use_providers(Broken(), Broken())
    else:
        telemetry.use_providers(MeterProvider(), tracers)
        instruments = telemetry.instruments_of_process()
        assert instruments is not None
        instruments.tracer = Broken()
        instruments.of = {}
    try:
        kms = FakeRemoteKms(refuse_k2)
        assert unwrap_one(kms, wrap_one(kms, KEY, "k"), "k") == KEY
        with pytest.raises(KmsAccessDeniedError):
            wrap_one(kms, KEY, "k2")
        with ThreadPoolExecutor(8) as pool:
            assert len(list(pool.map(lambda _: wrap_one(kms, KEY, "k"), range(50)))) == 50
    finally:
        telemetry.use_providers()


def test_without_opentelemetry() -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from parquet_keytools import SecretBytes
from parquet_keytools.kms.client import UnwrapRequest, WrapRequest
from parquet_keytools.kms.in_memory import InMemoryKms
kms = InMemoryKms({"k": bytes(16)})
(wrapped_key,) = kms.wrap_many([WrapRequest(SecretBytes(bytes(16)), "k")])
print(kms.unwrap_many([UnwrapRequest(wrapped_key, "k")])[0].reveal() == bytes(16))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_it_is_imported_when_there_is_something_to_tell() -> None:
    program = """
import sys
import parquet_keytools.keytools, parquet_keytools.kms.remote_client
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
