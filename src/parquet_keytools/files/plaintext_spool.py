"""Plaintext files that are collected before they are encrypted, because a Parquet footer comes last.

The first bytes stay in memory. All others go to a temporary file, encrypted with a key that only this process has:
no plaintext is written to a disk, and the temporary file of a killed process is useless.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict, deque
from pathlib import Path
from typing import IO, NamedTuple

from parquet_keytools.encryption.module_cipher import NONCE_LENGTH, TAG_LENGTH, AesGcm, InvalidTag
from parquet_keytools.errors import OutputError
from parquet_keytools.format.file_layout import Bytes, check_range
from parquet_keytools.runtime import operating_system
from parquet_keytools.runtime.threads_and_forks import ForkSafeLock, OwnerProcess
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.local_files import failing_as_output, refuse_in_child
from parquet_keytools.storage.locations import FileLocation

SEGMENT_BYTES = 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024
"""How much all files of one room keep in memory, in addition to the last segment of each."""

_KEY_BITS = 256
SLOT_BYTES = SEGMENT_BYTES + TAG_LENGTH
_CACHED_SEGMENTS = 4
"""Decrypted segments of a file: one for each thread that reads it, and one for the page walk."""


class SpoolRoom:
    """Room for the segments of any number of files; a temporary file is on the target's disk if that is local."""

    def __init__(self, target: FileLocation, memory_bytes: int = MEMORY_BYTES) -> None:
        self._target = target
        self._left_bytes = memory_bytes
        self._cipher = AesGcm(SecretBytes.random(_KEY_BITS))
        self._lock = ForkSafeLock()
        self._owner = OwnerProcess()
        self._freed: deque[StoredSegment | bytearray] = deque()
        self._file: IO[bytes] | None = None
        self._slots = 0
        self._free: list[int] = []
        self._stored = 0

    def put(self, data: bytearray) -> StoredSegment | bytearray:
        """Keep a segment, and return a handle for `get` and `free`."""
        refuse_in_child(self._owner, self._target)
        with self._lock:
            self._take_back()
            if len(data) <= self._left_bytes:
                self._left_bytes -= len(data)
                return data
            if self._file is None:
                folder = None
                if self._target.is_local:
                    folder = next(one for one in Path(self._target.path).parents if one.is_dir())
                with failing_as_output(self._target):
                    self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            slot = self._free.pop() if self._free else self._slots
            self._slots = max(self._slots, slot + 1)
            self._stored += 1
            # Nonces are unique, so a segment that was moved within the file does not authenticate.
            stored = StoredSegment(slot, len(data), self._stored.to_bytes(NONCE_LENGTH, "big"))
        sealed = bytearray(len(data) + TAG_LENGTH)
        self._cipher.encrypt_into(stored.nonce, data, b"", sealed)
        view, offset = memoryview(sealed), slot * SLOT_BYTES
        with failing_as_output(self._target, only_writing=True):
            while len(view):
                written = operating_system.write_at(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        return stored

    def get(self, kept: StoredSegment | bytearray) -> bytearray:
        """Return a segment; raise `OutputError` if the temporary file was changed."""
        if isinstance(kept, bytearray):
            return kept
        assert self._file is not None
        sealed = operating_system.read_at(self._file.fileno(), kept.length + TAG_LENGTH, kept.slot * SLOT_BYTES)
        plaintext = bytearray(kept.length)
        try:
            self._cipher.decrypt_into(kept.nonce, sealed, b"", plaintext)
        except InvalidTag:
            raise OutputError(
                f"{self._target} is not written: the temporary file for it was changed.", hint="Write it again."
            ) from None
        return plaintext

    def free(self, kept: StoredSegment | bytearray) -> None:
        """Forget a segment, except in a forked child."""
        # The garbage collector may call this at any time, also in a thread that has the lock.
        if not self._owner.is_here:
            return
        self._freed.append(kept)
        with contextlib.suppress(TimeoutError), self._lock.held_within(0):
            self._take_back()

    def _take_back(self) -> None:
        while self._freed:
            kept = self._freed.popleft()
            if isinstance(kept, bytearray):
                self._left_bytes += len(kept)
                continue
            self._free.append(kept.slot)
            if len(self._free) == self._slots and self._file is not None:
                self._file.truncate(0)
                self._slots = 0
                self._free.clear()


class StoredSegment(NamedTuple):
    """A segment in the temporary file: its slot, the length of its plaintext in bytes, and its nonce."""

    slot: int
    length: int
    nonce: bytes


class PlaintextSpool:
    """A plaintext file: written in order by one thread, then read in ranges by any number of threads."""

    def __init__(self, room: SpoolRoom, path: str) -> None:
        self.path = path
        self.size_bytes = 0
        self._room = room
        self._segments: list[StoredSegment | bytearray] = []
        self._filling = bytearray()
        self._cache: OrderedDict[int, bytearray] = OrderedDict()
        self._lock = ForkSafeLock()

    def write(self, data: Bytes) -> int:
        """Append bytes; return how many."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            taken = min(SEGMENT_BYTES - len(self._filling), len(view) - start)
            self._filling += view[start : start + taken]
            start += taken
            self.size_bytes += taken
            if len(self._filling) == SEGMENT_BYTES:
                self._segments.append(self._room.put(self._filling))
                self._filling = bytearray()
        return len(view)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return a range, without a copy if it is in one segment; raise `ParquetFormatError` if it is outside."""
        check_range(self, offset, length)
        ordinal, start = divmod(offset, SEGMENT_BYTES)
        if start + length <= SEGMENT_BYTES:
            return memoryview(self._segment(ordinal))[start : start + length] if length else memoryview(b"")
        data = bytearray()
        while len(data) < length:
            data += memoryview(self._segment(ordinal))[start : start + length - len(data)]
            ordinal, start = ordinal + 1, 0
        return memoryview(data)

    def _segment(self, ordinal: int) -> bytearray:
        if ordinal == len(self._segments):
            return self._filling
        kept = self._segments[ordinal]
        if isinstance(kept, bytearray):
            return kept
        with self._lock:
            found = self._cache.get(ordinal)
        if found is None:
            found = self._room.get(kept)
            with self._lock:
                self._cache[ordinal] = found
                while len(self._cache) > _CACHED_SEGMENTS:
                    self._cache.popitem(last=False)
        return found

    def close(self) -> None:
        """Forget everything."""
        for kept in self._segments:
            self._room.free(kept)
        self._segments = []
        self._filling = bytearray()
        self._cache.clear()
        self.size_bytes = 0
