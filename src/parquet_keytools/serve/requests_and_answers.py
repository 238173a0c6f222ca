"""HTTP and S3 requests (RFC 9110), their responses, and the access log."""

from __future__ import annotations

import hashlib
import hmac
import html
import itertools
import json
import logging
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from urllib.parse import quote, unquote, unquote_to_bytes
from xml.sax.saxutils import escape

from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    FileChangedError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
)
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.serve.served_tree import ReadRange, ServedFile, ServedTree

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
    """A GET or HEAD request; path and query are percent-encoded as sent, and names of headers in lower case."""

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, tuple[str, ...]]
    client: str = ""

    def header(self, name: str) -> str | None:
        """Return the value of a header, or None; refuse a repeated one, which a proxy may read differently."""
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

    opened: AbstractContextManager[ReadRange]
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
        if (client, file.key) in self._etags:
            self.begin(client, file)

    def is_other(self, client: str, file: ServedFile) -> bool:
        """Return whether a client began to read another version; its first range begins this version."""
        begun = self._etags.get((client, file.key))
        if begun in (None, file.etag):
            self.begin(client, file)
        return begun not in (None, file.etag)


@dataclass(frozen=True)
class ServedAnswer:
    """An HTTP response; the connection adds Content-Length and the headers of every response."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | ServedRange = b""


def decoded(text: str) -> str:
    """Return percent-decoded text of a URL, decoded once; text that is not UTF-8 is refused."""
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedRequestError(400, "InvalidURI", "The URL is not UTF-8.") from None


def write_access(facts: Mapping[str, object], withheld: Sequence[str]) -> None:
    """Write the access log record of a request, as a warning unless the outcome is `ok`."""
    # Protocol and key are empty if the request was refused before they were known. Text from the client that
    # repeats a part of a secret is withheld.
    facts = {
        name: WITHHELD if isinstance(fact, str) and _shows_a_secret(fact, withheld) else fact
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


def _shows_a_secret(text: str, withheld: Sequence[str]) -> bool:
    # Clients may percent-encode text several times.
    for _ in range(_MOST_ENCODINGS):
        text = unquote(text)
    text = text.casefold()
    parts = (
        secret.casefold()[start : start + _PART_OF_SECRET]
        for secret in withheld
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
    """Return the refusal for an error, with its text if it is of this library, and only with served paths."""
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
    """Return a file, the links of a folder, or a redirect to the folder's key with a slash: links are relative."""
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
    """Return the response to a GET or HEAD of a file."""
    # A client begins to read a file with HEAD, a GET of the whole file or its last bytes, or a listing. A later
    # range without a condition is refused if the file was replaced since: the client would mix two versions.
    file = tree.find(key)
    headers = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if file.modified is not None:
        headers["Last-Modified"] = formatdate(file.modified, usegmt=True)
    # The order of RFC 9110, section 13.2.2; times are too coarse for versions.
    match = request.header("if-match")
    if match is not None and match != "*" and not _names(match, file.etag):
        raise RefusedRequestError(412, "PreconditionFailed", "The file was replaced.", headers)
    wanted = request.header("range")
    if wanted is not None and (text := request.header("if-range")) is not None:
        wanted = wanted if _names(text, file.etag) else None
    if request.method == "HEAD" or wanted is None or _BEGINNING.fullmatch(wanted.strip()):
        reads.begin(request.client, file)
    elif match is None and reads.is_other(request.client, file):
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
    """Return first byte and length of a range; None for several, or other text (RFC 9110, section 14.2)."""
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


def _names(text: str, etag: str) -> bool:
    """Return whether one of these ETags is this one; weak ones never are."""
    return any(found[2] == etag and not found[1] for found in _ETAG.finditer(text))


# --- the tree as one read-only S3 bucket; requests are signed with AWS Signature Version 4, in the header ---

ALGORITHM = "AWS4-HMAC-SHA256"
_MAX_SKEW = timedelta(minutes=15)
_UNSIGNED = "UNSIGNED-PAYLOAD"
_NO_PAYLOAD = hashlib.sha256(b"").hexdigest()
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM}\s+Credential=([^,\s]+)\s*,\s*SignedHeaders=([^,\s]+)\s*,\s*Signature=([0-9a-f]{{64}})"
)
_SCOPE = re.compile(r"([^/]+)/(\d{8})/([a-z0-9-]{1,64})/s3/aws4_request", re.ASCII)


@dataclass(frozen=True)
class KeyPair:
    """S3 credentials that are valid for one run of the server."""

    access_key_id: str = field(default_factory=lambda: "PK" + secrets.token_hex(9).upper())
    secret: SecretBytes = field(default_factory=lambda: SecretBytes(secrets.token_urlsafe(30).encode()))


