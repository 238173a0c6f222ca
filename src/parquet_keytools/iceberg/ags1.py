"""AGS1, the encrypted stream of Iceberg: manifest lists, manifests, Avro data files and deletion vectors.

A stream is `AGS1`, the block length (u32 little-endian, 1 MiB) and blocks: nonce (12 bytes), ciphertext, tag (16
bytes). The AAD of a block is the AAD prefix and the block ordinal (u32 little-endian). Every block except the last
is full. An empty stream has one empty block; no other stream ends with an empty block.

A stream does not show that full blocks were cut off its end, so the length of the file is compared with the length
in its key metadata before anything is decrypted.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from parquet_keytools.encryption.module_cipher import NONCE_LENGTH, TAG_LENGTH, AesGcm, InvalidTag
from parquet_keytools.errors import DecryptionError, FormatLimitError, NotEncryptedError
from parquet_keytools.format.file_layout import Bytes, RangedFile
from parquet_keytools.iceberg.metadata import StandardKeyMetadata

MAGIC = b"AGS1"
ENCRYPTED_MAGICS = (MAGIC, b"PARE")
PLAINTEXT_MAGICS = {b"Obj\x01": "Avro", b"PAR1": "Parquet", b"PFA1": "Puffin"}
BLOCK_LENGTH = 1 << 20
HEADER_LENGTH = 8

_FRAMING = NONCE_LENGTH + TAG_LENGTH
_FULL_BLOCK = BLOCK_LENGTH + _FRAMING
_HEADER = MAGIC + struct.pack("<I", BLOCK_LENGTH)
MAX_BLOCKS = 1 << 32
_BLOCKS_PER_REQUEST = 8
_pack_ordinal = struct.Struct("<I").pack


class Ags1Writer:
    """Encrypts a stream as it is written, with one block in memory.

    A stream that an exception ends is not valid at any length. `finished` is called with the length of a complete
    file.
    """

    def __init__(
        self,
        file: Any,
        key_metadata: StandardKeyMetadata,
        finished: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._file = file
        self._finished = finished
        self._cipher = AesGcm(key_metadata.encryption_key)
        self._aad_prefix = key_metadata.aad_prefix
        self._block = bytearray()
        self._ordinal = 0
        self.closed = False
        file.write(_HEADER)
        self.encrypted_length = HEADER_LENGTH

    def write(self, data: Bytes) -> int:
        """Take plaintext and return its length; `FormatLimitError` beyond the blocks that AGS1 can count."""
        if self.closed:
            raise ValueError("the stream is closed")
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            # A full block is written when a byte follows it: the last block of a stream is never empty.
            if len(self._block) == BLOCK_LENGTH:
                self._write_block()
            taken = view[position : position + BLOCK_LENGTH - len(self._block)]
            self._block += taken
            position += len(taken)
        return len(view)

    def tell(self) -> int:
        """Return the number of plaintext bytes written so far."""
        return self._ordinal * BLOCK_LENGTH + len(self._block)

    def flush(self) -> None:
        """Do nothing: a block is written when it is full."""

    def close(self) -> None:
        """Write the last block and close the file."""
        if self.closed:
            return
        self.closed = True
        try:
            self._write_block()
        finally:
            self._file.close()
        self._finished(self.encrypted_length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self.closed:
            self.closed = True
            self._file.close()

    def _write_block(self) -> None:
        if self._ordinal >= MAX_BLOCKS:
            raise FormatLimitError(f"an AGS1 stream has no more than {MAX_BLOCKS} blocks.")
        nonce = os.urandom(NONCE_LENGTH)
        out = bytearray(len(self._block) + _FRAMING)
        out[:NONCE_LENGTH] = nonce
        aad = self._aad_prefix + _pack_ordinal(self._ordinal)
        self._cipher.encrypt_into(nonce, self._block, aad, memoryview(out)[NONCE_LENGTH:])
        self._file.write(bytes(out))
        self.encrypted_length += len(out)
        self._ordinal += 1
        self._block.clear()


class Ags1Reader(RangedFile):
    """Decrypts ranges of a stream: it reads and authenticates the blocks that a range touches, and no others.

    Any number of threads may call `read_at`. One block stays in memory. Closing the reader closes the file, which
    may be a file of Python, pyarrow, fsspec or PyIceberg. `path` is its name in errors.
    """

    def __init__(self, file: Any, key_metadata: StandardKeyMetadata, *, path: str) -> None:
        super().__init__()
        self._file = file
        self.path = path
        self._cipher = AesGcm(key_metadata.encryption_key)
        self._aad_prefix = key_metadata.aad_prefix
        self._lock = threading.Lock()
        self._kept = (-1, b"")
        file.seek(0, os.SEEK_END)
        length = file.tell()
        header = self._read_file(0, min(length, HEADER_LENGTH))
        if (kind := PLAINTEXT_MAGICS.get(header[:4])) is not None:
            raise NotEncryptedError(
                f"{path}: it is a plaintext {kind} file, but has the key metadata of an encrypted one.",
                hint="Do not trust this file: someone replaced it.",
            )
        if header != _HEADER:
            raise self._error("it does not begin like an AGS1 stream with blocks of 1 MiB")
        if key_metadata.file_length is not None and length != key_metadata.file_length:
            raise self._error(
                f"the file has {length} bytes, and its key metadata says {key_metadata.file_length}: blocks were "
                "cut off or added, or it is another file"
            )
        self._last, rest = divmod(max(0, length - HEADER_LENGTH - 1), _FULL_BLOCK)
        self._last_length = rest + 1 - _FRAMING
        if self._last_length < 0 or (self._last and not self._last_length):
            raise self._error(f"it is cut within a block: {length} bytes")
        if self._last >= MAX_BLOCKS:
            raise self._error(f"it has more blocks than AGS1 can count: {length} bytes")
        self.size_bytes = self._last * BLOCK_LENGTH + self._last_length
        if key_metadata.file_length is None:
            # Without a length, only a last block that is not full shows that the stream is whole.
            if self._last_length == BLOCK_LENGTH:
                raise self._error(
                    "its key metadata has no file_length, and its last block is full: blocks may have been cut off"
                )
            self._blocks(self._last, self._last)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return `length` plaintext bytes from `offset`, all authentic; fewer where the stream ends before."""
        end = min(offset + length, self.size_bytes)
        if offset < 0 or length < 0:
            raise ValueError("offset or length is negative")
        if offset >= end:
            # The one block of an empty stream is authenticated, too.
            if not self.size_bytes:
                self._blocks(0, 0)
            return b""
        first, last = offset // BLOCK_LENGTH, (end - 1) // BLOCK_LENGTH
        plaintext = self._blocks(first, last)
        start = offset - first * BLOCK_LENGTH
        return plaintext[start : start + end - offset]

    def _blocks(self, first: int, last: int) -> bytes:
        with self._lock:
            if first == last == self._kept[0]:
                return self._kept[1]
            lengths = [self._last_length if n == self._last else BLOCK_LENGTH for n in range(first, last + 1)]
            out = bytearray(sum(lengths))
            written = memoryview(out)
            for begin in range(first, last + 1, _BLOCKS_PER_REQUEST):
                wanted = lengths[begin - first : begin - first + _BLOCKS_PER_REQUEST]
                data = memoryview(
                    self._read_file(HEADER_LENGTH + begin * _FULL_BLOCK, sum(wanted) + len(wanted) * _FRAMING)
                )
                for ordinal, length in enumerate(wanted, begin):
                    self._decrypt(ordinal, data[: length + _FRAMING], written[:length])
                    data, written = data[length + _FRAMING :], written[length:]
            plaintext = bytes(out)
            self._kept = (last, plaintext[len(plaintext) - lengths[-1] :])
            return plaintext

    def _decrypt(self, ordinal: int, block: memoryview, out: memoryview) -> None:
        aad = self._aad_prefix + _pack_ordinal(ordinal)
        with suppress(InvalidTag):
            self._cipher.decrypt_into(block[:NONCE_LENGTH], block[NONCE_LENGTH:], aad, out)
            return
        raise self._error(
            f"block {ordinal} is not authentic: it was changed, moved or taken from another file, or the key "
            "metadata belongs to another file"
        )

    def _read_file(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        parts = []
        while length > 0 and (data := self._file.read(length)):
            parts.append(data)
            length -= len(data)
        if length:
            raise self._error("it became shorter while it was read")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _error(self, reason: str) -> DecryptionError:
        error = DecryptionError(
            f"{self.path}: {reason}.", hint="Do not trust this file; restore it from a backup."
        )
        error.path = self.path
        return error

    def close(self) -> None:
        """Close the stream and its file."""
        if not self.closed:
            self._kept = (-1, b"")
            try:
                self._file.close()
            finally:
                super().close()
