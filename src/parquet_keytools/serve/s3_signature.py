"""Signatures of requests to S3: AWS Signature Version 4, in the header or in the query (presigned)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote_to_bytes

from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.serve.requests_and_answers import RefusedRequestError, ServedRequest

ALGORITHM = "AWS4-HMAC-SHA256"
_MAX_SKEW = timedelta(minutes=15)
_MAX_EXPIRES_SECONDS = 7 * 24 * 3600
_UNSIGNED = "UNSIGNED-PAYLOAD"
_NO_PAYLOAD = hashlib.sha256(b"").hexdigest()
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM}\s+Credential=([^,\s]+)\s*,\s*SignedHeaders=([^,\s]+)\s*,\s*Signature=([0-9a-f]{{64}})"
)
_SCOPE = re.compile(r"([^/]+)/(\d{8})/([a-z0-9-]{1,64})/s3/aws4_request", re.ASCII)
_QUERY_NAMES = tuple(
    f"X-Amz-{name}" for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")
)


@dataclass(frozen=True)
class KeyPair:
    """The credentials of one run, which are valid nowhere else.

    Attributes:
        access_key_id: Names them.
        secret: Signs with them.
    """

    access_key_id: str = field(default_factory=lambda: "PK" + secrets.token_hex(9).upper())
    secret: SecretBytes = field(default_factory=lambda: SecretBytes(secrets.token_urlsafe(30).encode()))


@dataclass(frozen=True)
class _Claim:
    credential: str
    date: str
    signed_headers: str
    signature: str
    payload: str
    expires: timedelta | None


def _now() -> datetime:
    return datetime.now(UTC)


class SignatureCheck:
    """Checks signatures.

    Args:
        key_pair: What requests are signed with.
        now: The time.
    """

    def __init__(self, key_pair: KeyPair, now: Callable[[], datetime] = _now) -> None:
        self._key_pair = key_pair
        self._now = now

    def check(self, request: ServedRequest) -> None:
        """Return if a request is signed with our key pair, and not too old.

        Raises:
            RefusedRequestError: It is not signed, or wrongly.
        """
        in_query = any(name.lower().startswith("x-amz-") for name, _ in request.query)
        if in_query and "authorization" in request.headers:
            raise _refused("InvalidArgument", "Only one kind of signature is allowed.", status=400)
        claim = _claim_of_query(request) if in_query else _claim_of_header(request)
        scope = _SCOPE.fullmatch(claim.credential)
        if scope is None or scope[2] != claim.date[:8]:
            raise _refused("AuthorizationHeaderMalformed", "The scope of the credential is not valid.", status=400)
        if not hmac.compare_digest(scope[1].encode(), self._key_pair.access_key_id.encode()):
            raise _refused("InvalidAccessKeyId", "This access key is not the one of this run.")
        self._check_time(claim)
        expected = self._signature(request, claim, f"{scope[2]}/{scope[3]}/s3/aws4_request", in_query=in_query)
        if not hmac.compare_digest(expected.encode(), claim.signature.encode()):
            raise _refused("SignatureDoesNotMatch", "The signature is not that of the request.")

    def _check_time(self, claim: _Claim) -> None:
        try:
            signed_at = datetime.strptime(claim.date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            raise _refused("AccessDenied", "X-Amz-Date is not valid.") from None
        age = self._now() - signed_at
        if claim.expires is None:
            if abs(age) > _MAX_SKEW:
                raise _refused("RequestTimeTooSkewed", "The time of the request and that of the server differ.")
        elif age < -_MAX_SKEW:
            raise _refused("AccessDenied", "The request is not valid yet.")
        elif age > claim.expires:
            raise _refused("AccessDenied", "The request has expired.")

    def _signature(self, request: ServedRequest, claim: _Claim, scope: str, *, in_query: bool) -> str:
        canonical = hashlib.sha256(_canonical_request(request, claim, in_query=in_query)).hexdigest()
        text = f"{ALGORITHM}\n{claim.date}\n{scope}\n{canonical}"
        key = b"AWS4" + self._key_pair.secret.reveal()
        for part in (*scope.split("/"), text):
            key = hmac.digest(key, part.encode(), "sha256")
        return key.hex()


def _claim_of_header(request: ServedRequest) -> _Claim:
    text = request.header("authorization")
    is_old = text is not None and text.startswith("AWS ")
    if is_old or (text is None and "AWSAccessKeyId" in dict(request.query)):
        message = f"Signatures of version 2 are not accepted. Sign with {ALGORITHM} (signature_version='s3v4')."
        raise _refused("InvalidRequest", message, status=400)
    if text is None:
        raise _refused("AccessDenied", "The request is not signed.")
    found = _AUTHORIZATION.fullmatch(text)
    date, payload = request.header("x-amz-date"), request.header("x-amz-content-sha256")
    if found is None or date is None or payload is None:
        raise _refused("AuthorizationHeaderMalformed", "The request is not signed as S3 wants it.", status=400)
    if payload not in (_UNSIGNED, _NO_PAYLOAD):
        raise _refused("XAmzContentSHA256Mismatch", "A request that reads has no payload.", status=400)
    return _Claim(found[1], date, found[2], found[3], payload, None)


def _claim_of_query(request: ServedRequest) -> _Claim:
    values: dict[str, str] = {}
    for name, value in request.query:
        if name in values:
            raise _refused("InvalidArgument", "A parameter is there twice.", status=400)
        values[name] = value
    algorithm, credential, date, expires, signed, signature = (values.get(name, "") for name in _QUERY_NAMES)
    is_number = expires.isascii() and expires.isdigit() and len(expires) < 10
    if algorithm != ALGORITHM or not is_number or not 1 <= int(expires) <= _MAX_EXPIRES_SECONDS:
        raise _refused("AuthorizationQueryParametersError", "The query is not signed as S3 wants it.", status=400)
    payload = values.get("X-Amz-Content-Sha256", _UNSIGNED)
    return _Claim(credential, date, signed, signature, payload, timedelta(seconds=int(expires)))


def _canonical_request(request: ServedRequest, claim: _Claim, *, in_query: bool) -> bytes:
    names = claim.signed_headers.split(";")
    unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in names]
    if names != sorted(set(names)) or "host" not in names or unsigned:
        raise _refused("AccessDenied", "Host and all headers x-amz-* must be signed, each once.")
    lines = []
    for name in names:
        if name not in request.headers:
            raise _refused("AccessDenied", "A signed header is missing.")
        lines.append(f"{name}:{','.join(' '.join(value.split()) for value in request.headers[name])}\n")
    pairs = sorted(
        (_encoded(name), _encoded(value))
        for name, value in request.query
        if not (in_query and name == "X-Amz-Signature")
    )
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


def _refused(code: str, message: str, status: int = 403) -> RefusedRequestError:
    return RefusedRequestError(status, code, message)