def check_signature(request: ServedRequest, key_pair: KeyPair, now: datetime) -> None:
    """Check that a request is signed with the key pair and is recent."""
    text = request.header("authorization")
    if text is None:
        raise RefusedRequestError(403, "AccessDenied", "The request is not signed in its headers.")
    found = _AUTHORIZATION.fullmatch(text)
    date, payload = request.header("x-amz-date"), request.header("x-amz-content-sha256")
    if found is None or date is None or payload is None:
        raise _malformed("The Authorization header or a header that it needs is not valid.")
    credential, signed_headers, signature = found.groups()
    if payload not in (_UNSIGNED, _NO_PAYLOAD):
        raise RefusedRequestError(400, "XAmzContentSHA256Mismatch", "A read request must not have a payload.")
    scope = _SCOPE.fullmatch(credential)
    if scope is None or scope[2] != date[:8]:
        raise _malformed("The scope of the credential is not valid.")
    if not hmac.compare_digest(scope[1].encode(), key_pair.access_key_id.encode()):
        message = "This access key does not belong to this run of the server."
        raise RefusedRequestError(403, "InvalidAccessKeyId", message)
    try:
        age = now - datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise RefusedRequestError(403, "AccessDenied", "X-Amz-Date is not valid.") from None
    if abs(age) > _MAX_SKEW:
        message = "The request time differs too much from the server time."
        raise RefusedRequestError(403, "RequestTimeTooSkewed", message)
    key = b"AWS4" + key_pair.secret.reveal()
    names = (scope[2], scope[3], "s3", "aws4_request")
    canonical = hashlib.sha256(_canonical_request(request, signed_headers, payload)).hexdigest()
    for part in (*names, f"{ALGORITHM}\n{date}\n{'/'.join(names)}\n{canonical}"):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(key.hex().encode(), signature.encode()):
        raise RefusedRequestError(403, "SignatureDoesNotMatch", "The signature does not match the request.")


