"""New key material put in place, and the old one kept beside the file until it is restored or dropped.

At each moment the old file is there, whole, or the new one. A kept file is one line of JSON and then the old
bytes: the old tail of the Parquet file, or the old content of its key material file. It says which new state it
belongs to, so that nothing is restored over what another writer made.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pyarrow import fs as pafs

from parquet_keytools.errors import ChangedMeanwhileError, KeyMaterialError, KeytoolsError
from parquet_keytools.files.replacement import replacement
from parquet_keytools.keys.material_store import MAX_FILE_BYTES
from parquet_keytools.rotation.tail import (
    CheckWritten,
    ReplacedTail,
    Tail,
    changed_while_rotated,
    check_read_back,
    check_unchanged,
)
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.failures import warn_left_behind
from parquet_keytools.storage.locations import FileLocation, real_location
from parquet_keytools.storage.outputs import LocalSink, whole_output
from parquet_keytools.storage.sources import ends_with, open_source, read_whole
from parquet_keytools.storage.walk import names_in

_log = logging.getLogger(__name__)

COPY_LENGTH = 8 * 1024 * 1024
"""How many bytes are copied at a time where they go through this process."""


def replace_tail(
    location: FileLocation, tail: Tail, new: bytes, check: CheckWritten, *, locked_folder: str | None = None
) -> ReplacedTail:
    """Give a file a new tail: at each moment the file is there, whole, the old or the new one.

    Raises:
        ChangedMeanwhileError: The file is no longer the one that was read; nothing was changed.
        KeytoolsError: What `check` raises; nothing was changed.
        OSError: It cannot be written; nothing was changed.
    """
    reason = why_unconditional(location)
    if reason is None:
        # A store that copies ranges by itself has its own source file.
        from parquet_keytools.rotation.s3_replacement import replace_object_tail

        return replace_object_tail(location, tail, new, check)
    with replacement(location, lambda: check_unchanged(location, tail), locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            if location.is_local:
                # The data is copied by the operating system.
                assert isinstance(sink, LocalSink)
                with Path(location.path).open("rb") as opened:
                    how = copy_beginning(opened.fileno(), sink.file_descriptor, tail.offset)
            else:
                how = None
                sink.reserve(tail.offset + len(new))
                with open_source(location) as source:
                    for offset in range(0, tail.offset, COPY_LENGTH):
                        sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
            sink.write_at(tail.offset, new)
        with pending.open_written() as written:
            check(written)
    by_hand = tail.offset if how in (None, COPIED) else 0
    text = f"new tail, data {how}" if how is not None else f"rewritten whole{f'; {reason}' if reason else ''}"
    return ReplacedTail(text, len(new) + by_hand, tail.offset - by_hand)


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition and with its data copied by the store; None if it can.

    Returns:
        For people, where it is in S3; else empty.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.storage.s3_connection import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, and no role that Arrow assumes, the store would copy the data"


REFLINKED = "shared with the old file by the file system"
COPIED_IN_KERNEL = "copied in the kernel"
COPIED = "copied"

_FICLONE = 0x40049409
_NOT_THERE = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
)
"""What a file system answers that cannot do it for these files; an error of the disk is another one."""


def copy_beginning(source: int, target: int, length: int) -> str:
    """Copy the first `length` bytes of a file into an empty one.

    Returns:
        How it was done.

    Raises:
        ChangedMeanwhileError: The source became shorter.
        OSError: It cannot be read, or the target not be written.
    """
    if _reflink(source, target, length):
        return REFLINKED
    copied = _copy_in_kernel(source, target, length)
    if copied == length:
        return COPIED_IN_KERNEL
    while copied < length:
        data = operating_system.read_at(source, min(COPY_LENGTH, length - copied), copied)
        if not data:
            raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
        view = memoryview(data)
        while view:
            written = operating_system.write_at(target, view, copied)
            copied += written
            view = view[written:]
    return COPIED


def _reflink(source: int, target: int, length: int) -> bool:
    """Have the whole file shared and cut off: ranges would have to fit the file system's blocks."""
    if sys.platform != "linux" or not operating_system.POSIX:
        return False
    import fcntl

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise
    if os.fstat(target).st_size < length:
        raise ChangedMeanwhileError("the file became shorter while it was copied.", hint="Try again.")
    os.ftruncate(target, length)
    return True


def _copy_in_kernel(source: int, target: int, length: int) -> int:
    """Return how many bytes the kernel copied; fewer than all where it cannot go on."""
    copied = 0
    if sys.platform != "linux" or not hasattr(os, "copy_file_range"):
        return copied
    while copied < length:
        try:
            # The kernel copies no more than about 2 GiB at a time, and may copy less.
            count = os.copy_file_range(source, target, length - copied, copied, copied)
        except OSError as error:
            if error.errno in _NOT_THERE:
                break
            raise
        if count == 0:
            break  # Some file systems end like this what they cannot do; the copy by hand finds the end.
        copied += count
    return copied


def replace_external_material(
    location: FileLocation,
    old: bytes,
    new: bytes,
    check_parquet_file: Callable[[], None],
    *,
    locked_folder: str | None = None,
) -> None:
    """Replace a key material file.

    Raises:
        ChangedMeanwhileError: Its content is another one now.
        OutputError: It cannot be written, or does not read back as it was written.
    """

    def check() -> None:
        try:
            check_parquet_file()
            if read_whole(location, MAX_FILE_BYTES) == old:
                return
        except FileNotFoundError:
            pass
        raise changed_while_rotated(location)

    if why_unconditional(location) is None:
        from parquet_keytools.rotation.s3_replacement import replace_object

        replace_object(location, new, check)
        return
    with replacement(location, check, locked_folder=locked_folder) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, new)
        with pending.open_written() as written:
            check_read_back(written, 0, new)


SUFFIX = ".old_keys"
"""Ends the name of a kept file; as the name begins with a dot, readers of data sets pass over it."""

_NAME = re.compile(r"\.(?P<name>.+)\.[0-9TZ]+-[0-9a-f]+\.(?P<kind>tail|key_material)\.old_keys", re.DOTALL)
_MAX_KEPT_BYTES = 1024 * 1024 * 1024
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
            return ends_with(source, offset, new)
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
    line, _, old = read_whole(location, _MAX_KEPT_BYTES).partition(b"\n")
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
