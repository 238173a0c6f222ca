"""What is served: the files of one folder of an fsspec file system, by their paths below it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from parquet_keytools.errors import FileChangedError, KeytoolsError, KmsError
from parquet_keytools.storage.locations import FileLocation, PathLike
from parquet_keytools.storage.walk import is_data_file, names_passed_over

_MAX_KEY_BYTES = 1024
"""As in S3."""

_PIECE_BYTES = 1 << 20
_END_BYTES = 8
_MAGIC = b"PAR1"

_ODD = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Neither XML nor the lines of a log can hold these."""

_ABSOLUTE = re.compile(r"(?<![\w.:/])/[^\s/]|\bfile:/|\b[A-Za-z]:\\")
"""Where an absolute path begins, on POSIX, in a URL of a local file, or on Windows."""

_log = logging.getLogger("parquet_keytools.serve")


@dataclass(frozen=True)
class ServedFile:
    """A file as it is now.

    Attributes:
        key: Its path below the folder that is served.
        size_bytes: Its length.
        modified: When it was written, in seconds since 1970; None where that is unknown.
        etag: Without quotes; another one as soon as the file is another one or shows other columns, and in
            another run.
        version: What changes when the file is replaced.
    """

    key: str
    size_bytes: int
    modified: float | None
    etag: str
    version: tuple[object, ...]


@dataclass(frozen=True)
class ServedEntry:
    """An entry of a folder: its key, and whether that is a folder."""

    key: str
    is_folder: bool

    @property
    def sort_key(self) -> bytes:
        """Place among others, as S3 orders keys: a folder stands where the keys in it do."""
        return (self.key + "/" * self.is_folder).encode()