def _canonical_request(request: ServedRequest, signed_headers: str, payload: str) -> bytes:
    names = signed_headers.split(";")
    unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in names]
    if names != sorted(set(names)) or "host" not in names or unsigned:
        message = "The host header and all x-amz-* headers must be signed, each once."
        raise RefusedRequestError(403, "AccessDenied", message)
    if not set(names) <= request.headers.keys():
        raise RefusedRequestError(403, "AccessDenied", "A signed header is missing.")
    lines = [f"{name}:{','.join(' '.join(value.split()) for value in request.headers[name])}\n" for name in names]
    pairs = sorted((_encoded(name), _encoded(value)) for name, value in request.query)
    return "\n".join(
        (
            request.method,
            quote(unquote_to_bytes(request.raw_path), safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            "".join(lines),
            signed_headers,
            payload,
        )
    ).encode("latin-1", "replace")


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


def _malformed(message: str) -> RefusedRequestError:
    """Return an error that names the region, so that clients can sign the request again for it."""
    text = f"{message} Use the region {REGION!r}."
    return RefusedRequestError(400, "AuthorizationHeaderMalformed", text, facts={"Region": REGION})


BUCKET = "view"
REGION = "us-east-1"
"""The region that the server names. Requests may be signed for any region."""

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_BUCKETS = (
    "<Owner><ID>keytools</ID></Owner><Buckets><Bucket>"
    f"<Name>{BUCKET}</Name><CreationDate>1970-01-01T00:00:00.000Z</CreationDate></Bucket></Buckets>"
)
_MOST_KEYS = 1000
_LISTING = {
    "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "marker", "encoding-type",
    "fetch-owner", "x-id",
}  # fmt: skip
"""The supported query parameters of a listing."""


def answer_s3(
    tree: ServedTree,
    key_pair: KeyPair,
    request: ServedRequest,
    reads: BegunReads,
    keep: Callable[[], None],
) -> ServedAnswer:
    """Return the response to an S3 request, whose path has the form `/view/key`."""
    check_signature(request, key_pair, datetime.now(UTC))
    keep()
    query: dict[str, str] = {}
    for name, value in request.query:
        if name in query:
            raise RefusedRequestError(400, "InvalidArgument", f"The query parameter {name!r} is repeated.")
        query[name] = value
    bucket, _, key = request.path.removeprefix("/").partition("/")
    if not bucket and not key:
        _refuse_others(query, {"x-id", "max-buckets", "prefix"})
        return _xml("ListAllMyBucketsResult", _BUCKETS)
    if bucket != BUCKET:
        raise RefusedRequestError(404, "NoSuchBucket", f"The only bucket is {BUCKET}.")
    if key:
        _refuse_others(query, {"x-id", "partNumber"})
        if query.get("partNumber", "1") != "1":
            raise RefusedRequestError(416, "InvalidPartNumber", "Every file has one part.")
        return answer_file(tree, request, key, reads)
    if request.method == "HEAD":
        return ServedAnswer(200, {"x-amz-bucket-region": REGION})
    if "location" in query:
        return _xml("LocationConstraint", "")
    _refuse_others(query, _LISTING)
    if query.get("list-type", "2") != "2":
        raise RefusedRequestError(400, "InvalidArgument", "The list-type must be 2.")
    return _xml("ListBucketResult", _listing(tree, query, request.client, reads))


def _refuse_others(query: dict[str, str], known: set[str]) -> None:
    if other := sorted(query.keys() - known):
        raise RefusedRequestError(501, "NotImplemented", f"The parameter {other[0]!r} is not supported.")


def _listing(tree: ServedTree, query: dict[str, str], client: str, reads: BegunReads) -> str:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    most = _most_keys(query.get("max-keys", str(_MOST_KEYS)))
    encoding = query.get("encoding-type")
    if encoding not in (None, "url"):
        raise RefusedRequestError(400, "InvalidArgument", "The encoding-type must be url.")
    if delimiter not in ("", "/"):
        raise RefusedRequestError(501, "NotImplemented", "The delimiter must be a slash.")

    def text(key: str) -> str:
        return escape(key) if encoding is None else quote(key, safe="/-_.~")

    # ListObjects version 1 has no list-type, and continues after a key instead of a token.
    is_first_version = "list-type" not in query
    token = None if is_first_version else query.get("continuation-token")
    after = query.get("marker" if is_first_version else "start-after", "")
    if token is not None:
        after = unquote(token)
    found = list(itertools.islice(_entries(tree, prefix, delimiter, after), most + 1)) if most else []
    parts = [
        f"<Name>{BUCKET}</Name><Prefix>{text(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
        f"<IsTruncated>{str(len(found) > most).lower()}</IsTruncated>"
    ]
    if delimiter:
        parts.append(f"<Delimiter>{text(delimiter)}</Delimiter>")
    if encoding is not None:
        parts.append("<EncodingType>url</EncodingType>")
    if is_first_version:
        parts.append(f"<Marker>{text(after)}</Marker>")
    elif token is not None:
        parts.append(f"<ContinuationToken>{escape(token)}</ContinuationToken>")
    elif after:
        parts.append(f"<StartAfter>{text(after)}</StartAfter>")
    if len(found) > most:
        last = found[most - 1][0]
        parts.append(
            f"<NextMarker>{text(last)}</NextMarker>"
            if is_first_version
            else f"<NextContinuationToken>{_encoded(last)}</NextContinuationToken>"
        )
    files, folders = [], []
    for key, is_folder in found[:most]:
        if is_folder:
            folders.append(f"<CommonPrefixes><Prefix>{text(key)}</Prefix></CommonPrefixes>")
            continue
        try:
            file = tree.find_listed(key)
        except FileNotFoundError:
            # The file was removed after its folder was listed.
            continue
        reads.listed(client, file)
        modified = datetime.fromtimestamp(file.modified or 0, UTC).isoformat(timespec="milliseconds")
        files.append(
            f"<Contents><Key>{text(key)}</Key><LastModified>{modified[:-6]}Z</LastModified>"
            f"<ETag>&quot;{file.etag}&quot;</ETag><Size>{file.size_bytes}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    if not is_first_version:
        parts.append(f"<KeyCount>{len(files) + len(folders)}</KeyCount>")
    return "".join(parts + files + folders)


def _entries(tree: ServedTree, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, bool]]:
    """Yield keys after `after`, each with False, and common prefixes, each with True."""
    folder = prefix.rpartition("/")[0]
    if delimiter == "/":
        # Subfolders become common prefixes, so their content is not listed.
        try:
            entries = tree.entries(folder)
        except FileNotFoundError:
            return
        for entry in entries:
            key = entry.key + "/" * entry.is_folder
            is_later = key.encode() > after.encode()
            if entry.is_folder and after != key and after.startswith(key):
                is_later = next(tree.keys(entry.key, after=after), None) is not None
            if key.startswith(prefix) and is_later:
                yield key, entry.is_folder
        return
    for key in tree.keys(folder, after=after):
        if key.startswith(prefix):
            yield key, False


def error_document(error: RefusedRequestError) -> bytes:
    """Return the S3 error document of a refusal."""
    message = "".join(character if character.isprintable() else "?" for character in str(error))
    text = f"<Code>{error.code}</Code><Message>{escape(message)}</Message>"
    text += "".join(f"<{name}>{escape(fact)}</{name}>" for name, fact in error.facts.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{text}</Error>'.encode()


def _xml(root: str, content: str) -> ServedAnswer:
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE}">{content}</{root}>'
    return ServedAnswer(200, {"Content-Type": "application/xml"}, document.encode())


def _most_keys(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RefusedRequestError(400, "InvalidArgument", "max-keys is not a number.")
    return min(int(text), _MOST_KEYS)
