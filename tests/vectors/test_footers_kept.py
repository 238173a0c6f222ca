"""Whatever writer made a file, its footer is kept, except for positions and encryption fields.

Footers are compared field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from memory_files import MemorySource, NamedKeys, decrypted, encrypted
from soak import SOAK

from parquet_keytools.encryption.aad import ModulePlace, ModuleType
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.format.structs import ColumnChunk, ColumnMetaData, FileMetaData, RowGroup
from parquet_keytools.format.thrift import Struct, WireType, read_struct

_FOOTER_FIELDS = {FileMetaData.row_groups.field_id}
_ROW_GROUP_FIELDS = {
    field.field_id
    for field in (RowGroup.columns, RowGroup.file_offset, RowGroup.total_compressed_size, RowGroup.ordinal)
}
_CHUNK_FIELDS = {2, 3, 4, 5, 6, 7, 8, 9}
"""Offsets and lengths, the metadata, and the encryption fields."""

_METADATA_FIELDS = {
    field.field_id
    for field in (
        ColumnMetaData.total_compressed_size,
        ColumnMetaData.data_page_offset,
        ColumnMetaData.index_page_offset,
        ColumnMetaData.dictionary_page_offset,
        ColumnMetaData.bloom_filter_offset,
        ColumnMetaData.bloom_filter_length,
    )
}


def _kept(struct: Struct, changing: set[int]) -> bytes:
    """Return the bytes of a struct without the fields that may change."""
    return Struct({key: entry for key, entry in struct.fields.items() if key not in changing}).as_bytes()


def _structs(struct: Struct, field_id: int) -> list[Struct]:
    elements: list[Struct] = struct.fields[field_id][1].elements
    return elements


def _parts(footer: Struct, metadata_of: Callable[[int, int, Struct], Struct]) -> Iterable[bytes]:
    """Yield the kept parts of a footer."""
    yield _kept(footer, _FOOTER_FIELDS)
    for row_group_ordinal, row_group in enumerate(_structs(footer, FileMetaData.row_groups.field_id)):
        yield _kept(row_group, _ROW_GROUP_FIELDS)
        for column_ordinal, chunk in enumerate(_structs(row_group, RowGroup.columns.field_id)):
            yield _kept(chunk, _CHUNK_FIELDS)
            yield _kept(metadata_of(row_group_ordinal, column_ordinal, chunk), _METADATA_FIELDS)


def _visible(_: int, __: int, chunk: Struct) -> Struct:
    metadata: Struct = chunk.fields[ColumnChunk.meta_data.field_id][1]
    return metadata


def _plain_footer(data: bytes) -> Struct:
    length = int.from_bytes(data[-8:-4], "little")
    return read_struct(data[-8 - length : -8])[0]


def _encrypted_parts(data: bytes, footer: Footer, keys: NamedKeys) -> list[bytes]:
    length = int.from_bytes(data[-8:-4], "little")
    stored = data[-8 - length : -8]
    _, end = read_struct(stored)  # FileCryptoMetaData, and then the module
    footer_cipher = ModuleCipher(keys.footer_dek(b"kf"), footer.file_aad)

    def metadata_of(row_group_ordinal: int, column_ordinal: int, chunk: Struct) -> Struct:
        hidden = chunk.fields.get(ColumnChunk.encrypted_column_metadata.field_id)
        if hidden is None:
            return _visible(row_group_ordinal, column_ordinal, chunk)
        cipher = ModuleCipher(keys.footer_dek(b"kc"), footer.file_aad)
        place = ModulePlace(ModuleType.COLUMN_META_DATA, row_group_ordinal, column_ordinal)
        return read_struct(cipher.decrypt(hidden[1], place))[0]

    footer_struct, _ = read_struct(footer_cipher.decrypt(stored[end:], ModulePlace(ModuleType.FOOTER)))
    return list(_parts(footer_struct, metadata_of))


@pytest.mark.parametrize("own_keys", [0, 1, 2], ids=["footer key", "column keys", "every other column"])
def test_a_footer_is_kept_when_a_file_is_encrypted_and_decrypted(parquet_test_data: Path, own_keys: int) -> None:
    kept = 0
    # Outside of a soak, each file in one of the ways.
    for path in sorted(parquet_test_data.glob("*.parquet"))[slice(None) if SOAK else slice(own_keys, None, 3)]:
        data = path.read_bytes()
        keys = NamedKeys()
        footer_dek = keys.new(b"kf")
        try:
            leaves = read_footer(MemorySource(data), None).leaves
            own = ColumnKey(keys.new(b"kc"), b"kc")
            columns = {leaf.path: own for leaf in leaves if own_keys and leaf.ordinal % own_keys == 0}
            encryption = FileEncryption(footer_dek, b"kf", columns)  # type: ignore[arg-type]
            result = encrypted(data, encryption)
        except KeytoolsError:
            continue  # This file cannot be written; other tests list such files.
        before = list(_parts(_plain_footer(data), _visible))
        footer = read_footer(MemorySource(result), keys)
        assert _encrypted_parts(result, footer, keys) == before, path.name
        assert list(_parts(_plain_footer(decrypted(result, keys)), _visible)) == before, path.name
        kept += 1
    assert kept >= 8


def test_all_is_kept_where_nothing_moves(parquet_test_data: Path) -> None:
    """The plain reader and writer reproduce every footer, so that the comparison above covers all of it."""
    for path in sorted(parquet_test_data.glob("*.parquet")):
        data = path.read_bytes()
        length = int.from_bytes(data[-8:-4], "little")
        struct, _ = read_struct(data[-8 - length : -8])
        assert struct.as_bytes() == data[-8 - length : -8], path.name
        assert struct.fields[FileMetaData.row_groups.field_id][0] is WireType.LIST
