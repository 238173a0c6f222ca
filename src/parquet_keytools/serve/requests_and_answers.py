"""HTTP requests (RFC 9110) and their responses, shared by plain HTTP and S3.

A response is the list of a folder, a file with conditions and ranges, or a refusal. The access log is here, too.
"""

from __future__ import annotations

import html
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import quote, unquote, unquote_to_bytes

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    FileChangedError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.serve.served_tree import FileReader, ServedFile, ServedTree

LOGGER_NAME = "parquet_keytools.access"
"""Logger that gets one record per request."""

_log = logging.getLogger(LOGGER_NAME)


class RefusedRequestError(Exception):
    """The server refuses a request with an HTTP status, an S3 error code and facts for the S3 error document."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})


@dataclass(frozen=True)
class ServedRequest:
    """An HTTP request.

    Attributes:
        method: GET or HEAD.
        raw_path: Path as sent, percent-encoded, without the query.
        raw_query: Text after the question mark.
        headers: Name in lower case -> values, in the order of the request.
        client: IP address of the client.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, tuple[str, ...]]
    client: str = ""

    def header(self, name: str) -> str | None:
        """Return the value of a header, or None.

        Raises:
            RefusedRequestError: The header is repeated. A proxy may have read the other value.
        """
        values = self.headers.get(name, ())
        if len(values) > 1:
            raise RefusedRequestError(400, "InvalidRequest", f"The request has {len(values)} {name} headers.")
        return values[0].strip() if values else None

    @property
    def path(self) -> str:
        """The path, decoded once; a path that is not UTF-8 is refused."""
        return decoded(self.raw_path)

    @property
    def query(self) -> list[tuple[str, str]]:
        """Decoded names and values of the query, in the order of the request."""
        pairs = (part.partition("=") for part in self.raw_query.split("&") if part)
        return [(decoded(name), decoded(value)) for name, _, value in pairs]


_MOST_REMEMBERED = 100_000
"""Pairs of client and file, about 20 MB."""


@dataclass(frozen=True)
class ServedRange:
    """A range of a file to send; the reader stays open while it is sent."""

    opened: AbstractContextManager[FileReader]
    start: int
    length: int


class BegunReads:
    """The version of each file that each client began to read, so that no client mixes two versions.

    A client is an IP address: a reader uses several connections, and may reconnect between requests. Several
    readers behind one address count as one client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._etags: OrderedDict[tuple[str, str], str] = OrderedDict()

    def begin(self, client: str, file: ServedFile) -> None:
        """Remember the version that a client begins to read; drop the least recently used one above the limit."""
        with self._lock:
            self._etags[client, file.key] = file.etag
            self._etags.move_to_end((client, file.key))
            if len(self._etags) > _MOST_REMEMBERED:
                self._etags.popitem(last=False)

    def listed(self, client: str, file: ServedFile) -> None:
        """Remember the version that a listing shows: clients do not send HEAD for a listed file."""
        if self._begun(client, file.key) is not None:
            self.begin(client, file)

    def is_other(self, client: str, file: ServedFile) -> bool:
        """Return whether a client began to read another version; its first range begins this version."""
        begun = self._begun(client, file.key)
        if begun is None:
            self.begin(client, file)
        return begun not in (None, file.etag)

    def _begun(self, client: str, key: str) -> str | None:
        with self._lock:
            if (etag := self._etags.get((client, key))) is not None:
                self._etags.move_to_end((client, key))
            return etag


@dataclass(frozen=True)
class ServedAnswer:
    """An HTTP response.

    Attributes:
        status: The HTTP status.
        headers: Headers of this response. The connection adds Content-Length and the headers of every response.
        body: The bytes, or a range of a file. HEAD reports only its length.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | ServedRange = b""


def decoded(text: str) -> str:
    """Return percent-decoded text of a URL, decoded once; text that is not UTF-8 is refused."""
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedRequestError(400, "InvalidURI", "The URL is not UTF-8.") from None


