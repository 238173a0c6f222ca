"""Known fields with other types: skipped and kept, as by code that Thrift generates; a few are refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, NamedKeys, decrypted, encrypted
from pyarrow_versions import bloom_filters
from soak import sample

from parquet_keytools.conformance.file_verifier import verify_source
from parquet_keytools.conformance.inspection import inspect_source
from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.encryption.footer import read_envelope, read_footer
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.format.thrift import Struct, ThriftList, WireType

_TABLE = pa.table({"a": [i % 7 for i in range(100)], "b": [[1], None] * 50, "c": [{"d": "x"}] * 100})
_BOOL = (WireType.TRUE, WireType.FALSE)
_OTHERS: list[tuple[WireType, Any]] = [
    (WireType.BINARY, b"x"),
    (WireType.I16, 3),
    (WireType.I32, 5),
    (WireType.I64, 5),
    (WireType.TRUE, None),
    (WireType.STRUCT, Struct()),
    (WireType.LIST, ThriftList(WireType.I32, [1, 2])),
    (WireType.SET, ThriftList(WireType.BINARY, [b""])),
    (WireType.MAP, b"\x01\x55\x02\x04"),
    (WireType.DOUBLE, bytes(8)),
]


def _plain() -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        _TABLE,
        sink,
        write_page_index=True,
        row_group_size=50,
        sorting_columns=[pq.SortingColumn(0)],
        **bloom_filters({"a": {"ndv": 5, "fpp": 0.1}}),
    )
    return sink.getvalue()


_PLAIN = _plain()


def _footer(data: bytes) -> tuple[bytes, FileMetaData]:
    (length,) = struct.unpack("<I", data[-8:-4])
    return data[: -8 - length], FileMetaData.read(data[-8 - length : -8])[0]


def _with_footer(body: bytes, footer: FileMetaData) -> bytes:
    data = footer.serialise()
    return body + data + struct.pack("<I", len(data)) + b"PAR1"


def _paths(found: Struct, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for field_id, (_, value) in found.fields.items():
        yield (*path, field_id)
        if isinstance(value, Struct):
            yield from _paths(value, (*path, field_id))
        elif isinstance(value, ThriftList) and value.elements and isinstance(value.elements[0], Struct):
            yield from _paths(value.elements[0], (*path, field_id, 0))


def _holder(found: Any, path: tuple[int, ...]) -> Struct:
    for step in path[:-1]:
        found = found.elements[step] if isinstance(found, ThriftList) else found.fields[step][1]
    assert isinstance(found, Struct)
    return found


def _same_type(one: WireType, other: WireType) -> bool:
    return one is other or (one in _BOOL and other in _BOOL)


def _opens(data: bytes) -> bool:
    try:
        return bool(pq.read_table(pa.BufferReader(data)).equals(_TABLE))
    except (OSError, pa.ArrowException):
        return False


_ALL_PATHS = list(_paths(_footer(_PLAIN)[1].struct))


@pytest.mark.parametrize("path", _ALL_PATHS, ids=lambda path: ".".join(map(str, path)))
def test_what_arrow_opens_we_open(path: tuple[int, ...]) -> None:
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka")}
    for other in sample(_OTHERS, 4, _ALL_PATHS.index(path)):
        body, footer = _footer(_PLAIN)
        holder = _holder(footer.struct, path)
        if _same_type(holder.fields[path[-1]][0], other[0]):
            continue
        holder.set_entry(path[-1], other)
        data = _with_footer(body, footer)
        inspect_source(MemorySource(data))
        report = verify_source(MemorySource(data), None)[0]
        if not _opens(data):
            continue
        broken = {result.rule.id for result in report.rules if result.outcome.value == "broken"}
        assert broken <= {"encrypted", "field-types", "row-count"}, other
        assert read_footer(MemorySource(data), None).metadata.serialise() == footer.serialise(), other
        for plaintext_footer in (False, True):
            encryption = FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=plaintext_footer)  # type: ignore[arg-type]
            back = decrypted(encrypted(data, encryption), keys)
            assert pq.read_table(pa.BufferReader(back)).equals(_TABLE), other


def test_a_list_where_the_length_of_a_bloom_filter_belongs_is_kept() -> None:
    """As in the public file dict-page-offset-zero."""
    body, footer = _footer(_PLAIN)
    odd = (WireType.LIST, ThriftList(WireType.STRUCT, [Struct({1: (WireType.I32, 1)})]))
    for row_group in footer.row_groups:
        for chunk in row_group.columns:
            assert chunk.meta_data is not None
            chunk.meta_data.struct.set_entry(14, None)
            chunk.meta_data.struct.set_entry(15, odd)
    data = _with_footer(body, footer)
    report = verify_source(MemorySource(data), None)[0]
    result = next(result for result in report.rules if result.rule.id == "field-types")
    assert [finding.message for finding in result.findings] == [
        "ColumnMetaData.bloom_filter_length: another type."
    ]
    for plaintext_footer in (False, True):
        keys = NamedKeys()
        stored = encrypted(data, FileEncryption(keys.new(b"kf"), b"kf", plaintext_footer=plaintext_footer))
        back = read_footer(MemorySource(decrypted(stored, keys)), None)
        for chunks in back.chunks:
            for chunk in chunks:
                assert chunk.meta_data is not None and chunk.meta_data.struct.fields[15] == odd


_CHUNK = (4, 0, 1, 0)
_ENCRYPTED_FIELDS = {
    "FileMetaData.encryption_algorithm": (8,),
    "FileMetaData.footer_signing_key_metadata": (9,),
    "EncryptionAlgorithm.aes_gcm_v1": (8, 1),
    "Aes.aad_prefix": (8, 1, 1),
    "Aes.aad_file_unique": (8, 1, 2),
    "ColumnChunk.crypto_metadata": (*_CHUNK, 8),
    "ColumnCryptoMetaData.encryption_with_column_key": (*_CHUNK, 8, 2),
    "EncryptionWithColumnKey.path_in_schema": (*_CHUNK, 8, 2, 1),
    "EncryptionWithColumnKey.key_metadata": (*_CHUNK, 8, 2, 2),
}


@pytest.mark.parametrize("name", _ENCRYPTED_FIELDS)
def test_an_encrypted_file_does_not_become_another(name: str) -> None:
    """Generated code skips these too, and then treats the file as unencrypted."""
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka")}
    encryption = FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=True, aad_prefix=b"p")  # type: ignore[arg-type]
    stored = encrypted(_PLAIN, encryption)
    path = _ENCRYPTED_FIELDS[name]
    for other in _OTHERS:
        body, footer = _footer(stored)
        holder = _holder(footer.struct, path)
        if holder.fields[path[-1]][0] is other[0] or (path == (9,) and other[0] in _BOOL):
            continue  # In field 9 it is the 2019 draft, which has a message of its own.
        holder.set_entry(path[-1], other)
        source = MemorySource(_with_footer(body, footer))
        with pytest.raises(ParquetFormatError, match=rf"{name}: has the Thrift type {other[0].name}"):
            read_envelope(source).unverified_footer()


def test_nor_where_all_signs_but_one_are_removed() -> None:
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka")}
    stored = encrypted(_PLAIN, FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=True))  # type: ignore[arg-type]
    for removed, message in ((8, "does not say with which key"), (9, "names no encryption algorithm")):
        body, footer = _footer(stored)
        footer.encryption_algorithm = None
        for row_group in footer.row_groups:
            for chunk in row_group.columns:
                chunk.struct.set_entry(removed, None)
        with pytest.raises(ParquetFormatError, match=message):
            read_footer(MemorySource(_with_footer(body, footer)), None)
