"""Any bytes end in a struct or a format error, in time and memory proportional to their number."""

from __future__ import annotations

import time
import tracemalloc

from hypothesis import example, given, settings
from hypothesis import strategies as st
from soak import how_many

from parquet_keytools.errors import ParquetFormatError
from parquet_keytools.format.thrift import Struct, ThriftList, WireType, read_struct, varint, write_value

_SCALARS = {
    WireType.I16: st.integers(-(2**15), 2**15 - 1),
    WireType.I32: st.integers(-(2**31), 2**31 - 1),
    WireType.I64: st.integers(-(2**63), 2**63 - 1),
    WireType.BINARY: st.binary(max_size=200),
    WireType.DOUBLE: st.binary(min_size=8, max_size=8),
    WireType.UUID: st.binary(min_size=16, max_size=16),
    WireType.BYTE: st.binary(min_size=1, max_size=1),
    WireType.TRUE: st.none(),
    WireType.FALSE: st.none(),
}


def _structs(values: st.SearchStrategy[tuple[WireType, object]]) -> st.SearchStrategy[Struct]:
    return st.dictionaries(st.integers(-(2**15), 2**15 - 1), values, max_size=8).map(Struct)


def _map(pairs: list[tuple[object, object]]) -> bytes:
    written = [write_value(WireType.BINARY, key) + write_value(WireType.I32, value) for key, value in pairs]
    return varint(len(pairs)) + bytes((WireType.BINARY << 4 | WireType.I32,)) + b"".join(written)


def _nested(values: st.SearchStrategy[tuple[WireType, object]]) -> st.SearchStrategy[tuple[WireType, object]]:
    structs = _structs(values)
    numbers = st.lists(_SCALARS[WireType.I64], max_size=40)
    texts = st.lists(st.tuples(_SCALARS[WireType.BINARY], _SCALARS[WireType.I32]), min_size=1, max_size=5)
    return st.one_of(
        values,
        structs.map(lambda struct: (WireType.STRUCT, struct)),
        st.lists(structs, max_size=20).map(lambda items: (WireType.LIST, ThriftList(WireType.STRUCT, items))),
        numbers.map(lambda items: (WireType.SET, ThriftList(WireType.I64, items))),
        texts.map(lambda pairs: (WireType.MAP, _map(pairs))),
    )


_VALUES = st.one_of(
    *(strategy.map(lambda value, kind=kind: (kind, value)) for kind, strategy in _SCALARS.items())  # type: ignore[misc]
)


@given(_structs(st.recursive(_VALUES, _nested, max_leaves=30)))
@settings(max_examples=how_many(30, 10_000))
def test_every_struct_is_written_and_read_back(struct: Struct) -> None:
    data = struct.as_bytes()
    assert read_struct(data) == (struct, len(data))
    assert read_struct(memoryview(b"\0" + data + b"\0"), 1) == (struct, len(data) + 1)


@given(st.binary(max_size=2_000))
@example(b"\x19\xfc\xff\xff\xff\xff\x07")
@example(b"\x1c" * 2_000)
@example(b"\x18" + b"\x80" * 1_999)
@example(b"\x19\xf9\x10" * 600)
@settings(max_examples=how_many(80, 20_000))
def test_any_bytes_end_in_a_struct_or_a_format_error(data: bytes) -> None:
    try:
        struct, end = read_struct(data)
    except ParquetFormatError:
        return
    assert 0 < end <= len(data)
    # The parsed struct can be written, and means the same; it may be shorter, where integers were padded.
    written = struct.as_bytes()
    assert read_struct(written)[0] == struct
    assert len(written) <= end


@given(_structs(_VALUES), st.data())
@settings(max_examples=how_many(60, 10_000))
def test_a_struct_that_is_cut_off_is_refused(struct: Struct, data: st.DataObject) -> None:
    whole = struct.as_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        read_struct(whole[:cut])
    except ParquetFormatError:
        return
    raise AssertionError("a part of a struct was taken for a struct")


def test_hostile_counts_take_no_memory() -> None:
    for data in (
        b"\x19\xfc\xff\xff\xff\xff\x0f" + bytes(1_000),
        b"\x1b\xff\xff\xff\xff\x0f\x88" + bytes(1_000),
        b"\x18\xff\xff\xff\xff\x0f" + bytes(1_000),
    ):
        tracemalloc.start()
        start = time.process_time()
        try:
            read_struct(data)
        except ParquetFormatError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1_000_000
        assert time.process_time() - start < 1
