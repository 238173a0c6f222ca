"""How columns are protected: crypto metadata as all writers write it, and in every other way."""

from __future__ import annotations

from typing import Any

import pytest

from parquet_keytools.encryption import protection
from parquet_keytools.encryption.protection import ColumnEncryption, columns_of
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import ColumnChunk, ColumnCryptoMetaData, EncryptionWithColumnKey, RowGroup

LEAF = LeafColumn(("list", "größe"), 0, 0)


def chunk_of(key_metadata: bytes | None, path: tuple[str, ...] = LEAF.path) -> ColumnChunk:
    own = EncryptionWithColumnKey()
    own.path_in_schema = list(path)
    if key_metadata is not None:
        own.key_metadata = key_metadata
    crypto = ColumnCryptoMetaData()
    crypto.encryption_with_column_key = own
    chunk = ColumnChunk()
    chunk.file_offset = 0
    chunk.crypto_metadata = crypto
    return chunk


def found(chunk: ColumnChunk) -> Any:
    """Return what is found of a chunk, or the text of the error."""
    try:
        return columns_of((LEAF,), [RowGroup()], [[chunk]], is_encrypted=True)
    except ParquetFormatError as error:
        return str(error)


@pytest.mark.parametrize("length", [None, 0, 1, 2, 126, 127, 128, 129, 300, 16_383, 16_384, 40_000])
@pytest.mark.parametrize("tail", [b"", b"\0", b"\0\0", b"\0\0\0"])
def test_key_metadata_of_any_length(length: int | None, tail: bytes) -> None:
    key_metadata = None if length is None else (b"k" * length + tail)[-length or 0 :]
    chunk, _ = ColumnChunk.read(chunk_of(key_metadata).serialise())
    (column,) = found(chunk)
    assert (column.encryption, column.key_metadata) == (ColumnEncryption.COLUMN_KEY, key_metadata)


def test_the_usual_form_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColumnChunk, "copy_of", lambda *_: pytest.fail("parsed"))
    assert found(chunk_of(b"some key metadata"))[0].key_metadata == b"some key metadata"


@pytest.mark.parametrize("length", [5, 200])
def test_every_altered_byte_is_read_as_the_parser_reads_it(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = chunk_of(bytes(range(length))).serialise()
    usual = protection._usual_key_metadata
    differ = 0
    for at in range(len(written)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, written[at] ^ 1, written[at] ^ 0x80, (written[at] + 1) % 256}:
            data = written[:at] + bytes([value]) + written[at + 1 :]
            results = []
            for function in (usual, lambda *_: None):
                monkeypatch.setattr(protection, "_usual_key_metadata", function)
                try:
                    chunk, _ = ColumnChunk.read(data)
                    results.append(found(chunk))
                except ParquetFormatError as error:
                    results.append(str(error))
            assert results[0] == results[1], (at, value)
            differ += results[0] != found(chunk_of(bytes(range(length))))
    assert differ > len(written)


def test_crypto_metadata_of_another_column() -> None:
    assert "has the crypto metadata of another one" in found(chunk_of(b"key", ("list", "größer")))
