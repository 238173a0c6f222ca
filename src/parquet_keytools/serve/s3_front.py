"""Serve a tree as one read-only S3 bucket.

Requests are signed with AWS Signature Version 4, in the header.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote_to_bytes
from xml.sax.saxutils import escape

from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.serve.requests_and_answers import (
    BegunReads,
    RefusedRequestError,
    ServedAnswer,
    ServedRequest,
    answer_file,
)
from parquet_keytools.serve.served_tree import ServedTree

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


@dataclass(frozen=True)
class _Claim:
    credential: str
    date: str
    signed_headers: str
    signature: str
    payload: str


def check_signature(request: ServedRequest, key_pair: KeyPair, now: datetime) -> None:
    """Check that a request is signed with the key pair and is recent.

    Raises:
        RefusedRequestError: The signature is missing, malformed, wrong or expired.
    """
    claim = _claim_of_header(request)
    scope = _SCOPE.fullmatch(claim.credential)
    if scope is None or scope[2] != claim.date[:8]:
        raise _malformed("The scope of the credential is not valid.")
    if not hmac.compare_digest(scope[1].encode(), key_pair.access_key_id.encode()):
        raise _refused("InvalidAccessKeyId", "This access key does not belong to this run of the server.")
    _check_time(claim, now)
    key = b"AWS4" + key_pair.secret.reveal()
    names = (scope[2], scope[3], "s3", "aws4_request")
    canonical = hashlib.sha256(_canonical_request(request, claim)).hexdigest()
    for part in (*names, f"{ALGORITHM}\n{claim.date}\n{'/'.join(names)}\n{canonical}"):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(key.hex().encode(), claim.signature.encode()):
        raise _refused("SignatureDoesNotMatch", "The signature does not match the request.")


def _check_time(claim: _Claim, now: datetime) -> None:
    try:
        age = now - datetime.strptime(claim.date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise _refused("AccessDenied", "X-Amz-Date is not valid.") from None
    if abs(age) > _MAX_SKEW:
        raise _refused("RequestTimeTooSkewed", "The request time differs too much from the server time.")


def _claim_of_header(request: ServedRequest) -> _Claim:
    text = request.header("authorization")
    is_old = text is not None and text.startswith("AWS ")
    if is_old or (text is None and "AWSAccessKeyId" in dict(request.query)):
        message = f"Signatures of version 2 are not accepted. Sign with {ALGORITHM} (signature_version='s3v4')."
        raise _refused("InvalidRequest", message, status=400)
    if text is None:
        raise _refused("AccessDenied", "The request is not signed in its headers.")
    found = _AUTHORIZATION.fullmatch(text)
    date, payload = request.header("x-amz-date"), request.header("x-amz-content-sha256")
    if found is None or date is None or payload is None:
        raise _malformed("The Authorization header or a header that it needs is not valid.")
    if payload not in (_UNSIGNED, _NO_PAYLOAD):
        raise _refused("XAmzContentSHA256Mismatch", "A read request must not have a payload.", status=400)
    return _Claim(found[1], date, found[2], found[3], payload)


def _canonical_request(request: ServedRequest, claim: _Claim) -> bytes:
    names = claim.signed_headers.split(";")
    unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in names]
    if names != sorted(set(names)) or "host" not in names or unsigned:
        raise _refused("AccessDenied", "The host header and all x-amz-* headers must be signed, each once.")
    lines = []
    for name in names:
        if name not in request.headers:
            raise _refused("AccessDenied", "A signed header is missing.")
        lines.append(f"{name}:{','.join(' '.join(value.split()) for value in request.headers[name])}\n")
    pairs = sorted((_encoded(name), _encoded(value)) for name, value in request.query)
    return "\n".join(
        (
            request.method,
            quote(unquote_to_bytes(request.raw_path), safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            "".join(lines),
            claim.signed_headers,
            claim.payload,
        )
    ).encode("latin-1", "replace")


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


def _malformed(message: str) -> RefusedRequestError:
    """Return an error that names the region, so that clients can sign the request again for it."""
    text = f"{message} Use the region {REGION!r}."
    return RefusedRequestError(400, "AuthorizationHeaderMalformed", text, facts={"Region": REGION})


def _refused(code: str, message: str, status: int = 403) -> RefusedRequestError:
    return RefusedRequestError(status, code, message)


BUCKET = "view"
REGION = "us-east-1"
"""The region that the server names. Requests may be signed for any region."""

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
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
    """Return the response to an S3 request, whose path has the form `/view/key`.

    Raises:
        RefusedRequestError: The request is not signed or not supported, or its conditions do not hold.
        FileNotFoundError: The file does not exist.
        KeytoolsError: The file cannot be decrypted.
    """
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
        return _xml("ListAllMyBucketsResult", _buckets())
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
    is_encoded = query.get("encoding-type") == "url"
    if query.get("encoding-type", "url") != "url":
        raise RefusedRequestError(400, "InvalidArgument", "The encoding-type must be url.")
    if delimiter not in ("", "/"):
        raise RefusedRequestError(501, "NotImplemented", "The delimiter must be a slash.")

    def text(key: str) -> str:
        return quote(key, safe="/-_.~") if is_encoded else escape(key)

    # ListObjects version 1 has no list-type, and continues after a key instead of a token.
    is_first_version = "list-type" not in query
    token = None if is_first_version else query.get("continuation-token")
    after = query.get("marker" if is_first_version else "start-after", "")
    if token is not None:
        after = _key_of_token(token)
    found = list(itertools.islice(_entries(tree, prefix, delimiter, after), most + 1)) if most else []
    parts = [
        f"<Name>{BUCKET}</Name><Prefix>{text(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
        f"<IsTruncated>{str(len(found) > most).lower()}</IsTruncated>"
    ]
    if delimiter:
        parts.append(f"<Delimiter>{text(delimiter)}</Delimiter>")
    if is_encoded:
        parts.append("<EncodingType>url</EncodingType>")
    last = found[most - 1][0] if len(found) > most else None
    if is_first_version:
        parts.append(f"<Marker>{text(after)}</Marker>")
        if last is not None:
            parts.append(f"<NextMarker>{text(last)}</NextMarker>")
    elif token is not None:
        parts.append(f"<ContinuationToken>{escape(token)}</ContinuationToken>")
    elif after:
        parts.append(f"<StartAfter>{text(after)}</StartAfter>")
    if last is not None and not is_first_version:
        parts.append(f"<NextContinuationToken>{_token_of_key(last)}</NextContinuationToken>")
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


def _buckets() -> str:
    return (
        "<Owner><ID>keytools</ID></Owner><Buckets><Bucket>"
        f"<Name>{BUCKET}</Name><CreationDate>1970-01-01T00:00:00.000Z</CreationDate></Bucket></Buckets>"
    )


def _xml(root: str, content: str) -> ServedAnswer:
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE}">{content}</{root}>'
    return ServedAnswer(200, {"Content-Type": "application/xml"}, document.encode())


def _most_keys(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RefusedRequestError(400, "InvalidArgument", "max-keys is not a number.")
    return min(int(text), _MOST_KEYS)


def _token_of_key(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _key_of_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise RefusedRequestError(400, "InvalidArgument", "The continuation token is not valid.") from None