def write_access(facts: Mapping[str, object], secrets: Sequence[str]) -> None:
    """Write the access log record of a request, as a warning unless the outcome is `ok`.

    Protocol and key are empty if the request was refused before they were known. The key does not contain the
    secret of the URL. The outcome is `ok` or an error class; an error may occur after the status was sent. Text
    from the client that repeats a part of a secret is withheld.
    """
    facts = {
        name: WITHHELD if isinstance(fact, str) and _shows_a_secret(fact, secrets) else fact
        for name, fact in facts.items()
    }
    # repr() escapes line breaks, so that a name cannot forge another record.
    text = " ".join(f"{name}={value!r}" for name, value in facts.items() if value not in (None, ""))
    level = logging.INFO if facts["outcome"] == "ok" else logging.WARNING
    _log.log(level, "%s", text, extra={"access": facts})


WITHHELD = "(withheld: it repeats a secret)"
_PART_OF_SECRET = 8
"""Length of a shared part that is not chance, and too short to help an attacker guess the rest."""

_MOST_ENCODINGS = 5


def _shows_a_secret(text: str, secrets: Sequence[str]) -> bool:
    # Clients may percent-encode text several times.
    for _ in range(_MOST_ENCODINGS):
        text = unquote(text)
    text = text.casefold()
    parts = (
        secret.casefold()[start : start + _PART_OF_SECRET]
        for secret in secrets
        for start in range(len(secret) - _PART_OF_SECRET + 1)
    )
    return any(part in text for part in parts)


