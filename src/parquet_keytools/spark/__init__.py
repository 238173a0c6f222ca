"""Spark: its own Parquet reader and writer with the KMS clients of a configuration."""

from __future__ import annotations

from parquet_keytools.spark.session import (
    PLAINTEXT_FILES,
    build_jar,
    configure,
    configure_session,
    session_settings,
)

__all__ = ["PLAINTEXT_FILES", "build_jar", "configure", "configure_session", "session_settings"]
