"""The public names of the audit log."""

from parquet_keytools.runtime.audit import LOGGER_NAME, JsonFormatter, KeyUse, about

__all__ = ["LOGGER_NAME", "JsonFormatter", "KeyUse", "about"]
