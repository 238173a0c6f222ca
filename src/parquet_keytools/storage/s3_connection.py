"""A boto3 client with the options and permissions of one of Arrow's S3 file systems.

It aborts multipart uploads that killed processes left unfinished, which cost money.
"""

from __future__ import annotations

import logging
import os
import pickle
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

import boto3
import botocore.config
import botocore.exceptions
from pyarrow import fs as pafs

from parquet_keytools.storage.local_files import DEAD_AFTER_SECONDS, parse_temporary_name, warn_left_behind
from parquet_keytools.storage.locations import FileLocation

CONCURRENT_PARTS = 8
"""How many parts of an object are copied at a time."""

_TRIES = 10


def can_reach(filesystem: pafs.S3FileSystem) -> bool:
    """Return whether a client can have the same permissions as a file system."""
    given = _options(filesystem)
    # Arrow does not show the credentials of an assumed role, and the keys of SSE-C.
    return not (given["anonymous"] or given["role_arn"] or given.get("sse_customer_key"))


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
    timeouts = {
        name: given[theirs]
        for name, theirs in (("connect_timeout", "connect_timeout"), ("read_timeout", "request_timeout"))
        # Copying gigabytes inside the store takes longer than a read, so no less than the default.
        if given[theirs] > 60 or (name == "connect_timeout" and given[theirs] > 0)
    }
    return session.client(
        "s3",
        endpoint_url=endpoint or None,
        verify=given["tls_ca_file_path"] or None,
        config=botocore.config.Config(
            max_pool_connections=4 * CONCURRENT_PARTS,
            retries={"mode": "standard", "total_max_attempts": _TRIES},
            # As Arrow does.
            s3={"addressing_style": _addressing_style(given)},
            # Every store knows Content-MD5, which is sent with each write, but not the newer checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Arrow does not use proxies of the environment.
            proxies=_proxies(given),
            **timeouts,
        ),
    )


def _addressing_style(given: dict[str, Any]) -> Literal["virtual", "path", "auto"]:
    if given["force_virtual_addressing"]:
        return "virtual"
    return "path" if given["endpoint_override"] else "auto"


def _proxies(given: dict[str, Any]) -> dict[str, str]:
    proxy = given["proxy_options"]
    if not proxy or not proxy["host"]:
        return {}
    user = f"{proxy['username']}:{proxy['password']}@" if proxy["username"] else ""
    address = f"{proxy['scheme']}://{user}{proxy['host']}:{proxy['port']}"
    return {"http": address, "https": address}


_log = logging.getLogger(__name__)
_MOST_UPLOADS = 1000
_said_of: set[str] = set()


def end_dead_uploads(target: FileLocation) -> None:
    """Abort old uploads of temporary objects beside an object; warn of those that cannot be listed or aborted."""
    filesystem = target.filesystem
    if not isinstance(filesystem, pafs.S3FileSystem) or not can_reach(filesystem):
        return
    bucket, _, key = target.path.partition("/")
    client = client_of(filesystem)
    # The names of temporary objects begin with a dot.
    prefix = f"{key[: len(key) - len(target.name)]}."
    try:
        answer = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, MaxUploads=_MOST_UPLOADS)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        warn_left_behind(
            _log,
            f"unfinished uploads of the bucket {bucket} cannot be listed (s3:ListBucketMultipartUploads); if a "
            "process was killed while it wrote there, have a lifecycle rule of the bucket end them",
            is_logged=bucket not in _said_of,
        )
        _said_of.add(bucket)
        return
    for upload in answer.get("Uploads", ()):
        is_ours = parse_temporary_name(upload["Key"].rpartition("/")[2]) is not None
        if is_ours and age_seconds(upload) > DEAD_AFTER_SECONDS:
            end_upload(client, bucket, upload["Key"], upload["UploadId"])


def end_upload(client: Any, bucket: str, key: str, upload_id: str) -> None:
    """Abort an upload; warn if that is refused."""
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        if "NoSuchUpload" not in str(error):
            warn_left_behind(
                _log, f"the unfinished upload {upload_id} of {bucket}/{key} is left over, and cannot be ended"
            )


def age_seconds(upload: dict[str, Any]) -> float:
    """Return the age of an upload; 0 if the store does not report it."""
    begun = upload.get("Initiated")
    return (datetime.now(UTC) - begun).total_seconds() if isinstance(begun, datetime) else 0.0