class AccessFormatter(logging.Formatter):
    """Formats access log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as JSON."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        return json.dumps({"time": at, **getattr(record, "access", {})})


def refusal_of(error: Exception, tree: ServedTree) -> RefusedRequestError:
    """Return the refusal for an error.

    Only this library's errors are quoted, since they hold no secrets. Clients see served paths and no other paths
    of this machine; the log has the whole text.
    """
    text = tree.as_served(str(error)) or f"The file cannot be served ({type(error).__name__}). The log says why."
    match error:
        case RefusedRequestError():
            return error
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return RefusedRequestError(404, "NoSuchKey", "There is no such file.")
        case FileChangedError():
            return RefusedRequestError(412, "PreconditionFailed", text)
        case KmsUnavailableError() | KmsThrottledError():
            return RefusedRequestError(503, "ServiceUnavailable", text, {"Retry-After": "5"})
        case ColumnAccessDeniedError() | KmsAccessDeniedError():
            return RefusedRequestError(403, "AccessDenied", text)
        case PermissionError():
            return RefusedRequestError(403, "AccessDenied", "The server may not read this.")
        case KmsError():
            return RefusedRequestError(502, "InternalError", text)
        case KeytoolsError():
            # Not a 5xx status: engines would retry for minutes.
            return RefusedRequestError(422, "InvalidObjectState", text)
        case OSError():
            return RefusedRequestError(502, "InternalError", f"The storage failed: {type(error).__name__}.")
        case _:
            return RefusedRequestError(500, "InternalError", f"The server failed: {type(error).__name__}.")


def logged_outcome(error: BaseException | None) -> tuple[str, str]:
    """Return outcome and reason for the log; the text of a foreign error may hold secrets and is left out."""
    match error:
        case None:
            return "ok", ""
        case RefusedRequestError():
            return error.code, str(error)
        case KeytoolsError():
            return type(error).__name__, str(error)
        case _:
            return type(error).__name__, ""


_RANGE = re.compile(r"bytes\s*=\s*(?:(\d{1,40})-(\d{0,40})|-(\d{1,40}))", re.IGNORECASE | re.ASCII)
_BEGINNING = re.compile(r"bytes\s*=\s*(?:-\d+|0+-)", re.IGNORECASE | re.ASCII)
_ETAG = re.compile(r'(W/)?"([^"]*)"')


def answer_http(tree: ServedTree, request: ServedRequest, key: str, reads: BegunReads) -> ServedAnswer:
    """Return a file (see `answer_file`), or the links of a folder if the key is empty or ends with a slash.

    The key of a folder without a slash is redirected, since links are relative.
    """
    if key and not key.endswith("/"):
        try:
            return answer_file(tree, request, key, reads)
        except FileNotFoundError:
            if not tree.is_folder(key):
                raise
        return redirect_to_folder(request)
    links = []
    for entry in tree.entries(key.rstrip("/")):
        name = entry.key.rpartition("/")[2] + "/" * entry.is_folder
        links.append(f'<a href="{_relative(name)}">{html.escape(name)}</a><br>\n')
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "default-src 'none'"}
    return ServedAnswer(200, headers, f"<!doctype html>\n{''.join(links)}".encode())


def redirect_to_folder(request: ServedRequest) -> ServedAnswer:
    """Return a redirect to the same path and query with a slash after the path."""
    query = f"?{request.raw_query}" if request.raw_query else ""
    return ServedAnswer(301, {"Location": f"{request.raw_path}/{query}"})


def _relative(name: str) -> str:
    """Return a name as a relative link that clients do not take for an absolute URL."""
    # `quote` encodes the colon. fsspec takes every link that begins with "http" for an absolute URL.
    link = quote(name)
    return f"%68{link[1:]}" if link.startswith("http") else link


def answer_file(tree: ServedTree, request: ServedRequest, key: str, reads: BegunReads) -> ServedAnswer:
    """Return the response to a GET or HEAD of a file.

    A client begins to read a file with HEAD, a GET of the whole file or its last bytes, or a listing. A later
    range without a condition is refused if the file was replaced since: the client would mix two versions.

    Raises:
        RefusedRequestError: A condition of the request does not hold, or the range is outside the file.
        FileNotFoundError: The file does not exist.
        KeytoolsError: The file cannot be decrypted.
    """
    file = tree.find(key)
    headers = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if file.modified is not None:
        headers["Last-Modified"] = formatdate(file.modified, usegmt=True)
    match _failed_condition(request, file):
        case 304:
            return ServedAnswer(304, headers)
        case 412:
            raise RefusedRequestError(412, "PreconditionFailed", "The file was replaced.", headers)
    wanted = request.header("range")
    if wanted is not None and not _may_be_range(request, file):
        wanted = None
    if request.method == "HEAD" or wanted is None or _BEGINNING.fullmatch(wanted.strip()):
        reads.begin(request.client, file)
    elif request.header("if-match") is None and reads.is_other(request.client, file):
        raise RefusedRequestError(
            412,
            "PreconditionFailed",
            "The file was replaced since this client began to read it. Open it again, beginning with HEAD.",
            headers,
        )
    bounds = byte_range(wanted, file.size_bytes) if wanted is not None else None
    start, length = bounds or (0, file.size_bytes)
    if bounds is not None:
        headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{file.size_bytes}"
    return ServedAnswer(206 if bounds else 200, headers, ServedRange(tree.open(file), start, length))


def byte_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """Return first byte and length of a range, or None to send the whole file.

    Several ranges, and text that is not a range, get the whole file (RFC 9110, section 14.2).

    Raises:
        RefusedRequestError: The range is outside the file.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        start, end = max(0, size_bytes - int(suffix)), size_bytes
    else:
        start = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= end:
        raise RefusedRequestError(
            416,
            "InvalidRange",
            f"The range is outside the file, which has {size_bytes} bytes.",
            {"Content-Range": f"bytes */{size_bytes}"},
        )
    return start, end - start


def _failed_condition(request: ServedRequest, file: ServedFile) -> int | None:
    """Return 304 or 412 if a condition fails (RFC 9110, section 13.2.2); times are too coarse for versions."""
    if (text := request.header("if-match")) is not None and not _names(text, file.etag, strong=True):
        return 412
    if (text := request.header("if-none-match")) is not None and _names(text, file.etag, strong=False):
        return 304
    return None


def _may_be_range(request: ServedRequest, file: ServedFile) -> bool:
    text = request.header("if-range")
    # A date is too coarse to identify a version, so If-Range with a date gets the whole file.
    return text is None or (text != "*" and _names(text, file.etag, strong=True))


def _names(text: str, etag: str, *, strong: bool) -> bool:
    if text.strip() == "*":
        return True
    return any(found[2] == etag and not (strong and found[1]) for found in _ETAG.finditer(text))
