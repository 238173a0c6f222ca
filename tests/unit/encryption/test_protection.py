"""How columns are protected: crypto metadata as all writers write it, and every other combination."""

from __future__ import annotations

from typing import Any

import pytest

from parquet_keytools.encryption.protection import ColumnEncryption, check_chunk, columns_of
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.file_layout import LeafColumn
from parquet_keytools.format.structs import (
    ColumnChunk,
    ColumnCryptoMetaData,
    EncryptionWithColumnKey,
    EncryptionWithFooterKey,
    RowGroup,
)

LEAF = LeafColumn(("list", "größe"), 0, 0, 6)


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
    """Return the protection of a chunk, or the text of the error."""
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


def test_crypto_metadata_of_another_column() -> None:
    assert "has the crypto metadata of another one" in found(chunk_of(b"key", ("list", "größer")))


@pytest.mark.parametrize(("of", "count"), [("columns", 32_769), ("row groups", 32_768), ("row groups", 32_769)])
def test_there_are_no_more_columns_and_row_groups_than_ordinals(count: int, of: str) -> None:
    leaves = tuple(
        LeafColumn((f"c{ordinal}",), ordinal, 0, 1) for ordinal in range(count if of == "columns" else 1)
    )
    row_groups = [RowGroup() for _ in range(count if of == "row groups" else 1)]
    chunk = ColumnChunk()
    chunks = [[chunk] * len(leaves)] * len(row_groups)
    if count > 32_768:
        with pytest.raises(ParquetFormatError, match="more row groups or columns than ordinals"):
            columns_of(leaves, row_groups, chunks, is_encrypted=True)
    else:
        assert len(columns_of(leaves, row_groups, chunks, is_encrypted=True)) == len(leaves)
    assert len(columns_of(leaves, row_groups, chunks, is_encrypted=False)) == len(leaves)


def test_a_row_group_in_another_place_is_refused() -> None:
    """A reader that used the stated ordinal would look for modules of another row group."""

    def row_group(ordinal: int | None) -> RowGroup:
        made = RowGroup()
        if ordinal is not None:
            made.ordinal = ordinal
        return made

    def columns(*ordinals: int | None, is_encrypted: bool = True) -> Any:
        row_groups = [row_group(ordinal) for ordinal in ordinals]
        return columns_of((LEAF,), row_groups, [[ColumnChunk()] for _ in ordinals], is_encrypted=is_encrypted)

    assert columns(0, 1, 2) == columns(0, None, 2) == columns(None, None)
    for ordinals, where, stated in (((0, 0), 1, 0), ((1, 0), 0, 1), ((0, None, 1), 2, 1)):
        with pytest.raises(ParquetFormatError, match=f"row group {where} says that its ordinal is {stated}"):
            columns(*ordinals)
        assert columns(*ordinals, is_encrypted=False)


@pytest.mark.parametrize("count", [0, 2])
def test_a_row_group_has_a_chunk_for_each_column(count: int) -> None:
    with pytest.raises(ParquetFormatError, match=f"row group 1 has {count} chunks for 1 leaf columns"):
        columns_of(
            (LEAF,), [RowGroup(), RowGroup()], [[ColumnChunk()], [ColumnChunk()] * count], is_encrypted=True
        )


def with_footer_key() -> ColumnChunk:
    crypto = ColumnCryptoMetaData()
    crypto.encryption_with_footer_key = EncryptionWithFooterKey()
    chunk = ColumnChunk()
    chunk.crypto_metadata = crypto
    return chunk


def without_crypto_metadata() -> ColumnChunk:
    chunk = ColumnChunk()
    chunk.encrypted_column_metadata = b"module"
    return chunk


OTHER = LeafColumn(("other",), 1, 0, 1)


def checked(leaves: tuple[LeafColumn, ...], chunks: list[list[ColumnChunk]]) -> Any:
    """Return the columns of row groups, each chunk of which is checked."""
    columns = columns_of(leaves, [RowGroup() for _ in chunks], chunks, is_encrypted=True)
    for ordinal, these in enumerate(chunks):
        for leaf, chunk, column in zip(leaves, these, columns, strict=True):
            check_chunk(ordinal, leaf, chunk, column)
    return columns


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (chunk_of(b"key"), chunk_of(b"another key")),
        (chunk_of(b"key"), chunk_of(None)),
        (chunk_of(b"key"), with_footer_key()),
        (with_footer_key(), chunk_of(b"key")),
        (chunk_of(b"key"), ColumnChunk()),
        (ColumnChunk(), with_footer_key()),
    ],
)
def test_a_column_is_encrypted_alike_in_every_row_group(before: ColumnChunk, after: ColumnChunk) -> None:
    """Otherwise, readers of one row group would treat another as plaintext, or request another key."""
    chunks = [[before, ColumnChunk()], [before, ColumnChunk()], [after, ColumnChunk()]]

    assert len(checked((LEAF, OTHER), [chunks[0]] * 3)) == 2
    with pytest.raises(ParquetFormatError, match=r"row group 2: column 'list\.größe' is encrypted in another way"):
        checked((LEAF, OTHER), chunks)


@pytest.mark.parametrize("count", [0, 1])
def test_encrypted_metadata_says_with_which_key(count: int) -> None:
    """A column must not pass as plaintext after an attacker removes its crypto metadata."""
    chunks = [[ColumnChunk()]] * count + [[without_crypto_metadata()]]
    with pytest.raises(ParquetFormatError, match="does not say with which key") as caught:
        checked((LEAF,), chunks)
    assert caught.value.hint is not None and "restore the file" in caught.value.hint


def test_crypto_metadata_names_one_key() -> None:
    neither, both = ColumnChunk(), chunk_of(b"key")
    neither.crypto_metadata = ColumnCryptoMetaData()
    crypto = ColumnCryptoMetaData()
    crypto.encryption_with_footer_key = EncryptionWithFooterKey()
    crypto.encryption_with_column_key = both.crypto_metadata.encryption_with_column_key
    both.crypto_metadata = crypto

    for chunk in (neither, both):
        assert "its crypto metadata is not valid" in found(chunk)


def test_encrypted_columns_need_an_algorithm() -> None:
    """Without it, no reader would check the signature."""
    for chunk in (chunk_of(b"key"), with_footer_key()):
        with pytest.raises(ParquetFormatError, match="the footer names no encryption algorithm") as caught:
            columns_of((LEAF,), [RowGroup()], [[chunk]], is_encrypted=False)
        assert caught.value.hint is not None and "was removed from the footer" in caught.value.hint


def test_columns_of_a_file_without_row_groups_are_plaintext() -> None:
    columns = columns_of((LEAF, OTHER), [], [], is_encrypted=True)
    assert [(column.path, column.ordinal) for column in columns] == [(LEAF.path, 0), (OTHER.path, 1)]
    assert {column.encryption for column in columns} == {ColumnEncryption.PLAINTEXT}
