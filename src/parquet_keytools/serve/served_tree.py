"""The files below one folder of an fsspec file system, as the server sees them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from parquet_keytools.errors import FileChangedError, KeytoolsError, KmsError
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.storage.walk import is_data_file, leads_back, names_passed_over

_MAX_KEY_BYTES = 1024
"""Longest key, as in S3."""

_PIECE_BYTES = 1 << 20
_END_BYTES = 8
_MAGIC = b"PAR1"

_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML or log lines cannot hold."""

_ABSOLUTE = re.compile(r"(?<![\w.:/])/[^\s/]|\bfile:/|\b[A-Za-z]:\\")
"""Matches the start of an absolute POSIX or Windows path, or of a local file URL."""

_log = logging.getLogger("parquet_keytools.serve")

ReadRange = Callable[[int, int], bytes]
"""Takes the start and the length of a range of one version of a file."""


@dataclass(frozen=True)
class ServedFile:
    """The current version of a file; `modified` is in seconds since 1970.

    The ETag, without quotes, changes when the file is replaced, when it shows other columns, and with each run of
    the server; `version` changes when the file is replaced.
    """

    key: str
    size_bytes: int
    modified: float | None
    etag: str
    version: str


@dataclass(frozen=True)
class ServedEntry:
    """A file or folder in the list of a folder."""

    key: str
    is_folder: bool

    @property
    def sort_key(self) -> bytes:
        """Sort key in the order of S3, in which a folder takes the position of the keys in it."""
        return (self.key + "/" * self.is_folder).encode()


