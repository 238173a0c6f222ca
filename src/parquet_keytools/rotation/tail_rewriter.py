"""The tail of a Parquet file replaced, in the way that suits where the file lies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.rotation.kernel_copy import COPIED, copy_beginning
from parquet_keytools.rotation.replacement import COPY_LENGTH, replacement, sink_like
from parquet_keytools.rotation.tail import Tail, check_unchanged
from parquet_keytools.storage import FileLocation, LocalSink, open_source

Check = Callable[[ByteSource], None]
"""Raises if what was written is not what was meant; called before the file takes its place."""


@dataclass(frozen=True)
class ReplacedTail:
    """How a tail was replaced.

    Attributes:
        how: For people.
        bytes_written: What went through this process.
        bytes_copied: What the operating system or the store copied by itself.
    """

    how: str
    bytes_written: int
    bytes_copied: int


class TailRewriter(Protocol):
    """Gives a file a new tail: at each moment the file is there, whole, the old or the new one."""

    def replace(
        self, location: FileLocation, tail: Tail, new: bytes, check: Check, *, locked_folder: str | None = None
    ) -> ReplacedTail:
        """Replace the tail of a file.

        Args:
            location: The file.
            tail: Its tail as it was read.
            new: The new one; it begins at the same offset.
            check: Called with the complete new file.
            locked_folder: Path of a folder whose lock the caller has.

        Raises:
            ChangedMeanwhileError: The file is no longer the one that was read; nothing was changed.
            KeytoolsError: What `check` raises; nothing was changed.
            OSError: It cannot be written; nothing was changed.
        """
        ...


def tail_rewriter(location: FileLocation) -> TailRewriter:
    """Return what replaces tails of files that lie there."""
    # A store that copies ranges by itself has its own source file here, chosen by its file system's type.
    if location.is_local:
        return LocalTailRewriter()
    if not location.is_in_s3:
        return WholeFileRewriter()
    if (reason := why_unconditional(location)) is not None:
        return WholeFileRewriter(f"; {reason}")
    from parquet_keytools.rotation.s3_tail import S3TailRewriter

    return S3TailRewriter()


def why_unconditional(location: FileLocation) -> str | None:
    """Return why a file cannot be replaced on a condition and with its data copied by the store; None if it can.

    Args:
        location: The file.

    Returns:
        For people, where it is in S3; else empty.
    """
    if not location.is_in_s3:
        return ""
    if importlib.util.find_spec("boto3") is None:
        return "with the extra `aws` the store would copy the data"
    from parquet_keytools.rotation.s3_connection import can_reach

    if can_reach(location.filesystem):
        return None
    return "with access keys, and no role that Arrow assumes, the store would copy the data"


class LocalTailRewriter:
    """Writes a new file beside the old one, with the data copied by the operating system."""

    def replace(
        self, location: FileLocation, tail: Tail, new: bytes, check: Check, *, locked_folder: str | None = None
    ) -> ReplacedTail:
        """Replace the tail of a local file; see `TailRewriter`."""
        with replacement(
            location, lambda: check_unchanged(location, tail), locked_folder=locked_folder
        ) as pending:
            with Path(location.path).open("rb") as source, sink_like(pending, location) as sink:
                assert isinstance(sink, LocalSink)
                how = copy_beginning(source.fileno(), sink.file_descriptor, tail.offset)
                sink.write_at(tail.offset, new)
            with open_source(pending.location) as written:
                check(written)
        by_hand = tail.offset if how == COPIED else 0
        return ReplacedTail(f"new tail, data {how}", len(new) + by_hand, tail.offset - by_hand)


class WholeFileRewriter:
    """Writes the whole file anew, on any file system.

    Args:
        why: Said after how it was done; for people.
    """

    def __init__(self, why: str = "") -> None:
        self._why = why

    def replace(
        self, location: FileLocation, tail: Tail, new: bytes, check: Check, *, locked_folder: str | None = None
    ) -> ReplacedTail:
        """Replace the tail of a file anywhere; see `TailRewriter`."""
        with replacement(
            location, lambda: check_unchanged(location, tail), locked_folder=locked_folder
        ) as pending:
            with open_source(location) as source, pending.open_sink() as sink:
                sink.reserve(tail.offset + len(new))
                for offset in range(0, tail.offset, COPY_LENGTH):
                    sink.write_at(offset, source.read_at(offset, min(COPY_LENGTH, tail.offset - offset)))
                sink.write_at(tail.offset, new)
            with open_source(pending.location) as written:
                check(written)
        return ReplacedTail(f"rewritten whole{self._why}", tail.offset + len(new), 0)
