"""Older versions of the objects in a versioned bucket of S3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from botocore.exceptions import BotoCoreError, ClientError
from pyarrow import fs as pafs

from parquet_keytools.format.file_layout import RangedFile
from parquet_keytools.rotation.s3_replacement import can_reach, client_of
from parquet_keytools.runtime.threads_and_forks import share_with_arrow
from parquet_keytools.storage.http_files import HttpHandler
from parquet_keytools.storage.locations import FileLocation


class OlderVersion(NamedTuple):
    """A version of an object that is no longer the current one: `path` as it is printed, `location` to be read."""

    path: str
    version_id: str
    location: FileLocation


def older_versions(location: FileLocation) -> Iterator[OlderVersion]:
    """Yield the older versions of an object, or of all objects in a folder; none in a bucket without versions."""
    if not can_reach(location.filesystem):
        raise PermissionError("they cannot be listed with the credentials of this file system")
    client = client_of(location.filesystem)
    bucket, _, key = location.path.strip("/").partition("/")
    try:
        for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=key):
            for entry in page.get("Versions", ()):
                name, version_id = entry["Key"], entry["VersionId"]
                if entry["IsLatest"] or not entry["Size"] or (key and not f"{name}/".startswith(f"{key}/")):
                    continue
                below = pafs.PyFileSystem(_Version(client, version_id, entry["Size"]))
                path = f"{bucket}/{name}"
                yield OlderVersion(
                    f"{location.filesystem.type_name}:{path}", version_id, FileLocation(below, path)
                )
    except (BotoCoreError, ClientError) as error:
        raise _failure(error) from None


def _failure(error: Exception) -> OSError:
    """Return the error that replaces an error of the SDK, whose text may quote the request."""
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    kind = PermissionError if code in ("AccessDenied", "403") else OSError
    return kind(f"the store refused: {code or type(error).__name__}")


class _Version(HttpHandler):
    """A file system with one file, a version of an object, which is only read, as files of web servers are."""

    def __init__(self, client: Any, version_id: str, size_bytes: int) -> None:
        self._client = client
        self._version_id = version_id
        self._size_bytes = size_bytes

    __eq__, __hash__ = object.__eq__, object.__hash__

    def get_type_name(self) -> str:
        return "s3-version"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [pafs.FileInfo(path, pafs.FileType.File, size=self._size_bytes) for path in paths]

    def open_input_file(self, path: str) -> pa.NativeFile:
        if path.rpartition("/")[2].startswith("_KEY_MATERIAL_FOR_"):
            raise FileNotFoundError(f"{path}: which version of it belongs to the file is unknown")
        return pa.PythonFile(_VersionFile(self._client, path, self._version_id, self._size_bytes), mode="r")


class _VersionFile(RangedFile):
    def __init__(self, client: Any, path: str, version_id: str, size_bytes: int) -> None:
        super().__init__()
        share_with_arrow(self)
        self._client = client
        self._bucket, _, self._key = path.partition("/")
        self._version_id = version_id
        self.size_bytes = size_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range."""
        if not length:
            return b""
        try:
            answer = self._client.get_object(
                Bucket=self._bucket,
                Key=self._key,
                VersionId=self._version_id,
                Range=f"bytes={offset}-{offset + length - 1}",
            )
            data: bytes = answer["Body"].read()
        except (BotoCoreError, ClientError) as error:
            raise _failure(error) from None
        return data
