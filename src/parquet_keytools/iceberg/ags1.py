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
from collections.abc import Iterator
from typing import Any

from parquet_keytools.encryption.module_cipher import NONCE_LENGTH, TAG_LENGTH, AesGcm, InvalidTag
from parquet_keytools.errors import DecryptionError, NotEncryptedError
from parquet_keytools.iceberg.metadata import StandardKeyMetadata

MAGIC = b"AGS1"
ENCRYPTED_MAGICS = (MAGIC, b"PARE")
PLAINTEXT_MAGICS = {b"Obj\x01": "Avro", b"PAR1": "Parquet", b"PFA1": "Puffin"}
BLOCK_LENGTH = 1 << 20
HEADER_LENGTH = 8

_FRAMING = NONCE_LENGTH + TAG_LENGTH
_FULL_BLOCK = BLOCK_LENGTH + _FRAMING
_HEADER = MAGIC + struct.pack("<I", BLOCK_LENGTH)
_BLOCKS_PER_REQUEST = 8
_pack_ordinal = struct.Struct("<I").pack


def encrypted(plaintext: bytes, key_metadata: StandardKeyMetadata) -> Iterator[bytes]:
    """Yield the header and the blocks of a stream."""
    cipher = AesGcm(key_metadata.encryption_key)
    yield _HEADER
    for ordinal, start in enumerate(range(0, len(plaintext) or 1, BLOCK_LENGTH)):
        nonce = os.urandom(NONCE_LENGTH)
        aad = key_metadata.aad_prefix + _pack_ordinal(ordinal)
        yield nonce + cipher.encrypt(nonce, plaintext[start : start + BLOCK_LENGTH], aad)


def decrypted(file: Any, key_metadata: StandardKeyMetadata, *, path: str) -> bytes:
    """Return the plaintext of a stream, all of which is authentic.

    The file may be a file of Python, pyarrow, fsspec or PyIceberg. `path` is its name in errors.
    """
    file.seek(0, os.SEEK_END)
    length = file.tell()
    file.seek(0)
    header = _read(file, min(length, HEADER_LENGTH), path)
    if (kind := PLAINTEXT_MAGICS.get(header[:4])) is not None:
        raise NotEncryptedError(
            f"{path}: it is a plaintext {kind} file, but has the key metadata of an encrypted one.",
            hint="Do not trust this file: someone replaced it.",
        )
    if header != _HEADER:
        raise _error(path, "it does not begin like an AGS1 stream with blocks of 1 MiB")
    if key_metadata.file_length is not None and length != key_metadata.file_length:
        raise _error(
            path,
            f"the file has {length} bytes, and its key metadata says {key_metadata.file_length}: blocks were "
            "cut off or added, or it is another file",
        )
    last, rest = divmod(max(0, length - HEADER_LENGTH - 1), _FULL_BLOCK)
    last_length = rest + 1 - _FRAMING
    if last_length < 0 or (last and not last_length):
        raise _error(path, f"it is cut within a block: {length} bytes")
    if key_metadata.file_length is None and last_length == BLOCK_LENGTH:
        # Without a length, only a last block that is not full shows that the stream is whole.
        raise _error(
            path, "its key metadata has no file_length, and its last block is full: blocks may have been cut off"
        )
    cipher = AesGcm(key_metadata.encryption_key)
    blocks: list[bytes] = []
    left = length - HEADER_LENGTH
    while left:
        # Memory grows with blocks that are authentic, and not with the length of the file.
        data = memoryview(_read(file, min(left, _BLOCKS_PER_REQUEST * _FULL_BLOCK), path))
        left -= len(data)
        while data:
            aad = key_metadata.aad_prefix + _pack_ordinal(len(blocks))
            blocks.append(_decrypted_block(cipher, data[:_FULL_BLOCK], aad, len(blocks), path))
            data = data[_FULL_BLOCK:]
    return b"".join(blocks)


def _decrypted_block(cipher: AesGcm, block: memoryview, aad: bytes, ordinal: int, path: str) -> bytes:
    try:
        return cipher.decrypt(block[:NONCE_LENGTH], block[NONCE_LENGTH:], aad)
    except InvalidTag:
        raise _error(
            path,
            f"block {ordinal} is not authentic: it was changed, moved or taken from another file, or the key "
            "metadata belongs to another file",
        ) from None


def _read(file: Any, length: int, path: str) -> bytes:
    parts = []
    while length > 0 and (data := file.read(length)):
        parts.append(data)
        length -= len(data)
    if length:
        raise _error(path, "it became shorter while it was read")
    return b"".join(parts)


def _error(path: str, reason: str) -> DecryptionError:
    error = DecryptionError(f"{path}: {reason}.", hint="Do not trust this file; restore it from a backup.")
    error.path = path
    return error
