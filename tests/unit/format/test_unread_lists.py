"""Lists of footers that are bytes until they are looked at."""

from __future__ import annotations

import io
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_files import MemorySource, NamedKeys, encrypted

from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption, KeyChoice
from parquet_keytools.encryption.footer import read_footer
from parquet_keytools.encryption.protection import ColumnEncryption, leaves_of
from parquet_keytools.format import thrift_skim
from parquet_keytools.format.file_layout import leaf_columns
from parquet_keytools.format.footer_outline import UnreadChunks, UnreadList
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.format.thrift_compact import read_struct
from parquet_keytools.format.thrift_values import ThriftList, WireType, write_struct, write_value

LONG = b"k" * 300


@pytest.fixture(autouse=True)
def _expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift_skim, "_MANY_BYTES", 0)


def footer(names: str = "abc") -> bytes:
    """Return the plaintext footer of a file with three row groups: a column in plaintext, two under keys."""
    table = pa.table({name: list(range(30)) for name in names})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10, write_page_index=True)
    keys = NamedKeys()
    columns: dict[tuple[str, ...], KeyChoice] = {(name,): ColumnEncryption.PLAINTEXT for name in names}
    columns[(names[0],)] = ColumnKey(keys.new(b"ka"), b"ka")
    columns[(names[1],)] = ColumnKey(keys.new(LONG), LONG)
    encryption = FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=True)
    data = encrypted(sink.getvalue(), encryption)
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def test_chunks_of_usual_footers_are_not_read() -> None:
    data = footer()
    metadata, _ = FileMetaData.read(data)
    expected, _ = read_struct(data)

    for row_group, struct in zip(metadata.row_groups, expected.fields[4][1].elements, strict=True):
        unread = row_group.unread_chunks
        chunks = struct.fields[1][1].elements
        assert unread is not None
        assert [unread.chunk(ordinal) for ordinal in range(len(unread))] == chunks
        assert unread.crypto == [
            write_struct(chunk.fields[8][1]) if 8 in chunk.fields else None for chunk in chunks
        ]
        modules = [chunk.fields[9][1] if 9 in chunk.fields else None for chunk in chunks]
        assert [unread.module(ordinal) for ordinal in range(len(unread))] == modules
        assert sum(module is not None for module in modules) == 2
        assert unread.as_bytes() == write_value(*struct.fields[1])
    first, second, _ = [row_group.unread_chunks for row_group in metadata.row_groups]
    assert first is not None
    assert second is not None
    assert all(a is b for a, b in zip(first.crypto, second.crypto, strict=True))
    assert metadata.serialise() == write_struct(expected)


_CRYPTO = b"\x6c\x2c\x19\x18\x01a\x18\x02kk\x00\x00"


@pytest.mark.parametrize(
    "chunk",
    [
        b"\x26\x00" + _CRYPTO + b"\x18\x05" + bytes(5),
        b"\x26\xd8\xd8\x6c" + _CRYPTO + b"\x18\xe4\x01" + b"m" * 228,
        b"\x26\x00" + _CRYPTO + b"\x18\x85\x00" + b"\x18\x18\x18\x18\x18",
        b"\x26\x00" + _CRYPTO,
        b"\x26\x00\x26\x08\x15\x6c" + _CRYPTO.replace(b"\x6c", b"\x3c") + b"\x18\x05" + bytes(5),
        b"\x26\x00\x46\x08\x15\x6c" + _CRYPTO.replace(b"\x6c", b"\x1c") + b"\x18\x05" + bytes(5),
    ],
    ids=["bare", "long", "a length of too many bytes", "no module", "offset index", "column index"],
)
def test_chunks_whose_fields_are_known_are_what_a_reader_finds(chunk: bytes) -> None:
    chunk += b"\0"
    data = b"\x49\x1c\x19\x2c" + chunk + chunk + b"\x16\x02\x16\x02\0\0"
    metadata, _ = FileMetaData.read(data)
    expected, _ = read_struct(data)
    (row_group,), (struct,) = metadata.row_groups, expected.fields[4][1].elements

    assert row_group.unread_chunks is not None
    for found, general in zip(row_group.columns, struct.fields[1][1].elements, strict=True):
        assert found.struct.as_bytes() == chunk
        changed, _ = read_struct(found.struct.changed_bytes({2: (WireType.I64, 7)}))
        assert changed.fields == general.fields | {2: (WireType.I64, 7)}
        assert found.struct == general


def test_a_chunk_that_was_changed_is_what_is_seen_from_then_on() -> None:
    metadata, _ = FileMetaData.read(footer())
    row_group = metadata.row_groups[0]
    unread = row_group.unread_chunks
    assert unread is not None

    row_group.columns[1].file_offset = 77

    assert unread.as_bytes() is None
    assert unread.module(1) is None
    assert unread.chunk(1).fields[2] == (WireType.I64, 77)
    assert FileMetaData.read(metadata.serialise())[0].row_groups[0].columns[1].file_offset == 77


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_chunks_in_place_of_others(is_looked_at: bool) -> None:
    metadata, _ = FileMetaData.read(footer())
    row_group = metadata.row_groups[0]
    if is_looked_at:
        assert row_group.columns[0].file_offset is not None
    other = metadata.row_groups[1].columns[2].serialise()

    changed = row_group.with_chunks([None, other, None])

    written, _ = read_struct(changed.serialise())
    own = FileMetaData.read(footer())[0].row_groups[0].struct
    assert written.fields[1][1].elements[1] == read_struct(other)[0]
    assert written.fields[1][1].elements[0] != written.fields[1][1].elements[1]
    assert {key: value for key, value in written.fields.items() if key != 1} == {
        key: value for key, value in own.fields.items() if key != 1
    }
    assert len(row_group.columns) == 3


