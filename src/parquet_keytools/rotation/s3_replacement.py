"""Objects in S3 and stores that speak its protocol: replaced only while they are what was read.

Arrow's file system copies and moves whole objects and knows no conditions, so these calls are boto3's. Every
request that replaces an object carries its ETag as a condition. As some stores overlook conditions, it is compared
before, too: there two writers can still meet between the comparison and the request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import botocore.exceptions
from pyarrow import fs as pafs

from parquet_keytools.errors import ChangedMeanwhileError, KeytoolsError, OutputError
from parquet_keytools.files.opened_file import WithTail
from parquet_keytools.rotation.tail import CheckWritten, ReplacedTail, Tail, changed_while_rotated, check_unchanged
from parquet_keytools.runtime.working_threads import in_threads
from parquet_keytools.storage.failures import warn_left_behind
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.s3_connection import CONCURRENT_PARTS, age_seconds, client_of, end_upload
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.temporary_files import DEAD_AFTER_SECONDS

T = TypeVar("T")

_log = logging.getLogger(__name__)

LEAST_PART_BYTES = 5 * 1024**2
"""S3 takes no smaller part, but for the last one."""

PART_BYTES = 512 * 1024**2
"""The store copies parts at the same time; one could have 5 GiB."""

_MOST_PARTS = 10_000
_GONE = {"404", "NoSuchKey", "NotFound"}
_CHANGED = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_ENDED_BY_OTHERS = {"NoSuchUpload"}
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
"""What an object has beside its bytes, and a new one in its place has to have too."""


@dataclass(frozen=True)
class S3Object:
    """An object as it was found.

    Attributes:
        headers: What it has beside its bytes, by the names that calls take.
    """

    client: Any = field(repr=False)
    location: FileLocation
    etag: str
    size_bytes: int
    headers: Mapping[str, Any]

    @property
    def place(self) -> dict[str, str]:
        """Bucket and key, by the names that calls take."""
        return _place(self.location)


def find_object(location: FileLocation) -> S3Object:
    """Find an object.

    Raises:
        ChangedMeanwhileError: It is gone.
        OutputError: The store refuses, or keeps its tags secret, which would be lost.
    """
    assert isinstance(location.filesystem, pafs.S3FileSystem)
    client, place = client_of(location.filesystem), _place(location)
    with _as_ours(location):
        found: dict[str, Any] = dict(client.head_object(**place))
        headers = {name: found[name] for name in _KEPT_HEADERS if found.get(name)}
        if tags := _tags(client, location):
            headers["Tagging"] = "&".join(f"{quote(name, safe='')}={quote(tags[name], safe='')}" for name in tags)
    return S3Object(client, location, found["ETag"], found["ContentLength"], headers)


def read_object(found: S3Object, start: int, end: int) -> bytes:
    """Read a range of an object that is still the one that was found.

    Raises:
        ChangedMeanwhileError: It is another one now.
        OutputError: The store refuses.
    """
    if start == end:
        return b""
    with _as_ours(found.location):
        answer = found.client.get_object(**found.place, Range=f"bytes={start}-{end - 1}", IfMatch=found.etag)
        data: bytes = answer["Body"].read()
    if answer["ETag"] != found.etag or len(data) != end - start:
        raise changed_while_rotated(found.location)
    return data


def put_object(found: S3Object, data: bytes) -> None:
    """Replace an object by another one.

    Raises:
        ChangedMeanwhileError: It is no longer the one that was found.
        OutputError: The store refuses.
    """
    with _as_ours(found.location):
        _require_unchanged(found)
        _with_condition(
            found.etag,
            lambda condition: found.client.put_object(
                **found.place, Body=data, ContentMD5=_md5(data), **condition, **found.headers
            ),
        )


def put_beginning_and(found: S3Object, beginning: int, data: bytes, check: Callable[[], None]) -> None:
    """Replace an object by one that begins as it does, which the store copies, and goes on with other bytes.

    Args:
        found: The object.
        beginning: How many bytes the store copies; `LEAST_PART_BYTES` or more.
        data: What comes after these.
        check: Called when all is uploaded, before it takes the object's place.

    Raises:
        ChangedMeanwhileError: It is no longer the one that was found.
        OutputError: The store refuses.
    """
    client, place = found.client, found.place
    bounds = _part_bounds(beginning)
    with _as_ours(found.location):
        upload_id = client.create_multipart_upload(**place, **found.headers)["UploadId"]
        try:
            parts = _copied_parts(found, upload_id, bounds)
            last = client.upload_part(
                **place, UploadId=upload_id, PartNumber=len(bounds), Body=data, ContentMD5=_md5(data)
            )
            parts.append(_part(len(bounds), last))
            check()
            _require_unchanged(found)
            _with_condition(
                found.etag,
                lambda condition: client.complete_multipart_upload(
                    **place, UploadId=upload_id, MultipartUpload={"Parts": parts}, **condition
                ),
            )
        except BaseException:
            # Parts of an upload that is not finished cost money until somebody ends it.
            _end_upload(found, upload_id)
            raise
    _end_left_behind(found, bounds)


def _part_bounds(beginning: int) -> list[int]:
    """Return where copied parts begin and end.

    They are of equal length: a short one at the end might be too small to be a part. They follow from the length
    alone, so that those of a run that was cut off are known again.
    """
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
        return _part(number, answer["CopyPartResult"])

    count = len(bounds) - 1
    if count == 1:
        return [copy(1)]
    return in_threads(copy, range(1, count + 1), CONCURRENT_PARTS)


def _part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what completing an upload says of a part: its checksums too, where the store keeps any."""
    checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and value}
    checksums.pop("ChecksumType", None)
    return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


