"""The log of what was served: one record for each request, to the logger `parquet_keytools.access`."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

LOGGER_NAME = "parquet_keytools.access"

_log = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class Access:
    """One request.

    Attributes:
        client: Address and port of who asked.
        protocol: `http` or `s3`; empty where the request was refused before that was known.
        method: Of the request.
        key: The file or folder; empty where there is none, and without the secret that is part of the URL.
        start: First byte that was asked for; None where no file was opened.
        length: How many bytes were asked for.
        sent: How many were sent.
        status: The status of HTTP.
        outcome: `ok`, or the class of the error; that can also end an answer whose status had been sent.
        reason: What was wrong; empty where nothing was.
    """

    client: str
    protocol: str
    method: str
    key: str
    start: int | None
    length: int | None
    sent: int
    status: int
    outcome: str
    reason: str = ""


def write_access(access: Access) -> None:
    """Write a record: as a warning if something was refused."""
    facts = asdict(access)
    # Quoted as Python quotes: a line break in a name must not look like another record.
    text = " ".join(f"{name}={value!r}" for name, value in facts.items() if value not in (None, ""))
    _log.log(logging.INFO if access.outcome == "ok" else logging.WARNING, "%s", text, extra={"access": facts})


class AccessFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        return json.dumps({"time": at, **getattr(record, "access", {})})
