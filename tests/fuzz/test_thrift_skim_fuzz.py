"""Skimming accepts what the reader accepts, ends where it ends, and says of the rest what it says."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
from parquet_keytools.format import thrift_skim
from parquet_keytools.format.footer_outline import read_footer_outline
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.format.thrift_compact import MAX_DEPTH, read_struct
from parquet_keytools.format.thrift_outline import read_outline
from parquet_keytools.format.thrift_skim import skim_struct
from parquet_keytools.format.thrift_values import Struct, WireType, write_struct

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


@pytest.fixture(params=[True, False], ids=["with the expression", "field by field"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrift_skim, "_MANY_BYTES", 0 if request.param else sys.maxsize)


def _outcome(work: Callable[[bytes], tuple[Any, int]], data: bytes) -> tuple[Any, int | str]:
    """Return what was read with its end, or with the error."""
    try:
        return work(data)
    except ParquetFormatError as error:
        return None, str(error)


def _agree(data: bytes) -> None:
    (struct, read), (_, skimmed) = _outcome(read_struct, data), _outcome(skim_struct, data)
    if isinstance(skimmed, str) and "out of range" in skimmed:
        # The reader looks at the ids when it has the whole struct, and may find something else first.
        assert isinstance(read, str)
    else:
        assert skimmed == read
    _outlines_agree(data, struct, read)


def _outlines_agree(data: bytes, struct: Struct, read: int | str) -> None:
    """What is read when it is looked at is what is read at once, whether looked at from above or not at all."""
    ways = [lambda of, levels=levels: read_outline(of, 0, levels) for levels in (0, 1, 2, 4)]
    row_groups = FileMetaData.row_groups.field_id
    written = None if isinstance(read, str) else write_struct(struct)
    for levels, way in enumerate([*ways, lambda of: read_footer_outline(of, 0, row_groups)]):
        outline, outlined = _outcome(way, data)
        if isinstance(outlined, str):
            assert isinstance(read, str)
            continue
        assert outlined == read
        untouched = write_struct(outline)
        as_it_was = untouched == data[:outlined]
        assert levels or as_it_was
        for field_id in struct.fields:
            assert outline.entry(field_id) == struct.fields[field_id]
        assert outline == struct
        assert write_struct(outline) == written
        assert as_it_was or read_struct(untouched)[0] == struct


def _within(struct: Struct, field_id: int) -> Struct:
    entry = struct.entry_to_change(field_id)
    assert entry is not None
    inner: Struct = entry[1]
    return inner


_VALUES = [None, (WireType.I64, -7), (WireType.I32, 300), (WireType.TRUE, None), (WireType.BINARY, b"x" * 200)]


@given(st.sampled_from(_FOOTERS), st.data())
@settings(
    max_examples=how_many(150, 3_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_set_is_written_as_if_all_had_been_read(footer: bytes, draw: st.DataObject) -> None:
    """Fields set, removed and changed within, of structs whose fields were not read, and of copies of these."""
    row_group = FileMetaData.read(footer)[0].row_groups[0]
    chunk = draw.draw(st.sampled_from(row_group.columns))
    original = chunk.serialise()
    read, _ = read_struct(original)
    is_copy = draw.draw(st.booleans())
    if 3 in read.fields and draw.draw(st.booleans()):
        outlined, read = _within(chunk.struct, 3), read.fields[3][1]
    else:
        outlined = chunk.struct
    if is_copy:
        outlined = outlined.copy()
    for _ in range(draw.draw(st.integers(1, 5))):
        field_id = draw.draw(st.one_of(st.sampled_from(list(read.fields)), st.integers(1, 40)))
        entry = read.fields.get(field_id)
        if entry is not None and entry[0] is WireType.STRUCT and draw.draw(st.booleans()):
            for struct in (_within(outlined, field_id), entry[1]):
                struct.set_entry(1, (WireType.I32, 5))
        else:
            value = draw.draw(st.sampled_from(_VALUES))
            outlined.set_entry(field_id, value)
            read.set_entry(field_id, value)
        assert outlined.entry(field_id) == read.entry(field_id)
        assert outlined.entry_bytes(field_id) == read.entry_bytes(field_id)
    assert write_struct(outlined) == write_struct(read)
    assert outlined == read
    assert write_struct(outlined) == write_struct(read)
    assert not is_copy or chunk.serialise() == original


every = settings(
    max_examples=how_many(120, 20_000),
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


@pytest.mark.parametrize("footer", _FOOTERS, ids=["plain", "signed"])
def test_footers_are_skimmed_to_their_end(footer: bytes) -> None:
    metadata, end = FileMetaData.read(footer)
    protection, skimmed_end = FileMetaData.read_protection(footer)
    assert skimmed_end == end
    assert protection.encryption_algorithm == metadata.encryption_algorithm
    assert protection.footer_signing_key_metadata == metadata.footer_signing_key_metadata
    assert set(protection.struct.fields) == set(metadata.struct.fields) & {8, 9, 10}


@pytest.mark.parametrize("opening", [b"\x1c", b"\x19\x19", b"\x19\x1c", b"\x1b\x01\x5c\x02", b"\x19\x1c\x1c"])
def test_nesting_ends_where_it_ends_for_the_reader(opening: bytes) -> None:
    for depth in range(MAX_DEPTH // 3, MAX_DEPTH + 3):
        _agree(opening * depth + bytes(depth * 3))
        _agree(opening * depth + b"\x15\x02\x1c\x1c\x1c\x15\x02" + bytes(depth * 3 + 5))


def test_places_of_fields() -> None:
    data = b"\x15\x02\x18\x03abc\x1c\x15\x02\0\x51\0"
    assert skim_struct(data, keep=(2, 3, 8, 9))[0] == {
        2: (WireType.BINARY, 3, 7),
        3: (WireType.STRUCT, 8, 11),
        8: (WireType.TRUE, 12, 12),
    }


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
    _outcome(skim_struct, data)
    assert time.process_time() - start < 5


def _with_byte(footer: bytes, position: int, value: int) -> bytes:
    return footer[:position] + bytes([value]) + footer[position + 1 :]


@cache
def _ends_of_altered(footer: bytes, value: int) -> list[int | str]:
    """Where the reader ends, or what it says, with each byte altered: the same for both ways of skimming."""
    return [_outcome(read_struct, _with_byte(footer, position, value))[1] for position in range(len(footer))]


@pytest.mark.parametrize("value", [0x00, 0x0C, 0x19, 0xFF])
@pytest.mark.parametrize("footer", _FOOTERS, ids=["unencrypted", "signed"])
def test_each_byte_altered(footer: bytes, value: int) -> None:
    """Python before 3.11.5 matches some expressions wrongly, on few of all altered footers."""
    for position, read in enumerate(_ends_of_altered(footer, value)):
        assert _outcome(skim_struct, _with_byte(footer, position, value))[1] == read


def test_threads_read_one_outline_together() -> None:
    """Footers are shared: what one thread has just read must be there for the other."""
    data = _FOOTERS[1]
    struct, _ = read_struct(data)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            outline, _ = read_outline(data, 0, 0)
            with ThreadPoolExecutor(4) as pool:
                for result in [pool.submit(outline.__eq__, struct) for _ in range(4)]:
                    assert result.result()
    finally:
        sys.setswitchinterval(before)
