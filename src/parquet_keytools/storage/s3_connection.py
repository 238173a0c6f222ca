"""A boto3 client with the options and permissions of one of Arrow's S3 file systems."""

from __future__ import annotations

import os
import pickle
from functools import lru_cache
from typing import Any, Literal

import boto3
import botocore.config
from pyarrow import fs as pafs

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