class ServedTree:
    """The files of a data set in a folder, read-only; names that readers skip, as `_SUCCESS`, are not served.

    `folder` is the place of the file system's root in storage: links that lead out of it are refused. `only` is
    the key of the only file to serve. The file system's `ukey` must change whenever the file does.
    """

    def __init__(
        self,
        filesystem: Any,
        *,
        folder: PathLike | FileLocation | None = None,
        only: str | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._folder = None if folder is None else FileLocation.resolve(folder)
        is_local = self._folder is not None and self._folder.is_local
        self._local_folder = Path(self._folder.path).resolve() if self._folder and is_local else None
        self._only = only
        self._run = secrets.token_bytes(16)

    def find(self, key: str) -> ServedFile:
        """Return the current version of a file; `FileNotFoundError` if it does not exist or is not served."""
        path = self._checked(key)
        if self._only not in (None, key) or not key:
            raise FileNotFoundError(key)
        facts = self._filesystem.info(path)
        if facts["type"] != "file" or not self._is_data_file(key):
            raise FileNotFoundError(key)
        version = str(self._filesystem.ukey(path))
        # The view may have another length than the stored file, and other bytes for other access rights.
        with self._opened(path) as stream:
            return self._described(key, version, stream, _seconds(facts))

    def _described(self, key: str, version: str, stream: Any, modified: float | None) -> ServedFile:
        size = stream.seek(0, os.SEEK_END)
        digest = hashlib.blake2b(key=self._run, digest_size=20)
        digest.update(repr((key, size, version)).encode(errors="surrogatepass"))
        # The footer identifies the visible columns. No page is read.
        stream.seek(max(0, size - _END_BYTES))
        end = bytes(stream.read(_END_BYTES))
        length = min(int.from_bytes(end[:4], "little"), size - _END_BYTES) if end[4:] == _MAGIC else 0
        stream.seek(size - len(end) - length)
        left = length + len(end)
        while left and (piece := bytes(stream.read(min(left, _PIECE_BYTES)))):
            left -= len(piece)
            digest.update(piece)
        return ServedFile(key, size, modified, _etag(digest.digest()), version)

    def find_listed(self, key: str) -> ServedFile:
        """Return the current version of a listed file, even if the file cannot be decrypted."""
        try:
            return self.find(key)
        except KmsError:
            raise
        except (KeytoolsError, PermissionError):
            # A foreign or damaged file. Reading it raises the error; listing its folder must still work.
            facts = self._filesystem.info(self._checked(key))
            return ServedFile(key, int(facts["size"]), _seconds(facts), _etag(secrets.token_bytes(20)), "")

    @contextlib.contextmanager
    def open(self, file: ServedFile) -> Iterator[ReadRange]:
        """Open the version of a file that `find` returned, or raise `FileChangedError`."""
        with self._opened(self._checked(file.key)) as stream:
            if self._described(file.key, file.version, stream, None).etag != file.etag:
                raise _changed(file)
            yield partial(self._read, file, stream)

    def _read(self, file: ServedFile, stream: Any, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start` of this version, or raise `FileChangedError`."""
        stream.seek(start)
        parts = []
        while length and (part := stream.read(length)):
            parts.append(part)
            length -= len(part)
        # Checked after reading, so that all bytes come from the version that was found.
        if length or not self.is_current(file):
            raise _changed(file)
        return b"".join(parts)

    def is_current(self, file: ServedFile) -> bool:
        """Return whether a file is still this version; this needs no key."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self._filesystem.ukey(self._checked(file.key)) == file.version)
        return False

    def is_folder(self, key: str) -> bool:
        """Return whether the key is an existing folder."""
        try:
            return bool(self._filesystem.info(self._checked(key))["type"] == "directory")
        except FileNotFoundError:
            return False

    def as_served(self, text: str) -> str | None:
        """Return a text with served paths only; None if it has other absolute paths of this machine."""
        if self._folder is not None:
            places = {str(self._folder), self._folder.path, str(self._local_folder or "")}
            for place in sorted((place.rstrip("/") for place in places), key=len, reverse=True):
                text = text.replace(f"{place}/", "") if place else text
        return None if _ABSOLUTE.search(text) else text

    def entries(self, folder: str) -> list[ServedEntry]:
        """Return the entries of a folder in the order of S3."""
        path = self._checked(folder)
        if not self.is_folder(folder):
            raise FileNotFoundError(folder)
        found = []
        for facts in self._filesystem.ls(path, detail=True):
            name = str(facts["name"]).rstrip("/").rpartition("/")[2]
            key = f"{folder}/{name}" if folder else name
            if self._only is None and names_passed_over(name):
                continue
            try:
                place, kind = self._checked(key), facts["type"]
                if kind not in ("file", "directory"):
                    kind = self._filesystem.info(place)["type"]  # `ls` reports a link, `info` reports its target.
            except FileNotFoundError:
                _log.warning("%r is not served: a broken link, a link out of the folder, or an invalid name", key)
                continue
            if self._only not in (None, key) or (kind == "file" and not self._is_listed(key)):
                continue
            if kind == "directory" and self._local_folder and leads_back(str(self._local_folder / key)):
                _log.warning("%r is not served: a link to a folder that contains it", key)
            elif kind in ("file", "directory"):
                found.append(ServedEntry(key, kind == "directory"))
        return sorted(found, key=lambda entry: entry.sort_key)

    def _is_data_file(self, key: str) -> bool:
        """Return whether a file belongs to the data set; a file that the user named always does."""
        return self._only == key or self._folder is None or is_data_file(self._folder.below(key))

    def _is_listed(self, key: str) -> bool:
        try:
            return self._is_data_file(key)
        except FileNotFoundError:
            return False
        except OSError:
            # The file may be data. A client that reads it gets the error.
            return True

    def keys(self, folder: str, *, after: str = "") -> Iterator[str]:
        """Yield the keys after `after` of all files below a folder, in the order of S3."""
        try:
            entries = self.entries(folder)
        except FileNotFoundError:
            return
        for entry in entries:
            if not entry.is_folder:
                if entry.key.encode() > after.encode():
                    yield entry.key
            elif entry.sort_key > after.encode() or after.startswith(f"{entry.key}/"):
                yield from self.keys(entry.key, after=after)

    def _opened(self, path: str) -> Any:
        # No read-ahead, since each byte costs a decryption.
        return self._filesystem.open(path, "rb", cache_type="none")

    def _checked(self, key: str) -> str:
        """Return a valid key that readers do not skip, and that does not lead out of the folder."""
        parts = key.split("/") if key else []
        if (
            any(part in ("", ".", "..") for part in parts)
            or _ODD.search(key)
            or (self._only is None and names_passed_over(key))
            or len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES
        ):
            raise FileNotFoundError(key)
        if self._local_folder is not None:
            try:
                place = (self._local_folder / key).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                raise FileNotFoundError(key) from None
            if not place.is_relative_to(self._local_folder):
                raise FileNotFoundError(key)
        return key


def _etag(digest: bytes) -> str:
    """Return an ETag with a dash: S3 clients compare an ETag without a dash with the MD5 sum of the file."""
    return f"{digest.hex()}-1"


def _changed(file: ServedFile) -> FileChangedError:
    return FileChangedError(f"{file.key} was replaced while it was read.")


def _seconds(facts: dict[str, Any]) -> float | None:
    found = facts.get("mtime", facts.get("modified", facts.get("created")))
    return found.timestamp() if isinstance(found, datetime) else found