def test_how_usual_columns_are_encrypted_is_known_without_reading_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: dict[tuple[str, ...], KeyChoice] = {("a",): ColumnEncryption.PLAINTEXT}
    sink = io.BytesIO()
    pq.write_table(pa.table({name: list(range(30)) for name in "abc"}), sink, row_group_size=10)
    keys = NamedKeys()
    columns["b",] = ColumnKey(keys.new(b"kb"), b"kb")
    data = encrypted(sink.getvalue(), FileEncryption(keys.new(b"kf"), b"kf", columns))

    def refused(*_: object) -> NoReturn:
        pytest.fail("a chunk was read")

    monkeypatch.setattr(UnreadChunks, "chunk", refused)
    monkeypatch.setattr(UnreadChunks, "_read", refused)
    footer = read_footer(MemorySource(data), keys)
    assert [(column.encryption, column.key_metadata) for column in footer.columns] == [
        (ColumnEncryption.PLAINTEXT, None),
        (ColumnEncryption.COLUMN_KEY, b"kb"),
        (ColumnEncryption.FOOTER_KEY, None),
    ]


def test_lists_that_are_known_are_told_from_those_that_only_begin_like_them() -> None:
    known = footer("abc")
    for names in ("abd", "abcd", "ab", "abc"):
        data = footer(names)
        FileMetaData.read(known)
        metadata, end = FileMetaData.read(data)
        expected, expected_end = read_struct(data)
        assert end == expected_end
        assert metadata.struct == expected
        assert [leaf.path for leaf in leaves_of(metadata)] == [(name,) for name in names]
        assert leaves_of(metadata) == leaf_columns(metadata.schema)


def test_a_list_is_read_once_its_elements_are_looked_at() -> None:
    written = ThriftList(WireType.I32, [1, -2])
    data = write_value(WireType.LIST, written)
    unread = UnreadList(data)

    assert unread.as_bytes() == data
    assert unread == written
    assert unread.as_bytes() is None
    unread.elements.append(3)
    assert write_value(WireType.LIST, unread) == write_value(WireType.LIST, ThriftList(WireType.I32, [1, -2, 3]))
    with pytest.raises(AttributeError):
        unread.other  # type: ignore[attr-defined]  # noqa: B018


def test_chunks_are_cut_around_their_crypto_metadata() -> None:
    data = footer()
    expected, _ = read_struct(data)
    metadata, _ = FileMetaData.read(data)
    changed, _ = FileMetaData.read(data)

    for row_group, other, struct in zip(
        metadata.row_groups, changed.row_groups, expected.fields[4][1].elements, strict=True
    ):
        unread = row_group.unread_chunks
        assert unread is not None
        cut = unread.cut()
        assert cut is not None
        assert cut == row_group.cut_chunks() == [chunk.cut() for chunk in other.columns]
        for (before, crypto, after), chunk in zip(cut, struct.fields[1][1].elements, strict=True):
            assert before + (crypto or b"") + after == write_struct(chunk)
            assert crypto == (write_struct(chunk.fields[8][1]) if 8 in chunk.fields else None)
        assert sum(crypto is None for _, crypto, _ in cut) == 1

    row_group = metadata.row_groups[0]
    row_group.columns[2].file_offset = 77
    assert row_group.unread_chunks is not None
    assert row_group.unread_chunks.cut() is None
    assert row_group.cut_chunks()[2] == (row_group.columns[2].serialise(), None, b"")


@pytest.mark.parametrize("module", [b"", b"m", b"m" * 127, b"m" * 128, b"m" * 16_383])
def test_chunks_are_cut_before_modules_of_every_length(module: bytes) -> None:
    metadata, _ = FileMetaData.read(footer())
    chunk = metadata.row_groups[0].columns[0]
    chunk.encrypted_column_metadata = module
    again = FileMetaData.read(metadata.serialise())[0].row_groups[0]

    assert again.unread_chunks is not None
    assert again.unread_chunks.cut() == again.cut_chunks() == [each.cut() for each in again.columns]
    assert again.columns[0].encrypted_column_metadata == module


def test_a_length_that_is_written_in_more_bytes_than_it_needs() -> None:
    data = footer()
    found = FileMetaData.read(data)[0].row_groups[0].unread_chunks
    assert found is not None
    module = found.module(0)
    assert module is not None
    (before, crypto, after), *_ = found.cut() or []
    assert crypto is not None
    short = b"m" * 100
    written = b"\x18" + bytes((len(short) | 0x80, 0)) + short + b"\0"
    again = FileMetaData.read(data.replace(crypto + after, crypto + written, 1))[0].row_groups[0]

    assert again.unread_chunks is not None
    assert again.unread_chunks.module(0) == short
    assert again.unread_chunks.cut() is None
    assert again.cut_chunks()[0] == (before, crypto, written)


def test_lists_with_the_same_bytes_are_equal_unread() -> None:
    written = write_value(WireType.LIST, ThriftList(WireType.I32, [1, 2]))
    other = write_value(WireType.LIST, ThriftList(WireType.I32, [1, 3]))
    one, same, different = UnreadList(written), UnreadList(written), UnreadList(other)

    assert one == same
    assert one.as_bytes() == same.as_bytes() == written
    assert one != different
    assert different == ThriftList(WireType.I32, [1, 3])
    same.elements.append(3)
    assert one != same
    assert UnreadList(b"\xf5\x02\x02\x04") == one, "a count in a byte of its own"
