"""A struct that is read field by field equals the result of a naive reader, which builds all of it at once."""

from __future__ import annotations

import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from memory_files import NamedKeys, encrypted
from soak import how_many

from parquet_keytools.encryption.file_encryption import ColumnKey, FileEncryption
from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.format.thrift import MAX_DEPTH, Struct, ThriftList, WireType, read_struct

_LONG = b"k" * 300


def _footers() -> list[bytes]:
    table = pa.table({"a": list(range(20)), "b": [[1], None] * 10, "c": [{"d": "x" * i} for i in range(20)]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10, write_page_index=True, sorting_columns=[pq.SortingColumn(0)])
    keys = NamedKeys()
    columns = {("a",): ColumnKey(keys.new(b"ka"), b"ka"), ("c", "d"): ColumnKey(keys.new(_LONG), _LONG)}
    encryption = FileEncryption(keys.new(b"kf"), b"kf", columns, plaintext_footer=True)  # type: ignore[arg-type]
    plain = sink.getvalue()
    return [
        data[-8 - int.from_bytes(data[-8:-4], "little") : -8] for data in (plain, encrypted(plain, encryption))
    ]


_FOOTERS = _footers()


# --- The naive reader ---


class _Naive:
    """Reads a whole struct; raises IndexError or ValueError for invalid bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.is_in_map = False

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise IndexError
        self.at += length
        return self.data[self.at - length : self.at]

    def varint(self, bits: int) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= bits:
                raise ValueError("too long")
        if value >> bits:
            raise ValueError("too large")
        return value

    def zigzag(self, bits: int) -> int:
        value = self.varint(bits)
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int) -> dict[int, tuple[int, Any]]:
        fields: dict[int, tuple[int, Any]] = {}
        field_id = 0
        while header := self.take(1)[0]:
            field_id = field_id + (header >> 4) if header >> 4 else self.zigzag(16)
            is_wrong = field_id in fields or not -32_768 <= field_id <= 32_767
            if is_wrong and not self.is_in_map:
                raise ValueError("twice, or out of range")
            code = header & 0x0F
            fields[field_id] = code, None if code in (1, 2) else self.value(code, depth + 1)
        return fields

    def value(self, code: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if code == 12:
            return self.struct(depth)
        if code in (4, 5, 6):
            return self.zigzag({4: 16, 5: 32, 6: 64}[code])
        if code == 8:
            return self.take(self.varint(32))
        if code in (9, 10):
            (header,) = self.take(1)
            count = header >> 4 if header >> 4 < 15 else self.varint(32)
            return self.elements(count, header & 0x0F, depth)
        if code == 11:
            # Maps stay bytes: fields in them may be repeated.
            start, was_in_map, self.is_in_map = self.at, self.is_in_map, True
            count = self.varint(32)
            types = self.take(1)[0] if count else 0
            if count > len(self.data):
                raise ValueError("too many")
            for _ in range(count):
                self.value(types >> 4, depth + 1)
                self.value(types & 15, depth + 1)
            self.is_in_map = was_in_map
            return self.data[start : self.at]
        return self.take({1: 1, 2: 1, 3: 1, 7: 8, 13: 16}[code])

    def elements(self, count: int, code: int, depth: int) -> list[Any]:
        if count > len(self.data):
            raise ValueError("too many")
        return [self.value(code, depth + 1) for _ in range(count)]


def _naive(data: bytes) -> tuple[Any, int] | None:
    reader = _Naive(data)
    try:
        return reader.struct(0), reader.at
    except (IndexError, ValueError, KeyError):
        return None


def _all(value: Any) -> Any:
    """Return a value of the lazy reader in the naive reader's form."""
    if isinstance(value, Struct):
        return {field_id: (int(code), _all(inner)) for field_id, (code, inner) in value.fields.items()}
    if isinstance(value, ThriftList):
        return [_all(element) for element in value.elements]
    return value


def _agree(data: bytes) -> None:
    expected = _naive(data)
    for path in ((), FileMetaData.PATH, (1, 1), (2,)):
        try:
            struct, end = read_struct(data, 0, path)
        except ParquetFormatError:
            assert expected is None
            continue
        assert struct.as_bytes() == data[:end]
        try:
            found = _all(struct)
        except ParquetFormatError:
            assert expected is None  # A field of a nested struct is repeated.
            continue
        if expected is not None:
            assert (found, end) == expected
            # Everything was built, and is written from there.
            written = struct.as_bytes()
            assert _naive(written) == (expected[0], len(written))


_VALUES = [None, (WireType.I64, -7), (WireType.I32, 300), (WireType.TRUE, None), (WireType.BINARY, b"x" * 200)]


@given(st.sampled_from(_FOOTERS), st.data())
@settings(
    max_examples=how_many(75, 3_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_set_is_written_as_if_all_had_been_read(footer: bytes, draw: st.DataObject) -> None:
    """Set, remove and change nested fields of structs whose fields were not read, and of copies of these."""
    row_group = FileMetaData.read(footer)[0].row_groups[0]
    chunk = draw.draw(st.sampled_from(row_group.columns))
    original = chunk.serialise()
    read, _ = _naive(original) or ({}, 0)
    lazy = chunk.struct
    is_copy = draw.draw(st.booleans())
    if 3 in read and draw.draw(st.booleans()):
        inner = lazy.entry(3)
        assert inner is not None
        lazy, read = inner[1], read[3][1]
    if is_copy:
        lazy = lazy.copy()
    for _ in range(draw.draw(st.integers(1, 5))):
        field_id = draw.draw(st.one_of(st.sampled_from(list(read) or [1]), st.integers(1, 40)))
        if not is_copy and read.get(field_id, (0,))[0] == 12 and draw.draw(st.booleans()):
            entry = lazy.entry(field_id)
            assert entry is not None
            entry[1].set_entry(1, (WireType.I32, 5))
            read[field_id][1][1] = (5, 5)
        else:
            value = draw.draw(st.sampled_from(_VALUES))
            lazy.set_entry(field_id, value)
            read.pop(field_id, None)
            if value is not None:
                read[field_id] = value
        assert _all(lazy) == read
        assert _naive(lazy.as_bytes()) == (read, len(lazy.as_bytes()))
    assert not is_copy or chunk.serialise() == original


every = settings(
    max_examples=how_many(60, 20_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x1c", b"\x19\x3c", b"\x19\xfc\x10", b"\x1b\x03\xcc"]))
@example(b"\x15\x80\x80\x80\x80\x80\x80\x00\x00", b"")
@example(b"\x15\xff\xff\xff\xff\x1f\x00", b"\x1c")
@example(b"\x11\x05\x02\x00\x00", b"")
@example(b"\x05\x01\x00\x11\x05\x00\x00\x00", b"")
@example(b"\x19\x57" + bytes(39) + b"\0", b"")
@example(b"\xf1" * 2_184 + b"\x71\0", b"")
@example(b"\xf1" * 2_184 + b"\x81\0", b"")
@every
def test_any_bytes(data: bytes, begin: bytes) -> None:
    _agree(begin + data)


@given(st.sampled_from(_FOOTERS), st.data())
@every
def test_altered_footers(footer: bytes, draw: st.DataObject) -> None:
    data = bytearray(footer)
    for _ in range(draw.draw(st.integers(0, 3))):
        position = draw.draw(st.integers(0, len(data) - 1))
        kind = draw.draw(st.sampled_from(["set", "header", "cut", "insert"]))
        if kind == "set":
            data[position] = draw.draw(st.integers(0, 255))
        elif kind == "header":
            data[position] = draw.draw(st.integers(0, 15)) << 4 | draw.draw(st.integers(0, 13))
        elif kind == "cut":
            del data[position : position + draw.draw(st.integers(1, 20))]
        else:
            data[position:position] = draw.draw(st.binary(max_size=5))
    _agree(bytes(data))


@pytest.mark.parametrize("opening", [b"\x1c", b"\x19\x19", b"\x19\x1c", b"\x1b\x01\x5c\x02", b"\x19\x1c\x1c"])
def test_nesting_ends_where_it_ends_for_the_naive_reader(opening: bytes) -> None:
    for depth in range(MAX_DEPTH // 3, MAX_DEPTH + 3):
        _agree(opening * depth + bytes(depth * 3))
        _agree(opening * depth + b"\x15\x02\x1c\x1c\x1c\x15\x02" + bytes(depth * 3 + 5))


@pytest.mark.parametrize(
    "data",
    [
        b"\x19\xfc\xff\xff\x3f" + b"\x18\x7f" * 2_000_000,
        b"\x1c" + (b"\x19\x6c" + b"\x15\x02" * 31) * 30_000,
        (b"\x1c" * 4 + b"\x15\x80") * 100_000,
        b"\x05\x01" + b"\x11" * 32_766 + b"\0",
        b"\x19\xf9\xff\xff\x7f" + b"\x19\x6c" * 1_000_000,
    ],
    ids=["texts", "lists", "nested", "ids", "list headers"],
)
def test_time_is_proportional_to_the_bytes(data: bytes) -> None:
    start = time.process_time()
    _agree_on_refusal(data)
    assert time.process_time() - start < 5


def _agree_on_refusal(data: bytes) -> None:
    try:
        read_struct(data)
    except ParquetFormatError:
        return
    assert data.endswith(b"\0")


@pytest.mark.parametrize("value", [0x00, 0x0C, 0x19, 0xFF])
@pytest.mark.parametrize("footer", _FOOTERS, ids=["unencrypted", "signed"])
def test_each_byte_altered(footer: bytes, value: int) -> None:
    step = how_many(40, 1)
    # Each value alters other bytes.
    for position in range(value % step, len(footer), step):
        _agree(footer[:position] + bytes([value]) + footer[position + 1 :])


def test_threads_read_one_struct_together() -> None:
    """Footers are shared: fields that one thread has just read must be visible to the other."""
    data = _FOOTERS[1]
    expected, _ = _naive(data) or (None, 0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            struct, _ = read_struct(data)
            with ThreadPoolExecutor(4) as pool:
                for result in [pool.submit(_all, struct) for _ in range(4)]:
                    assert result.result() == expected
    finally:
        sys.setswitchinterval(before)
