"""The audit log: who wrapped, unwrapped or re-wrapped which key with which master key, for which file.

It is off unless `audit_log` is true under `kms`. Records go to the logger `parquet_keytools.audit`; the
application configures its handlers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import getpass
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

LOGGER_NAME = "parquet_keytools.audit"

_log = logging.getLogger(LOGGER_NAME)
_subject: contextvars.ContextVar[str | None] = contextvars.ContextVar("parquet_keytools_subject", default=None)
_MAX_SUBJECT_LENGTH = 1_000


@dataclass(frozen=True)
class KeyUse:
    """One key that the KMS was requested to wrap, unwrap or re-wrap.

    Attributes:
        operation: `wrap`, `unwrap` or `rewrap`; of a master key itself `delete` or `cancel_deletion`.
        outcome: `ok`, or the class of the error.
        backend: Name of the KMS client.
        kms_instance: The `instance_id` of the configuration.
        new_master_key_id: The master key that re-wraps the key; None for other operations.
        principal: The caller's identity in the KMS, if the client knows it.
        subject: The file, folder or table that the key is for; None if unknown.
    """

    operation: str
    outcome: str
    backend: str
    kms_instance: str
    master_key_id: str
    new_master_key_id: str | None
    principal: str
    subject: str | None


@contextlib.contextmanager
def about(subject: object) -> Iterator[None]:
    """Set the file, folder or table that the keys used in a block are for. An inner block overrides an outer one.

    Args:
        subject: A path or `FileLocation`, recorded as text.
    """
    token = _subject.set(str(subject)[:_MAX_SUBJECT_LENGTH])
    try:
        yield
    finally:
        _subject.reset(token)


def current_subject() -> str | None:
    """Return the subject of the innermost `about` block."""
    return _subject.get()


def default_principal() -> str:
    """Return user and host of this process."""
    user = ""
    if sys.platform != "win32":
        with contextlib.suppress(ImportError, KeyError):
            import pwd

            user = pwd.getpwuid(os.geteuid()).pw_name
    if not user:
        try:
            user = getpass.getuser()
        except (OSError, KeyError, ImportError):
            user = "unknown"
    return f"{user}@{socket.gethostname()}"


def write(use: KeyUse) -> None:
    """Write a record. Exceptions of handlers are suppressed, since the key has already been used.

    The level of the audit logger applies, but not the level of the root logger.
    """
    try:
        if _log.level > logging.INFO or _log.manager.disable >= logging.INFO:
            return
        facts = asdict(use)
        # Quoted, because a line break in a name must not look like another record.
        text = " ".join(f"{name}={value!r}" for name, value in facts.items() if value is not None)
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, "%s", (text,), None, "write", facts)
        if not _log.hasHandlers():
            warn_of_no_handler()
        _log.handle(record)
    except Exception as error:
        # Like the handlers of the standard library.
        if logging.raiseExceptions and sys.stderr:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"parquet_keytools: an audit record was lost: {type(error).__name__}\n")


class JsonFormatter(logging.Formatter):
    """Formats each record of the audit log as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        facts = {name: getattr(record, name, None) for name in KeyUse.__dataclass_fields__}
        if record.name != LOGGER_NAME:
            facts = {"logger": record.name, "message": record.getMessage()}
        return json.dumps({"time": at, **facts, "process": record.process, "thread": record.threadName})


@functools.cache
def warn_of_no_handler() -> None:
    """Warn once if the audit log is on, and no handler takes its records."""
    text = "audit_log is on, but the logger %s has no handler: audit records are lost"
    logging.getLogger("parquet_keytools").warning(text, LOGGER_NAME)
