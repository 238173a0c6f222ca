"""A request as it came, what is answered to it, what is refused, and what the log of accesses says of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from urllib.parse import unquote_to_bytes

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    FileChangedError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.serve.served_tree import FileReader

LOGGER_NAME = "parquet_keytools.access"
"""It gets one record for each request."""

_log = logging.getLogger(LOGGER_NAME)


class RefusedRequestError(Exception):
    """A request is not answered with what it asks for.

    Attributes:
        status: The status of HTTP.
        code: What S3 calls it.
        headers: Of the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class ServedRequest:
    """A request.

    Attributes:
        method: GET or HEAD.
        raw_path: As it was sent, with its percent signs, and without the query.
        raw_query: What follows the question mark.
        headers: Name in lower case -> its values, in their order.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, tuple[str, ...]]

    def header(self, name: str) -> str | None:
        """Return a header that can be there once.

        Raises:
            RefusedRequestError: It is there twice: who is before us may have read the other one.
        """
        values = self.headers.get(name, ())
        if len(values) > 1:
            raise RefusedRequestError(400, "InvalidRequest", f"The header {name} is there {len(values)} times.")
        return values[0].strip() if values else None

    @property
    def path(self) -> str:
        """The path, decoded once; what is not UTF-8 is refused."""
        return decoded(self.raw_path)

    @property
    def query(self) -> list[tuple[str, str]]:
        """Names and values of the query, decoded, in their order."""
        pairs = (part.partition("=") for part in self.raw_query.split("&") if part)
        return [(decoded(name), decoded(value)) for name, _, value in pairs]


@dataclass(frozen=True)
class ServedRange:
    """Bytes of a file that are an answer.

    Attributes:
        opened: Gives the reader, for as long as the answer is sent.
        key: Of the file.
        start: The first byte.
        length: How many.
    """

    opened: AbstractContextManager[FileReader]
    key: str
    start: int
    length: int


@dataclass(frozen=True)
class ServedAnswer:
    """An answer.

    Attributes:
        status: The status of HTTP.
        headers: Without those that every answer has, and without Content-Length where a body is given.
        body: All bytes of it, or those of a file; with HEAD they are counted and not sent.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | ServedRange = b""


def decoded(text: str) -> str:
    """Return text of an URL, decoded once.

    Raises:
        RefusedRequestError: It is not UTF-8.
    """
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedRequestError(400, "InvalidURI", "The URL is not UTF-8.") from None


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


def refusal_of(error: Exception) -> RefusedRequestError:
    """Return how an error is answered; errors of ours hold no secrets, others are not quoted."""
    match error:
        case RefusedRequestError():
            return error
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return RefusedRequestError(404, "NoSuchKey", "There is no such file.")
        case FileChangedError():
            return RefusedRequestError(412, "PreconditionFailed", str(error))
        case KmsUnavailableError() | KmsThrottledError():
            return RefusedRequestError(503, "ServiceUnavailable", str(error), {"Retry-After": "5"})
        case ColumnAccessDeniedError() | KmsAccessDeniedError():
            return RefusedRequestError(403, "AccessDenied", str(error))
        case PermissionError():
            return RefusedRequestError(403, "AccessDenied", "The server may not read this.")
        case KmsError():
            return RefusedRequestError(502, "InternalError", str(error))
        case KeytoolsError():
            # No status of 500 and more: engines would try the same again, for minutes.
            return RefusedRequestError(422, "InvalidObjectState", str(error))
        case OSError():
            return RefusedRequestError(502, "InternalError", f"The storage failed: {type(error).__name__}.")
        case _:
            return RefusedRequestError(500, "InternalError", f"The server failed: {type(error).__name__}.")


def logged_outcome(error: BaseException | None) -> tuple[str, str]:
    """Return what the log says of an error: its kind, and what was wrong; texts of others may hold secrets."""
    match error:
        case None:
            return "ok", ""
        case RefusedRequestError():
            return error.code, str(error)
        case KeytoolsError():
            return type(error).__name__, str(error)
        case _:
            return type(error).__name__, ""
