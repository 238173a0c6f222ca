"""Objects in S3 and compatible stores, replaced only if they are still the objects that were read.

Arrow's file system copies and moves whole objects and has no conditional requests, so these calls use boto3. Every
request that replaces an object has its ETag as a condition. Some stores ignore conditions, so the ETag is also
compared before; in such a store another writer can still come between the comparison and the request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote

import boto3
import botocore.config
import botocore.exceptions
from pyarrow import fs as pafs

from parquet_keytools.errors import OutputError
from parquet_keytools.format.file_layout import ByteSource, HeldSource
from parquet_keytools.rotation.file_keys import Tail, changed_while_rotated, check_unchanged
from parquet_keytools.runtime.threads_and_forks import in_threads
from parquet_keytools.storage.locations import FileLocation, open_source

# --- A boto3 client with the options and permissions of one of Arrow's S3 file systems ---

CONCURRENT_PARTS = 8
"""How many parts of an object are copied at a time."""

_TRIES = 10


def can_reach(filesystem: pafs.S3FileSystem) -> bool:
    """Return whether a client can have the same permissions as a file system."""
    given = _options(filesystem)
    # Arrow does not show the credentials of an assumed role, and the keys of SSE-C.
    proxy = given["proxy_options"] and given["proxy_options"]["host"]
    return not (given["anonymous"] or given["role_arn"] or proxy or given.get("sse_customer_key"))


def client_of(filesystem: pafs.S3FileSystem) -> Any:
    """Return the client of a file system; equal file systems share it, but not across a fork."""
    return _client(pickle.dumps(filesystem), os.getpid())


def _options(filesystem: pafs.S3FileSystem) -> dict[str, Any]:
    # Pickling is the public way to them.
    _, (options,) = filesystem.__reduce__()
    return dict(options)


@lru_cache(maxsize=16)
def _client(pickled: bytes, _process_id: int) -> Any:
    given = _options(pickle.loads(pickled))  # noqa: S301 - made here
    session = boto3.session.Session(
        aws_access_key_id=given["access_key"] or None,
        aws_secret_access_key=given["secret_key"] or None,
        aws_session_token=given["session_token"] or None,
        region_name=given["region"] or None,
    )
    endpoint = given["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{given['scheme']}://{endpoint}"
    style: Literal["virtual", "path", "auto"] = "path" if endpoint else "auto"
    if given["force_virtual_addressing"]:
        style = "virtual"
    return session.client(
        "s3",
        endpoint_url=endpoint or None,
        verify=given["tls_ca_file_path"] or None,
        config=botocore.config.Config(
            max_pool_connections=4 * CONCURRENT_PARTS,
            retries={"mode": "standard", "total_max_attempts": _TRIES},
            # As Arrow does.
            s3={"addressing_style": style},
            # Every store knows Content-MD5, which is sent with each write, but not the newer checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Arrow does not use proxies of the environment.
            proxies={},
        ),
    )


# --- Objects ---

LEAST_PART_BYTES = 5 * 1024**2
"""S3 accepts no smaller part, except the last one."""

PART_BYTES = 512 * 1024**2
"""The store copies several parts at a time. The maximum is 5 GiB."""

_log = logging.getLogger("parquet_keytools.storage")

_MOST_PARTS = 10_000
_CHANGED = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_CHANGED |= {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}
_NO_CONDITIONS = {"501", "NotImplemented"}
_NO_TAGS = {"501", "NotImplemented", "405", "MethodNotAllowed", "NoSuchTagSet"}

_KEPT_HEADERS = (
    "CacheControl",
    "ContentDisposition",
    "ContentEncoding",
    "ContentLanguage",
    "ContentType",
    "Expires",
    "Metadata",
    "StorageClass",
    "WebsiteRedirectLocation",
    "ServerSideEncryption",
    "SSEKMSKeyId",
    "BucketKeyEnabled",
    "ObjectLockMode",
    "ObjectLockRetainUntilDate",
    "ObjectLockLegalHoldStatus",
)
"""Attributes of an object that its replacement keeps."""


def replace_object_tail(
    location: FileLocation, tail: Tail, new: bytes, check: Callable[[ByteSource], None]
) -> tuple[str, int, int]:
    """Replace the tail of an object; see `replace_tail`.

    The new object consists of parts: those that the store copies from the old object, and the new tail. If the
    data is smaller than the smallest part, the object is sent whole.
    """
    with _raising_ours(location):
        found = _find_object(location)
        if found.size_bytes != tail.size_bytes:
            raise changed_while_rotated(location)
        with open_source(location) as source:
            check(HeldSource(source, tail.offset, new, is_end=True))
        if tail.offset < LEAST_PART_BYTES:
            data = read_object(found, 0, tail.offset) + new
            # The object that was found has the tail that was read, so this data belongs to it.
            check_unchanged(location, tail)
            _put_object(found, data)
            return "object sent whole", len(data), 0
        _put_beginning_and(found, tail, new)
        return "new tail, data copied by the store", len(new), tail.offset


def replace_object(location: FileLocation, new: bytes, check: Callable[[], None]) -> None:
    """Replace a small object."""
    with _raising_ours(location):
        found = _find_object(location)
        # After the object was found: the check sees the object of the condition, or a newer one.
        check()
        _put_object(found, new)


@dataclass(frozen=True)
class S3Object:
    """An object as it was found; `headers` has its attributes and tags, as arguments for calls."""

    client: Any = field(repr=False)
    location: FileLocation
    etag: str
    size_bytes: int
    headers: Mapping[str, Any]

    @property
    def place(self) -> dict[str, str]:
        """Bucket and key, as arguments for calls."""
        return _place(self.location)


def _find_object(location: FileLocation) -> S3Object:
    assert isinstance(location.filesystem, pafs.S3FileSystem)
    client, place = client_of(location.filesystem), _place(location)
    found: dict[str, Any] = dict(client.head_object(**place))
    headers = {name: found[name] for name in _KEPT_HEADERS if found.get(name)}
    if tags := _tags(client, location):
        headers["Tagging"] = "&".join(f"{quote(name, safe='')}={quote(tags[name], safe='')}" for name in tags)
    return S3Object(client, location, found["ETag"], found["ContentLength"], headers)


def read_object(found: S3Object, start: int, end: int) -> bytes:
    """Read a range of an object."""
    if start == end:
        return b""
    answer = found.client.get_object(**found.place, Range=f"bytes={start}-{end - 1}", IfMatch=found.etag)
    data: bytes = answer["Body"].read()
    if answer["ETag"] != found.etag or len(data) != end - start:
        raise changed_while_rotated(found.location)
    return data


def _put_object(found: S3Object, data: bytes) -> None:
    _replace_if_unchanged(found, found.client.put_object, Body=data, ContentMD5=_md5(data), **found.headers)


def _put_beginning_and(found: S3Object, tail: Tail, new: bytes) -> None:
    """Replace an object by one with the same data, of `LEAST_PART_BYTES` or more, which the store copies."""
    client, place = found.client, found.place
    bounds = part_bounds(tail.offset)
    upload_id = client.create_multipart_upload(**place, **found.headers)["UploadId"]
    try:
        parts = _copied_parts(found, upload_id, bounds)
        last = client.upload_part(
            **place, UploadId=upload_id, PartNumber=len(bounds), Body=new, ContentMD5=_md5(new)
        )
        parts.append(part_of_answer(len(bounds), last))
        check_unchanged(found.location, tail)
        _replace_if_unchanged(
            found, client.complete_multipart_upload, UploadId=upload_id, MultipartUpload={"Parts": parts}
        )
    except BaseException:
        # Parts of an unfinished upload cost money.
        _end_upload(client, place, upload_id)
        raise


def part_bounds(beginning: int) -> list[int]:
    """Return the bounds of copied parts, which have equal lengths: a short last one might be too small."""
    count = -(-beginning // max(PART_BYTES, -(-beginning // (_MOST_PARTS - 1))))
    return [beginning * position // count for position in range(count + 1)]


def _copied_parts(found: S3Object, upload_id: str, bounds: list[int]) -> list[dict[str, Any]]:
    """Have the store copy the beginning of an object."""

    def copy(number: int) -> dict[str, Any]:
        answer = found.client.upload_part_copy(
            **found.place,
            UploadId=upload_id,
            PartNumber=number,
            CopySource=found.place,
            CopySourceRange=f"bytes={bounds[number - 1]}-{bounds[number] - 1}",
            CopySourceIfMatch=found.etag,
        )
        return part_of_answer(number, answer["CopyPartResult"])

    count = len(bounds) - 1
    return [copy(1)] if count == 1 else in_threads(copy, range(1, count + 1), CONCURRENT_PARTS)


def part_of_answer(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a part for completing an upload, with its checksums if the store keeps any."""
    checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and value}
    checksums.pop("ChecksumType", None)
    return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