class ServedTree:
    """The files of the data set below one folder, read-only.

    Files and folders that readers of data sets pass over (`_SUCCESS`, `.part.crc`, key material, notes) are not
    there: clients that copy everything would fail at each of them.

    Args:
        filesystem: An fsspec file system. `info` has to change whenever the file does.
        root: The folder there.
        folder: The same folder as it is stored. On this machine's disks, links that lead out of it are refused.
        only: The key of the one file that is served; None serves all.
    """

    def __init__(
        self,
        filesystem: Any,
        root: str,
        *,
        folder: PathLike | FileLocation | None = None,
        only: str | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._folder = None if folder is None else FileLocation.resolve(folder)
        is_local = self._folder is not None and self._folder.is_local
        self._local_folder = Path(self._folder.path).resolve() if self._folder and is_local else None
        self._only = only
        self._run = secrets.token_bytes(16)

    def find(self, key: str) -> ServedFile:
        """Return what is known of a file; one that nobody may ask for is not there."""
        path = self._path_of(key)
        if self._only not in (None, key) or not key:
            raise FileNotFoundError(key)
        facts = self._filesystem.info(path)
        if facts["type"] != "file" or not self._is_data_file(key):
            raise FileNotFoundError(key)
        version = self._version(key, path)
        # What is served may have another length than the file, and other bytes than it had with other rights.
        with self._opened(path) as stream:
            return self._described(key, version, stream, _seconds(facts))

    def _described(self, key: str, version: tuple[object, ...], stream: Any, modified: float | None) -> ServedFile:
        size = stream.seek(0, os.SEEK_END)
        digest = hashlib.blake2b(key=self._run, digest_size=20)
        digest.update(repr((key, size, version)).encode(errors="surrogatepass"))
        for piece in _footer(stream, size):
            digest.update(piece)
        return ServedFile(key, size, modified, _etag(digest.digest()), version)

    def find_listed(self, key: str) -> ServedFile:
        """Return what is known of a file that is listed, also of one that cannot be served, if the KMS works."""
        try:
            return self.find(key)
        except KmsError:
            raise
        except (KeytoolsError, PermissionError):
            # No file of ours, or a damaged one. Who reads it gets the error; those beside it are not its victims.
            facts = self._filesystem.info(self._path_of(key))
            return ServedFile(key, int(facts["size"]), _seconds(facts), _etag(secrets.token_bytes(20)), ())

    @contextlib.contextmanager
    def open(self, file: ServedFile) -> Iterator[FileReader]:
        """Open a file that was found; what is read belongs to the very file that was found.

        Raises:
            FileNotFoundError: It is gone.
            FileChangedError: It is another one now, or shows other columns.
            KeytoolsError: What the file system says of the file.
        """
        with self._opened(self._path_of(file.key)) as stream:
            if self._described(file.key, file.version, stream, None).etag != file.etag:
                raise _changed(file)
            yield FileReader(self, file, stream)

    def check_unchanged(self, file: ServedFile) -> None:
        """Raise `FileChangedError` if a file is no longer the one that was found; that needs no key."""
        try:
            if self._version(file.key, self._path_of(file.key)) == file.version:
                return
        except FileNotFoundError:
            pass
        raise _changed(file)

    def is_folder(self, key: str) -> bool:
        """Whether there is a folder of this key."""
        try:
            return bool(self._filesystem.info(self._path_of(key))["type"] == "directory")
        except FileNotFoundError:
            return False

    def local_status(self, key: str) -> os.stat_result | None:
        """Return what this machine's disks say of a file or folder; None for one that lies elsewhere.

        Raises:
            FileNotFoundError: There is none of this key.
        """
        self._path_of(key)
        return None if self._local_folder is None else (self._local_folder / key).stat()

    def local_space(self) -> Any:
        """Return the `os.statvfs_result` of the disk with the folder; None for a folder that lies elsewhere."""
        if sys.platform == "win32" or self._local_folder is None:
            return None
        return os.statvfs(self._local_folder)

    def as_served(self, text: str) -> str | None:
        """Return a text with paths as clients know them; None if it has other absolute paths of this machine."""
        if self._folder is not None:
            places = {str(self._folder), self._folder.path, str(self._local_folder or "")}
            for place in sorted((place.rstrip("/") for place in places), key=len, reverse=True):
                text = text.replace(f"{place}/", "") if place else text
        return None if _ABSOLUTE.search(text) else text

    def entries(self, folder: str) -> list[ServedEntry]:
        """Return what a folder holds, sorted as S3 sorts keys; the one that is served has an empty key."""
        path = self._path_of(folder)
        if not self.is_folder(folder):
            raise FileNotFoundError(folder)
        found = []
        for facts in self._filesystem.ls(path, detail=True):
            name = str(facts["name"]).rstrip("/").rpartition("/")[2]
            key = f"{folder}/{name}" if folder else name
            if self._only is None and names_passed_over(name):
                continue
            try:
                place = self._path_of(key)
                # A link is listed as such, and described as what it leads to.
                is_known = facts["type"] in ("file", "directory")
                kind = facts["type"] if is_known else self._filesystem.info(place)["type"]
            except FileNotFoundError:
                _log.warning("%r is not served: a link that leads nowhere or out, or a name that is too odd", key)
                continue
            if self._only not in (None, key) or (kind == "file" and not self._is_listed(key)):
                continue
            if kind == "directory" and self._leads_back(key):
                _log.warning("%r is not served: a link to a folder that contains it", key)
            elif kind in ("file", "directory"):
                found.append(ServedEntry(key, kind == "directory"))
        return sorted(found, key=lambda entry: entry.sort_key)

    def _is_data_file(self, key: str) -> bool:
        """Return whether a file belongs to the data set; the one that the user named does."""
        return self._only == key or self._folder is None or is_data_file(self._folder.below(key))

    def _is_listed(self, key: str) -> bool:
        try:
            return self._is_data_file(key)
        except FileNotFoundError:
            return False
        except OSError:
            # It may be data. A client that reads it gets the error.
            return True

    def _leads_back(self, key: str) -> bool:
        """Return whether a folder is a link to one that contains it: everything there is listed already."""
        if self._local_folder is None or not (self._local_folder / key).is_symlink():
            return False
        place = (self._local_folder / key).resolve()
        return any((self._local_folder / above).resolve() == place for above in PurePosixPath(key).parents)

    def keys(self, folder: str, *, after: str = "") -> Iterator[str]:
        """Yield the keys of all files below a folder, sorted as S3 sorts them, that come after one."""
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
        # Nothing is read ahead: each byte costs a decryption.
        return self._filesystem.open(path, "rb", cache_type="none")

    def _version(self, key: str, path: str) -> tuple[object, ...]:
        """Return what changes when a file is replaced: on this machine, whatever its times are set to."""
        local: tuple[int, ...] = ()
        if self._local_folder is not None:
            found = (self._local_folder / key).stat()
            local = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        return self._filesystem.ukey(path), *local

    def _path_of(self, key: str) -> str:
        """Return the path of a key; whatever is odd about one is no file of ours."""
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") for part in parts) or _ODD.search(key):
            raise FileNotFoundError(key)
        if self._only is None and names_passed_over(key):
            raise FileNotFoundError(key)
        if len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES:
            raise FileNotFoundError(key)
        if self._local_folder is not None:
            try:
                place = (self._local_folder / key).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                raise FileNotFoundError(key) from None
            if not place.is_relative_to(self._local_folder):
                raise FileNotFoundError(key)
        return "/".join([self._root, *parts]) if self._root or not parts else key


class FileReader:
    """Reads one file for one answer."""

    def __init__(self, tree: ServedTree, file: ServedFile, stream: Any) -> None:
        self._tree = tree
        self._file = file
        self._stream = stream

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file, which must have them.

        Raises:
            FileChangedError: The file is no longer the one that was found, or is shorter.
            KeytoolsError: They are not authentic, or a key is unavailable.
        """
        self._stream.seek(start)
        parts = []
        while length and (part := self._stream.read(length)):
            parts.append(part)
            length -= len(part)
        # After reading: what was read before a change is of the file that was found.
        self._tree.check_unchanged(self._file)
        if length:
            raise _changed(self._file)
        return b"".join(parts)


def _etag(digest: bytes) -> str:
    """Return an ETag. S3 clients take one without a dash for the MD5 sum of the file, and compare it."""
    return f"{digest.hex()}-1"


def _changed(file: ServedFile) -> FileChangedError:
    return FileChangedError(f"{file.key} was replaced while it was read.")


def _footer(stream: Any, size_bytes: int) -> Iterator[bytes]:
    """Yield the footer of a Parquet file in pieces: it says which columns are there. No page is read."""
    stream.seek(max(0, size_bytes - _END_BYTES))
    end = bytes(stream.read(_END_BYTES))
    yield end
    if end[4:] == _MAGIC:
        left = min(int.from_bytes(end[:4], "little"), size_bytes - _END_BYTES)
        stream.seek(size_bytes - _END_BYTES - left)
        while left > 0 and (piece := bytes(stream.read(min(left, _PIECE_BYTES)))):
            left -= len(piece)
            yield piece


def _seconds(facts: dict[str, Any]) -> float | None:
    for name in ("mtime", "modified", "LastModified", "last_modified", "created"):
        found = facts.get(name)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return None
