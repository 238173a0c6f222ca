"""Metrics and traces through OpenTelemetry, if it is installed.

OpenTelemetry is imported at the first measurement. Its failures are ignored: telemetry must not break an
operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from parquet_keytools.runtime.threads_and_forks import ForkSafeLock

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

NAME = "parquet_keytools"
"""Name of the meter and the tracer, and prefix of all names."""

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
_KEYS = [1, 2, 3, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000]

COUNTERS = {
    "kms.calls": ("{call}", "Calls to the KMS, each with all its retries"),
    "kms.retries": ("{try}", "Retries"),
    "kms.keys": ("{key}", "Keys wrapped, unwrapped and re-wrapped"),
    "kek_cache.requests": ("{request}", "Lookups in a cache of KEKs"),
}
HISTOGRAMS: dict[str, tuple[str, str, list[Any]]] = {
    "kms.call.duration": ("s", "Duration of a call to the KMS, with all its retries", _SECONDS),
    "kms.throttle.wait": ("s", "Time that an attempt was held back by throttling", _SECONDS),
    "kms.operation.keys": ("{key}", "Keys in one operation", _KEYS),
}


def count(name: str, number: int, attributes: Attributes) -> None:
    """Add to a counter of `COUNTERS`."""
    instruments = instruments_of_process()
    if instruments is not None and number:
        with contextlib.suppress(Exception):
            instruments.of[name].add(number, _named(attributes))


def measure(name: str, value: float, attributes: Attributes) -> None:
    """Record a value in a histogram of `HISTOGRAMS`."""
    instruments = instruments_of_process()
    if instruments is not None:
        with contextlib.suppress(Exception):
            instruments.of[name].record(value, _named(attributes))


def _named(attributes: Attributes) -> Attributes:
    return {f"{NAME}.{key}": value for key, value in attributes.items()}


class Span:
    """A span over a `with` block. It records the class of an exception, but not its text."""

    def __init__(self, name: str, attributes: Attributes) -> None:
        self._name = name
        self._attributes = attributes
        self._span: Any = None
        self._context: Any = None

    def __enter__(self) -> Self:
        instruments = instruments_of_process()
        if instruments is not None:
            with contextlib.suppress(Exception):
                self._context = instruments.tracer.start_as_current_span(
                    f"{NAME}.{self._name}",
                    attributes=_named(self._attributes),
                    # A recorded exception includes its text and traceback.
                    record_exception=False,
                    set_status_on_exception=False,
                )
                self._span = self._context.__enter__()
        return self

    def note(self, **attributes: str | int | float | bool) -> None:
        """Add attributes."""
        self._change(lambda span: span.set_attributes(_named(attributes)))

    def event(self, name: str, **attributes: str | int | float | bool) -> None:
        """Add an event."""
        self._change(lambda span: span.add_event(name, _named(attributes)))

    def failed(self, kind: str) -> None:
        """Mark the span as failed, with the name of an error class."""

        def fail(span: Any) -> None:
            span.set_attribute("error.type", kind)
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR)

        self._change(fail)

    def _change(self, change: Callable[[Any], object]) -> None:
        if self._span is not None:
            with contextlib.suppress(Exception):
                change(self._span)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.failed(kind.__name__)
        if self._context is not None:
            with contextlib.suppress(Exception):
                self._context.__exit__(None, None, None)


def use_providers(meter_provider: Any = None, tracer_provider: Any = None) -> None:
    """Set the OpenTelemetry providers; None selects the global provider."""
    _State.instruments = _NOT_MADE
    _State.providers = (meter_provider, tracer_provider)


class _Instruments:
    """The tracer and the meter's instruments."""

    def __init__(self, meter_provider: Any, tracer_provider: Any) -> None:
        from opentelemetry import metrics, trace

        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self.tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        self.of: dict[str, Any] = {}
        for name, (unit, description) in COUNTERS.items():
            self.of[name] = meter.create_counter(f"{NAME}.{name}", unit=unit, description=description)
        for name, (unit, description, boundaries) in HISTOGRAMS.items():
            self.of[name] = meter.create_histogram(
                f"{NAME}.{name}",
                unit=unit,
                description=description,
                explicit_bucket_boundaries_advisory=boundaries,
            )


_NOT_MADE: Any = object()


class _State:
    lock = ForkSafeLock()
    providers: tuple[Any, Any] = (None, None)
    instruments: _Instruments | None = _NOT_MADE


def instruments_of_process() -> _Instruments | None:
    """Return the instruments; None if OpenTelemetry is missing or broken."""
    if _State.instruments is _NOT_MADE:
        with _State.lock:
            if _State.instruments is _NOT_MADE:
                try:
                    _State.instruments = _Instruments(*_State.providers)
                except Exception:
                    _State.instruments = None
    return _State.instruments