def _tags(client: Any, location: FileLocation) -> dict[str, str]:
    try:
        answer = client.get_object_tagging(**_place(location))
    except botocore.exceptions.ClientError as error:
        if _code(error) in _NO_TAGS:
            return {}
        if _code(error) == "AccessDenied":
            raise OutputError(
                f"{location}: access to its tags is denied, and they would be lost when it is replaced.",
                hint="Allow s3:GetObjectTagging and s3:PutObjectTagging.",
            ) from None
        raise
    return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}


def _replace_if_unchanged(found: S3Object, send: Callable[..., object], **arguments: Any) -> None:
    """Send a request that replaces an object, if its ETag is unchanged, as far as the store knows conditions."""
    if found.client.head_object(**found.place)["ETag"] != found.etag:
        raise changed_while_rotated(found.location)
    try:
        send(IfMatch=found.etag, **found.place, **arguments)
    except botocore.exceptions.ClientError as error:
        if _code(error) not in _NO_CONDITIONS:
            raise
        send(**found.place, **arguments)


@contextlib.contextmanager
def _raising_ours(location: FileLocation) -> Iterator[None]:
    try:
        yield
    except botocore.exceptions.ClientError as error:
        code = _code(error)
        if code in _CHANGED:
            raise changed_while_rotated(location) from None
        raise OutputError(f"{location}: the store refuses: {code}.") from None
    except botocore.exceptions.BotoCoreError as error:
        raise OutputError(f"{location}: the store cannot be reached: {type(error).__name__}.") from None


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _md5(data: bytes) -> str:
    # Only against transmission errors: the store refuses data that was not received as it was sent.
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _place(location: FileLocation) -> dict[str, str]:
    bucket, _, key = location.path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _end_upload(client: Any, place: Mapping[str, str], upload_id: str) -> None:
    """Abort an upload; warn if that is refused."""
    try:
        client.abort_multipart_upload(**place, UploadId=upload_id)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        if "NoSuchUpload" not in str(error):
            name = f"{place['Bucket']}/{place['Key']}"
            _log.warning("the unfinished upload %s of %s is left over, and cannot be ended", upload_id, name)
