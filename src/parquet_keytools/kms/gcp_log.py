"""Silence in the log of Google's libraries while keys and tokens pass through them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

_LOGGERS = (
    "google.auth.transport.requests",
    "google.cloud.kms_v1.services.key_management_service.transports.grpc",
    "google.cloud.kms_v1.services.key_management_service.transports.rest",
    "google.cloud.kms_v1.services.key_management_service.transports.rest_base",
)
"""Those that log whole requests and answers at DEBUG; a filter of a logger does not hold for the ones below it."""

_in_our_call: ContextVar[bool] = ContextVar("parquet_keytools_gcp_call", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep these loggers silent in this thread: what they log has keys and access tokens in it."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_not_our_call)
    token = _in_our_call.set(True)
    try:
        yield
    finally:
        _in_our_call.reset(token)


def _not_our_call(record: logging.LogRecord) -> bool:
    return not _in_our_call.get()