def _end_left_behind(found: S3Object, bounds: list[int]) -> None:
    """End uploads that rotations of this object left behind, when a new object has taken its place.

    One that is under way just now could not be completed any more: its condition is the old ETag. Uploads of other
    writers are left alone; ours are known by the lengths of their parts, or by their age where they have none.
    What cannot be seen or ended stays, and a warning names it: to rotate is not to clean up.
    """
    try:
        answer = found.client.list_multipart_uploads(
            Bucket=found.place["Bucket"], Prefix=found.place["Key"], MaxUploads=100
        )
        for upload in answer.get("Uploads", ()):
            if upload["Key"] == found.place["Key"] and _is_ours(found, upload, bounds):
                _end_upload(found, upload["UploadId"])
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, KeyError):
        warn_left_behind(
            _log,
            f"unfinished uploads of {found.location} cannot be listed (s3:ListBucketMultipartUploads, "
            "ListMultipartUploadParts); if a rotation was cut off, have a lifecycle rule of the bucket end them",
        )


def _is_ours(found: S3Object, upload: dict[str, Any], bounds: list[int]) -> bool:
    parts = found.client.list_parts(**found.place, UploadId=upload["UploadId"]).get("Parts", ())
    if not parts:
        # Nothing tells whose it is; nobody begins one and waits for a day.
        return age_seconds(upload) > DEAD_AFTER_SECONDS
    copied = [part for part in parts if part["PartNumber"] < len(bounds)]
    return bool(copied) and all(
        part["Size"] == bounds[part["PartNumber"]] - bounds[part["PartNumber"] - 1] for part in copied
    )


def _end_upload(found: S3Object, upload_id: str) -> None:
    end_upload(found.client, found.place["Bucket"], found.place["Key"], upload_id)


def _tags(client: Any, location: FileLocation) -> dict[str, str]:
    try:
        answer = client.get_object_tagging(**_place(location))
    except botocore.exceptions.ClientError as error:
        if _code(error) in _NO_TAGS:
            return {}
        if _code(error) == "AccessDenied":
            raise OutputError(
                f"{location}: its tags may not be read, and would be lost when it is replaced.",
                hint="Allow s3:GetObjectTagging and s3:PutObjectTagging.",
            ) from None
        raise
    return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}


