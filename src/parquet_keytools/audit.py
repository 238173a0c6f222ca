"""The audit log: who wrapped, unwrapped or rewrapped which key with which master key, for which file.

Off unless the configuration says `audit_log: true` under `kms`. Records go to the logger
`parquet_keytools.audit` of the standard library; where they go from there is for the application to say.
"""

from __future__ import annotations

import contextlib
import contextvars
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
    """One key that the KMS was asked to wrap, unwrap or rewrap.

    Attributes:
        operation: `wrap`, `unwrap` or `rewrap`.
        outcome: `ok`, or the class of the error.
        backend: Name of the KMS client.
        kms_instance: The `instance_id` of the configuration.
        new_master_key_id: The one that a rewrap goes to; None for all else.
        principal: Who asked, as the KMS knows him, where the client knows that.
        subject: The file, folder or table that the key is for; None where that is not known.
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
    """Say which file, folder or table the keys are for that the block uses; within another one, it is more exact.

    Args:
        subject: Its text is taken: a path, a `FileLocation`.
    """
    token = _subject.set(str(subject)[:_MAX_SUBJECT_LENGTH])
    try:
        yield
    finally:
        _subject.reset(token)


def current_subject() -> str | None:
    """Return what the innermost `about` says."""
    return _subject.get()


def default_principal() -> str:
    """Return user and host of this process, as the operating system knows them."""
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
    """Write a record. Nothing that a handler raises comes out: the key has been used, whatever becomes of this.

    The level of the root logger does not matter, for an audit log that is switched on has to come; that of
    this logger does.
    """
    try:
        if _log.level > logging.INFO or _log.manager.disable >= logging.INFO:
            return
        facts = asdict(use)
        # Quoted as Python quotes: a line break in a name must not look like another record.
        text = " ".join(f"{name}={value!r}" for name, value in facts.items() if value is not None)
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, "%s", (text,), None, "write", facts)
        if not _log.hasHandlers():
            _warn_of_no_handler()
        _log.handle(record)
    except Exception as error:
        # As the standard library's handlers do it.
        if logging.raiseExceptions and sys.stderr:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"parquet_keytools: an audit record was lost: {type(error).__name__}\n")


class JsonFormatter(logging.Formatter):
    """Formats a record of the audit log as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        facts = {name: getattr(record, name, None) for name in KeyUse.__dataclass_fields__}
        if record.name != LOGGER_NAME:
            facts = {"logger": record.name, "message": record.getMessage()}
        return json.dumps({"time": at, **facts, "process": record.process, "thread": record.threadName})


_warned = False


def _warn_of_no_handler() -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("parquet_keytools").warning(
            "the configuration says audit_log, and the logger %s has no handler: its records are lost", LOGGER_NAME
        )
