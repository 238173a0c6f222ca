"""Objects in S3 replaced by a rotation: the store copies the data, and only the footer travels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.format.byte_ranges import ByteSource
from parquet_keytools.rotation.s3_objects import (
    LEAST_PART_BYTES,
    S3Object,
    find_object,
    put_beginning_and,
    put_object,
    read_object,
)
from parquet_keytools.rotation.tail import ChangedMeanwhileError, Tail, check_unchanged
from parquet_keytools.rotation.tail_rewriter import Check, ReplacedTail
from parquet_keytools.storage import FileLocation, open_source


class S3TailRewriter:
    """Makes the new object of parts: what the store copies of the old one, and the new tail.

    Objects whose data is smaller than the smallest part of the protocol are sent as a whole.
    """

    def replace(
        self, location: FileLocation, tail: Tail, new: bytes, check: Check, *, locked_folder: str | None = None
    ) -> ReplacedTail:
        """Replace the tail of an object; see `TailRewriter`."""
        found = find_object(location)
        if found.size_bytes != tail.size_bytes:
            raise ChangedMeanwhileError(f"{location} changed while its keys were rotated.", hint="Try again.")
        with open_source(location) as source:
            check(_WithNewTail(source, tail.offset, new))
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

    Args:
        location: The object.
        new: What takes its place.
        check: Raises if it is no longer the one that was read.

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


class _WithNewTail:
    """What an object will be when its tail is replaced."""

    def __init__(self, source: ByteSource, offset: int, new: bytes) -> None:
        self.path = source.path
        self.size_bytes = offset + len(new)
        self._source = source
        self._offset = offset
        self._new = new

    def read_at(self, offset: int, length: int) -> bytes:
        data = b"" if offset >= self._offset else self._source.read_at(offset, min(length, self._offset - offset))
        start = max(offset - self._offset, 0)
        return bytes(data) + self._new[start : start + length - len(data)]