def _require_unchanged(found: S3Object) -> None:
    # Not every store minds conditions.
    if found.client.head_object(**found.place)["ETag"] != found.etag:
        raise changed_while_rotated(found.location)


def _with_condition(etag: str, send: Callable[[dict[str, Any]], T]) -> T:
    """Send a request that holds only while the object has this ETag, as far as the store knows conditions."""
    try:
        return send({"IfMatch": etag})
    except botocore.exceptions.ClientError as error:
        if _code(error) not in _NO_CONDITIONS:
            raise
    return send({})


@contextlib.contextmanager
def _as_ours(location: FileLocation) -> Iterator[None]:
    try:
        yield
    except botocore.exceptions.ClientError as error:
        code = _code(error)
        if code in _CHANGED or code in _GONE or code in _ENDED_BY_OTHERS:
            raise changed_while_rotated(location) from None
        raise OutputError(f"{location}: the store refuses: {code}.") from None
    except botocore.exceptions.BotoCoreError as error:
        raise OutputError(f"{location}: the store cannot be reached: {type(error).__name__}.") from None


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _md5(data: bytes) -> str:
    # So the store itself refuses what did not arrive as it was sent; this protects from no attacker.
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _place(location: FileLocation) -> dict[str, str]:
    bucket, _, key = location.path.partition("/")
    return {"Bucket": bucket, "Key": key}


def replace_object_tail(location: FileLocation, tail: Tail, new: bytes, check: CheckWritten) -> ReplacedTail:
    """Replace the tail of an object; see `replace_tail`.

    The new object is made of parts: what the store copies of the old one, and the new tail. Objects whose data is
    smaller than the smallest part of the protocol are sent as a whole.
    """
    found = find_object(location)
    if found.size_bytes != tail.size_bytes:
        raise changed_while_rotated(location)
    with open_source(location) as source:
        check(WithTail(source, tail.offset, new))
    if tail.offset < LEAST_PART_BYTES:
        data = read_object(found, 0, tail.offset) + new
        # What was found has the tail that was read, so what is sent has the data that belongs to it.
        check_unchanged(location, tail)
        with _unless_done(found, len(data), new):
            put_object(found, data)
        return ReplacedTail("object sent whole", len(data), 0)
    with _unless_done(found, tail.offset + len(new), new):
        put_beginning_and(found, tail.offset, new, lambda: check_unchanged(location, tail))
    return ReplacedTail("new tail, data copied by the store", len(new), tail.offset)


def replace_object(location: FileLocation, new: bytes, check: Callable[[], None]) -> None:
    """Replace a small object.

    Raises:
        ChangedMeanwhileError: It is gone, or changed after `check`.
        KeytoolsError: What `check` raises.
        OutputError: The store refuses.
    """
    found = find_object(location)
    # After it was found: what is checked here is what the condition is about, or a newer one.
    check()
    with _unless_done(found, len(new), new):
        put_object(found, new)


@contextlib.contextmanager
def _unless_done(found: S3Object, size_bytes: int, end: bytes) -> Iterator[None]:
    """Let an error pass over that came after the object was replaced: of a request whose answer was lost.

    The object would be taken for one that somebody else changed. No two rotations write the same bytes.
    """
    try:
        yield
    except (ChangedMeanwhileError, OutputError):
        if not _is_done(found, size_bytes, end):
            raise


def _is_done(found: S3Object, size_bytes: int, end: bytes) -> bool:
    try:
        now = find_object(found.location)
        if now.etag == found.etag or now.size_bytes != size_bytes:
            return False
        return read_object(now, size_bytes - len(end), size_bytes) == end
    except KeytoolsError:
        return False
