"""The public names of metrics and traces."""

from parquet_keytools.runtime.telemetry import NAME, use_providers

__all__ = ["NAME", "use_providers"]
