"""The tree as one bucket of S3, read-only."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from urllib.parse import quote
from xml.sax.saxutils import escape

from parquet_keytools.serve.http_front import answer_file
from parquet_keytools.serve.requests_and_answers import RefusedRequestError, ServedAnswer, ServedRequest
from parquet_keytools.serve.s3_signature import SignatureCheck
from parquet_keytools.serve.served_tree import ServedFile, ServedTree

BUCKET = "view"
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MOST_KEYS = 1000
_LISTING = {
    "list-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "encoding-type",
    "fetch-owner", "x-id",
}  # fmt: skip
"""Parameters of a listing; what else is asked for is not there."""


class S3Front:
    """Answers requests of S3 clients, with paths of the form `/view/key`.

    Args:
        tree: What is served.
        signatures: Checks who asks.
    """

    def __init__(self, tree: ServedTree, signatures: SignatureCheck) -> None:
        self._tree = tree
        self._signatures = signatures

    def answer(
        self, request: ServedRequest, seen_before: Callable[[ServedFile], bool], keep: Callable[[], None]
    ) -> ServedAnswer:
        """Return the answer to a request.

        Args:
            request: The request.
            seen_before: Whether the connection read another version of a file before.
            keep: Called as soon as the signature is found to be right.

        Raises:
            RefusedRequestError: It is not signed, asks for what is not there, or its conditions do not hold.
            FileNotFoundError: There is no such file.
            KeytoolsError: What is wrong with the file.
        """
        self._signatures.check(request)
        keep()
        query: dict[str, str] = {}
        for name, value in request.query:
            if name in query:
                raise RefusedRequestError(400, "InvalidArgument", f"The parameter {name!r} is there twice.")
            if not name.lower().startswith("x-amz-"):
                query[name] = value
        bucket, _, key = request.path.removeprefix("/").partition("/")
        if not bucket and not key:
            self._refuse_others(query, {"x-id", "max-buckets", "prefix"})
            return _xml("ListAllMyBucketsResult", _buckets())
        if bucket != BUCKET:
            raise RefusedRequestError(404, "NoSuchBucket", f"The only bucket is {BUCKET}.")
        if key:
            self._refuse_others(query, {"x-id", "partNumber"})
            if query.get("partNumber", "1") != "1":
                raise RefusedRequestError(416, "InvalidPartNumber", "Every file has one part.")
            return answer_file(self._tree, request, key, seen_before)
        if request.method == "HEAD":
            return ServedAnswer(200, {"x-amz-bucket-region": "us-east-1"})
        if "location" in query:
            return _xml("LocationConstraint", "")
        self._refuse_others(query, _LISTING)
        if query.get("list-type") != "2":
            raise RefusedRequestError(501, "NotImplemented", "List with ListObjectsV2 (list-type=2).")
        return _xml("ListBucketResult", self._listing(query))

    @staticmethod
    def _refuse_others(query: dict[str, str], known: set[str]) -> None:
        if other := sorted(query.keys() - known):
            raise RefusedRequestError(501, "NotImplemented", f"The parameter {other[0]!r} is not supported.")

    def _listing(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = _most_keys(query.get("max-keys", str(_MOST_KEYS)))
        is_encoded = query.get("encoding-type") == "url"
        if query.get("encoding-type", "url") != "url":
            raise RefusedRequestError(400, "InvalidArgument", "The encoding-type can be url only.")

        def text(key: str) -> str:
            return quote(key, safe="/-_.~") if is_encoded else escape(key)

        token = query.get("continuation-token")
        after = _key_of_token(token) if token is not None else query.get("start-after", "")
        found = list(itertools.islice(self._entries(prefix, delimiter, after), most + 1)) if most else []
        parts = [
            f"<Name>{BUCKET}</Name><Prefix>{text(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
            f"<IsTruncated>{str(len(found) > most).lower()}</IsTruncated>"
        ]
        if delimiter:
            parts.append(f"<Delimiter>{text(delimiter)}</Delimiter>")
        if is_encoded:
            parts.append("<EncodingType>url</EncodingType>")
        if token is not None:
            parts.append(f"<ContinuationToken>{escape(token)}</ContinuationToken>")
        elif after:
            parts.append(f"<StartAfter>{text(after)}</StartAfter>")
        if len(found) > most:
            parts.append(f"<NextContinuationToken>{_token_of_key(found[most - 1][0])}</NextContinuationToken>")
        files, folders = [], []
        for key, is_folder in found[:most]:
            if is_folder:
                folders.append(f"<CommonPrefixes><Prefix>{text(key)}</Prefix></CommonPrefixes>")
                continue
            try:
                file = self._tree.find_listed(key)
            except FileNotFoundError:
                # Removed since its folder was read.
                continue
            modified = datetime.fromtimestamp(file.modified or 0, UTC).isoformat(timespec="milliseconds")
            files.append(
                f"<Contents><Key>{text(key)}</Key><LastModified>{modified[:-6]}Z</LastModified>"
                f"<ETag>&quot;{file.etag}&quot;</ETag><Size>{file.size_bytes}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        parts.append(f"<KeyCount>{len(files) + len(folders)}</KeyCount>")
        return "".join(parts + files + folders)

    def _entries(self, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, bool]]:
        """Yield keys, and with a delimiter common prefixes in their places, that come after one."""
        folder = prefix.rpartition("/")[0]
        if delimiter == "/":
            # What is below the next folders needs no look.
            try:
                entries = self._tree.entries(folder)
            except FileNotFoundError:
                return
            for entry in entries:
                key = entry.key + "/" * entry.is_folder
                is_later = key.encode() > after.encode()
                if entry.is_folder and after != key and after.startswith(key):
                    is_later = next(self._tree.keys(entry.key, after=after), None) is not None
                if key.startswith(prefix) and is_later:
                    yield key, entry.is_folder
            return
        last = None
        for key in self._tree.keys(folder, after=after):
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if not found:
                yield key, False
            elif (common := prefix + head + delimiter) not in (last, after):
                last = common
                yield common, True


def error_document(error: RefusedRequestError) -> bytes:
    """Return what S3 clients read an error from."""
    text = f"<Code>{error.code}</Code><Message>{escape(_printable(str(error)))}</Message>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{text}</Error>'.encode()


def _buckets() -> str:
    return (
        "<Owner><ID>keytools</ID></Owner><Buckets><Bucket>"
        f"<Name>{BUCKET}</Name><CreationDate>1970-01-01T00:00:00.000Z</CreationDate></Bucket></Buckets>"
    )


def _xml(root: str, content: str) -> ServedAnswer:
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE}">{content}</{root}>'
    return ServedAnswer(200, {"Content-Type": "application/xml"}, document.encode())


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


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
        raise RefusedRequestError(400, "InvalidArgument", "The continuation token is not one of ours.") from None
