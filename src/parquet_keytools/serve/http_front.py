"""The tree over HTTP (RFC 9110): folders, and files with conditions and ranges; also the files of S3."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote

from parquet_keytools.serve.requests_and_answers import (
    RefusedRequestError,
    ServedAnswer,
    ServedRange,
    ServedRequest,
)
from parquet_keytools.serve.served_tree import ServedFile, ServedTree

_RANGE = re.compile(r"bytes\s*=\s*(?:(\d{1,40})-(\d{0,40})|-(\d{1,40}))", re.IGNORECASE | re.ASCII)
_ETAG = re.compile(r'(W/)?"([^"]*)"')


def answer_http(
    tree: ServedTree, request: ServedRequest, key: str, seen_before: Callable[[ServedFile], bool]
) -> ServedAnswer:
    """Return the answer to a request: a file, or the links of a folder, whose key is empty or ends with a slash.

    Raises:
        RefusedRequestError: A condition of the request does not hold, or the file does not have the range.
        FileNotFoundError: There is no such file or folder.
        KeytoolsError: What is wrong with the file.
    """
    if key and not key.endswith("/"):
        return answer_file(tree, request, key, seen_before)
    links = []
    for entry in tree.entries(key.rstrip("/")):
        name = entry.key.rpartition("/")[2] + "/" * entry.is_folder
        links.append(f'<a href="./{quote(name)}">{html.escape(name)}</a><br>\n')
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "default-src 'none'"}
    return ServedAnswer(200, headers, f"<!doctype html>\n{''.join(links)}".encode())


def answer_file(
    tree: ServedTree, request: ServedRequest, key: str, seen_before: Callable[[ServedFile], bool] | None = None
) -> ServedAnswer:
    """Return the answer to a GET or HEAD of a file.

    Args:
        tree: Where it is.
        request: The request.
        key: Of the file.
        seen_before: Whether the connection read another version of this file before: then a range without a
            condition is refused, for its sender would mix two files.

    Raises:
        RefusedRequestError: A condition of the request does not hold, or the file does not have the range.
        FileNotFoundError: There is no such file.
        KeytoolsError: What is wrong with the file.
    """
    file = tree.find(key)
    headers = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if file.modified is not None:
        headers["Last-Modified"] = formatdate(file.modified, usegmt=True)
    match _failed_condition(request, file):
        case 304:
            return ServedAnswer(304, headers)
        case 412:
            raise RefusedRequestError(412, "PreconditionFailed", "The file is another one now.", headers)
    wanted = request.header("range")
    has_condition = request.header("if-match") is not None
    if wanted is not None and not _may_be_range(request, file):
        wanted, has_condition = None, True
    is_other = seen_before is not None and seen_before(file)
    if wanted is not None and request.method == "GET" and is_other and not has_condition:
        raise RefusedRequestError(
            412, "PreconditionFailed", "The file was replaced since its last range. Begin with HEAD.", headers
        )
    bounds = byte_range(wanted, file.size_bytes) if wanted is not None else None
    start, length = bounds or (0, file.size_bytes)
    if bounds is not None:
        headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{file.size_bytes}"
    return ServedAnswer(206 if bounds else 200, headers, ServedRange(tree.open(file), key, start, length))


def byte_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """Return first byte and length of a range; None for what is to be answered with the whole file.

    That is allowed for every `Range`, and done for several ranges and for what is no range (RFC 9110, 14.2).

    Args:
        text: The header.
        size_bytes: Of the file.

    Raises:
        RefusedRequestError: The file has no byte of it.
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
            f"The file has {size_bytes} bytes, and none of this range.",
            {"Content-Range": f"bytes */{size_bytes}"},
        )
    return start, end - start


def _failed_condition(request: ServedRequest, file: ServedFile) -> int | None:
    """Return 304 or 412 where a condition says so, in the order of RFC 9110, 13.2.2."""
    if (text := request.header("if-match")) is not None:
        if not _names(text, file.etag, strong=True):
            return 412
    elif (since := _seconds_of(request.header("if-unmodified-since"))) is not None and (
        file.modified is not None and int(file.modified) > since
    ):
        return 412
    if (text := request.header("if-none-match")) is not None:
        return 304 if _names(text, file.etag, strong=False) else None
    since = _seconds_of(request.header("if-modified-since"))
    return 304 if since is not None and file.modified is not None and int(file.modified) <= since else None


def _may_be_range(request: ServedRequest, file: ServedFile) -> bool:
    text = request.header("if-range")
    # A date is too coarse to say that a file is the same: then the whole file is sent.
    return text is None or (text != "*" and _names(text, file.etag, strong=True))


def _names(text: str, etag: str, *, strong: bool) -> bool:
    if text.strip() == "*":
        return True
    return any(found[2] == etag and not (strong and found[1]) for found in _ETAG.finditer(text))


def _seconds_of(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text is not None else None
    except (ValueError, OverflowError):
        return None
