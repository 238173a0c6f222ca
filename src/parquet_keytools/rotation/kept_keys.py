"""Old key material kept beside a file, until it is restored or dropped.

A kept file is one line of JSON and then the old bytes: the old tail of the Parquet file, or the old content of
its key material file. It says which new state it belongs to, so that nothing is restored over what another
writer made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pyarrow import fs as pafs

from parquet_keytools.errors import KeyMaterialError, KeytoolsError
from parquet_keytools.storage.failures import warn_left_behind
from parquet_keytools.storage.locations import FileLocation, real_location
from parquet_keytools.storage.outputs import whole_output
from parquet_keytools.storage.sources import open_source, read_whole
from parquet_keytools.storage.walk import names_in

_log = logging.getLogger(__name__)

SUFFIX = ".old_keys"
"""Ends the name of a kept file; as the name begins with a dot, readers of data sets pass over it."""

_NAME = re.compile(r"\.(?P<name>.+)\.[0-9TZ]+-[0-9a-f]+\.(?P<kind>tail|key_material)\.old_keys", re.DOTALL)
_MAX_FILE_BYTES = 1024 * 1024 * 1024
_MAX_HEAD_BYTES = 4096

Kind = Literal["tail", "key_material"]


@dataclass(frozen=True)
class KeptKeys:
    """Old key material of a file.

    Attributes:
        offset: Where the tail begins; 0 for a key material file.
        new_sha256: Digest of what took the place of the old bytes.
    """

    location: FileLocation
    kind: Kind
    offset: int
    new_sha256: str
    old: bytes = field(repr=False)


def new_rotation_id() -> str:
    """Return an id for a rotation; those of later ones sort after it."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{secrets.token_hex(4)}"


def keep(
    parquet_file: FileLocation,
    replaced: FileLocation,
    kind: Kind,
    offset: int,
    old: bytes,
    new: bytes,
    rotation_id: str,
) -> FileLocation:
    """Keep old bytes beside a Parquet file; to be called before they are replaced."""
    new_sha256 = _sha256(new)
    # A rotation may come to one file twice, by way of links: what it kept first must not be lost then.
    change_id = f"{rotation_id}{new_sha256[:8]}"
    location = parquet_file.sibling(f".{parquet_file.name}.{change_id}.{kind}{SUFFIX}")
    head = {"keptKeys": 1, "kind": kind, "offset": offset, "oldSHA256": _sha256(old), "newSHA256": new_sha256}
    with whole_output(location, like=real_location(replaced)) as pending, pending.open_sink() as sink:
        line = json.dumps(head).encode() + b"\n"
        sink.write_at(0, line)
        sink.write_at(len(line), old)
    return location


def remove_kept(location: FileLocation) -> None:
    """Remove a kept file that is needed no more; if that is refused, the report of the run names it."""
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        pass
    except OSError:
        warn_left_behind(
            _log, f"{location} holds old keys that are needed no more, and cannot be removed: remove it"
        )


def may_be_in_place(replaced: FileLocation, offset: int, new: bytes) -> bool:
    """Return whether a file has the new bytes already, or nobody can tell."""
    try:
        with open_source(replaced) as source:
            if source.size_bytes != offset + len(new):
                return False
            return bytes(source.read_at(offset, len(new))) == new
    except FileNotFoundError:
        return False
    except (KeytoolsError, OSError):
        return True


@dataclass(frozen=True)
class KeptFile:
    """A file with old key material, by its name; not yet read.

    Attributes:
        is_regular: Whether it is a file, and no link, folder or pipe.
    """

    location: FileLocation
    kind: str
    is_regular: bool = True

    def looks_kept(self) -> bool:
        """Return whether it begins as what `keep` writes does, so that nothing else is removed."""
        if not self.is_regular:
            return False
        try:
            with open_source(self.location) as source:
                line, newline, _ = bytes(source.read_at(0, min(source.size_bytes, _MAX_HEAD_BYTES))).partition(
                    b"\n"
                )
            head = json.loads(line)
            return bool(newline) and head["keptKeys"] == 1 and head["kind"] == self.kind
        except (ValueError, KeyError, TypeError, RecursionError, KeytoolsError, OSError):
            return False


def kept_files_in(filesystem: pafs.FileSystem, folder: str) -> dict[str, list[KeptFile]]:
    """Return what is kept in a folder: name of the Parquet file -> its kept files, the newest first."""
    found: dict[str, list[KeptFile]] = {}
    for name, path, is_file in sorted(names_in(FileLocation(filesystem, folder)), reverse=True):
        parts = _NAME.fullmatch(name)
        if parts:
            location = FileLocation(filesystem, path)
            is_regular = is_file and _is_regular(location)
            kept = KeptFile(location, parts["kind"], is_regular)
            found.setdefault(parts["name"], []).append(kept)
    return found


def _is_regular(location: FileLocation) -> bool:
    """Return whether it is a file, and no link to one."""
    if not location.is_local:
        return True
    try:
        return stat.S_ISREG(os.lstat(location.path).st_mode)
    except OSError:
        return False


def read_kept(file: KeptFile) -> KeptKeys:
    """Read a kept file.

    Raises:
        KeyMaterialError: It is damaged, or a link.
    """
    location = file.location
    if not file.is_regular:
        raise KeyMaterialError("not a regular file: nothing is restored from it", path=str(location))
    line, _, old = read_whole(location, _MAX_FILE_BYTES).partition(b"\n")
    try:
        head: dict[str, Any] = json.loads(line)
        kept = KeptKeys(location, head["kind"], int(head["offset"]), str(head["newSHA256"]), old)
        intact = head["keptKeys"] == 1 and head["oldSHA256"] == _sha256(old) and kept.kind == file.kind
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise KeyMaterialError("the old keys that were kept are damaged", path=str(location))
    return kept


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
